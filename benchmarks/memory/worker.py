"""One rank of the memory benchmark: train by a plan and count the bytes of a step."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from step_memory import measure_step

from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planning.plan_files import load_job
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.training.worker import make_trainer

WARM_UP_STEPS = 2
MEASURED_STEPS = 3


def measure(worker: Worker, *, plan_path: str) -> list[dict[str, Any]]:
    """Per rank the least of a few steps' peaks, with AdamW, which the plan is for.

    The least: a thread of gloo may hold a buffer a moment longer than the step needs it.
    """
    plan, target = load_job(plan_path)
    target = replace(target, build_optimizer=None)
    device = join_as(worker, plan.cluster)
    trainer, _ = make_trainer(plan, target, worker, device=device, seed=0)
    graph = trainer.program.graph
    if graph.batch_size != plan.model.global_batch:
        graph = graph.with_batch_size(plan.model.global_batch)
    for step in range(WARM_UP_STEPS):
        trainer.step(random_batch(graph, seed=step))
    batch = random_batch(graph, seed=WARM_UP_STEPS)
    found = [measure_step(trainer, batch) for _ in range(MEASURED_STEPS)]
    least = min(found, key=lambda report: report.peak_bytes)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, asdict(least))
    return reports
