"""Best-first search over pipelines: stages are priced lazily, in order of their lower bound.

In: for each micro-batch size and tiling the costs of its stages, known or bounded. Out: proposals,
which are pipelines with all stages priced, approximately the best first. A node is a micro-batch
size with a tiling; its estimate is the least pipeline time T (``costs``) under the known bounds, a
lower bound of all its pipelines. The node with the least estimate is expanded: the stages of its
best pipeline are priced, most micro-batches in flight first, until the pipeline is worse than the
next node's estimate or all its stages are exact. Then it is the best of all remaining pipelines
(best-first branch and bound).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ..inter_op.inter_op import Pipeline, PipelineSearch, StageChoice, total_seconds
from ..inter_op.sweep import Tiling
from .costs import Costs

TOLERANCE = 1e-3
"""Relative distance to the minimum within which the search must prove its result before it ends."""

MOST_CUTS = 256
FEW_CUTS = 128
"""Number of groups of blocks between which a model of over ``MOST_CUTS`` blocks is first cut."""

COARSE = 0.05
"""Maximum relative loss by cutting between groups of blocks only, before refinement."""

ROUGH = 0.01
"""Relative tolerance of the step time T while pipelines are cut between groups of blocks only."""

NEAR = 4
"""Number of steps tried before and after each cut, and factor by which the steps shrink."""

PATIENCE = 1.01
"""Ratio to the next node's estimate up to which a pipeline's stages are priced further."""


@dataclass(frozen=True, slots=True)
class PipelineProposal:
    """Pipeline that the dynamic program proposes for a micro-batch size, with its step time T."""

    rows: int
    pipeline: Pipeline

    @property
    def key(self) -> tuple[int, tuple[StageChoice, ...]]:
        """Return a key that identifies the micro-batch size and the stages."""
        return self.rows, self.pipeline.stages

    @property
    def seconds(self) -> float:
        return self.pipeline.seconds


@dataclass
class SearchNode:
    """Node of the branch and bound: all pipelines with one of ``numbers`` of stages on one tiling
    (division of the devices into stages) at one micro-batch size.

    ``estimate`` is the time of the best pipeline under the known bounds; before the first ``look``,
    a cheap lower bound.
    """

    rows: int
    costs: Costs
    tiling: Tiling
    numbers: tuple[int, ...]
    estimate: float = 0.0
    _seen: int = -1
    _best: Pipeline | None = None

    @property
    def is_looked_at(self) -> bool:
        return self._seen >= 0

    @property
    def num_blocks(self) -> int:
        return self.costs.runs.classes.num_blocks

    def look(self, cutoff: float) -> None:
        """Find the node's best pipeline under the known cost bounds; ``estimate`` becomes infinite
        if there is none below ``cutoff``.

        Does nothing if no stage was priced since the last call. The even cut and the last best
        pipeline may lower the cutoff. With very many blocks, stages of any size are first cut at
        few places, then near the best cuts.
        """
        if self._seen == self.costs.version:
            return
        known = [self._known_seconds(stages) for stages in self._tries()]
        cutoff = min([cutoff, *(seconds * (1 + TOLERANCE) for seconds in known)])
        if self.tiling.fixed or self.num_blocks <= MOST_CUTS:
            best = self._best_of(range(self.num_blocks + 1), cutoff, self.numbers)
        else:
            step = -(-self.num_blocks // FEW_CUTS)
            few = (*range(0, self.num_blocks, step), self.num_blocks)
            best = self._best_of(few, cutoff * (1 + COARSE), self.numbers, ROUGH)
            while best is not None and step > 1:
                step = -(-step // NEAR)
                nearer = self._best_of(self._near(best, step), best.seconds, (len(best.stages),))
                best = best if nearer is None else nearer
            best = best if best is not None and best.seconds < cutoff else None
        self._best, self._seen = best, self.costs.version
        self.estimate = float("inf") if best is None else best.seconds * (1 - TOLERANCE)

    def _near(self, best: Pipeline, step: int) -> list[int]:
        """Return the cuts of pipeline ``best``, and cuts ``step`` to ``NEAR`` times ``step`` blocks
        away from them."""
        own = [stage.start for stage in best.stages[1:]]
        found = {cut + step * by for cut in own for by in range(-NEAR, NEAR + 1)}
        return [0, *sorted(cut for cut in found if 0 < cut < self.num_blocks), self.num_blocks]

    def _best_of(
        self,
        at: Sequence[int],
        cutoff: float,
        numbers: Iterable[int],
        tolerance: float = TOLERANCE,
    ) -> Pipeline | None:
        """Return the best pipeline whose stages begin at the blocks ``at``."""
        cuts = self.costs.runs.cuts(at) if len(at) <= self.num_blocks else self.costs.runs.every
        search = PipelineSearch(self.tiling, cuts, self.costs.seconds, tolerance, cutoff)
        best = search.best_of(numbers)
        if best is None:
            return None
        stages = tuple(replace(s, start=at[s.start], stop=at[s.stop]) for s in best.stages)
        return replace(best, stages=stages)

    def _tries(self) -> Iterator[tuple[StageChoice, ...]]:
        if self._best is not None and len(self._best.stages) in self.numbers:
            yield self._best.stages
        if self.tiling.fixed:
            cuts = [
                round(self.num_blocks * at / self.tiling.most) for at in range(self.tiling.most + 1)
            ]
            yield tuple(
                StageChoice(cuts[at], cuts[at + 1], move.first_device, move.num_devices)
                for at, move in enumerate(self.tiling.moves)
            )

    def _known_seconds(self, stages: tuple[StageChoice, ...]) -> float:
        return total_seconds(self.costs.known(stages))

    def price(self, patience: float) -> Pipeline | None:
        """Compute the exact costs of the best pipeline's stages while its step time T stays within
        ``patience``.

        Returns the pipeline with its exact T, or None if pricing stopped early.
        """
        assert self._best is not None, "there is something to price"
        stages = self._best.stages
        own = [(0.0, 0.0)] * len(stages)
        for at in _halving(len(stages)):
            own[at] = self.costs.price(len(stages) - at, at == 0, stages[at])
            if total_seconds(own) > patience:
                return None
        return Pipeline(stages, total_seconds(own))

    def finish(self, num_stages: int) -> None:
        """Record that no better pipeline with ``num_stages`` stages is left."""
        self.numbers = tuple(number for number in self.numbers if number != num_stages)
        self._seen = 0 if self.numbers else self._seen


def _halving(number: int) -> list[int]:
    """Return the indices below ``number``: first, last, then the ends and middles of the gaps.

    >>> _halving(6)
    [0, 5, 1, 4, 2, 3]
    """
    found = [0, number - 1][:number]
    gaps = [(1, number - 2)]
    while gaps:
        low, high = gaps.pop(0)
        if low > high:
            continue
        found += [low, high] if high > low else [low]
        middle = (low + high) // 2
        if low < middle < high:
            found.append(middle)
        gaps += [(low + 1, middle - 1), (middle + 1, high - 1)] if middle > low else []
    return found


def best_first(
    nodes: Iterable[SearchNode], enough: Callable[[float, list[PipelineProposal]], bool]
) -> Iterator[PipelineProposal]:
    """Yield pipelines with exact step times as they are found, always expanding the search node
    with the least estimate.

    Ends when no node has a pipeline left, or when ``enough`` returns true for the least estimate
    and the proposals so far.
    """
    numbers = count()
    found: list[PipelineProposal] = []
    heap: list[tuple[float, int, SearchNode]] = []
    for node in nodes:
        if node.estimate < float("inf"):
            heapq.heappush(heap, (node.estimate, next(numbers), node))
    while heap and not enough(heap[0][0], found):
        if _look_at_first(heap):
            continue
        _, _, node = heapq.heappop(heap)
        while _look_at_first(heap):
            pass
        rival = heap[0][0] if heap else float("inf")
        before = node.estimate
        node.look(float("inf"))
        if node.estimate < float("inf") and node.estimate <= max(rival, before) * PATIENCE:
            patience = max(rival, node.estimate) * PATIENCE
            pipeline = node.price(patience)
            if pipeline is not None:
                found.append(PipelineProposal(node.rows, pipeline))
                yield found[-1]
                if pipeline.seconds <= node.estimate * (1 + 2 * TOLERANCE):
                    node.finish(len(pipeline.stages))
        if node.numbers and node.estimate < float("inf"):
            heapq.heappush(heap, (node.estimate, next(numbers), node))


def _look_at_first(heap: list[tuple[float, int, SearchNode]]) -> bool:
    """Look at the node with the least estimate unless done before; return whether it was new."""
    if not heap or heap[0][2].is_looked_at:
        return False
    _, number, node = heapq.heappop(heap)
    node.look(float("inf"))
    if node.estimate < float("inf"):
        heapq.heappush(heap, (node.estimate, number, node))
    return True
