"""The peak memory of a pipeline rank, by a walk over its row of the schedule, in bytes.

In: a schedule, a rank, for each of its stages the bytes of its states and of a micro-batch, and the
bytes of messages. Out: the bytes of each stage at the peak of all the rank's stages together.

A stage holds its states all the time, and its gradients from its first backward on. Each
micro-batch holds its activations from its forward to its backward, or until its weight gradients
are computed, if these are deferred. The stage that computes also holds the peak of its forward or
backward. Messages come from ``planner.schedules.messages_held``. At the step's end all gradients
are held, and no activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ...cost_model.simulator.actions import (
    COMPUTE,
    FORWARD,
    INPUT_BACKWARD,
    STEP,
    WEIGHT_BACKWARD,
    Action,
    Schedule,
    last_before_reduce,
)
from ...planner.schedules.held import MessageBytes, messages_held
from .saved_tensors import BUFFERS, INPUTS, Moment, StageActivations
from .state_traffic import COMMUNICATION, GATHERED, GRADIENTS
from .storages import SAVED

Bytes = dict[str, float]

STATES = (GRADIENTS, GATHERED, COMMUNICATION, BUFFERS)
"""Memory categories that take the same bytes for a slice of the sequences as for whole
sequences."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Bytes of a stage on one rank. ``states``: training states by category, including gradients
    and the parameters that ZeRO gathers once per step. ``run(moment)`` returns the bytes of one
    micro-batch. ``holds_inputs``: the inputs of all micro-batches are copied to the device before
    the first one, as on GPUs; on a CPU they are not copied."""

    states: Mapping[str, float]
    run: Callable[[Moment], StageActivations]
    holds_inputs: bool


def fullest_moment(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, StageBytes],
    messages: MessageBytes,
    most: int,
) -> dict[int, Bytes]:
    """Return the bytes by category of each stage of ``rank`` (by number in the schedule) at the
    moment of the step at which the rank holds most. ``most``: largest number of sent messages whose
    buffers are kept."""
    found = (held for _, held in action_bytes(schedule, rank, stages, messages, most))
    return max(found, key=lambda held: sum(sum(own.values()) for own in held.values()), default={})


def action_bytes(
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, StageBytes],
    messages: MessageBytes,
    most: int,
) -> Iterator[tuple[Action, dict[int, Bytes]]]:
    """Yield each compute action and weight update of ``rank``, with the bytes by category that each
    of its stages holds meanwhile. ``most``: largest number of sent messages whose buffers are
    kept."""
    row = _Row(schedule, stages, last_before_reduce(schedule.table[rank]))
    for action, num_bytes in messages_held(schedule, rank, messages, most):
        if action.kind in COMPUTE:
            yield action, row.compute(action, num_bytes)
        elif action.kind == STEP:
            yield action, row.step(action, num_bytes if schedule.is_asynchronous else 0.0)


@dataclass
class _Row:
    """State of a rank's memory while its row of actions in the schedule is followed. By stage:
    ``waiting`` is the number of micro-batches between forward and backward, ``late`` the number
    between backward of inputs and backward of weights."""

    schedule: Schedule
    stages: Mapping[int, StageBytes]
    lasts: frozenset[Action]
    waiting: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    late: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    with_gradients: set[int] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)

    def compute(self, action: Action, message_bytes: float) -> dict[int, Bytes]:
        """Return the bytes by category of each stage of the rank during a forward or backward.
        ``message_bytes``: bytes of messages held meanwhile."""
        run = self.stages[action.stage].run(self._moment(action))
        stage, share = action.stage, self._share(action)
        if action.kind == FORWARD:
            held = self._held(stage, _of_slice(run.forward, share), message_bytes)
            self.waiting[stage] += share
            return held
        if action.kind == WEIGHT_BACKWARD:
            self.late[stage] -= share
            held = self._held(stage, _of_slice(run.weights, share), message_bytes)
        else:
            self.waiting[stage] -= share
            held = self._held(stage, _of_slice(run.backward, share), message_bytes)
            if action.kind == INPUT_BACKWARD:
                self.late[stage] += share
                return held
        self.with_gradients.add(stage)
        self.updated.discard(stage)
        return held

    def step(self, action: Action, message_bytes: float) -> dict[int, Bytes]:
        """Return the bytes by category of each stage of the rank while ``action`` updates
        weights."""
        self.updated.add(action.stage)
        return self._held(None, {}, message_bytes)

    def _moment(self, action: Action) -> Moment:
        """Return whether the action's micro-batch is the first, or the last, of the step to add to
        the weight gradients of its stage."""
        stage = action.stage
        is_first = stage not in self.with_gradients
        if action.kind == FORWARD:
            is_only = is_first and self.schedule.num_microbatches == 1
            return Moment(is_first=is_first, is_last=is_only)
        is_last = action in self.lasts
        if action.kind == INPUT_BACKWARD:
            is_last = action._replace(kind=WEIGHT_BACKWARD) in self.lasts
        return Moment(is_first=is_first or stage in self.updated, is_last=is_last)

    def _share(self, action: Action) -> float:
        slices = self.schedule.slices
        return slices[action.slice] / sum(slices) if slices else 1

    def _held(
        self, running: int | None, taken: Mapping[str, float], message_bytes: float
    ) -> dict[int, Bytes]:
        """Return the bytes of each stage by category. ``taken``: bytes of the present computation,
        which are added to stage ``running``; ``message_bytes``: bytes of messages."""
        found = {stage: self._resting(stage, stage == running) for stage in self.stages}
        last = found[next(iter(found)) if running is None else running]
        for name, size in taken.items():
            if name != INPUTS:
                last[name] = last.get(name, 0.0) + size
        last[COMMUNICATION] = last.get(COMMUNICATION, 0.0) + message_bytes
        return found

    def _resting(self, stage: int, runs: bool) -> Bytes:
        """Return a stage's bytes by category without its present computation. ``runs``: there is
        one."""
        own = self.stages[stage]
        found = {k: size for k, size in own.states.items() if k not in (GRADIENTS, GATHERED)}
        if not runs:
            found[GATHERED] = own.states.get(GATHERED, 0.0)
            found[GRADIENTS] = own.states[GRADIENTS] if stage in self.with_gradients else 0.0
        run = own.run(Moment(is_first=True, is_last=self.schedule.num_microbatches == 1))
        found[SAVED] = (run.kept - run.inputs) * self.waiting[stage] + run.late * self.late[stage]
        found[INPUTS] = run.inputs * self.schedule.num_microbatches if own.holds_inputs else 0.0
        if not runs:
            found[BUFFERS] = run.forward.get(BUFFERS, 0)
        return found


def _of_slice(taken: Mapping[str, int], share: float) -> Mapping[str, float]:
    """Return the bytes by category that the computation of one slice of the sequences takes.
    ``taken``: bytes for whole sequences; ``share``: length of the slice relative to theirs."""
    return {k: size if k in STATES else size * share for k, size in taken.items()}
