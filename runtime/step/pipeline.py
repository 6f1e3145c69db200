"""The interpreter of a schedule: one rank's row of the action table, step by step.

In: the schedule, the rank's executors by stage, its exchange with other ranks. Out: ``step(batch)``
runs the row and returns the loss of the whole step, the mean over the micro-batches, on every rank;
only a read of the loss waits for it. Every plan runs through it; a plan with one stage has a row
without messages. Values for a stage of the same rank are handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...cost_model.simulator.actions import (
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
    ActionKind,
    Row,
    Schedule,
    last_before_reduce,
)
from ...planner.errors import PlanError
from ..messages.exchange import Direction, Exchange
from ..messages.local_transfer import LocalTransfer
from ..messages.pending_results import Progress
from ..messages.watchdog import BETWEEN_STEPS

Key = tuple[Direction, int, int]
"""Key of values that are computed and sent together: direction, stage, and number of the
micro-batch (or slice of one)."""

Values = Mapping[str, Tensor]
_NOTHING: Values = {}


class Executor(Protocol):
    """Interface of the executor of a stage on one rank; ``StageExecutor`` implements it.

    If sequences are sliced, ``microbatch`` is ``m * num_slices + j`` for slice ``j`` of micro-batch
    ``m``, except in ``loss``. ``backward`` scales the loss by one over the number of micro-batches;
    ``gradients`` are of the values sent. ``backward_inputs`` and ``backward_weights`` are the
    halves of ``backward``. ``last``: no other action adds to the weights' gradients before they are
    reduced.
    """

    def begin_step(self, batch: Values) -> None: ...
    def forward(self, microbatch: int, received: Values) -> Values: ...
    def backward(self, microbatch: int, gradients: Values, *, last: bool) -> Values: ...
    def backward_inputs(self, microbatch: int, gradients: Values) -> Values: ...
    def backward_weights(self, microbatch: int, *, last: bool) -> None: ...
    def loss(self, microbatch: int) -> Tensor | None: ...
    def finish_step(self) -> None: ...


class StepMoments(NamedTuple):
    """Times of a step, as ``Hooks.clock`` returns them: its begin and end, and for each action the
    start, the time when its messages had arrived (None if it needs none) and the end."""

    began: Any
    actions: tuple[tuple[Action, Any, Any | None, Any], ...]
    ended: Any


class ActionTiming(NamedTuple):
    """Times of an executed action, in seconds since the step began. A compute action waits for its
    messages from start to ready and computes until its end."""

    action: Action
    start_seconds: float
    ready_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a ``PipelineRunner``.

    ``complete`` is called when all executors have reduced their gradients, ``update`` at each STEP
    action. ``progress`` is called before each action with its description and the ranks that take
    part in it, for a watchdog. ``clock`` returns seconds and turns on ``timings``; on an
    accelerator it should synchronize first. (A recorder sets the runner's ``clock`` to
    ``DeviceQueue.moment`` and reads ``moments``.)
    """

    complete: Callable[[], None] | None = None
    update: Callable[[], None] | None = None
    progress: Progress | None = None
    clock: Callable[[], float] | None = None


NO_HOOKS = Hooks()


class PipelineRunner:
    """Runner of training steps on one rank; ``moments`` are the times of the last step, if it has a
    ``clock``."""

    def __init__(
        self,
        schedule: Schedule,
        executors: Mapping[int, Executor],
        exchange: Exchange,
        *,
        handover: LocalTransfer | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        """Make the runner; ``executors`` has one for each stage of this rank (empty on an idle
        rank). ``handover`` transfers values between stages of this rank."""
        self.schedule = schedule
        self.moments: StepMoments | None = None
        self.clock: Callable[[], Any] | None = hooks.clock
        self._executors = executors
        self._exchange = exchange
        self._handover = handover
        self._row = prepare(schedule, frozenset(executors))
        self._complete, self._update = hooks.complete, hooks.update
        self._progress = hooks.progress
        self._outputs: dict[Key, Values] = {}
        self._posted: set[Key] = set()
        self._trains = any(
            action.kind in (BACKWARD, INPUT_BACKWARD) for row in schedule.table for action in row
        )

    @property
    def timings(self) -> tuple[ActionTiming, ...]:
        """The times of the last step's actions, if there is a ``clock`` that returns seconds."""
        if self.moments is None:
            return ()
        began = self.moments.began
        return tuple(
            ActionTiming(
                action, start - began, (start if ready is None else ready) - began, end - began
            )
            for action, start, ready, end in self.moments.actions
        )

    def step(self, batch: Values, *, reduces: bool = True) -> Tensor:
        """Run one step on the global ``batch``; return the loss on every rank (float64 scalar),
        without ``loss_scale``. If not ``reduces``, gradients stay unsummed on each rank; a later
        step adds to them."""
        clock = self.clock
        timed: list[tuple[Action, Any, Any | None, Any]] = []
        began = clock() if clock else None
        self._posted.clear()
        self._outputs.clear()
        self._exchange.begin_step()
        together = (self._exchange.peers(stage) for stage in self._executors)
        self._tell("beginning a step", tuple(sorted(set().union(*together))))
        for executor in self._executors.values():
            executor.begin_step(batch)
        with torch.set_grad_enabled(self._trains):
            for prepared in self._row:
                start = clock() if clock else None
                if not reduces:
                    if prepared.action.kind == REDUCE:
                        continue
                    prepared = replace(prepared, is_last=False)
                ready = self._perform(prepared)
                if clock:
                    timed.append((prepared.action, start, ready, clock()))
        self._tell("waiting until all messages have gone")
        self._exchange.finish()
        self.moments = StepMoments(began, tuple(timed), clock()) if clock else None
        stages = self.schedule.replicas(self.schedule.num_parts - 1)
        loss = self._exchange.share_loss(self._mean_loss(), stages)
        self._tell(BETWEEN_STEPS)
        return loss

    def _perform(self, prepared: Prepared) -> Any | None:
        """Run one action; return the time when its messages had arrived (None without a clock or
        messages)."""
        kind = prepared.action.kind
        if kind in RECEIVES:
            self._exchange.post(*prepared.key)
            self._posted.add(prepared.key)
            return None
        ready, received = None, _NOTHING
        if kind in COMPUTE and kind != WEIGHT_BACKWARD:
            received = self._received(prepared)
            ready = self.clock() if self.clock else None
        self._tell(prepared.doing, () if kind in SENDS else self._exchange.peers(prepared.key[1]))
        if kind in COMPUTE:
            self._compute(prepared, received)
        elif kind in SENDS:
            self._exchange.send(*prepared.key, self._outputs.pop(prepared.key))
        elif kind == REDUCE:
            self._executors[prepared.action.stage].finish_step()
            if prepared.is_last and self._complete is not None:
                self._complete()
        elif kind == STEP and self._update is not None:
            self._update()
        return ready

    def _compute(self, prepared: Prepared, received: Values) -> None:
        """Run a forward or backward; give its results to other stages of this rank, and keep them
        to be sent."""
        kind, (_, stage, unit) = prepared.action.kind, prepared.key
        executor = self._executors[stage]
        if kind == WEIGHT_BACKWARD:
            executor.backward_weights(unit, last=prepared.is_last)
            return
        if kind == FORWARD:
            values = executor.forward(unit, received)
        elif kind == INPUT_BACKWARD:
            values = executor.backward_inputs(unit, received)
        else:
            values = executor.backward(unit, received, last=prepared.is_last)
        if self._handover is not None:
            self._handover.give(*prepared.key, values)
        if prepared.is_sent:
            self._outputs[prepared.key] = values

    def _received(self, prepared: Prepared) -> Values:
        """Wait for the values that a forward or backward needs from other stages; return them by
        key. Gradients of a value that went to several stages are summed."""
        received: dict[str, Tensor] = {}
        if self._handover is not None:
            received.update(self._handover.take(*prepared.key))
        if prepared.key not in self._posted:
            return received
        self._tell(prepared.waiting)
        self._posted.discard(prepared.key)
        for key, value in self._exchange.receive(*prepared.key).items():
            received[key] = received[key] + value if key in received else value
        return received

    def _mean_loss(self) -> Tensor | None:
        """Return this rank's part of the loss, the mean over micro-batches; None without a loss."""
        found = [
            loss.detach().to(torch.float64)
            for executor in self._executors.values()
            for m in range(self.schedule.num_microbatches)
            if (loss := executor.loss(m)) is not None
        ]
        return torch.stack(found).sum() / self.schedule.num_microbatches if found else None

    def _tell(self, what: str, waits_for: tuple[int, ...] = ()) -> None:
        if self._progress is not None:
            self._progress(what, waits_for)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An action of this rank's schedule with facts computed once, before the first step.

    ``key`` is the key of the values that it receives, makes or sends. ``is_last``: it is the last
    to add to its stage's weight gradients before they are reduced, or the last REDUCE of the rank.
    ``is_sent``: the values that it makes are sent later. ``doing`` and ``waiting`` describe the
    action, and the wait for its messages, to a watchdog.
    """

    action: Action
    is_last: bool
    is_sent: bool
    key: Key
    doing: str
    waiting: str


def prepare(schedule: Schedule, stages: frozenset[int]) -> tuple[Prepared, ...]:
    """Return the actions, in order, of the rank that computes ``stages`` under a schedule; none
    without stages. Raises PlanError AP541 unless the schedule places exactly these stages on one
    rank."""
    row = _row_of(schedule, stages)
    sends = frozenset(action for action in row if action.kind in SENDS)
    lasts = last_before_reduce(row) | _last_reduce(row)
    return tuple(
        Prepared(
            action=action,
            is_last=action in lasts,
            is_sent=action._replace(kind=_sender(action)) in sends,
            key=_key(action, schedule.num_slices),
            doing=_doing(action),
            waiting=_waiting(action),
        )
        for action in row
    )


_FORWARD = frozenset((FORWARD, SEND_FORWARD, RECV_FORWARD))
_DONE: Mapping[ActionKind, str] = {
    REDUCE: "completing the gradients",
    STEP: "updating the weights",
}


def _sender(action: Action) -> ActionKind:
    """Return the kind of action that sends the values made by ``action``; STEP if none."""
    if action.kind in (BACKWARD, INPUT_BACKWARD):
        return SEND_BACKWARD
    return SEND_FORWARD if action.kind == FORWARD else STEP


def _key(action: Action, num_slices: int) -> Key:
    direction: Direction = "forward" if action.kind in _FORWARD else "backward"
    return direction, action.stage, action.microbatch * num_slices + action.slice


def _doing(action: Action) -> str:
    """Describe an action for a watchdog.

    >>> _doing(Action(FORWARD, 1, 0)), _doing(Action(STEP, 1))
    ('1F0: computing (stage 1, micro-batch 0)', '1STEP: updating the weights of stage 1')
    """
    if action.kind in _DONE:
        return f"{action}: {_DONE[action.kind]} of stage {action.stage}"
    verb = "computing" if action.kind in COMPUTE else "sending"
    return f"{action}: {verb} (stage {action.stage}, micro-batch {action.microbatch})"


def _waiting(action: Action) -> str:
    what, side = "gradients", "later"
    if action.kind == FORWARD:
        what, side = "activations", "earlier"
    where = f"(stage {action.stage}, micro-batch {action.microbatch})"
    return f"{action}: waiting for {what} from {side} stages {where}"


def _last_reduce(row: Row) -> frozenset[Action]:
    return frozenset([action for action in row if action.kind == REDUCE][-1:])


def _row_of(schedule: Schedule, stages: frozenset[int]) -> Row:
    if not stages:
        return ()
    ranks = {schedule.stage_rank[stage] for stage in stages}
    row = schedule.table[min(ranks)]
    if len(ranks) > 1 or {action.stage for action in row} != stages:
        raise PlanError(
            "AP541",
            f"schedule {schedule.name!r} does not place stages {sorted(stages)} on one rank",
            why="the plan gives these stages the same devices",
            where="schedule",
            fix="plan again",
        )
    return row
