"""Derivation of an op's strategies on one mesh axis from its signature.

- split a letter: inputs with the letter are ``S``, inputs without it ``R`` (``I`` if no gradient
  flows), outputs with it ``S``; outputs without it are partial sums, ``P``, and then every
  term of the sum that lacks the letter enters as ``P`` too;
- pass partial sums through: one factor of each term is ``P``, all others are ``R``;
- ``R``: every input's gradient is a partial sum if the output's is, as the backward is linear;
- ``I``: everything is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ..graph.graph import TensorSpec
from ..graph.layout import INVARIANT, PARTIAL, REPLICATE, AxisStrategy, Placement, shard
from .annotation import FLOATS, Signature


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
