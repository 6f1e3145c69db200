"""Pipelines whose parallel branches run on separate devices.

In: stage costs as for ``inter_op``, a section of parallel branches. Out: stages before the section,
stages of each branch on its own run of devices, and stages after the section, that minimize

    T = Σ before + max over branches (Σ of the branch) + Σ after + (B − 1)·max t_i

A micro-batch takes the longest path through the graph; the slowest stage limits the rate. For each
of a few bounds on a stage's cost, each number of stages after the section and each maximum number
of stages in a branch, dynamic programming over devices and blocks finds the least sum. T is within
a factor of ``BOUND_STEP`` of the minimum; the simulator ranks the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..stage.branches import Section
from .inter_op import Floats, Pipeline, StageChoice, Table

BOUND_STEP = 1.2
"""Ratio between successive bounds on a stage's cost."""

MOST_DEVICES = 16
"""Maximum devices of a cluster on which branches may get separate devices."""

MOST_STAGES = 3
"""Maximum stages of a branch, and of the parts before and after the section."""


Stages = tuple[StageChoice, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Stages for consecutive blocks on consecutive devices, with their seconds per micro-batch."""

    seconds: float
    stages: Stages


NONE = _Part(float("inf"), ())

_Least = tuple[Floats, NDArray[np.int64], NDArray[np.int64]]


def branch_pipelines(table: Table, section: Section, num_microbatches: int) -> tuple[Pipeline, ...]:
    """Return the best pipeline that runs the parallel branches of ``section`` on separate devices,
    for each total number of stages, fastest first; empty on more than ``MOST_DEVICES``.

    Blocks must follow the section; they do in any model, as every value leads to the loss.
    """
    if table.num_devices > MOST_DEVICES or section.stop >= table.num_blocks:
        return ()
    best: dict[int, Pipeline] = {}
    for bound in _bounds(table, num_microbatches):
        for stages in _Bounded(table, section, bound).found():
            total = _seconds(table, section, stages, num_microbatches)
            known = best.get(len(stages))
            if known is None or total < known.seconds:
                best[len(stages)] = Pipeline(stages, total)
    return tuple(sorted(best.values(), key=lambda pipeline: pipeline.seconds))


def _seconds(table: Table, section: Section, stages: Stages, num_microbatches: int) -> float:
    """Return the pipeline time T of ``stages`` in seconds. A stage's cost depends on the number of
    stages from it to the end, on the longest path."""
    before = [stage for stage in stages if stage.start < section.start]
    after = [stage for stage in stages if stage.start >= section.stop]
    branches = [
        [stage for stage in stages if start <= stage.start < stop]
        for start, stop in section.branches
    ]
    deepest = max(len(branch) for branch in branches)
    own = [
        _costs(table, before, len(after) + deepest),
        *(_costs(table, branch, len(after)) for branch in branches),
        _costs(table, after, 0),
    ]
    longest = sum(own[0]) + max(sum(branch) for branch in own[1:-1]) + sum(own[-1])
    return longest + (num_microbatches - 1) * max(cost for run in own for cost in run)


def _costs(table: Table, stages: list[StageChoice], after: int) -> list[float]:
    """Return the seconds per micro-batch of consecutive stages before ``after`` other stages."""
    return [
        float(
            table.costs(after + len(stages) - index, stage.first_device, stage.num_devices)[
                stage.start, stage.stop
            ]
        )
        for index, stage in enumerate(stages)
    ]


def _bounds(table: Table, num_microbatches: int) -> Iterator[float]:
    """Yield upper limits on the seconds of a stage, from infinity down, for which to search
    pipelines. A single micro-batch needs no limit but infinity, as its slowest stage has no extra
    cost."""
    yield float("inf")
    if num_microbatches == 1:
        return
    whole: list[float] = []
    for first in range(table.num_devices):
        for size in table.sizes(first):
            if first + size <= table.num_devices:
                cost = table.costs(2, first, size)
                whole += [float(c) for c in cost[np.isfinite(cost)]]
    if not whole:
        return
    bound, most = max(whole), min(whole)
    while bound > most:
        yield bound
        bound /= BOUND_STEP


@dataclass
class _Bounded:
    """Search of pipelines in which no stage takes more than ``bound`` seconds per micro-batch."""

    table: Table
    section: Section
    bound: float
    runs: dict[tuple[int, ...], _Least] = field(default_factory=dict)
    masked: dict[tuple[int, int, int], Floats] = field(default_factory=dict)

    def found(self) -> Iterator[Stages]:
        """Yield the pipeline with the least sum of seconds for each number of stages before, in and
        after the section, and each last device of its branches."""
        num_blocks, devices = self.table.num_blocks, self.table.num_devices
        start, stop = self.section.start, self.section.stop
        for after in range(1, MOST_STAGES + 1):
            for end in range(len(self.section.branches), devices):
                last = self.chain_of(stop, num_blocks, on=(end, devices), count=after, after=0)
                if last is NONE:
                    continue
                for deepest in range(1, MOST_STAGES + 1):
                    for stages in self._before(start, end, after, deepest):
                        yield (*stages, *last.stages)

    def _before(self, start: int, end: int, after: int, deepest: int) -> Iterator[Stages]:
        """Yield the stages before and in the section, if its branches use devices up to ``end``.
        ``after`` stages follow it; a branch has at most ``deepest`` stages."""
        for first, branches in self._branches(0, end, after, deepest).items():
            if start == 0:
                if first == 0:
                    yield branches.stages
                continue
            for before in range(1, MOST_STAGES + 1):
                lead = self.chain_of(0, start, on=(0, first), count=before, after=after + deepest)
                if lead is not NONE:
                    yield (*lead.stages, *branches.stages)

    def _branches(self, index: int, end: int, after: int, deepest: int) -> dict[int, _Part]:
        """Map each possible first device to the best stages of branch ``index`` and all later
        branches, and the seconds of the slowest branch. The branches use devices up to ``end``."""
        if index == len(self.section.branches):
            return {end: _Part(0.0, ())}
        start, stop = self.section.branches[index]
        found: dict[int, _Part] = {}
        for behind, later in self._branches(index + 1, end, after, deepest).items():
            for first in range(index, behind):
                ways = [
                    self.chain_of(start, stop, on=(first, behind), count=count, after=after)
                    for count in range(1, deepest + 1)
                ]
                own = min(ways, key=lambda part: part.seconds)
                longest = max(later.seconds, own.seconds)
                if longest < found.get(first, NONE).seconds:
                    found[first] = _Part(longest, (*own.stages, *later.stages))
        return found

    def chain_of(
        self, start: int, stop: int, *, on: tuple[int, int], count: int, after: int
    ) -> _Part:
        """Return the fastest cut of blocks ``start`` to ``stop`` into ``count`` stages on the
        devices from ``on[0]`` to ``on[1]`` (exclusive), or ``NONE``.

        ``after`` further stages follow, so the first stage has ``count + after`` stages to the end.
        """
        if start >= stop or not float(self._least(stop, on, count, after)[0][start]) < np.inf:
            return NONE
        seconds = float(self._least(stop, on, count, after)[0][start])
        stages = []
        (first, end), block = on, start
        for left in range(count, 0, -1):
            _, middles, sizes = self._least(stop, (first, end), left, after)
            middle, size = int(middles[block]), int(sizes[block])
            stages.append(StageChoice(block, middle, first, size))
            first, block = first + size, middle
        return _Part(seconds, tuple(stages))

    def _least(self, stop: int, on: tuple[int, int], count: int, after: int) -> _Least:
        """Return, for each first block, the least sum F of the seconds of ``count`` stages up to
        block ``stop``, and the end block and number of devices of the first of these stages.

        F(k, d, n) = min over i, m of t(k..i, m devices at d) + F(i, d + m, n − 1), where t is the
        seconds of a stage of blocks k to i − 1, d its first device, n the number of stages.
        """
        key = (stop, *on, count, after)
        found = self.runs.get(key)
        if found is not None:
            return found
        first, end = on
        blocks = self.table.num_blocks + 1
        value = np.full(blocks, np.inf)
        middles, sizes = np.zeros(blocks, dtype=np.int64), np.zeros(blocks, dtype=np.int64)
        for size in self.table.sizes(first) if first < end else ():
            if first + size > end or (count == 1) != (first + size == end):
                continue
            rest = np.full(blocks, np.inf)
            if count == 1:
                rest[stop] = 0.0
            else:
                rest = self._least(stop, (first + size, end), count - 1, after)[0]
            total = self._cost(count + after, first, size) + rest[None, :]
            total[:, stop + 1 :] = np.inf
            middle = np.argmin(total, axis=1)
            least = total[np.arange(blocks), middle]
            better = least < value
            value[better], middles[better] = least[better], middle[better]
            sizes[better] = size
        self.runs[key] = value, middles, sizes
        return self.runs[key]

    def _cost(self, left: int, first: int, size: int) -> Floats:
        key = (left, first, size)
        found = self.masked.get(key)
        if found is None:
            cost = self.table.costs(left, first, size)
            found = np.where(cost <= self.bound, cost, np.inf)
            self.masked[key] = found
        return found
