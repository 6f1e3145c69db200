"""The modes and random numbers that a model is planned with, whatever is around its first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from autoparallel.passes.tracing.python_state import Generators

if TYPE_CHECKING:
    from autoparallel.passes.initialization.deferred_init import Deferred, Init
    from autoparallel.passes.programs.program import Program
    from autoparallel.planner.plan import Plan


@contextmanager
def as_at_start() -> Iterator[None]:
    """Planning neither depends on the modes around a model's first use nor draws random numbers.

    All ranks go on with the random numbers that they had: a script that draws its batches draws
    the same ones on every rank, and those that it draws alone.
    """
    generators = Generators.now()
    try:
        with in_modes_of_training():
            yield
    finally:
        generators.restore()


@contextmanager
def in_modes_of_training() -> Iterator[None]:
    """Compute gradients without autocast, in any surroundings; torch draws nothing for good."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng(),
    ):
        yield


def say_if_rows_are_apart(program: Program, plan: Plan, rank: int) -> None:
    """Say on rank 0 that micro-batches do not see each other where one device's rows do."""
    mixing = program.graph.accumulation.mixing
    if mixing and plan.num_microbatches > 1 and rank == 0:
        where = program.graph[mixing[0]].module or mixing[0]
        sys.stderr.write(
            f"autoparallel: {where} sees each of the {plan.num_microbatches} micro-batches for "
            "itself, as when gradients are accumulated; one device sees the whole batch, and "
            "microbatches=1 computes that\n"
        )
        sys.stderr.flush()


def say_if_drawn_apart(deferred: Deferred, asked: Init, rank: int | None = None) -> None:
    """Say on rank 0 that each rank draws its own shards, where nobody asked for that."""
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    if asked == "auto" and deferred.init == "sharded" and own == 0:
        sys.stderr.write(
            "autoparallel: initial weights are drawn by each rank for its shards, so they are not "
            "those of the model alone, whose numbers take a rank more than 10 s: "
            'init="exact" (--init exact) draws them\n'
        )
        sys.stderr.flush()
