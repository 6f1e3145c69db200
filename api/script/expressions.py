"""Call of an op as Python text, in public PyTorch functions if an exact form exists.

In: an op and its arguments, tensors as text. Out: an ``Expression``. Ops without an entry here are
written as ``torch.ops.aten…``. ``fold`` breaks long lines of a script.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoparallel.planner.ops.catalog import SPECS, spec_named

LINE = 100
INDENT = "    "

OPERATORS = {spec.name: spec.script[2:-2] for spec in SPECS if spec.script.startswith("a ")}
"""Python's operator for each op that has one."""

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class Expression:
    """Text of a Python expression, and whether it needs parentheses as an operand."""

    text: str
    is_compound: bool = False
    """True if the text needs parentheses as an operand."""

    @property
    def operand(self) -> str:
        return f"({self.text})" if self.is_compound else self.text


def function(head: str, note: str, lines: Iterable[str]) -> str:
    """Return the text of a function with signature ``head``, docstring ``note`` and body
    ``lines``."""
    body = [INDENT + line if line else line for line in (f'"""{note}"""', *lines)]
    return "\n".join([f"def {head}:", *body])


def fold(line: str) -> list[str]:
    """Break a long line inside its longest brackets; drop its comment if that suffices.

    >>> fold(f"x = f({'a' * 60}, {'b' * 60})")[0]
    'x = f('
    """
    code, _, comment = line.partition("  # ")
    if len(line) <= LINE or len(code) <= LINE or code.lstrip().startswith(("#", '"""')):
        return [line if len(line) <= LINE or not code.strip() else code]
    commas = _brackets(code)
    if not commas:
        return [code]
    start, *cuts, end = max(commas, key=lambda each: each[-1] - each[0])
    indent = code[: len(code) - len(code.lstrip())] + INDENT
    ends = [*cuts, end]
    parts = [code[a + 1 : b].strip() for a, b in zip([start, *cuts], ends, strict=True)]
    parts = [part for part in parts if part]
    body = [indent + ", ".join(parts)]
    if len(body[0]) > LINE:
        comma = "," if len(parts) > 1 or code[start] != "(" else ""
        body = [each for part in parts for each in fold(f"{indent}{part}{comma}")]
    last = code[end:] + (f"  # {comment}" if comment else "")
    return [code[: start + 1], *body, indent[len(INDENT) :] + last]


def _brackets(code: str) -> list[list[int]]:
    """Return a list for each outermost pair of brackets in ``code``: the positions of the opening
    bracket, the commas directly inside, and the closing bracket."""
    plain = re.sub(r'"[^"]*"', lambda found: "_" * len(found[0]), code)
    found: list[list[int]] = []
    depth = 0
    for place, char in enumerate(plain):
        depth -= char in ")]}"
        if depth == 0 and char in "([{":
            found.append([place])
        elif (depth == 1 and char == ",") or (depth == 0 and char in ")]}"):
            found[-1].append(place)
        depth += char in "([{"
    return [] if depth else [each for each in found if each[-1] - each[0] > 1]


def assignment(names: Sequence[str], made: Expression) -> str:
    """Return the line ``names = made``; without names only the expression ``made``."""
    start = ", ".join(names)
    start = f"({start})" if len(start) > LINE // 2 else start
    return f"{start} = {made.text}" if names else made.text


def dictionary(items: Mapping[str, Any]) -> str:
    """Write a dict from names to values; the values are given as text or numbers."""
    return "{" + ", ".join(f'"{name}": {value}' for name, value in items.items()) + "}"


def call_of(head: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Expression:
    """Return a call of the function ``head``, with arguments written by ``literal``."""
    parts = (*map(literal, args), *(f"{name}={literal(v)}" for name, v in (kwargs or {}).items()))
    return Expression(f"{head}({', '.join(parts)})")


def literal(value: Any) -> str:
    """Return a value as Python source; an ``Expression`` is written as its text.

    >>> literal([1, torch.float32, True, float("inf")])
    '[1, torch.float32, True, float("inf")]'
    """
    if isinstance(value, Expression):
        return value.text
    if isinstance(value, list | tuple):
        inner = ", ".join(map(literal, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str):
        return repr(value) if '"' in value else f'"{value}"'
    if isinstance(value, torch.device):
        return "None"
    return str(value)


def op_call(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expression:
    """Write the call of an aten op; ``path`` is its name with the overload."""
    kwargs = {
        name: value
        for name, value in kwargs.items()
        if name not in ("device", "layout", "pin_memory")
        and value is not None
        and (name, value) != ("approximate", "none")
    }
    special = SPECIAL.get(path.partition(".")[0])
    made = special(list(args), dict(kwargs)) if special is not None else None
    if made is not None:
        return made
    name = path.partition(".")[0]
    if name in OPERATORS and len(args) == 2 and not kwargs:
        left, right = (a.operand if isinstance(a, Expression) else literal(a) for a in args)
        return Expression(f"{left} {OPERATORS[name]} {right}", is_compound=True)
    head, _, form = spec_named(name).script.format(name).rstrip(")").partition("(")
    if form.isdigit():
        return _formed(path, args, kwargs, head=head, count=int(form))
    if head.startswith(".") and args and isinstance(args[0], Expression):
        rest = args[1:]
        if form == "*" and len(rest) == 1 and isinstance(rest[0], list) and rest[0]:
            rest = rest[0]
        return call_of(f"{args[0].operand}{head}", rest, kwargs)
    if head.startswith("F."):
        return call_of(head, args, kwargs)
    if _is_function(name) and not any(isinstance(each, list) and None in each for each in args):
        return call_of(f"torch.{name}", args, kwargs)
    return call_of(f"torch.ops.aten.{path}", args, kwargs)


def _is_function(name: str) -> bool:
    """Return whether ``torch`` has a public function ``name`` that only calls the aten op
    ``name``."""
    function = getattr(torch._C._VariableFunctions, name, None)
    return not name.startswith("_") and function is not None and getattr(torch, name) is function


Special = Callable[[list[Any], dict[str, Any]], "Expression | None"]


def _by_name(
    args: Sequence[Any], names: Sequence[str], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def is_method(name: str) -> bool:
    """Return whether an op is written as a method, as views and other cheap ops are: calls can be
    chained."""
    return spec_named(name).script.startswith(".")


def _formed(
    path: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, head: str, count: int
) -> Expression:
    """Return an op's call by the function ``head`` that takes ``count`` arguments by position,
    without arguments equal to defaults."""
    name, _, overload = path.partition(".")
    parameters = getattr(getattr(torch.ops.aten, name), overload)._schema.arguments
    given = _by_name(args, [each.name for each in parameters], kwargs)
    first = [tuple(each) if isinstance(each, list) else each for each in args[:count]]
    options = {
        each.name: REDUCTIONS[given[each.name]] if each.name == "reduction" else given[each.name]
        for each in parameters[len(first) :]
        if each.name in given
        and given[each.name] != each.default_value
        and each.name != "cudnn_enable"
    }
    return call_of(head, first, options)


def _embedding(args: list[Any], kwargs: dict[str, Any]) -> Expression | None:
    named = _by_name(args, ("weight", "indices", "padding_idx", "scale", "sparse"), kwargs)
    if named.get("scale") or named.get("sparse"):
        return None
    padding = named.get("padding_idx", -1)
    options = {} if padding < 0 else {"padding_idx": padding}
    return call_of("F.embedding", [named["indices"], named["weight"]], options)


def _slice(args: list[Any], kwargs: dict[str, Any]) -> Expression | None:
    named = _by_name(args, ("self", "dim", "start", "end", "step"), kwargs)
    dim = named.get("dim", 0)
    if not isinstance(dim, int) or dim < 0 or not isinstance(named["self"], Expression):
        return None
    start, end, step = named.get("start"), named.get("end"), named.get("step", 1)
    if not start and (end is None or end >= sys.maxsize) and step == 1:
        return named["self"] if isinstance(named["self"], Expression) else None
    cut = f"{start or ''}:{'' if end is None or end >= sys.maxsize else end}"
    cut += f":{step}" if step != 1 else ""
    places = ", ".join([":"] * dim + [cut])
    return Expression(f"{named['self'].operand}[{places}]")


def _to(args: list[Any], kwargs: dict[str, Any]) -> Expression | None:
    dtypes = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
    rest = [
        each
        for each in (*args[1:], *kwargs.values())
        if not isinstance(each, torch.dtype | torch.device) and each not in (None, False)
    ]
    if len(dtypes) != 1 or rest or not isinstance(args[0], Expression):
        return None
    return call_of(f"{args[0].operand}.to", dtypes)


def _index(args: list[Any], kwargs: dict[str, Any]) -> Expression | None:
    if not isinstance(args[0], Expression) or not isinstance(args[1], list):
        return None
    places = [":" if each is None else literal(each) for each in args[1]]
    return Expression(f"{args[0].operand}[{', '.join(places)}]")


def _reduction(name: str) -> Special:
    def reduction(args: list[Any], kwargs: dict[str, Any]) -> Expression | None:
        named = _by_name(args, ("self", "dim", "keepdim"), kwargs)
        tensor, dims = named.pop("self"), named.pop("dim", None)
        if not isinstance(tensor, Expression) or (dims is not None and not isinstance(dims, list)):
            return None
        first = [] if dims is None else [dims[0] if len(dims) == 1 else tuple(dims)]
        options = {key: value for key, value in named.items() if value not in (None, False)}
        return call_of(f"{tensor.operand}.{name}", first, options)

    return reduction


def _dropout(args: list[Any], kwargs: dict[str, Any]) -> Expression | None:
    """Return dropout's input if dropout has no effect, else None (no public function applies)."""
    named = _by_name(args, ("input", "p", "train"), kwargs)
    is_off = not named.get("train") or not named.get("p")
    return named["input"] if is_off and isinstance(named["input"], Expression) else None


SPECIAL: dict[str, Special] = {
    "dropout": _dropout,
    "mean": _reduction("mean"),
    "sum": _reduction("sum"),
    "embedding": _embedding,
    "slice": _slice,
    "to": _to,
    "_to_copy": _to,
    "index": _index,
}
"""Writers of aten ops whose public function takes other arguments, or of which only some calls have
one: functions that build expressions, which records of ops cannot hold."""
