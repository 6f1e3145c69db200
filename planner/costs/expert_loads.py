"""Measured loads of experts, and places for hot experts that make the busiest rank lighter.

In: the tokens that each expert of each layer got in a run. Out: the tokens of the busiest rank
divided by the mean; and, for each expert, the ranks that compute it. The ranks along the mesh axes
that spread a layer's experts own equal, consecutive parts of them, in the model's order. A rank may
also compute copies of other ranks' experts, or leave an expert of its own to other ranks. Each rank
of an expert gets an equal share of its tokens.

Source: He et al. 2022, "FasterMoE" (PPoPP, section 4.2), which sends hot experts in each step
instead of holding them on several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import nlargest, nsmallest
from typing import NamedTuple

import numpy as np

from ..graph.expert_dims import is_expert_layer
from ..graph.graph import Blocks, Graph
from ..plan import ExpertPlacement, PlacedExpert, Plan

MOST_COPIES = (0, 1, 2, 4)
"""Numbers of experts that a rank may compute for other ranks. A copy takes the memory of an expert
in each layer, and its weights travel in each micro-batch."""

HOTTEST = 4
"""Number of a rank's experts, by tokens, that a step of ``place_experts`` considers."""

LEAST_RELIEF = 0.01
"""Fraction of the busiest rank's tokens of which a change must relieve it."""

Places = tuple[tuple[int, ...], ...]
"""Ranks of each expert, its owner first if the owner computes it."""


class Balance(NamedTuple):
    """Loads of ranks. ``busiest``: tokens of the busiest rank / the mean; ``moved``: experts that
    the rank with the most of them sends or receives."""

    busiest: float
    moved: float = 0.0


@dataclass(frozen=True, eq=False)
class ExpertLoads:
    """Measured tokens of each expert. ``counts``: by layer of experts; ``alike``: for each layer,
    all layers in blocks of the same kind, whose prices are the mean over them; ``most_copies``:
    numbers of copies per rank that may be planned."""

    counts: Mapping[str, tuple[int, ...]]
    alike: Mapping[str, tuple[str, ...]]
    most_copies: tuple[int, ...] = MOST_COPIES

    @staticmethod
    def of(counts: Mapping[str, tuple[int, ...]], graph: Graph, blocks: Blocks) -> ExpertLoads:
        """Return the loads of a graph's layers of experts; ``counts`` has all of them."""
        kinds: dict[str, list[str]] = {}
        layers = [node.name for node in graph if is_expert_layer(node)]
        for name in layers:
            kinds.setdefault(blocks.template.get(name, name), []).append(name)
        alike = {name: tuple(kinds[blocks.template.get(name, name)]) for name in layers}
        return ExpertLoads(counts, alike)

    @staticmethod
    def of_plan(plan: Plan, graph: Graph, blocks: Blocks) -> ExpertLoads | None:
        """Return the loads by which a plan was made, and the copies of its experts; None without
        loads."""
        found = [each for stage in plan.stages for each in stage.placements]
        if not found:
            return None
        own = ExpertLoads.of({each.layer: each.counts for each in found}, graph, blocks)
        return replace(own, most_copies=(max(each.copies for each in found),))

    def balance(self, layer: str, sizes: Sequence[int], sent: Sequence[int]) -> Balance:
        """Return the mean balance of the layers like ``layer`` over the ranks along the axes at
        ``sent``, of several axes of ``sizes`` over which experts are split."""
        found = [
            _busiest(_part_loads(self.counts[name], sizes, sent)) for name in self.alike[layer]
        ]
        return Balance(float(np.mean(found)))

    def placed(self, layer: str, num_ranks: int, copies: int) -> Balance:
        """Return the mean balance of the layers like ``layer`` if each rank computes at most
        ``copies`` experts for other ranks."""
        found = [placed_balance(self.counts[name], num_ranks, copies) for name in self.alike[layer]]
        return Balance(*np.mean(found, axis=0).tolist())

    def placement(self, layer: str, num_ranks: int, copies: int) -> ExpertPlacement:
        """Return the placement of a layer's experts on ``num_ranks`` ranks, each of which computes
        at most ``copies`` experts of other ranks."""
        counts = self.counts[layer]
        places = place_experts(counts, num_ranks, copies)
        by_owner = tuple((owner,) for owner in owners(len(counts), num_ranks))
        placed = tuple(
            PlacedExpert(expert, ranks)
            for expert, ranks in enumerate(places)
            if ranks != by_owner[expert]
        )
        before, after = (
            _busiest(rank_loads(counts, each, num_ranks)) for each in (by_owner, places)
        )
        return ExpertPlacement(layer, counts, copies, before, after, placed)

    def without_copies(self) -> ExpertLoads:
        """Return the same loads for a training system that computes each expert on its owner."""
        return replace(self, most_copies=(0,))


def _part_loads(counts: Sequence[int], sizes: Sequence[int], sent: Sequence[int]) -> Sequence[int]:
    """Return the tokens of each rank along the axes at ``sent`` of axes of ``sizes``."""
    parts = np.array(counts, dtype=np.int64).reshape(*sizes, -1)
    others = tuple(at for at in range(len(sizes) + 1) if at not in sent)
    loads: list[int] = parts.sum(axis=others).reshape(-1).tolist()
    return loads


def _busiest(loads: Sequence[float]) -> float:
    """Return the largest load divided by the mean; 1 if all are 0.

    >>> _busiest([3, 1, 1, 3])
    1.5
    """
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def rank_loads(counts: Sequence[int], places: Places, num_ranks: int) -> list[float]:
    """Return the tokens of each rank if an expert's tokens are shared by its ranks.

    >>> rank_loads((6, 2), ((0, 1), (1,)), 2)
    [3.0, 5.0]
    """
    loads = [0.0] * num_ranks
    for count, ranks in zip(counts, places, strict=True):
        for rank in ranks:
            loads[rank] += count / len(ranks)
    return loads


def owners(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Return the rank that owns each expert.

    >>> owners(4, 2)
    (0, 0, 1, 1)
    """
    return tuple(expert * num_ranks // num_experts for expert in range(num_experts))


@cache
def placed_balance(counts: tuple[int, ...], num_ranks: int, copies: int) -> Balance:
    """Return the balance of ``place_experts``."""
    places = place_experts(counts, num_ranks, copies)
    sent, received = [0] * num_ranks, [0] * num_ranks
    for owner, ranks in zip(owners(len(counts), num_ranks), places, strict=True):
        for rank in ranks:
            sent[owner] += rank != owner
            received[rank] += rank != owner
    return Balance(_busiest(rank_loads(counts, places, num_ranks)), max(*sent, *received))


@cache
def place_experts(counts: tuple[int, ...], num_ranks: int, copies: int) -> Places:
    """Return ranks for each expert that make the busiest rank lighter, where each rank computes at
    most ``copies`` experts of other ranks and at least one expert.

    Local search from the owners: the busiest rank gives one of its hottest experts, or a share of
    it, to a light rank, perhaps for another expert in return, as long as all ranks that this
    concerns then have less than the busiest had.

    >>> place_experts((8, 1, 1, 2), 2, 1)
    ((0, 1), (0,), (1,), (1, 0))
    """
    places: list[tuple[int, ...]] = [(owner,) for owner in owners(len(counts), num_ranks)]
    loads = rank_loads(counts, tuple(places), num_ranks)
    search = _Search(counts, places, loads, [copies] * num_ranks)
    while search.improve():
        pass
    return tuple(search.places)


Change = tuple[tuple[int, tuple[int, ...]], ...]
"""Experts with their new ranks."""


@dataclass
class _Search:
    """State of ``place_experts``: the ranks of each expert, and the load of each rank and its room
    for copies."""

    counts: tuple[int, ...]
    places: list[tuple[int, ...]]
    loads: list[float]
    room: list[int]

    def improve(self) -> bool:
        """Make the best change that relieves the busiest rank; return whether there is one. A
        change of two experts is tried only if no change of a single one helps."""
        busiest = max(range(len(self.loads)), key=self.loads.__getitem__)
        single = [
            change for expert in self._hottest(busiest) for change in self._of(expert, busiest)
        ]
        pairs = (change for first in single for change in self._with_return(first, busiest))
        return self._take(single, self.loads[busiest]) or self._take(pairs, self.loads[busiest])

    def _take(self, changes: Iterable[Change], load: float) -> bool:
        """Make the permitted change after which the ranks that it concerns have the least; return
        whether this is less than ``load``."""
        best, least = None, load * (1 - LEAST_RELIEF)
        for change in changes:
            loads, room = self._after(change)
            if max(loads.values()) < least and min(room.values()) >= 0 and self._keeps_all(change):
                best, least = change, max(loads.values())
        if best is None:
            return False
        for rank, after in self._after(best)[0].items():
            self.loads[rank] = after
        for rank, left in self._after(best)[1].items():
            self.room[rank] = left
        for expert, ranks in best:
            self.places[expert] = ranks
        return True

    def _hottest(self, rank: int) -> list[int]:
        """Return the experts of ``rank`` with the most tokens there."""
        own = [expert for expert, ranks in enumerate(self.places) if rank in ranks]
        return nlargest(HOTTEST, own, key=lambda each: self.counts[each] / len(self.places[each]))

    def _of(self, expert: int, busiest: int) -> Iterator[Change]:
        """Yield the changes in which a light rank helps ``busiest`` with an expert or replaces it,
        or other ranks of the expert do without it."""
        ranks = self.places[expert]
        others = [rank for rank in range(len(self.loads)) if rank not in ranks]
        for rank in nsmallest(HOTTEST, others, key=self.loads.__getitem__):
            yield ((expert, (*ranks, rank)),)
            yield ((expert, tuple(rank if each == busiest else each for each in ranks)),)
        if len(ranks) > 1:
            yield ((expert, tuple(rank for rank in ranks if rank != busiest)),)

    def _with_return(self, change: Change, busiest: int) -> Iterator[Change]:
        """Yield a change together with the move of an expert to ``busiest`` in return."""
        expert, ranks = change[0]
        for rank in set(ranks) - set(self.places[expert]):
            own = [other for other, places in enumerate(self.places) if rank in places]
            for other in own:
                places = self.places[other]
                if busiest not in places:
                    moved = tuple(busiest if each == rank else each for each in places)
                    yield (*change, (other, moved))

    def _after(self, change: Change) -> tuple[dict[int, float], dict[int, int]]:
        """Return the loads, and the room for copies, that ranks have after a change, as far as it
        concerns them."""
        loads, room = dict[int, float](), dict[int, int]()
        for expert, ranks in change:
            owner = expert * len(self.loads) // len(self.counts)
            for held, sign in ((self.places[expert], -1), (ranks, 1)):
                for rank in held:
                    share = sign * self.counts[expert] / len(held)
                    loads[rank] = loads.get(rank, self.loads[rank]) + share
                    room[rank] = room.get(rank, self.room[rank]) - sign * (rank != owner)
        return loads, room

    def _keeps_all(self, change: Change) -> bool:
        """Return whether each rank still has an expert after a change."""
        changed = dict(change)
        left = {rank for expert, ranks in changed.items() for rank in self.places[expert]}
        every = (changed.get(expert, ranks) for expert, ranks in enumerate(self.places))
        return left <= {rank for ranks in every for rank in ranks}
