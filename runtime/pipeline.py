"""The interpreter of a schedule: one rank's row of the action table, step by step.

In: the schedule, the rank's executor and exchange. Out: ``step(batch)`` runs the row and
returns the loss of the whole step, the mean over the micro-batches, on every rank. Every
plan runs through it; a plan with one stage has a row without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..cost_model.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    RECEIVES,
    RECV_FORWARD,
    REDUCE,
    SEND_FORWARD,
    SENDS,
    STEP,
    Action,
    Schedule,
)
from ..planner.errors import PlanError
from .exchange import Direction, Exchange


class Executor(Protocol):
    """One rank's part of a stage, as ``runtime.executor.StageExecutor`` is.

    ``backward`` scales the loss by one over the number of micro-batches; ``gradients`` are
    those of the values sent. ``last`` marks the stage's last backward of the step.
    """

    def begin_step(self, batch: Mapping[str, Tensor]) -> None: ...
    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...
    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], *, last: bool
    ) -> Mapping[str, Tensor]: ...
    def loss(self, microbatch: int) -> Tensor | None: ...
    def finish_step(self) -> None: ...


class ActionTiming(NamedTuple):
    """An action as it ran, in seconds since the step began.

    A compute action waits for its messages from start to ready and computes until its end.
    """

    action: Action
    start_seconds: float
    ready_seconds: float
    end_seconds: float


class PipelineRunner:
    """Runs training steps on one rank; ``timings`` holds the last step's if it has a clock."""

    def __init__(
        self,
        schedule: Schedule,
        executor: Executor | None,
        exchange: Exchange,
        *,
        stage: int | None,
        update: Callable[[], None] | None = None,
        progress: Callable[[str], None] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``stage`` is the one this rank works for; a rank that the plan leaves idle has none.

        ``update`` updates the weights at the stage's STEP, after the gradients are complete.
        ``progress`` is told what the rank is about to do, for a watchdog. ``clock`` returns
        the second and turns on ``timings``; on an accelerator it should synchronize first.
        """
        self.schedule = schedule
        self.timings: tuple[ActionTiming, ...] = ()
        self._executor = executor
        self._exchange = exchange
        self._row = () if stage is None else schedule.table[schedule.stage_rank[stage]]
        self._update = update
        self._progress = progress
        self._clock = clock
        self._outputs: Mapping[str, Tensor] = {}
        self._posted: set[tuple[Direction, int, int]] = set()
        if any(action.stage != stage for action in self._row):
            raise PlanError(
                "AP541", f"schedule {schedule.name!r} gives one rank several stages",
                where="schedule",
            )  # fmt: skip
        backwards = [action for action in self._row if action.kind == BACKWARD]
        self._last_backward = backwards[-1] if backwards else None
        self._trains = any(action.kind == BACKWARD for row in schedule.table for action in row)

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run one step on the global ``batch``: the true loss on every rank (float64 scalar)."""
        timings: list[ActionTiming] = []
        began = self._clock() if self._clock else 0.0
        self._posted.clear()
        if self._executor is not None:
            self._executor.begin_step(batch)
        with torch.set_grad_enabled(self._trains):
            for action in self._row:
                start = self._clock() - began if self._clock else 0.0
                ready = self._perform(action, began)
                if self._clock:
                    end = self._clock() - began
                    timings.append(ActionTiming(action, start, max(start, ready), end))
        self._tell("waiting until all messages have gone")
        self._exchange.finish()
        self.timings = tuple(timings)
        self._tell("waiting for the loss of the last stage")
        loss = self._exchange.share_loss(self._mean_loss())
        self._tell("between steps")
        return loss

    def _perform(self, action: Action, began: float) -> float:
        """Does one action; when its messages were there."""
        assert self._executor is not None
        ready = 0.0
        stage, m = action.stage, action.microbatch
        if action.kind in COMPUTE:
            direction: Direction = "forward" if action.kind == FORWARD else "backward"
            received = self._received(action, direction)
            ready = self._clock() - began if self._clock else 0.0
            self._tell(f"{action}: computing (stage {stage}, micro-batch {m})")
            if action.kind == FORWARD:
                self._outputs = self._executor.forward(m, received)
            elif action.kind == BACKWARD:
                last = action == self._last_backward
                self._outputs = self._executor.backward(m, received, last=last)
            else:
                raise PlanError("AP542", f"{action}: split backwards are not supported")
        elif action.kind in RECEIVES:
            direction = "forward" if action.kind == RECV_FORWARD else "backward"
            self._exchange.post(direction, stage, m)
            self._posted.add((direction, stage, m))
        elif action.kind in SENDS:
            direction = "forward" if action.kind == SEND_FORWARD else "backward"
            self._tell(f"{action}: sending (stage {stage}, micro-batch {m})")
            self._exchange.send(direction, stage, m, self._outputs)
            self._outputs = {}
        elif action.kind == REDUCE:
            self._tell(f"{action}: completing the gradients of stage {stage}")
            self._executor.finish_step()
        elif action.kind == STEP and self._update is not None:
            self._tell(f"{action}: updating the weights of stage {stage}")
            self._update()
        return ready

    def _received(self, action: Action, direction: Direction) -> Mapping[str, Tensor]:
        """Waits for what a compute action needs from other stages."""
        stage, m = action.stage, action.microbatch
        if (direction, stage, m) not in self._posted:
            return {}
        what = "activations" if direction == "forward" else "gradients"
        side = "earlier" if direction == "forward" else "later"
        self._tell(
            f"{action}: waiting for {what} from {side} stages (stage {stage}, micro-batch {m})"
        )
        return self._exchange.receive(direction, stage, m)

    def _mean_loss(self) -> Tensor | None:
        """The mean over the micro-batches, in the stage that computes the loss."""
        if self._executor is None:
            return None
        losses = [self._executor.loss(m) for m in range(self.schedule.num_microbatches)]
        found = [loss.detach().to(torch.float64) for loss in losses if loss is not None]
        return torch.stack(found).mean() if found else None

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what)
