"""Branches: stages that do not depend on each other, and so can run at the same time.

In: the values that blocks read from each other. Out: the graph of a plan's stages, and the sections
of a model whose branches can be on separate devices: two towers, parallel encoders, the arms of a
wide module.

A value from stage 0 to stage 2 that passes stage 1 needs no edge of its own, so the edges form the
transitive reduction. Stages that each depend on the stage before are a chain, the usual pipeline;
otherwise schedule, simulator and runtime follow the edges
(``cost_model.simulator.actions.Schedule``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import networkx as nx

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.simulator.actions import Edges, Wiring, chain
from ..plan import Plan
from ..schedules.orders import depths
from .structure import Structure

SMALLEST_SHARE = 0.05
"""Minimum fraction of a section's ops that a branch must have to be worth separate devices."""

WeightedEdges = tuple[tuple[int, int, float], ...]
"""Edges (source stage, target stage, fraction of the target's receive seconds)."""


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive blocks that form parallel branches: each branch is the blocks between
    neighbouring positions in ``bounds``, and reads no value of another branch."""

    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.bounds[0]

    @property
    def stop(self) -> int:
        return self.bounds[-1]

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise(self.bounds))


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Devices of pipeline stages: ``ends`` has the first and the last device of each stage."""

    cluster: Cluster
    ends: tuple[tuple[int, int], ...]

    def slowness(self, source: int, target: int) -> float:
        """Return how many times as long stage ``target`` takes to receive from stage ``source`` as
        from the devices just before its own."""
        (first, last), (other, end) = self.ends[target], self.ends[source]
        before = self.cluster.entry_link(first, last - first + 1)
        if end + 1 == first:
            return 1.0
        here = self.cluster.send_link(range(other, end + 1), range(first, last + 1))
        return before.bytes_per_second / here.bytes_per_second


def reduce_edges(pairs: Iterable[tuple[int, int]], num_stages: int) -> Edges | None:
    """Return the fewest (source, target) edges between stages whose paths imply all ``pairs``; None
    if they form a chain.

    >>> reduce_edges([(0, 1), (1, 2), (0, 2)], 3), reduce_edges([(0, 2), (1, 2)], 3)
    (None, ((0, 2), (1, 2)))
    """
    found = set(pairs)
    if found >= set(chain(num_stages)):
        return None
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(num_stages))
    graph.add_edges_from(found)
    return tuple(sorted(nx.transitive_reduction(graph).edges))


def stage_edges(
    structure: Structure, starts: Sequence[int], places: StagePlacement | None = None
) -> WeightedEdges | None:
    """Return (source stage, target stage, fraction of the target's receive seconds) of the
    transfers between stages that begin at the blocks ``starts``; None if the stages form a chain.

    A stage's receive seconds assume the link from the devices just before it; with ``places``,
    fractions over slower links are scaled up.
    """
    stage_of = _stage_of(structure, starts)
    num_bytes: dict[tuple[int, int], int] = {}
    for ref, made, _ in structure.crossing:
        source = stage_of[made]
        for target in {stage_of[reader] for reader in structure.readers[ref]} - {source}:
            size = structure.graph.spec(ref).num_bytes
            num_bytes[source, target] = num_bytes.get((source, target), 0) + max(size, 1)
    edges = reduce_edges(num_bytes, len(starts))
    if edges is None:
        return None
    received = [0] * len(starts)
    for source, target in edges:
        received[target] += num_bytes[source, target]
    factor = (lambda s, t: 1.0) if places is None else places.slowness
    return tuple((s, t, factor(s, t) * num_bytes[s, t] / received[t]) for s, t in edges)


def _stage_of(structure: Structure, starts: Sequence[int]) -> list[int]:
    ends = [*starts[1:], len(structure.blocks.blocks)]
    return [
        stage
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
        for _ in range(start, end)
    ]


def stage_starts(plan: Plan) -> list[int]:
    """Return the position of the first block of each stage."""
    return list(accumulate((len(stage.blocks) for stage in plan.stages[:-1]), initial=0))


def stage_depths(edges: WeightedEdges | None, num_stages: int) -> tuple[int, ...]:
    """Return, for each stage, the number of stages on the longest path from it to a last stage,
    both included.

    >>> stage_depths(None, 3), stage_depths(((0, 2, 0.5), (1, 2, 0.5)), 3)
    ((3, 2, 1), (2, 2, 1))
    """
    pairs = chain(num_stages) if edges is None else tuple((s, t) for s, t, _ in edges)
    return depths(Wiring.of(num_stages, pairs))


def block_edges(structure: Structure) -> frozenset[tuple[int, int]]:
    """Return the pairs (block, later block that reads a value of it)."""
    return frozenset(
        (structure.position[ref.name], reader)
        for ref, readers in structure.readers.items()
        for reader in readers
        if reader > structure.position[ref.name]
    )


def find_sections(structure: Structure) -> tuple[Section, ...]:
    """Return the sections of a model that consist of parallel branches. They do not overlap, and
    are in the order of the model's blocks.

    A boundary between two independent blocks separates two branches, which extend on both sides
    until an edge crosses it; the best boundary has the most ops on its smaller side. The largest
    section is taken first; its branches are not divided again.
    """
    weights = [len(block.nodes) for block in structure.blocks.blocks]
    return parallel_sections(block_edges(structure), weights)


def parallel_sections(
    edges: Iterable[tuple[int, int]], weights: Sequence[int]
) -> tuple[Section, ...]:
    """Return the sections of parallel branches among blocks that read from each other by ``edges``
    (block, later block); ``weights`` are the numbers of ops of the blocks.

    >>> parallel_sections([(0, 1), (0, 2), (1, 3), (2, 3)], [1, 1, 1, 1])
    (Section(bounds=(1, 2, 3)),)
    """
    edges = frozenset(edges)
    splits = [s for s in range(1, len(weights)) if (s - 1, s) not in edges]
    drawn = [found for split in splits if (found := _widest(edges, weights, split)) is not None]
    drawn.sort(reverse=True)
    taken: list[Section] = []
    for smaller, start, stop in drawn:
        if smaller < SMALLEST_SHARE * sum(weights[start:stop]):
            continue
        if all(stop <= other.start or start >= other.stop for other in taken):
            inside = [
                split
                for split in splits
                if start < split < stop
                and not any(start <= i < split <= j < stop for i, j in edges)
            ]
            taken.append(Section((start, *inside, stop)))
    return tuple(sorted(taken, key=lambda section: section.start))


def _widest(
    edges: Iterable[tuple[int, int]], weights: Sequence[int], split: int
) -> tuple[int, int, int] | None:
    """Return the section, with a boundary between branches before block ``split``, whose smaller
    side has the most ops, as (these ops, start, stop); None without any."""
    crossing = [(i, j) for i, j in edges if i < split <= j]
    best: tuple[int, int, int] | None = None
    for start in sorted({0, *(i + 1 for i, _ in crossing)}):
        stop = min((j for i, j in crossing if i >= start), default=len(weights))
        smaller = min(sum(weights[start:split]), sum(weights[split:stop]))
        if start < split < stop and (best is None or smaller > best[0]):
            best = (smaller, start, stop)
    return best
