"""Plans of every schedule, predicted and measured: the bytes of a rank at its fullest moment.

In: a model, a schedule, a number of micro-batches. Out: the plan with the bytes of its ranks, and
what the tensors of these took in a step on processes of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from schedule_cases import SCHEDULES as SYNCHRONOUS
from schedule_cases import Case, Models

from autoparallel.passes.memory.stage_memory import with_stage_memory
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.evaluate.evaluate import TRANSIENT
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import loads
from autoparallel.planner.stage.stage_cost import combine_bytes
from autoparallel.planner.variants.replicas import stages_of_ranks
from autoparallel.runtime.step.trainer import Trainer
from benchmarks.memory.step_memory import measure_step

WIDTH, SEQ, ROWS = 256, 64, 4
"""A message is 0.26 MB, a layer keeps 4 MB of a micro-batch; a rank holds 50 MB of states."""

MODELS = Models(
    {
        "gpt": (
            "examples/gpt.py",
            {"d_model": WIDTH, "n_head": 4, "n_layer": 8, "seq": SEQ, "vocab": 256},
        ),
        "skip": ("tests/models/long_skip.py", {"width": WIDTH}),
    },
    sequences={"gpt": SEQ},
)
ROWS_OF = {"gpt": ROWS, "skip": ROWS * SEQ}
SCHEDULES = (*SYNCHRONOUS, "pipedream", "pipedream-2bw", "ampnet")
COUNTS = (4, 16, 64)


def planned(case: Case, *, is_gpu: bool = False, runs: bool = True) -> Plan | None:
    """With the bytes of its stages; None where the model or the schedule cannot have this."""
    plan = MODELS.planned(case, ROWS_OF[case.model] * case.count)
    if plan is None:
        return None
    _, program = MODELS.captured(case.model)
    return with_stage_memory(plan, program.graph, program.blocks, is_gpu=is_gpu, runs=runs)


def predicted(plan: Plan) -> list[Mapping[str, int]]:
    """The bytes of each rank of the pipeline by category."""
    return [
        combine_bytes((plan.stages[stage].prediction.memory_bytes for stage in stages), TRANSIENT)
        for stages in stages_of_ranks(plan)
    ]


def measured(model: str, texts: Sequence[str]) -> list[Mapping[str, int]]:
    """On a rank: the bytes by category of each plan's second step."""
    deferred, program = MODELS.captured(model)
    found = []
    for text in texts:
        plan = loads(text, "test")
        trainer = Trainer(program, plan, deferred, device=torch.device("cpu"))
        batch = random_batch(program.graph.with_batch_size(plan.model.global_batch), seed=0)
        trainer.step(batch)
        report = measure_step(trainer, batch)
        found.append({k: v for k, v in report.by_category.items() if k != "batch"})
    return found
