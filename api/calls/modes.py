"""Modes and random states for planning, independent of where a model is first used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from autoparallel.passes.tracing.python_state import Generators
from autoparallel.planner.dims.batch import meeting, meeting_text

if TYPE_CHECKING:
    from autoparallel.passes.initialization.deferred_init import Deferred, Init
    from autoparallel.passes.programs.program import Program
    from autoparallel.planner.plan import Plan


@contextmanager
def as_at_start() -> Iterator[None]:
    """Enable gradients and disable autocast inside the context, then restore random generators.

    Thus a script draws the same batches on all ranks as without planning.
    """
    generators = Generators.now()
    try:
        with in_modes_of_training():
            yield
    finally:
        generators.restore()


@contextmanager
def in_modes_of_training() -> Iterator[None]:
    """Enable gradients and disable autocast inside the context, then restore torch's generators."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng(),
    ):
        yield


def say_if_rows_are_apart(program: Program, plan: Plan, rank: int) -> None:
    """Warn on rank 0 if the plan has several micro-batches and an op, such as batch norm, mixes
    samples: it sees only samples of one micro-batch."""
    node = meeting(program.graph)
    if program.graph.accumulation.mixing and node and plan.num_microbatches > 1 and rank == 0:
        sys.stderr.write(
            f"autoparallel: {meeting_text(node)}, and each of the {plan.num_microbatches} "
            "micro-batches is computed for itself, as when gradients are accumulated; one device "
            "sees the whole batch, and microbatches=1 computes that\n"
        )
        sys.stderr.flush()


def say_if_drawn_apart(deferred: Deferred, asked: Init, rank: int | None = None) -> None:
    """Warn on rank 0 if each rank draws initial weights for its own shards by default, as these
    differ from the weights drawn on one device."""
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    if asked == "auto" and deferred.init == "sharded" and own == 0:
        sys.stderr.write(
            "autoparallel: initial weights are drawn by each rank for its shards, so they are not "
            "those of the model alone, whose numbers take a rank more than 10 s: "
            'init="exact" (--init exact) draws them\n'
        )
        sys.stderr.flush()
