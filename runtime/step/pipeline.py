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
"""Direction of values, stage, and the unit that is computed and sent at once: a micro-batch or a
slice of a micro-batch."""

Values = Mapping[str, Tensor]
_NOTHING: Values = {}


class Executor(Protocol):
    """One rank's part of a stage, as ``runtime.step.executor.StageExecutor`` is.

    Where sequences are sliced, slice ``j`` of micro-batch ``m`` has number ``m * num_slices + j``,
    except in ``loss``. ``backward`` scales the loss by one over the number of micro-batches;
    ``gradients`` are of the values sent. ``backward_inputs`` and ``backward_weights`` are its
    halves. ``last`` marks the last action before a REDUCE that gives the stage's weights gradients.
    """

    def begin_step(self, batch: Values) -> None: ...
    def forward(self, microbatch: int, received: Values) -> Values: ...
    def backward(self, microbatch: int, gradients: Values, *, last: bool) -> Values: ...
    def backward_inputs(self, microbatch: int, gradients: Values) -> Values: ...
    def backward_weights(self, microbatch: int, *, last: bool) -> None: ...
    def loss(self, microbatch: int) -> Tensor | None: ...
    def finish_step(self) -> None: ...


class StepMoments(NamedTuple):
    """Times of a step: its begin and end, and for each action its start, the arrival of its
    messages (None if it takes none) and its end. They are made by ``Hooks.clock``."""

    began: Any
    actions: tuple[tuple[Action, Any, Any | None, Any], ...]
    ended: Any


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
    """The functions that a runner calls besides its executors.

    ``complete`` is called when all executors have reduced their gradients, ``update`` at each STEP.
    ``progress`` is told the rank's next action, and the ranks that do it with this rank, for a
    watchdog. ``clock`` returns seconds and turns on ``timings``; on an accelerator it should
    synchronize first. (A recorder sets the runner's ``clock`` to ``DeviceQueue.moment`` and reads
    ``moments``.)
    """

    complete: Callable[[], None] | None = None
    update: Callable[[], None] | None = None
    progress: Progress | None = None
    clock: Callable[[], float] | None = None


NO_HOOKS = Hooks()


class PipelineRunner:
    """Runner of training steps on one rank; ``moments`` are the last step's, given a ``clock``."""

    def __init__(
        self,
        schedule: Schedule,
        executors: Mapping[int, Executor],
        exchange: Exchange,
        *,
        handover: LocalTransfer | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        """Make the runner; ``executors`` are for this rank's stages, none on an idle rank.

        ``handover`` carries values between its stages.
        """
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
        """The actions of the last step, where ``clock`` returns seconds."""
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
        """Run one step on the global ``batch``; return the true loss on every rank (float64
        scalar).

        If not ``reduces``, gradients stay as they are on each rank; a later step adds to them.
        """
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
        """Run one action; return the time when its messages were there, if there is a clock."""
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
        """Run a compute action; hand its values to this rank's stages, and keep them for sends."""
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
        """Wait for the values that a compute action needs from other stages.

        Gradients of a value that went to several stages are summed.
        """
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
        """Return this rank's part of the mean over all micro-batches, or None without a loss."""
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
    """An action of this rank, with facts that are found once: to find them in every step would be
    as much work as sending the messages in a pipeline of small stages.

    ``key`` names the values that it takes, makes or sends. ``is_last``: it is the last to give its
    stage's weights gradients before they are reduced; or it is the last REDUCE of the row.
    ``is_sent``: the row sends its values. ``doing`` and ``waiting`` tell a watchdog of the action,
    and of the wait for its messages.
    """

    action: Action
    is_last: bool
    is_sent: bool
    key: Key
    doing: str
    waiting: str


def prepare(schedule: Schedule, stages: frozenset[int]) -> tuple[Prepared, ...]:
    """Return the prepared row of a rank with these stages; empty if there are none.

    Raises PlanError AP541 unless the schedule places exactly these stages on one rank.
    """
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
    """Return the kind of action that sends the values of this action; STEP if none does."""
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
