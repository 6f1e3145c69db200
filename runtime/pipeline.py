"""The interpreter of a schedule: one rank's row of the action table, step by step.

In: the schedule, the rank's executors by stage, its exchange with other ranks. Out:
``step(batch)`` runs the row and returns the loss of the whole step, the mean over the
micro-batches, on every rank; who reads it waits for it. Every plan runs through it; a plan
with one stage has a row without messages. What a stage makes for a stage of the same rank is
handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..cost_model.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVES,
    RECV_FORWARD,
    REDUCE,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    STEP,
    WEIGHT_BACKWARD,
    Action,
    Row,
    Schedule,
)
from ..planner.errors import PlanError
from .exchange import Direction, Exchange

Values = Mapping[str, Tensor]


class Executor(Protocol):
    """One rank's part of a stage, as ``runtime.executor.StageExecutor`` is.

    Where sequences are sliced, slice ``j`` of micro-batch ``m`` is ``m * num_slices + j``, but in
    ``loss``. ``backward`` scales the loss by one over the number of micro-batches;
    ``gradients`` are those of the values sent. ``backward_inputs`` and ``backward_weights`` are
    its halves. ``last`` marks the last action before a REDUCE that gives the stage's weights
    gradients.
    """

    def begin_step(self, batch: Values) -> None: ...
    def forward(self, microbatch: int, received: Values) -> Values: ...
    def backward(self, microbatch: int, gradients: Values, *, last: bool) -> Values: ...
    def backward_inputs(self, microbatch: int, gradients: Values) -> Values: ...
    def backward_weights(self, microbatch: int, *, last: bool) -> None: ...
    def loss(self, microbatch: int) -> Tensor | None: ...
    def finish_step(self) -> None: ...


class LocalHandover(Protocol):
    """What goes between stages of one rank, as ``runtime.handover.Handover`` has it."""

    def give(self, direction: Direction, stage: int, microbatch: int, values: Values) -> None: ...
    def take(self, direction: Direction, stage: int, microbatch: int) -> Values: ...


class ActionTiming(NamedTuple):
    """An action as it ran, in seconds since the step began.

    A compute action waits for its messages from start to ready and computes until its end.
    """

    action: Action
    start_seconds: float
    ready_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a runner calls besides its executors.

    ``complete`` when all of them have reduced their gradients, ``update`` at each STEP.
    ``progress`` is told what the rank is about to do, for a watchdog. ``clock`` returns the
    second and turns on ``timings``; on an accelerator it should synchronize first.
    """

    complete: Callable[[], None] | None = None
    update: Callable[[], None] | None = None
    progress: Callable[[str], None] | None = None
    clock: Callable[[], float] | None = None


NO_HOOKS = Hooks()


class PipelineRunner:
    """Runs training steps on one rank; ``timings`` holds the last step's if it has a clock."""

    def __init__(
        self,
        schedule: Schedule,
        executors: Mapping[int, Executor],
        exchange: Exchange,
        *,
        handover: LocalHandover | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        """``executors`` are those of the stages this rank works for; none if it is left idle.

        ``handover`` carries what its stages make for each other.
        """
        self.schedule = schedule
        self.timings: tuple[ActionTiming, ...] = ()
        self._executors = executors
        self._exchange = exchange
        self._handover = handover
        self._row = row_of(schedule, frozenset(executors))
        self._complete, self._update = hooks.complete, hooks.update
        self._progress, self._clock = hooks.progress, hooks.clock
        self._outputs: dict[Action, Values] = {}
        self._posted: set[tuple[Direction, int, int]] = set()
        self._sends = frozenset(action for action in self._row if action.kind in SENDS)
        self._lasts = _last_backwards(self._row)
        reduces = [action for action in self._row if action.kind == REDUCE]
        self._last_reduce = reduces[-1] if reduces else None
        self._trains = any(
            action.kind in (BACKWARD, INPUT_BACKWARD) for row in schedule.table for action in row
        )

    def step(self, batch: Values) -> Tensor:
        """Run one step on the global ``batch``: the true loss on every rank (float64 scalar)."""
        timings: list[ActionTiming] = []
        began = self._clock() if self._clock else 0.0
        self._posted.clear()
        self._outputs.clear()
        for executor in self._executors.values():
            executor.begin_step(batch)
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
        stages = self.schedule.replicas(self.schedule.num_parts - 1)
        loss = self._exchange.share_loss(self._mean_loss(), stages)
        self._tell("between steps")
        return loss

    def _perform(self, action: Action, began: float) -> float:
        """Does one action; when its messages were there."""
        ready = 0.0
        stage, m = action.stage, self._unit(action)
        if action.kind == WEIGHT_BACKWARD:
            self._tell(f"{action}: computing (stage {stage}, micro-batch {m})")
            self._executors[stage].backward_weights(m, last=action in self._lasts)
        elif action.kind in COMPUTE:
            direction: Direction = "forward" if action.kind == FORWARD else "backward"
            received = self._received(action, direction)
            ready = self._clock() - began if self._clock else 0.0
            self._tell(f"{action}: computing (stage {stage}, micro-batch {action.microbatch})")
            self._keep(action, direction, self._computed(action, received))
        elif action.kind in RECEIVES:
            direction = "forward" if action.kind == RECV_FORWARD else "backward"
            self._exchange.post(direction, stage, m)
            self._posted.add((direction, stage, m))
        elif action.kind in SENDS:
            direction = "forward" if action.kind == SEND_FORWARD else "backward"
            self._tell(f"{action}: sending (stage {stage}, micro-batch {action.microbatch})")
            self._exchange.send(direction, stage, m, self._outputs.pop(action))
        elif action.kind == REDUCE:
            self._tell(f"{action}: completing the gradients of stage {stage}")
            self._executors[stage].finish_step()
            if action == self._last_reduce and self._complete is not None:
                self._complete()
        elif action.kind == STEP and self._update is not None:
            self._tell(f"{action}: updating the weights of stage {stage}")
            self._update()
        return ready

    def _unit(self, action: Action) -> int:
        """What is computed and sent at once: a micro-batch, or a slice of one."""
        return action.microbatch * self.schedule.num_slices + action.slice

    def _computed(self, action: Action, received: Values) -> Values:
        executor, m = self._executors[action.stage], self._unit(action)
        if action.kind == FORWARD:
            return executor.forward(m, received)
        if action.kind == INPUT_BACKWARD:
            return executor.backward_inputs(m, received)
        return executor.backward(m, received, last=action in self._lasts)

    def _keep(self, action: Action, direction: Direction, values: Values) -> None:
        """Hands what was computed to this rank's stages, and keeps it until it is sent."""
        kind = SEND_FORWARD if direction == "forward" else SEND_BACKWARD
        stage, m = action.stage, self._unit(action)
        if self._handover is not None:
            self._handover.give(direction, stage, m, values)
        send = action._replace(kind=kind)
        if send in self._sends:
            self._outputs[send] = values

    def _received(self, action: Action, direction: Direction) -> Values:
        """Waits for what a compute action needs from other stages.

        Gradients of a value that went to several stages are summed.
        """
        stage, m = action.stage, self._unit(action)
        received: dict[str, Tensor] = {}
        if self._handover is not None:
            received.update(self._handover.take(direction, stage, m))
        if (direction, stage, m) not in self._posted:
            return received
        what = "activations" if direction == "forward" else "gradients"
        side = "earlier" if direction == "forward" else "later"
        self._tell(
            f"{action}: waiting for {what} from {side} stages "
            f"(stage {stage}, micro-batch {action.microbatch})"
        )
        self._posted.discard((direction, stage, m))
        for key, value in self._exchange.receive(direction, stage, m).items():
            received[key] = received[key] + value if key in received else value
        return received

    def _mean_loss(self) -> Tensor | None:
        """This rank's part of the mean over all micro-batches; None where it makes no loss."""
        found = [
            loss.detach().to(torch.float64)
            for executor in self._executors.values()
            for m in range(self.schedule.num_microbatches)
            if (loss := executor.loss(m)) is not None
        ]
        return torch.stack(found).sum() / self.schedule.num_microbatches if found else None

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what)


def _last_backwards(row: Row) -> frozenset[Action]:
    """The actions that give a stage's weights gradients last before they are reduced."""
    found: set[Action] = set()
    latest: dict[int, Action] = {}
    for action in row:
        if action.kind in (BACKWARD, WEIGHT_BACKWARD):
            latest[action.stage] = action
        elif action.kind == REDUCE:
            found.add(latest[action.stage])
    return frozenset(found)


def row_of(schedule: Schedule, stages: frozenset[int]) -> Row:
    """The row of a rank that works for these stages; empty for none.

    Raises PlanError AP541 where the schedule gives a rank other stages than those together.
    """
    if not stages:
        return ()
    ranks = {schedule.stage_rank[stage] for stage in stages}
    row = schedule.table[min(ranks)]
    if len(ranks) > 1 or {action.stage for action in row} != stages:
        raise PlanError(
            "AP541",
            f"schedule {schedule.name!r} puts other stages together than {sorted(stages)}",
            why="the plan gives these stages the same devices",
            where="schedule",
            fix="plan again",
        )
    return row
