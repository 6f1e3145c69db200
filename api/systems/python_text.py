"""Python text that calls functions, for configurations of other systems.

In: names and values. Out: calls with keyword arguments, and the import statements of their names.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping


class Code(str):
    """Python text, which ``call`` writes as it is; other values are written by ``repr``."""

    __slots__ = ()


def call(name: str, /, **arguments: object) -> Code:
    """Write a call with keyword arguments, one a line if it is long.

    >>> print(call("layer", width=4, norm=call("Norm", eps=1e-6)))
    layer(width=4, norm=Norm(eps=1e-06))
    """
    words = [
        f"{key}={value if isinstance(value, Code) else literal(value)}"
        for key, value in arguments.items()
    ]
    line = f"{name}({', '.join(words)})"
    if len(line) <= 64 and "\n" not in line:
        return Code(line)
    return Code(
        f"{name}(\n" + textwrap.indent("".join(f"{word},\n" for word in words), "    ") + ")"
    )


def literal(value: object) -> str:
    """Write a value as Python, with double quotes.

    >>> print(literal({"name": None}))
    {"name": None}
    """
    return json.dumps(value) if isinstance(value, str) else repr(value).replace("'", '"')


def import_lines(text: str, modules: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the import statements of the names of ``modules`` that ``text`` uses, with those of
    the standard library first."""
    words = set(re.findall(r"\w+", text))
    found = ((module, sorted(words & set(names))) for module, names in sorted(modules.items()))
    lines = {module: _import(module, names) for module, names in found if names}
    groups = (STANDARD, ("torch",), set(lines) - {*STANDARD, "torch"})
    texts = ([line for module, line in lines.items() if module in group] for group in groups)
    return [line for group in texts if group for line in (*group, "")][:-1]


STANDARD = ("dataclasses", "functools", "pathlib")
"""Modules of the standard library that a text may use."""


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
