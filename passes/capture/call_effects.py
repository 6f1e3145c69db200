"""Inputs, results and side effects of a layer's call.

In: a module, the arguments and the result of its call, while a model is exported. Out: a key that
is equal for equivalent calls of equal layers (``call_key``), the form of the result
(``call_result``), and evidence of side effects (``state_of``, ``watch_counts``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from .repeats import Count

_LITERALS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, Enum)


@dataclass(frozen=True, slots=True)
class Result:
    """Form of the result of a layer's call: its pytree structure and its leaves. A leaf is
    ``("made", i)`` for the ``i``-th tensor that the call makes, ``("given", i)`` for its ``i``-th
    tensor argument, or ``("literal", value)``. ``forms`` are the shapes, strides and dtypes of the
    made tensors as a JSON text."""

    structure: TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    forms: str


def call_key(flat: Sequence[Any], structure: TreeSpec) -> Any:
    """Return a key of all properties of a call's arguments, except tensors' values, on which its
    effect may depend; None if they cannot be determined. ``flat`` and ``structure``: leaves and
    pytree structure of the arguments."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    leaves: list[Any] = []
    for value in flat:
        if isinstance(value, Tensor):
            leaves.append(
                (
                    objects.setdefault(id(value), len(objects)),
                    storages.setdefault(_storage(value), len(storages)),
                    tuple(value.shape),
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.requires_grad,
                    isinstance(value, nn.Parameter),
                )
            )
        elif isinstance(value, _LITERALS):
            leaves.append((type(value), value))
        else:
            return None
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return (*modes, repr(structure), tuple(leaves)) if objects else None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def call_result(
    output: Any, given: Sequence[Tensor], layer: nn.Module
) -> tuple[list[Tensor], Result | None]:
    """Return the tensors that a layer's call has made, and the form of its result, or None if no
    single op could replace the call. ``output``: the call's result; ``given``: its tensor
    arguments."""
    flat, structure = tree_flatten(output)
    own = [*layer.parameters(), *layer.buffers()]
    taken = {_storage(tensor) for tensor in (*given, *own)}
    has_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    inputs = {id(tensor): at for at, tensor in enumerate(given)}
    made: dict[int, Tensor] = {}
    leaves: list[tuple[str, Any]] = []
    for value in flat:
        if id(value) in inputs:
            leaves.append(("given", inputs[id(value)]))
        elif isinstance(value, Tensor):
            is_new = id(value) not in made
            if is_new and (
                _storage(value) in taken
                or value.requires_grad != (has_grad and value.is_floating_point())
            ):
                return [], None
            made.setdefault(id(value), value)
            taken.add(_storage(value))
            leaves.append(("made", list(made).index(id(value))))
        elif isinstance(value, _LITERALS):
            leaves.append(("literal", value))
        else:
            return [], None
    tensors = list(made.values())
    forms = [
        (list(t.shape), list(t.stride()), str(t.dtype).removeprefix("torch.")) for t in tensors
    ]
    result = Result(structure, tuple(leaves), json.dumps(forms))
    return tensors, result if tensors else None


class _Same:
    """Wrapper that compares equal only to wrappers of the very same object, which it keeps
    alive."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def state_of(layer: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Return a record of the state that a layer's forward may change, for a comparison afterwards:
    the attributes of its modules and its arguments."""
    flat, structure = tree_flatten((args, kwargs))
    found: list[Any] = [repr(structure)]
    found += [(_Same(value), getattr(value, "_version", 0)) for value in flat]
    for module in layer.modules():
        for name, value in vars(module).items():
            found.append((name, _Same(value), [_Same(item) for item in _held(value)]))
    return found


def _held(value: Any) -> Iterable[Any]:
    """Return the items directly inside of a module's attribute ``value`` (of a list or dict);
    nothing for modules and tensors."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return ()
    return getattr(value, "__dict__", {}).values()


@contextmanager
def watch_counts(layer: nn.Module, counts: Sequence[Count]) -> Iterator[list[Count]]:
    """Record, within a ``with`` block, each access to the attributes ``counts`` (module path,
    name), which hold a layer's number."""
    reads: list[Count] = []
    names: dict[str, list[str]] = {}
    for path, name in counts:
        names.setdefault(path, []).append(name)
    with ExitStack() as undo:
        for path, own in names.items():
            module = layer.get_submodule(path)
            undo.callback(setattr, module, "__class__", type(module))
            module.__class__ = _watching(type(module), path, own, reads)
        yield reads


def _watching(
    kind: type[nn.Module], path: str, names: Sequence[str], reads: list[Count]
) -> type[nn.Module]:
    """Return a subclass of ``kind`` that appends (``path``, name) to ``reads`` at each access to an
    attribute in ``names``."""

    def property_of(name: str) -> property:
        def read(module: nn.Module) -> Any:
            reads.append((path, name))
            return vars(module)[name]

        def write(module: nn.Module, value: Any) -> None:
            reads.append((path, name))
            vars(module)[name] = value

        return property(read, write)

    members: dict[str, Any] = {name: property_of(name) for name in names}
    for key in ("__module__", "__qualname__", "__doc__"):
        members[key] = getattr(kind, key)
    made: type[nn.Module] = type(kind)(kind.__name__, (kind,), members)  # type: ignore[misc]
    return made
