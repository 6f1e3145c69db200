"""Tensors that share memory: the owner of the storage behind each view.

In: a graph. Out: for each output the output that owns its memory. Strides are followed through
views: they decide whether a ``contiguous`` or ``reshape`` copies, and whether a matrix product
copies its factors, which it needs as rows or as a batch of matrices. Sources:
at::detail::computeStride (PyTorch's ATen/TensorUtils.cpp), at::matmul
(ATen/native/LinearAlgebra.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ..graph.graph import Graph, Node
from .attention import writes_scores
from .case import Case
from .catalog import spec_of
from .views import moved_order

Key = tuple[str, int]
Strides = tuple[int, ...]


def storage_of(graph: Graph) -> Mapping[Key, Key]:
    """Map each (node, output index) to the output that owns its memory: itself, unless it is a
    view.

    An op's own copy of an input has the key ``copy_of``, and owns its memory.
    """
    owners: dict[Key, Key] = {}
    strides: dict[Key, Strides] = {}
    for node in graph:
        source = (node.inputs[0].name, node.inputs[0].index) if node.inputs else None
        for index, spec in enumerate(node.outputs):
            key = (node.name, index)
            seen = None
            if source is not None and node.kind != "input":
                seen = _view_strides(_case(node, graph), strides[source], index)
            if seen is not None and source is not None:
                owners[key], strides[key] = owners[source], seen
            else:
                owners[key] = key
                strides[key] = _fresh(node, graph, strides) or contiguous(spec.shape)
        owners.update((key, key) for key in _copies(node, graph, strides))
    return owners


def copy_of(name: str, position: int) -> Key:
    """Return the key of an op's own copy of its input at ``position``."""
    return name, -1 - position


def _copies(node: Node, graph: Graph, strides: Mapping[Key, Strides]) -> Iterator[Key]:
    count = spec_of(node).copies
    if count == 0:
        return
    factors = node.inputs[:count]
    shapes = [graph.spec(ref).shape for ref in factors]
    batch = max((shape[:-2] for shape in shapes), key=len)
    if count == 1 or min(map(len, shapes)) < 3:
        batch = ()  # folded into rows
    for position, (ref, shape) in enumerate(zip(factors, shapes, strict=True)):
        if len(shape) < 3 or (batch and shape[:-2] != batch):
            continue
        wanted = (prod(batch), *shape[-2:]) if batch else (prod(shape[:-1]), shape[-1])
        if reshaped(shape, strides[ref.name, ref.index], wanted) is None:
            yield copy_of(node.name, position)


def _case(node: Node, graph: Graph) -> Case:
    return Case(node, tuple(graph.spec(ref) for ref in node.inputs), node.outputs)


def contiguous(shape: Sequence[int]) -> Strides:
    """Return the strides of a dense row-major tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return dense(shape, range(len(shape)))


def dense(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Return the strides of a dense tensor whose dims are stored in ``order``, outermost first."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _view_strides(case: Case, strides: Strides, index: int) -> Strides | None:
    """Return the strides of an output if it is a view of the first input, else None."""
    spec = spec_of(case.node)
    shape, target = case.shape, case.outputs[index].shape
    if spec.is_identity(case.node, case.inputs, case.outputs):
        return strides
    if spec.memory == "dense":
        return strides if is_dense(shape, strides) else None
    if spec.memory != "view":
        return None
    match spec.form:
        case "reshape":
            return reshaped(shape, strides, target)
        case "expand":
            offset = len(target) - len(shape)
            return tuple(
                0 if dim < offset or shape[dim - offset] != size else strides[dim - offset]
                for dim, size in enumerate(target)
            )
        case "cut" | "parts":
            step = case.argument(4, "step", 1) if spec.name == "slice" else 1
            dim = case.dims(1 if spec.form == "cut" else 2, "dim", 0)[0]
            return tuple(
                stride * step if at == dim else stride for at, stride in enumerate(strides)
            )
        case "take":
            dim = case.dims(1, "dim", 0)[0]
            return strides[:dim] + strides[dim + 1 :]
        case "as_complex":
            return tuple(stride // 2 for stride in strides[:-1])
        case "as_real":
            return (*(stride * 2 for stride in strides), 1)
    order = moved_order(case)
    return None if order is None else tuple(strides[dim] for dim in order)


def _fresh(node: Node, graph: Graph, strides: Mapping[Key, Strides]) -> Strides | None:
    """Return the strides of a new tensor that the op lays out like an input; None if row-major.

    Elementwise ops keep the order of the dims; attention keeps the order of the queries' dims.
    """
    memory, shape = spec_of(node).memory, node.spec.shape
    if writes_scores(node, [graph.spec(ref) for ref in node.inputs]):
        return None
    if memory not in ("ordered", "queries"):
        return None
    for ref in node.inputs[:1] if memory == "queries" else node.inputs:
        if graph.spec(ref).shape == shape:
            held = strides[ref.name, ref.index]
            return dense(shape, sorted(range(len(shape)), key=lambda dim: -held[dim]))
    return None


def is_dense(shape: Sequence[int], strides: Strides) -> bool:
    """Return whether strides are row-major; strides of dims of size 1 do not matter."""
    return all(
        size == 1 or held == wanted
        for size, held, wanted in zip(shape, strides, contiguous(shape), strict=True)
    )


def reshaped(shape: Sequence[int], strides: Strides, target: Sequence[int]) -> Strides | None:
    """Return the strides of a view with the shape ``target``; None if it needs a copy.

    >>> reshaped((2, 3, 4), (12, 4, 1), (6, 4)), reshaped((3, 2), (1, 3), (6,))
    ((4, 1), None)
    """
    if 0 in shape:
        return contiguous(target)
    found = [1] * len(target)
    at = len(target) - 1
    base = strides[-1] if strides else 1
    chunk = remaining = 1
    for dim in reversed(range(len(shape))):
        chunk *= shape[dim]
        joins = dim > 0 and (shape[dim - 1] == 1 or strides[dim - 1] == chunk * base)
        if joins:
            continue
        while at >= 0 and (remaining < chunk or target[at] == 1):
            found[at] = remaining * base
            remaining *= target[at]
            at -= 1
        if remaining != chunk:
            return None
        if dim > 0:
            base, chunk, remaining = strides[dim - 1], 1, 1
    return tuple(found) if at < 0 else None
