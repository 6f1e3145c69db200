"""A batch as a tree: its tensors, each at a place, and its fixed other values.

In: a dict, list or tuple, possibly nested. Out: the place of each tensor, and batches of the same
form with other tensors. A program reads every tensor with its rows in the first dimension; a place
says in which dimension the batch has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from ...planner.errors import UsageError

Batch = Any
"""Arguments of a model's forward: a dict by name, or a list or tuple by position."""

LeafPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class InputPlace:
    """Location in a batch of one input of a program: its ``path`` through the batch's containers,
    and the dimension ``dim`` that counts its rows."""

    path: LeafPath
    dim: int = 0

    @property
    def name(self) -> str:
        """Name of the input in the graph: its path as text, which begins with ``input`` if the
        batch is a tuple."""
        path = self.path if isinstance(self.path[0], str) else ("input", *self.path)
        return "_".join(map(str, path))

    def read(self, batch: Batch) -> Any:
        """Return the value at this location of ``batch`` as the program takes it (see ``taken``).
        Raises KeyError, IndexError, TypeError or AttributeError if ``batch`` has another form."""
        return self.taken(leaf_at(batch, self.path))

    def taken(self, value: Any) -> Any:
        """Return a value of the batch as the program takes it: a tensor is made dense, with its
        rows in the first dimension."""
        if not isinstance(value, Tensor):
            return value
        dense = value if value.layout == torch.strided else value.to_dense()
        return dense.movedim(self.dim, 0) if self.dim else dense

    def given(self, value: Tensor) -> Tensor:
        """Move the rows of a program's tensor to the dimension that counts rows in the batch; the
        inverse of ``taken``."""
        return value.movedim(0, self.dim) if self.dim else value


@dataclass(frozen=True)
class Example:
    """Example batch of arguments for a model; ``dims`` maps the path of each tensor with rows to
    the dimension that counts them."""

    batch: Batch
    dims: Mapping[LeafPath, int]

    @classmethod
    def of(cls, batch: Batch) -> Example:
        """Return ``batch`` as an example. All tensors whose dimension 0 is as long as the first
        tensor's have their rows there."""
        tensors = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, Tensor)]
        rows = next((leaf.shape[0] for _, leaf in tensors if leaf.dim()), None)
        return cls(batch, {path: 0 for path, leaf in tensors if leaf.shape[:1] == (rows,)})

    @cached_property
    def places(self) -> tuple[InputPlace, ...]:
        """Locations of the batch's tensors, in the batch's order."""
        return tuple(
            InputPlace(path, self.dims.get(path, 0))
            for path, leaf in leaves(self.batch)
            if isinstance(leaf, Tensor)
        )

    @cached_property
    def rows(self) -> int | None:
        """Number of rows (samples) of the batch; None if no tensor has rows."""
        found = next(iter(self.dims.items()), None)
        return None if found is None else int(leaf_at(self.batch, found[0]).shape[found[1]])

    @property
    def fixed(self) -> dict[LeafPath, Any]:
        """Values in the batch that are not tensors, by path."""
        return {path: leaf for path, leaf in leaves(self.batch) if not isinstance(leaf, Tensor)}

    def tensors(self) -> list[Tensor]:
        """Return the batch's tensors in the order of ``places``, dense and with rows first."""
        return [place.read(self.batch) for place in self.places]

    @property
    def inputs(self) -> dict[str, InputPlace]:
        """Locations of the batch's tensors, by the names that they have as inputs of a graph."""
        found: dict[str, InputPlace] = {}
        for place in self.places:
            name = place.name
            while name in found:
                name += "_"
            found[name] = place
        return found

    def with_inputs(self, inputs: Mapping[str, Tensor]) -> Batch:
        """Return a batch of the example's form with the tensors ``inputs``, by name. Tensors that
        are not given become zeros, with as many rows."""
        known = [name for name, place in self.inputs.items() if place.path in self.dims]
        rows = next((inputs[name].shape[0] for name in known if name in inputs), None)
        made = {}
        for name, place in self.inputs.items():
            value = inputs.get(name)
            if value is None and rows is not None and place.path in self.dims:
                like = place.read(self.batch)
                value = like.new_zeros((rows, *like.shape[1:]), device="cpu")
            if value is not None:
                made[place.path] = place.given(value)
        return fill_batch(self.batch, made)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """Return a batch of the example's form with ``tensors``, in the order of ``places``."""
        flat, structure = self._flat
        given = iter([place.given(each) for place, each in zip(self.places, tensors, strict=True)])
        made = [next(given) if is_tensor else leaf for leaf, is_tensor in flat]
        return tree_unflatten(made, structure)

    @cached_property
    def _flat(self) -> tuple[list[tuple[Any, bool]], TreeSpec]:
        """Leaves of the batch as (value, whether it is a tensor), and the batch's pytree
        structure."""
        flat, structure = tree_flatten(self.batch)
        return [(leaf, isinstance(leaf, Tensor)) for leaf in flat], structure


def leaf_at(batch: Batch, path: LeafPath) -> Any:
    """Return the value in a batch at ``path`` (keys, indices and attributes)."""
    for step in path:
        if isinstance(step, str) and not isinstance(batch, Mapping):
            batch = getattr(batch, step)
        else:
            batch = batch[step]
    return batch


def leaves(batch: Batch) -> list[tuple[LeafPath, Any]]:
    """Return all values in a batch as (path, value), in the batch's order. Raises UsageError AP110
    for a batch that is neither a dict nor a sequence."""
    if isinstance(batch, str) or not isinstance(batch, Mapping | Sequence):
        raise UsageError(
            "AP110",
            f"the example batch must be a dict or a tuple, not a {type(batch).__name__}",
            fix="let `example_batch` return the arguments of the model's forward",
        )
    return parts(batch)


def parts(value: Any) -> list[tuple[LeafPath, Any]]:
    """Return all leaves of nested containers as (path, leaf); if ``value`` is a leaf, its path is
    empty."""
    return [(tuple(map(_step, path)), leaf) for path, leaf in tree_flatten_with_path(value)[0]]


def _step(key: Any) -> str | int:
    match key:
        case MappingKey(key=int(name)) | SequenceKey(idx=name):
            return name
        case MappingKey(key=name) | GetAttrKey(name=name):
            return str(name)
    return str(key)


def path_text(path: LeafPath) -> str:
    """Return a path in a batch as code would write it: ``hidden[0]`` in a dict, ``[0]`` in a
    tuple."""
    first = path[:1]
    name = str(first[0]) if first and isinstance(first[0], str) else ""
    return name + "".join(f"[{step!r}]" for step in path[1 if name else 0 :])


def fill_batch(template: Batch, found: Mapping[LeafPath, Any]) -> Any:
    """Return a copy of the batch ``template`` with the values ``found``, by path, in place of its
    own."""
    pairs, structure = tree_flatten_with_path(template)
    return tree_unflatten(
        [found.get(tuple(map(_step, path)), leaf) for path, leaf in pairs], structure
    )


def row_dims(few: Batch, more: Batch) -> dict[LeafPath, int]:
    """Return by path the dimension that counts rows in each tensor: the first whose size differs
    between two batches with few and with more rows."""
    larger = dict(leaves(more))
    found = {}
    for path, leaf in leaves(few):
        other = larger.get(path)
        if isinstance(leaf, Tensor) and isinstance(other, Tensor) and leaf.dim() == other.dim():
            sizes = enumerate(zip(leaf.shape, other.shape, strict=True))
            dim = next((dim for dim, (size, after) in sizes if size != after), None)
            if dim is not None:
                found[path] = dim
    return found


def dims_of_size(batch: Batch, rows: int) -> dict[LeafPath, int]:
    """Return by path the first dimension of each tensor with size ``rows``, if it has one."""
    return {
        path: list(leaf.shape).index(rows)
        for path, leaf in leaves(batch)
        if isinstance(leaf, Tensor) and rows in leaf.shape
    }


def resize_batch(
    batch: Batch, dims: Mapping[LeafPath, int], size: Callable[[LeafPath, int], int]
) -> Batch:
    """Return a copy of the batch on ``meta`` with other sizes: the tensor at each path in ``dims``
    has ``size(path, current size)`` entries in its dimension there."""
    made = {}
    for path, dim in dims.items():
        leaf = leaf_at(batch, path)
        shape = [*leaf.shape[:dim], size(path, leaf.shape[dim]), *leaf.shape[dim + 1 :]]
        made[path] = torch.empty(
            shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad
        )
    return fill_batch(batch, made)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of a batch, neither of which is a tensor, are equal."""
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def register_dataclasses(tree: Any) -> None:
    """Make torch's pytrees treat the dataclasses in ``tree`` that hold tensors as containers."""
    while kinds := {type(leaf) for leaf in tree_leaves(tree) if _is_structure(leaf)}:
        for kind in kinds:
            register_dataclass(kind)


def holds_tensors(value: Any) -> bool:
    """Return whether an attribute of an object is a tensor, or a container that has tensors."""
    if is_dataclass(value):
        held = [getattr(value, field.name, None) for field in fields(value)]
    else:
        held = list(getattr(value, "__dict__", {}).values())
    found = (leaf for each in held for leaf in tree_leaves(each))
    return any(isinstance(leaf, Tensor) or _is_structure(leaf) for leaf in found)


def _is_structure(value: Any) -> bool:
    """Return whether a value is a dataclass instance that holds tensors."""
    is_class = isinstance(value, type)
    return is_dataclass(value) and not is_class and holds_tensors(value)
