"""The rank that the others wait for, named on stderr while a run goes on."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch

from autoparallel.planner.plan import Plan
from autoparallel.report.facts import rank_seconds
from autoparallel.runtime.process import Worker
from autoparallel.runtime.stragglers import (
    WaitSampler,
    find_straggler,
    gather_shares,
    is_due,
)

BUSY = ("compute", "optimizer")
"""The parts of a rank's predicted step in which it does not wait for others."""


class StragglerCheck(ExitStack):
    """Compares the ranks' waiting at some steps; a context manager around the steps.

    Does nothing for one process, and on GPUs, whose hosts run ahead of them.
    """

    def __init__(self, plan: Plan, worker: Worker, device: torch.device) -> None:
        super().__init__()
        self._plan, self._worker = plan, worker
        is_sampled = worker.world_size > 1 and device.type == "cpu"
        self._sampler = self.enter_context(WaitSampler()) if is_sampled else None

    def check(self, step: int) -> None:
        """After ``step``: at some steps, rank 0 names the slow rank. Collective over all ranks."""
        if self._sampler is None or not is_due(step):
            return
        self._worker.watchdog.progress("comparing how long ranks wait")
        waits = gather_shares(self._sampler.take_share())
        found = find_straggler(waits, planned_waits(self._plan, self._worker.world_size))
        if found is not None and self._worker.rank == 0:
            sys.stderr.write(f"autoparallel: step {step}: {found}\n")
            sys.stderr.flush()


def planned_waits(plan: Plan, num_ranks: int) -> list[float]:
    """The predicted share of a step that each rank does not compute."""
    shares = []
    for rank in range(num_ranks):
        stages = [index for index, stage in enumerate(plan.stages) if rank in stage.devices]
        seconds = rank_seconds(plan, stages)
        busy = sum(seconds.get(name, 0.0) for name in BUSY)
        shares.append(max(0.0, 1.0 - busy / plan.prediction.step_seconds))
    return shares
