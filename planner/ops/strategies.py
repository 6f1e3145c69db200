"""Strategies of a node on one mesh axis, by the rule of its op.

The signature gives:

- split a letter: inputs with the letter are ``S``, inputs without it ``R`` (``I`` if no gradient
  flows), outputs with it ``S``; outputs without it are partial sums, ``P``, and then every
  term of the sum that lacks the letter enters as ``P`` too;
- pass partial sums through: one factor of each term is ``P``, all others are ``R``;
- ``R``: every input's gradient is a partial sum if the output's is, as the backward is linear;
- ``I``: everything is whole.

Exchange of splits: a matrix of several parts (a fused weight) that is split along its other
dimension becomes its parts, each split along the dimension that is cut: one all-to-all for all
parts, and one back for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from ..graph.graph import Graph, Node, Ref, TensorSpec, flat_form
from ..graph.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    AxisStrategy,
    InnerCollective,
    Placement,
    shard,
)
from .annotation import FLOATS, Signature
from .attention import balanced_strategies, grouped_strategies, ring_strategies
from .attention_limits import is_packed
from .case import Case
from .catalog import signature_of

EXCHANGED = "aten.split_with_sizes.default"
"""Op by which the pass ``split-fused`` cuts weights into parts."""


def axis_strategies(node: Node, graph: Graph, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return every strategy of ``node`` on one mesh axis of ``axis_size`` ranks, ``"I"`` last.

    A parameter is split or ``R``; an input, buffer or constant is split or ``I``. Only dimensions
    that the axis divides are split; the caller checks splits of one dimension by several axes.
    """
    if node.kind != "op":
        return _held(node, axis_size)
    found = op_strategies(node, graph, axis_size)
    return (*found[:-1], *ring_strategies(_case(node, graph), axis_size), found[-1])


def _case(node: Node, graph: Graph) -> Case:
    return Case(node, tuple(graph.spec(ref) for ref in node.inputs), node.outputs)


def op_strategies(node: Node, graph: Graph, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return the strategies of a node's op, also for a constant that an op computes, in which a
    tensor is split along a dimension only if its entries are computed apart."""
    case, nodes = _case(node, graph), graph.by_name
    derived = derive(
        signature_of(case),
        case.inputs,
        case.outputs,
        axis_size=axis_size,
        leaves=[nodes[ref.name].kind != "op" for ref in node.inputs],
    )
    balanced = balanced_strategies(case, derived, axis_size)
    if is_packed(node) and balanced:  # ranks always share documents by their lengths
        derived = tuple(each for each in derived if each.inputs[0] != balanced[0].inputs[0])
    return (
        *exchanged_parts(case, axis_size),
        *derived[:-1],
        *balanced,
        *grouped_strategies(case, axis_size),
        derived[-1],
    )


def strategies_form(node: Node, graph: Graph) -> tuple[Any, ...]:
    """Return a key that is equal for nodes with equal ``axis_strategies``, as in equal layers."""
    return op_form(node, graph) if node.kind == "op" else (node.kind, node.outputs)


def op_form(node: Node, graph: Graph) -> tuple[Any, ...]:
    """Return a key that is equal for nodes with equal ``op_strategies``."""
    parts: list[Any] = [node.op, node.rule, node.outputs]
    for ref in node.inputs:
        producer = graph.by_name[ref.name]
        parts += (producer.outputs[ref.index], producer.kind == "op")
    positions: dict[Ref, int] = {}
    arguments = node.args, {k: v for k, v in node.kwargs.items() if k != "number"}
    flat_form(arguments, lambda ref: positions.setdefault(ref, len(positions)), parts)
    return tuple(parts)


def _held(node: Node, axis_size: int) -> tuple[AxisStrategy, ...]:
    whole = REPLICATE if node.kind == "parameter" else INVARIANT
    splits: list[tuple[str, Placement]] = [
        (f"d{dim}", shard(dim))
        for dim, size in enumerate(node.spec.shape)
        if size and size % axis_size == 0 and not node.spec.stored
    ]
    return tuple(
        AxisStrategy(label, (), (placement,) * len(node.outputs))
        for label, placement in [*splits, (whole.kind, whole)]
    )


def exchanged_parts(case: Case, axis_size: int) -> tuple[AxisStrategy, ...]:
    """Return the strategy of an op that cuts a fused weight into parts: the weight is split along
    the dimension that is not cut, the parts along the other, after an all-to-all."""
    if case.node.op != EXCHANGED or case.rank != 2:
        return ()
    cut = case.dims(2, "dim", 0)[0]
    sizes = [case.shape[1 - cut], *(spec.shape[cut] for spec in case.outputs)]
    if any(not size or size % axis_size for size in sizes):
        return ()
    num_bytes = case.inputs[0].num_bytes // axis_size
    both = [InnerCollective("all_to_all", num_bytes)]
    if case.inputs[0].requires_grad:
        both.append(InnerCollective("all_to_all", num_bytes, backward=True))
    return (
        AxisStrategy("exchange", (shard(1 - cut),), (shard(cut),) * len(case.outputs), tuple(both)),
    )


def derive(
    signature: Signature | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    axis_size: int,
    leaves: Sequence[bool],
) -> tuple[AxisStrategy, ...]:
    """Return every strategy of a node on one axis; without a signature, only replicated strategies.

    ``leaves`` marks inputs that no op computes: a partial sum never comes from such inputs alone.
    """
    whole = _whole(inputs, outputs)
    strategies: list[AxisStrategy] = []
    if signature is not None:
        strategies += _splits(signature, inputs, outputs, whole, axis_size)
        strategies += _partials(signature, inputs, outputs, whole, leaves)
    if REPLICATE in whole:
        replicated = tuple(REPLICATE if spec.requires_grad else INVARIANT for spec in outputs)
        strategies.append(AxisStrategy("R", whole, replicated))
    strategies.append(AxisStrategy("I", (INVARIANT,) * len(inputs), (INVARIANT,) * len(outputs)))
    return tuple(strategies)


def _whole(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> tuple[Placement, ...]:
    """Return placements of unsplit inputs: ``R`` if the gradient is a partial sum, else ``I``."""
    differentiable = any(spec.requires_grad for spec in outputs)
    return tuple(
        REPLICATE if differentiable and spec.requires_grad else INVARIANT for spec in inputs
    )


def _splits(
    signature: Signature,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    whole: tuple[Placement, ...],
    axis_size: int,
) -> Iterator[AxisStrategy]:
    for letter in _divisible(signature, [*inputs, *outputs], axis_size):
        reduced = letter in signature.invariant
        placements = [
            shard(letters.index(letter)) if letter in letters else whole[position]
            for position, letters in enumerate(signature.inputs)
        ]
        missing = INVARIANT if reduced else PARTIAL
        results = tuple(
            shard(letters.index(letter)) if letter in letters else missing
            for letters in signature.outputs
        )
        if any(spec.stored and p.is_shard for spec, p in zip(inputs, placements, strict=True)):
            continue  # whole on every rank
        if PARTIAL in results and not _contract(signature, letter, inputs, placements):
            continue
        inner = signature.inner.get(letter, ())
        groups = signature.groups.get(letter, 0)
        if groups % axis_size == 0:
            yield AxisStrategy(letter, tuple(placements), results, inner, groups)


def _divisible(signature: Signature, specs: Sequence[TensorSpec], axis_size: int) -> list[str]:
    """Return the letters whose dimensions the axis divides, if no tensor has them twice."""
    found: dict[str, bool] = {}
    for letters, spec in zip(signature.inputs + signature.outputs, specs, strict=True):
        for letter, size in zip(letters, spec.shape, strict=True):
            if letter is not None:
                fits = size > 0 and size % axis_size == 0 and letters.count(letter) == 1
                found[letter] = found.get(letter, True) and fits
    return [letter for letter, fits in found.items() if fits]


def _contract(
    signature: Signature, letter: str, inputs: Sequence[TensorSpec], placements: list[Placement]
) -> bool:
    """Return whether splitting ``letter`` makes the outputs partial sums; if so, give a factor of
    each term without the letter the placement ``P`` (partial)."""
    if signature.sums:
        return True
    for term in signature.terms:
        if not any(letter in signature.inputs[position] for position in term):
            if inputs[term[0]].dtype not in FLOATS:
                return False
            placements[term[0]] = PARTIAL
    return bool(signature.terms)


def _partials(
    signature: Signature,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    whole: tuple[Placement, ...],
    leaves: Sequence[bool],
) -> Iterator[AxisStrategy]:
    """Yield strategies in which one factor of each term is partial, and so are the outputs."""
    if not signature.terms or any(spec.dtype not in FLOATS for spec in outputs):
        return
    for chosen in product(*signature.terms):
        if all(leaves[position] for position in chosen):
            continue
        if any(inputs[position].dtype not in FLOATS for position in chosen):
            continue
        placements = tuple(
            PARTIAL if position in chosen else placement for position, placement in enumerate(whole)
        )
        yield AxisStrategy("P", placements, (PARTIAL,) * len(outputs))
