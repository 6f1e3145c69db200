"""Objects made from the options of a run: updates, callbacks, and the choice to compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from autoparallel.options.run_options import RunOptions
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.update.update import UpdateOptions
from autoparallel.target.target import Target, running_user_code
from autoparallel.training.callbacks import Callback, all_of
from autoparallel.training.metrics import (
    JsonLines,
    StepBar,
    TensorBoard,
    WeightsAndBiases,
    check_installed,
)


def check_run_options(options: RunOptions) -> None:
    """Raise UsageError AP156 or AP900 for bad values, AP905 if a metrics package is missing."""
    if options.verified and options.elastic is not None:
        raise UsageError(
            "AP156",
            "--verify of a run with --elastic",
            why="the plan changes with the hosts that are there",
            fix="autoparallel verify PLAN first, then run without --verify",
        )
    update_options(options, "cpu")
    check_installed({"tensorboard": options.tensorboard, "wandb": options.wandb})


def update_options(options: RunOptions, device: str) -> UpdateOptions:
    """Return the options of optimizer updates (clipping, accumulation, loss scale); ``device`` is
    the device type that a loss scale is for."""
    scaler = None
    if options.loss_scale is not None:
        if not options.loss_scale > 0:
            raise UsageError("AP900", f"loss_scale is {options.loss_scale}, but must be above 0")
        scaler = torch.amp.GradScaler(device, init_scale=options.loss_scale)
    return UpdateOptions(
        options.clip_norm, options.clip_value, options.accumulate, options.on_nan, scaler
    )


def with_compile_choice(plan: Plan, compiled: bool | None, *, rank: int) -> Plan:
    """Return the plan with ``compiled`` as requested; rank 0 warns if it was priced otherwise."""
    if compiled is None or compiled == plan.compiled:
        return plan
    if rank == 0:
        priced, runs = ("eager", "compiled") if compiled else ("compiled", "eager")
        sys.stderr.write(
            f"autoparallel: the plan is priced for {priced} blocks and runs {runs}: "
            "its predictions are of another run\n"
        )
    return replace(plan, compiled=compiled)


@contextmanager
def open_callbacks(
    options: RunOptions,
    plan: Plan,
    target: Target,
    *,
    rank: int,
    num_steps: int,
    kept: int | None = None,
) -> Iterator[Callback]:
    """Open the callbacks of a run on rank 0, none elsewhere, and close them at its end.

    ``kept``: in a restart, the last step whose written figures stay. Raises UsageError AP905 and
    AP906 for metrics, and AP907 if the model file's ``callbacks()`` fails or returns other objects.
    """
    made: list[Callback] = []
    try:
        if rank == 0:
            made += _metrics(options, plan, kept)
            made += _of_target(target)
            made += [StepBar(num_steps)] if sys.stdout.isatty() else []
        yield all_of(made)
    finally:
        for each in made:
            each.close()


def _metrics(options: RunOptions, plan: Plan, kept: int | None) -> Iterator[Callback]:
    if options.metrics is not None:
        yield JsonLines(options.metrics, kept=kept)
    if options.tensorboard is not None:
        yield TensorBoard(options.tensorboard, kept=kept)
    if options.wandb is not None:
        settings = {
            "model": plan.model.target,
            "global_batch": plan.model.global_batch,
            "num_devices": plan.cluster.num_devices,
            **plan.model.settings,
        }
        yield WeightsAndBiases(options.wandb, settings)


def _of_target(target: Target) -> Sequence[Callback]:
    if target.callbacks is None:
        return ()
    with running_user_code("AP907", f"callbacks of {target.name} fails"):
        found = list(target.callbacks())
    return [all_of(found, source=f"callbacks of {target.name}")]
