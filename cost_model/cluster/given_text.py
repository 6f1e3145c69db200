"""Texts from users and files as values: JSON, TOML, whole numbers, names.

In: a text that may be damaged or hostile. Out: its value, or ``ValueError`` with a reason to print.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

MAX_DIGITS = 18
"""Maximum digits of a whole number: all counts and sizes in bytes are far below 10**18."""

MAX_BYTES = 2**28
"""Maximum bytes of a text file: a plan of 1,000 stages has 30 MB."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal may take for commands (control and direction characters), or that no
valid text contains (surrogates)."""


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file of at most ``limit`` bytes. Raises ``OSError`` if it cannot
    be read and ``ValueError`` if it is larger or not UTF-8."""
    with path.open("rb") as file:
        found = file.read(limit + 1)
    if len(found) > limit:
        raise ValueError(f"it has more than {limit >> 20} MiB")
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def parse_json(text: str) -> Any:
    """Return the value that a JSON text encodes. Raises ``ValueError`` for invalid JSON.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    try:
        return json.loads(text, parse_int=whole_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the dict that a TOML text encodes. Raises ``ValueError`` for invalid TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def whole_number(text: str) -> int:
    """Return the integer that ``text`` writes in decimal digits. Raises ``ValueError``.

    >>> whole_number("-12")
    -12
    """
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{shortened(text)!r} is not a whole number")
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too large")
    return int(text)


def printable(text: str) -> str:
    r"""Return a text in which control characters, except tabs and newlines, are escaped.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return _CONTROLS.sub(lambda match: ascii(match.group())[1:-1], text)


def shortened(text: str, size: int = 60) -> str:
    """Return ``text``, cut after ``size`` characters and followed by "…" if it is longer."""
    return text if len(text) <= size else f"{text[:size]}…"


def check_texts(value: Any, breaks: str = "") -> None:
    """Raise ``ValueError`` if any text in ``value`` (parsed JSON or TOML) contains control
    characters, unless they are in ``breaks``; values of settings may have tabs and newlines."""
    if isinstance(value, str):
        kept = value.translate(dict.fromkeys(map(ord, breaks)))
        if _CONTROLS.search(kept) or "\n" in kept or "\t" in kept:
            raise ValueError(f"{shortened(repr(value))} contains control characters")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_texts(key)
            check_texts(item, "\n\t" if key == "settings" else breaks)
    elif isinstance(value, list):
        for item in value:
            check_texts(item, breaks)
