"""What the decisions of a kind follow from, but for prices: equal keys, equal decisions.

In: a block, the graph at a number of rows, a mesh, what its axes are for. Out: a key that is
equal for all meshes and numbers of rows on which the kind has the same ways to run its nodes:
the same strategies on every axis (bytes of their collectives apart), and dimensions that the
same products of axes divide. So what is made of it is made once, and priced for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..graph import Block, Graph, Node, Ref
from ..layout import AxisStrategy
from ..positions import Dims
from .choices import Restriction, dims_on, experts_on, input_specs, strategies_of
from .prices import Prices

T = TypeVar("T")


def known(
    cache: dict[Any, Any], key: tuple[object, ...], given: tuple[Any, ...], make: Callable[[], T]
) -> T:
    """What ``make`` makes of ``key`` and of the very objects ``given``, made once.

    The objects count by identity, as comparing them would take longer; they are kept with
    what is made, so that no other can take their place.
    """
    own = (*key, *map(id, given))
    found = cache.get(own)
    if found is None:
        found = given, make()
        cache[own] = found
    made: T = found[1]
    return made


def structure_key(
    block: Block, graph: Graph, prices: Prices, restriction: Restriction
) -> tuple[object, ...]:
    """The key of a kind on a mesh; ``prices.cache`` is of one graph and its batch sizes."""
    sizes = prices.mesh.shape
    axes = tuple(_axis_key(block, graph, axis, prices, restriction) for axis in range(len(sizes)))
    pins = (prices.mesh, tuple(restriction.pins.items())) if restriction.pins else None
    rows = None if graph.batch_dims else graph.batch_size
    return (
        block.nodes, axes, _divided(block, graph, prices), _light(block, graph, prices),
        restriction.sequence_parallel, restriction.features.denied, pins, rows,
    )  # fmt: skip


def _axis_key(
    block: Block, graph: Graph, axis: int, prices: Prices, restriction: Restriction
) -> tuple[object, ...]:
    """What an axis is for, and which strategies the nodes have on it."""
    size = prices.mesh.shape[axis]
    given = (
        restriction.split_batch, restriction.split_parameters, restriction.split_positions,
        restriction.split_experts, restriction.gathers,
    )  # fmt: skip
    roles = tuple(axis in each for each in given)
    if size == 1:
        return (1, roles)
    rows_fit = bool(graph.batch_dims) or graph.batch_size % size == 0
    denied = restriction.features.denied
    by_positions = bool(denied) or (roles[1] or roles[2])
    return (
        roles, rows_fit, _strategies_key(block, graph, size, prices),
        _dims_key(block, graph, size, prices) if by_positions else None,
        _experts_key(block, graph, size, prices) if roles[3] else None,
    )  # fmt: skip


def _kept(prices: Prices, key: tuple[object, ...], make: Callable[[], object]) -> int:
    """A number that is equal where what ``make`` gives is."""
    found: int | None = prices.cache.get(key)
    if found is None:
        numbers: dict[object, int] = prices.cache.setdefault((key[0], "numbers"), {})
        found = numbers.setdefault((key[1], make()), len(numbers))
        prices.cache[key] = found
    return found


def _strategies_key(block: Block, graph: Graph, size: int, prices: Prices) -> int:
    def make() -> object:
        return tuple(
            tuple(map(_form, strategies_of(graph[name], graph, size, prices)))
            for name in block.nodes
        )

    return _kept(prices, ("strategies of", block.nodes, size, graph.batch_size), make)


def _form(strategy: AxisStrategy) -> tuple[object, ...]:
    """A strategy without the bytes of its collectives."""
    inner = tuple((each.kind, each.backward) for each in strategy.collectives)
    return strategy.label, strategy.inputs, strategy.outputs, inner, strategy.groups


def _dims_key(block: Block, graph: Graph, size: int, prices: Prices) -> int:
    def make() -> object:
        dims: Dims = dims_on(graph, size, prices)
        return tuple(dims.get(ref) for ref in _refs(block, graph))

    return _kept(prices, ("dims of", block.nodes, size, graph.batch_size), make)


def _experts_key(block: Block, graph: Graph, size: int, prices: Prices) -> int:
    def make() -> object:
        found = experts_on(graph, size, prices)
        return tuple((found.dims.get(ref), ref in found.views) for ref in _refs(block, graph))

    return _kept(prices, ("experts of", block.nodes, size, graph.batch_size), make)


def _refs(block: Block, graph: Graph) -> list[Ref]:
    found: list[Ref] = []
    for name in block.nodes:
        node = graph[name]
        found += [*node.inputs, *(Ref(name, index) for index in range(len(node.outputs)))]
    return found


def _divided(block: Block, graph: Graph, prices: Prices) -> bytes:
    """Which products of axes divide each dimension of each tensor that the block's nodes see."""
    key = ("dimensions of", block.nodes, graph.batch_size)
    dims = prices.cache.get(key)
    if dims is None:
        specs = [
            spec
            for name in block.nodes
            for spec in (*input_specs(graph[name], graph), *graph[name].outputs)
        ]
        dims = np.array([size for spec in specs for size in spec.shape], dtype=np.int64)
        prices.cache[key] = dims
    products = [1]
    for size in prices.mesh.shape:
        products += [size * each for each in products]
    divides = dims[:, None] % np.array(products[1:])[None, :] == 0
    return np.packbits(np.column_stack([divides, dims == 0])).tobytes()


def _light(block: Block, graph: Graph, prices: Prices) -> tuple[bool, ...]:
    """Of each node whether it is a view of what it reads (``is_light``)."""
    key = ("light", block.nodes, graph.batch_size)
    found: tuple[bool, ...] | None = prices.cache.get(key)
    if found is None:
        found = tuple(is_light(graph[name], graph, prices) for name in block.nodes)
        prices.cache[key] = found
    return found


def is_light(node: Node, graph: Graph, prices: Prices) -> bool:
    """Whether an op does no work, and makes nothing larger than what it reads."""
    read = [ref for ref in node.inputs if graph[ref.name].kind not in ("constant", "buffer")]
    if not read or any(graph[ref.name].kind != "op" for ref in read):
        return False
    num_bytes = sum(spec.num_bytes for spec in node.outputs)
    if num_bytes > max(graph.spec(ref).num_bytes for ref in read):
        return False
    work = prices.rules.work(node, input_specs(node, graph), node.outputs)
    return not work.flops_forward and not work.bytes_forward
