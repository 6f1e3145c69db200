"""Report of a slow rank on stderr during a run."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch

from autoparallel.analysis.facts import rank_seconds
from autoparallel.planner.plan import Plan
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.groups import stages_of_rank
from autoparallel.runtime.messages.shared_objects import gather_values
from autoparallel.runtime.profile.stragglers import (
    CHECK_STEPS,
    FIRST_STEP,
    WINDOW_SECONDS,
    WINDOW_STEPS,
    StragglerWatch,
    WorkSampler,
)

WORK = ("compute", "optimizer")
"""Purposes of predicted seconds in which a rank works and does not wait for other ranks."""


class StragglerCheck(ExitStack):
    """Check for ranks that compute slowly; a context manager around the training steps.

    It does nothing in a single process, with parameter servers, and on GPUs, where the CPU's time
    does not show the device's.
    """

    def __init__(self, plan: Plan, worker: Worker, device: torch.device) -> None:
        super().__init__()
        self._worker, self._num_steps, self._first = worker, 0, FIRST_STEP
        stages = [stages_of_rank(plan, rank) for rank in range(worker.world_size)]
        self._watch = StragglerWatch([planned_work(plan, each) for each in stages], stages)
        has_peers = worker.world_size > 1 and plan.servers is None
        is_sampled = has_peers and device.type == "cpu"
        self._sampler = self.enter_context(WorkSampler()) if is_sampled else None

    def check(self, step: int) -> None:
        """Compare ranks every few steps; rank 0 names a slow rank. Collective over all ranks."""
        if self._sampler is None:
            return
        self._num_steps += 1
        if self._num_steps == FIRST_STEP:
            self._sampler.reset()
        num_steps = self._num_steps - self._first
        if num_steps < WINDOW_STEPS or num_steps % CHECK_STEPS:
            return
        self._worker.watchdog.progress("comparing how long ranks work")
        times = gather_values(self._sampler.read())
        if min(seconds for _, seconds in times) < WINDOW_SECONDS:
            return
        self._sampler.reset()
        self._first = self._num_steps
        found = self._watch.compare(times)
        if found is not None and self._worker.rank == 0:
            sys.stderr.write(f"autoparallel: step {step}: {found}\n")
            sys.stderr.flush()


def planned_work(plan: Plan, stages: tuple[int, ...]) -> float:
    """Return the predicted fraction of a step in which a rank with ``stages`` computes."""
    seconds = rank_seconds(plan, [stage % len(plan.stages) for stage in stages])
    work = sum(seconds.get(name, 0.0) for name in WORK)
    return min(1.0, work / plan.prediction.step_seconds)
