"""A function of rows as text: the ops between the two products of an expert.

``describe`` traces a function of one tensor, modules in it included, to JSON: a list of
calls ``[target, arguments, options]``, where ``{"at": i}`` is the argument (0) or the result
of call i. ``activate`` runs such a text. Only functions of ``torch``,
``torch.nn.functional`` and ``operator`` and methods of tensors may be called.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

_HOMES = {"functional": nn.functional, "torch": torch, "operator": operator}


class _Tracer(fx.Tracer):
    """Tracer of ``torch.fx`` that enters every module."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


class _Function(nn.Module):
    def __init__(self, owner: nn.Module, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.owner, self._function = owner, function

    def forward(self, rows: Any) -> Any:
        return self._function(rows)


def describe(owner: nn.Module, function: Callable[[Any], Any]) -> str | None:
    """Return a JSON text that lists the torch calls that make up ``function``, of one tensor; it
    may use modules of ``owner``. None if it does anything besides such calls.

    >>> describe(nn.Module(), lambda x: torch.relu(x) * 2)
    '[["torch.relu", [{"at": 0}], {}], ["operator.mul", [{"at": 1}, 2], {}]]'
    """
    try:
        graph = _Tracer().trace(_Function(owner, function))
        return _text(graph)
    except (fx.proxy.TraceError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


def _text(graph: fx.Graph) -> str | None:
    places: dict[fx.Node, int] = {}
    calls: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            places[node] = 0
        elif node.op == "output":
            if places.get(node.args[0]) != len(calls):
                return None
        elif node.op in ("call_function", "call_method"):
            target = _name(node)
            if target is None:
                return None
            args = [_encoded(arg, places) for arg in node.args]
            kwargs = {key: _encoded(arg, places) for key, arg in node.kwargs.items()}
            calls.append([target, args, kwargs])
            places[node] = len(calls)
        else:
            return None
    return json.dumps(calls)


def _name(node: fx.Node) -> str | None:
    if isinstance(node.target, str):
        return f"method.{node.target}"
    name = getattr(node.target, "__name__", "")
    for home, module in _HOMES.items():
        if getattr(module, name, None) is node.target:
            return f"{home}.{name}"
    return None


def _encoded(value: Any, places: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"at": places[value]}
    if isinstance(value, slice):
        return {"slice": _encoded([value.start, value.stop, value.step], places)}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        listed = [_encoded(item, places) for item in value]
        return {"tuple": listed} if isinstance(value, tuple) else listed
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} cannot be written down")


def activate(text: str, rows: Tensor) -> Tensor:
    """Apply to ``rows`` the function that ``text`` describes, a result of ``describe``."""
    values: list[Any] = [rows]
    for target, args, kwargs in _calls(text):
        options = {key: _decoded(arg, values) for key, arg in kwargs.items()}
        values.append(target(*_decoded(args, values), **options))
    result: Tensor = values[-1]
    return result


@lru_cache(maxsize=256)
def _calls(text: str) -> tuple[tuple[Callable[..., Any], Any, Any], ...]:
    return tuple((_target(target), args, kwargs) for target, args, kwargs in json.loads(text))


def _target(name: str) -> Callable[..., Any]:
    home, _, name = name.partition(".")
    owner = Tensor if home == "method" else _HOMES[home]
    found: Callable[..., Any] = getattr(owner, name)
    return found


def _decoded(value: Any, values: list[Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, values) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "at":
        return values[held]
    if kind == "ellipsis":
        return Ellipsis
    if kind == "dtype":
        return getattr(torch, held)
    listed = _decoded(held, values)
    return slice(*listed) if kind == "slice" else tuple(listed)
