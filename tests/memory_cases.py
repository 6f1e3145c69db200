"""Plans of every schedule, predicted and measured: the bytes of a rank at its fullest moment.

In: a model, a schedule, a number of micro-batches. Out: the plan with the bytes of its ranks, and
what the tensors of these took in a step on processes of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autoparallel.cost_model.resolve import parse_cluster
from autoparallel.options import parse_parallel
from autoparallel.passes.deferred_init import Deferred, record_build
from autoparallel.passes.inputs import random_batch
from autoparallel.passes.program import Program
from autoparallel.passes.stage_memory import with_stage_memory
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.evaluate import BRIEF
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import loads
from autoparallel.planner.pricing.stage_cost import together
from autoparallel.planner.replicas import stages_of_ranks
from autoparallel.planning import PlanOptions, capture_model, plan_program
from autoparallel.runtime.memory_counter import measure_step
from autoparallel.runtime.trainer import Trainer
from autoparallel.targets import Target, load_target

WIDTH, SEQ, ROWS = 256, 64, 4
"""A message is 0.26 MB, a layer keeps 4 MB of a micro-batch; a rank holds 50 MB of states."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": (
        "examples/gpt.py",
        {"d_model": WIDTH, "n_head": 4, "n_layer": 8, "seq": SEQ, "vocab": 256},
    ),
    "skip": ("tests/models/long_skip.py", {"width": WIDTH}),
}
ROWS_OF = {"gpt": (ROWS, SEQ), "skip": (ROWS * SEQ, None)}
SCHEDULES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved,chunks=2", "bfs,chunks=2", "zb-h1",
    "zb-h1,chunks=2", "zb-h2", "zbv", "dualpipev", "chimera", "terapipe,slices=2",
    "pipedream", "pipedream-2bw", "ampnet",
)  # fmt: skip
COUNTS = (4, 16, 64)


@dataclass(frozen=True)
class Case:
    """``parallel`` besides the schedule and the micro-batches."""

    model: str
    schedule: str
    count: int
    parallel: str = "pp=2"

    def __str__(self) -> str:
        return f"{self.model} {self.forced}"

    @property
    def forced(self) -> str:
        return f"{self.parallel},schedule={self.schedule},microbatches={self.count}"

    @property
    def num_ranks(self) -> int:
        forced = parse_parallel(self.parallel)
        return (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)


@cache
def target(model: str) -> Target:
    path, settings = MODELS[model]
    return load_target(path, settings)


@cache
def captured(model: str) -> tuple[Deferred, Program]:
    found = target(model)
    deferred = record_build(found.build_model, seed=0)
    batch = found.example_batch(2, ROWS_OF[model][1])
    return deferred, capture_model(deferred.model, batch, found.loss_fn, "fp32")


def planned(case: Case, *, is_gpu: bool = False) -> Plan | None:
    """With the bytes of its stages; None where the model or the schedule cannot have this."""
    _, program = captured(case.model)
    rows, seq = ROWS_OF[case.model]
    options = PlanOptions(
        global_batch=rows * case.count, seq=seq, forced=parse_parallel(case.forced)
    )
    cluster = parse_cluster(f"cpu:{case.num_ranks}")
    try:
        plan = plan_program(program, target(case.model), cluster, options)
    except AutoparallelError:
        return None
    return with_stage_memory(plan, program.graph, program.blocks, is_gpu=is_gpu)


def predicted(plan: Plan) -> list[Mapping[str, int]]:
    """The bytes of each rank of the pipeline by category."""
    return [
        together((plan.stages[stage].prediction.memory_bytes for stage in stages), BRIEF)
        for stages in stages_of_ranks(plan)
    ]


def measured(model: str, texts: Sequence[str]) -> list[Mapping[str, int]]:
    """On a rank: the bytes by category of each plan's second step."""
    deferred, program = captured(model)
    found = []
    for text in texts:
        plan = loads(text, "test")
        trainer = Trainer(program, plan, deferred, device=torch.device("cpu"))
        batch = random_batch(program.graph.with_batch_size(plan.model.global_batch), seed=0)
        trainer.step(batch)
        report = measure_step(trainer, batch)
        found.append({k: v for k, v in report.by_category.items() if k != "batch"})
    return found
