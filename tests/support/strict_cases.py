"""Plans with pipelines, run under the rules of NCCL and CUDA and held to one device.

In: a model, a schedule and a number of micro-batches. Out: the comparison, in float64, of two steps
on the ranks of a ``strict`` group with two steps on one device: losses, gradients and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from one_device import build_optimizer, reference_of
from schedule_cases import Case, Models

from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import Verification, verify

GPT = {"d_model": 16, "n_head": 2, "n_layer": 8, "seq": 8, "vocab": 32}
MODELS = Models(
    {
        "chain": ("examples/gpt.py", GPT),
        "tied": ("examples/gpt.py", {**GPT, "tied": True}),
        "skip": ("tests/models/long_skip.py", {}),
        "u-net": ("examples/unet.py", {"channels": 8, "depth": 2}),
        "encoder-decoder": ("hf:tests/zoo/t5", {}),
        "branches": ("tests/models/three_arms.py", {}),
    },
    sequences={"chain": 8, "tied": 8, "encoder-decoder": 8},
)
COUNTS = (1, 4, 16, 64)
ROWS = 64


def planned(case: Case) -> str | None:
    """The plan file; None where the model or the schedule cannot have this."""
    plan = MODELS.planned(case, ROWS)
    return None if plan is None else dumps(plan)


def run_cases(model: str, texts: Sequence[str]) -> list[Verification]:
    """On a rank: each plan of ``model`` for two steps."""
    deferred, program = MODELS.captured(model, "fp64")
    graph = program.with_batch_size(ROWS).graph
    batches = [random_batch(graph, seed=step) for step in range(2)]
    reference = cache(lambda: reference_of(MODELS.target(model), program, batches))
    found = []
    for text in texts:
        plan = loads(text, "test")
        plan = replace(plan, model=replace(plan.model, precision="fp64"))
        cpu = torch.device("cpu")
        trainer = Trainer(program, plan, deferred, device=cpu, build=build_optimizer)
        found.append(verify(trainer, batches, reference))
    return found
