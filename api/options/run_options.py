"""What a run does besides plain steps: updates, metrics and a model file's callbacks.

In: options of the command line, which pass to the workers as JSON. Out: how each step updates
the weights, and who is told of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.update.update import OnNan, UpdateOptions
from autoparallel.target.load import running_user_code
from autoparallel.training.callbacks import Callback, all_of
from autoparallel.training.metrics import JsonLines, TensorBoard, WeightsAndBiases, check_installed

if TYPE_CHECKING:
    from autoparallel.planner.plan import Plan
    from autoparallel.target.load import Target

"""Beside a checkpoint's weights: scheduler, loss scale and counters."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``autoparallel run`` by the names of its command line.

    ``compiled``: whether blocks run compiled; None leaves it to the plan. ``elastic``: options of
    planning by name, where fewer hosts than the plan's may go on; None where they may not.
    ``trace_steps`` are recorded and written to ``trace``. ``check_first_step``: whether the first
    one is compared with the model alone; None where that is quick.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    loss_scale: float | None = None
    on_nan: OnNan = "ignore"
    metrics: str | None = None
    tensorboard: str | None = None
    wandb: str | None = None
    compiled: bool | None = None
    elastic: Mapping[str, Any] | None = None
    trace_steps: int = 0
    trace: str | None = None
    check_first_step: bool | None = None

    def check(self) -> None:
        """Raises UsageError AP900 for a bad value and AP905 where a package is missing."""
        self.update("cpu")
        check_installed({"tensorboard": self.tensorboard, "wandb": self.wandb})

    def update(self, device: str) -> UpdateOptions:
        """What an update does; ``device`` is the kind that the loss is on."""
        scaler = None
        if self.loss_scale is not None:
            if not self.loss_scale > 0:
                raise UsageError("AP900", f"loss_scale is {self.loss_scale}, but must be above 0")
            scaler = torch.amp.GradScaler(device, init_scale=self.loss_scale)
        return UpdateOptions(self.clip_norm, self.clip_value, self.accumulate, self.on_nan, scaler)

    def sinks(self, plan: Plan, kept: int | None = None) -> Iterator[Callback]:
        """The places that the figures go to; ``kept`` as in ``told``.

        Raises UsageError AP905 and AP906.
        """
        if self.metrics is not None:
            yield JsonLines(self.metrics, kept=kept)
        if self.tensorboard is not None:
            yield TensorBoard(self.tensorboard, kept=kept)
        if self.wandb is not None:
            settings = {"model": plan.model.target, "global_batch": plan.model.global_batch,
                        "num_devices": plan.cluster.num_devices, **plan.model.settings}  # fmt: skip
            yield WeightsAndBiases(self.wandb, settings)


def as_asked(plan: Plan, compiled: bool | None, *, rank: int) -> Plan:
    """The plan, compiled or not as asked; rank 0 says where that is not what was priced."""
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
def told(
    options: RunOptions, plan: Plan, target: Target, *, rank: int, kept: int | None = None
) -> Iterator[Callback]:
    """Who is told of the steps, on rank 0; elsewhere nobody. Closed at the end, however it comes.

    ``kept``: in a restart, the last step whose figures stay where they were written.

    Raises UsageError AP907 where ``callbacks()`` of the model file gives something else.
    """
    made: list[Callback] = []
    try:
        if rank == 0:
            made += options.sinks(plan, kept)
            made += _of_target(target)
        yield all_of(made)
    finally:
        for each in made:
            each.close()


def _of_target(target: Target) -> Sequence[Callback]:
    if target.callbacks is None:
        return ()
    with running_user_code("AP907", f"callbacks of {target.name} fails"):
        found = list(target.callbacks())
    return [all_of(found, source=f"callbacks of {target.name}")]
