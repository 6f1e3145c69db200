"""A model that lives in a script under torchrun: planned on rank 0, trained on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from autoparallel.cost_model.detect import threads_per_device
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning import (
    CAPTURE_BATCH,
    PlanOptions,
    capture_model,
    captured_seq,
    find_cluster,
    plan_program,
)
from autoparallel.runtime.trainer import Trainer, join, share_text
from autoparallel.targets import Target


def join_training(
    target: Target,
    plan: Plan | None,
    cluster: str,
    options: PlanOptions,
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> Trainer:
    """The trainer of this rank for ``target``'s model, whose weights it starts from.

    Without ``plan`` rank 0 makes one for the processes that torchrun started, and all use it.
    Collective over all ranks. The weights must be the same on every rank.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        torch.set_num_threads(threads_per_device(world_size))
    device = join(kind, int(os.environ.get("LOCAL_RANK", rank)))
    model = target.build_model()
    precision = options.precision if plan is None else plan.model.precision
    batch = target.example_batch(CAPTURE_BATCH, options.seq)
    program = capture_model(model, batch, target.loss_fn, precision)
    if plan is None:
        name = f"cpu:{world_size}" if cluster == "local" and kind == "cpu" else cluster
        text = None
        if rank == 0:
            text = dumps(plan_program(program, target, find_cluster(name), options))
        plan = loads(share_text(text))
    _check_length(plan, captured_seq(program))
    weights = {**_named(model.named_parameters), **_named(model.named_buffers)}
    return Trainer(program, plan, weights, device=device, build=build_optimizer)


def _named(method: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in method(remove_duplicate=False)}


def _check_length(plan: Plan, seq: int | None) -> None:
    if plan.model.seq is not None and seq is not None and plan.model.seq != seq:
        raise UsageError(
            "AP143",
            f"the plan is for sequences of {plan.model.seq}, the example batch has {seq}",
            fix="give the plan's length as seq, or plan for this one",
        )
