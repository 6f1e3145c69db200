"""A model that lives in a script under torchrun: planned on rank 0, trained on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoparallel.cost_model.detect import threads_per_device
from autoparallel.module import Job
from autoparallel.passes.deferred_init import Deferred, record_build
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning import (
    capture_rows,
    captured_seq,
    find_cluster,
    plan_program,
)
from autoparallel.runtime.initial_values import Weights
from autoparallel.runtime.pretrained import pretrained
from autoparallel.runtime.shared import share_tensor, share_text
from autoparallel.runtime.trainer import Trainer, join


def join_training(
    job: Job,
    plan: Plan | None,
    build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    progress: Callable[..., None] | None = None,
    buckets: Sequence[int] = (),
) -> Trainer:
    """The trainer of this rank for the job's model. Collective over all ranks.

    Without ``plan`` rank 0 makes one for the processes that torchrun started, and all use it.
    Initial weights are rank 0's: its model's, or those that its generator's state makes. So
    are the random numbers of the forward: they follow rank 0's ``torch.manual_seed``.
    ``progress`` is told what a step is about to do; ``buckets``: see ``Trainer``.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        torch.set_num_threads(threads_per_device(world_size))
    device = join(kind, int(os.environ.get("LOCAL_RANK", rank)))
    start: Deferred | Mapping[str, torch.Tensor]
    if job.rng_state is not None:
        start = record_build(job.target.build_model, share_tensor(job.rng_state))
        model = start.model
    else:
        model = job.target.build_model()
        start = {
            name: share_tensor(tensor.detach())
            for method in (model.named_parameters, model.named_buffers)
            for name, tensor in method(remove_duplicate=False)
        }
    weights: Weights = start
    if job.weights is not None:
        weights = pretrained(job.weights, model, start, partial=job.weights_partial)
    target, options = job.target, job.options
    precision = options.precision if plan is None else plan.model.precision
    rows = options.global_batch if plan is None else plan.model.global_batch
    program = capture_rows(target, model, global_batch=rows, seq=options.seq, precision=precision)
    if plan is None:
        is_local_cpu = job.cluster == "local" and kind == "cpu"
        text = None
        if rank == 0:
            cluster = find_cluster(f"cpu:{world_size}" if is_local_cpu else job.cluster)
            text = dumps(plan_program(program, target, cluster, options))
        plan = loads(share_text(text))
    _check_length(plan, captured_seq(program))
    seed = int(share_tensor(torch.tensor(torch.initial_seed() % 2**63)))
    return Trainer(
        program, plan, weights, device=device, build=build_optimizer, progress=progress, seed=seed,
        buckets=buckets,
    )  # fmt: skip


def _check_length(plan: Plan, seq: int | None) -> None:
    if plan.model.seq is not None and seq is not None and plan.model.seq != seq:
        raise UsageError(
            "AP143",
            f"the plan is for sequences of {plan.model.seq}, the example batch has {seq}",
            fix="give the plan's length as seq, or plan for this one",
        )
