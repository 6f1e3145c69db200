"""Equal layers of a model, found in its modules before a capture.

In: a model. Out: for each list of numbered submodules (``ModuleList``, ``Sequential``, …) the
groups of its entries that hold the same modules with the same settings and parameters of the same
shapes. Such entries may only differ in integers that count the layers (``layer_idx``);
``repeat_calls`` then checks that no forward reads them.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..initialization.deferred_init import named_tensors
from ..tracing.opaque import ANNOTATION

MIN_ALIKE = 5
"""Least number of layers of a group; in smaller groups every layer is captured in full, as the
first two and the last layer of any group are."""

MIN_MODULES = 3
"""Least number of modules in a layer of a group: capturing a smaller layer is cheaper than
replacing it by an op."""

_MAX_KINDS = 16
_MAX_DEPTH = 6
_STRUCTURE = frozenset(("_parameters", "_buffers", "_modules"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum, type)

Count = tuple[str, str]
"""Attribute that numbers a layer among equal layers: (path of a module in the layer, its
attribute)."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Group of equal layers of a model: ``members`` are their module paths in order, ``counts`` the
    attributes that hold the number of a layer and so differ."""

    members: tuple[str, ...]
    counts: tuple[Count, ...]


def find_repeats(model: nn.Module) -> tuple[Repeat, ...]:
    """Return the groups of equal layers of a model; of nested module lists only the outermost."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    tied = find_tied(model)
    shared = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
    repeats: list[Repeat] = []
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        found = _groups(path, module, shared, uses)
        repeats += found
        taken = {member for repeat in found for member in repeat.members}
        for name, child in module.named_children():
            inner = f"{path}.{name}".removeprefix(".")
            if inner not in taken:
                pending.append((inner, child))
    return tuple(repeats)


@dataclass
class _Group:
    """Group of equal layers while it is collected. ``first``: modules of its first layer, by path;
    ``number``: that layer's number in the module list."""

    first: dict[str, nn.Module]
    number: int
    members: list[str]
    counts: set[Count]


def _groups(path: str, owner: nn.Module, shared: set[str], uses: Mapping[int, int]) -> list[Repeat]:
    entries = [(name, child) for name, child in owner.named_children() if name.isdecimal()]
    if len(entries) < MIN_ALIKE:
        return []
    groups: list[_Group] = []
    for name, child in entries:
        member = f"{path}.{name}".removeprefix(".")
        modules = dict(child.named_modules())
        if not _may_repeat(member, child, modules, shared, uses):
            continue
        for group in groups:
            counts = _difference(group, modules, int(name))
            if counts is not None:
                group.members.append(member)
                group.counts |= counts
                break
        else:
            if len(groups) == _MAX_KINDS:
                return []
            groups.append(_Group(modules, int(name), [member], set()))
    return [
        Repeat(tuple(group.members), tuple(sorted(group.counts)))
        for group in groups
        if len(group.members) >= MIN_ALIKE
    ]


def _may_repeat(
    path: str,
    layer: nn.Module,
    modules: Mapping[str, nn.Module],
    shared: set[str],
    uses: Mapping[int, int],
) -> bool:
    """Return whether a layer may belong to a group of equal layers: it has enough modules, no
    instance attribute that replaces ``forward``, no class that the user annotated, and shares no
    module or tensor with the rest of the model."""
    if len(modules) < MIN_MODULES or "forward" in vars(layer):
        return False
    if hasattr(type(layer), ANNOTATION) or any(uses[id(each)] > 1 for each in modules.values()):
        return False
    return not any(each == path or each.startswith(f"{path}.") for each in shared)


def _difference(group: _Group, modules: Mapping[str, nn.Module], number: int) -> set[Count] | None:
    """Compare a layer (``modules`` by path, with its ``number``) with the first layer of a group.
    Return the attributes that hold the layer's number; None if anything else differs."""
    if modules.keys() != group.first.keys():
        return None
    counts: set[Count] = set()
    for path, module in modules.items():
        other = group.first[path]
        if type(module) is not type(other) or not _same_tensors(module, other):
            return None
        mine, its = vars(module), vars(other)
        if mine.keys() != its.keys():
            return None
        for name, value in mine.items():
            if name in _STRUCTURE or value is its[name] or _same_setting(name, value, its[name]):
                continue
            if not _counts(value, number, its[name], group.number):
                return None
            counts.add((path, name))
    return counts


def _same_setting(name: str, one: Any, other: Any) -> bool:
    if name.startswith("_") and "_hooks" in name:  # the keys are numbers of the handles
        return _same(list(one.values()), list(other.values()))
    return _same(one, other)


def _counts(one: Any, number: int, other: Any, first: int) -> bool:
    """Return whether two attributes count layers: integers that differ as the layers' numbers
    do."""
    return type(one) is int and type(other) is int and one - number == other - first


def _same_tensors(one: nn.Module, other: nn.Module) -> bool:
    if one._modules.keys() != other._modules.keys():
        return False
    if one._non_persistent_buffers_set != other._non_persistent_buffers_set:
        return False
    for mine, its in ((one._parameters, other._parameters), (one._buffers, other._buffers)):
        if mine.keys() != its.keys():
            return False
        if any(not _same_form(mine[name], its[name]) for name in mine):
            return False
    return True


def _same_form(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        type(one) is type(other)
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.requires_grad == other.requires_grad
        and one.stride() == other.stride()
        and one.device == other.device
    )


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Return whether two attributes have equal contents; False if this cannot be decided, as for
    modules, tensors and at a large ``depth`` of nesting."""
    if one is other:
        return True
    if type(one) is not type(other) or depth > _MAX_DEPTH:
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, Tensor | nn.Module):
        return False
    if isinstance(one, Mapping):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(_same(a, b, depth + 1) for a, b in pairs)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(a, b, depth + 1) for a, b in pairs)
    if isinstance(one, set | frozenset):
        return all(isinstance(item, _PLAIN) for item in one) and bool(one == other)
    return all(_same(a, b, depth + 1) for a, b in _parts(one, other))


def _parts(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of corresponding contents of two objects of one type, for a comparison of
    both."""
    if isinstance(one, types.FunctionType):
        yield one.__code__, other.__code__
        yield (one.__defaults__, one.__kwdefaults__), (other.__defaults__, other.__kwdefaults__)
        yield _cells(one), _cells(other)
    elif isinstance(one, functools.partial):
        yield (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
    elif hasattr(one, "__dict__") and not isinstance(one, types.MethodType | types.ModuleType):
        yield vars(one), vars(other)
        yield hasattr(type(one), "__slots__"), False
    else:
        yield False, True


def _cells(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def find_tied(model: nn.Module) -> dict[str, str]:
    """Map each name of a tied parameter or buffer, except the first, to the first name. Two names
    are tied if they are the same tensor, or the same part of one storage in the same shape. Works
    on the ``meta`` device."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors(model):
        canonical = first.setdefault(_identity(tensor), name)
        if canonical != name:
            tied[name] = canonical
    return tied


def _identity(tensor: Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
