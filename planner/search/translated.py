"""Conversion of a solution between two models of stages with the same mesh shape."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph.layout import NodeLayout
from ..stage.assembly import Solution
from ..stage.decisions import Decision
from ..stage.stage_model import StageModel


def reindex_solution(one: StageModel, other: StageModel, solution: Solution) -> Solution | None:
    """Return a solution of model ``one`` with the choice numbers of ``other`` (another mesh or
    number of rows); None if ``other`` lacks one of its layouts.

    A split is only offered if it divides the rows, so equal layouts may have different numbers.
    """
    if one is other:
        return solution
    own = one.structure
    found: dict[str, tuple[int, ...]] = {}
    for owner, choices in solution.items():
        is_shared = owner in own.graph.by_name and owner not in own.blocks.kinds
        pairs = [
            (model.shared(owner),) if is_shared else model.kind(owner).decisions
            for model in (one, other)
        ]
        if len(pairs[0]) != len(pairs[1]):
            return None
        numbers = [
            _number_of(first.choices[choice].layouts, second, choice)
            for first, second, choice in zip(*pairs, choices, strict=True)
        ]
        if None in numbers:
            return None
        found[owner] = tuple(number for number in numbers if number is not None)
    return found


def _number_of(layouts: Mapping[str, NodeLayout], decision: Decision, near: int) -> int | None:
    """Return the number of the choice with ``layouts``, or None; ``near`` is tried first."""
    choices = decision.choices
    if near < len(choices) and choices[near].layouts == layouts:
        return near
    return next((at for at, each in enumerate(choices) if each.layouts == layouts), None)
