"""The fastest plan of one device per rank, of one or several stages per rank, by trying all.

In: a small case whose plans are pipelines of single devices. Out: the least step of what fits, as
``evaluate`` prices it, over every number of micro-batches, of stages per rank, every schedule
that can have them, every cut of the blocks into stages, and every block as it is, selectively or
fully recomputed.

On one device there is one layout and one ZeRO stage, so this is all that there is to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from one_stage import plan
from random_cases import Case
from recut import recut

from autoparallel.planner.evaluate.evaluate import Evaluator
from autoparallel.planner.plan import Plan, Recompute, StagePlan
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import (
    CHUNKED_SCHEDULES,
    DERIVED_SCHEDULES,
    SCHEDULES,
    Forced,
    divisors,
)
from autoparallel.planner.schedules.schedules import can_have

EVERY_SCHEDULE = (*SCHEDULES, *CHUNKED_SCHEDULES, *DERIVED_SCHEDULES)

PIPELINES = features_of(("pp", *SCHEDULES, *CHUNKED_SCHEDULES), (), EVERY_SCHEDULE)
"""Pipelines of single devices, under the schedules that are gone through."""


@dataclass
class EveryPipeline:
    """All pipelines of a case with one device per rank."""

    case: Case
    evaluator: Evaluator = field(init=False)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.case.graph, self.case.blocks)

    def best(self) -> Plan | None:
        """The fastest that fits, its step and peak memory predicted; None if nothing fits."""
        found: Plan | None = None
        limit = self.case.request.memory_limit_bytes
        for each in self._plans():
            priced = self.evaluator.evaluation(each, each.cluster)
            fits = limit is None or priced.peak_memory_bytes <= limit
            if fits and (found is None or priced.step_seconds < found.prediction.step_seconds):
                prediction = replace(
                    each.prediction,
                    step_seconds=priced.step_seconds,
                    peak_memory_bytes=priced.peak_memory_bytes,
                )
                found = replace(each, prediction=prediction)
        return found

    def _plans(self) -> Iterator[Plan]:
        for count in divisors(self.case.request.global_batch):
            base = self._base(count)
            for schedule, chunks in self._schedules(count):
                for starts in self._cuts(chunks):
                    cut = recut(
                        base, self.case.graph, self.case.blocks, schedule, chunks, starts=starts
                    )
                    yield from self._recomputed(cut)

    def _base(self, num_microbatches: int) -> Plan:
        """A pipeline of one stage per device: its meshes and layouts."""
        case, ranks = self.case, self.case.cluster.num_devices
        forced = Forced(pp=ranks, schedule="1f1b", num_microbatches=num_microbatches)
        request = replace(case.request, forced=forced, memory_limit_bytes=None)
        return plan(case.graph, case.blocks, case.cluster, request)

    def _schedules(self, num_microbatches: int) -> Iterator[tuple[str, int]]:
        """Schedules with the stages per rank that they can have."""
        ranks = self.case.cluster.num_devices
        for chunks in range(1, len(self.case.blocks.blocks) // ranks + 1):
            for schedule in SCHEDULES if chunks == 1 else CHUNKED_SCHEDULES:
                if can_have(schedule, ranks * chunks, num_microbatches, chunks):
                    yield schedule, chunks

    def _cuts(self, chunks: int) -> Iterator[tuple[int, ...]]:
        """The first block of every stage."""
        number = self.case.cluster.num_devices * chunks
        for later in combinations(range(1, len(self.case.blocks.blocks)), number - 1):
            yield (0, *later)

    def _recomputed(self, cut: Plan) -> Iterator[Plan]:
        """The plan with its blocks recomputed in every way; without a limit only as it is."""
        if self.case.request.memory_limit_bytes is None:
            yield cut
            return
        modes = self.case.request.recomputations
        for chosen in product(modes, repeat=len(self.case.blocks.blocks)):
            left = iter(chosen)
            yield replace(cut, stages=tuple(_with_modes(stage, left) for stage in cut.stages))


def _with_modes(stage: StagePlan, modes: Iterator[Recompute]) -> StagePlan:
    return replace(
        stage, blocks=tuple(replace(block, recompute=next(modes)) for block in stage.blocks)
    )
