"""Discrete-event simulation of a schedule: when each rank computes, waits and sends.

In: an action table and the seconds and bytes of each stage. Out: a timeline: the length of
the step, the bubble, the exposed communication and the memory of each pipeline rank.

A rank has one compute stream that runs its compute actions in order. Each pair of ranks has
one channel per direction that carries messages one after the other; a message starts when
it is sent, its receive is posted and the channel is free. With no communication, GPipe and
1F1B of D equal stages and N micro-batches have the bubble (D-1)/(D-1+N) (Narayanan et al.
2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_FORWARD,
    STEP,
    WEIGHT_BACKWARD,
    Action,
    Schedule,
)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds and bytes by stage, one entry per stage.

    ``forward_seconds``, ``backward_seconds``: one micro-batch. ``send_seconds[s]``: one
    micro-batch's message from stage s to s+1, and the same backwards unless
    ``send_backward_seconds[s]`` (from s+1 to s) says otherwise; one entry less than there are
    stages. ``step_seconds``: gradient synchronization and optimizer, once per step.
    ``activation_bytes``: what one micro-batch keeps until its backward, on the worst rank.
    ``static_bytes``: everything held throughout. ``weight_backward_seconds``: the part of the
    backward that a split schedule may delay, half of it by default. What is left empty is zero.
    """

    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    send_seconds: Sequence[float] = ()
    step_seconds: Sequence[float] = ()
    activation_bytes: Sequence[int] = ()
    static_bytes: Sequence[int] = ()
    send_backward_seconds: Sequence[float] = ()
    weight_backward_seconds: Sequence[float] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        expected = {
            "backward_seconds": stages, "send_seconds": stages - 1, "step_seconds": stages,
            "activation_bytes": stages, "static_bytes": stages,
            "send_backward_seconds": stages - 1, "weight_backward_seconds": stages,
        }  # fmt: skip
        for name, length in expected.items():
            found = len(getattr(self, name))
            if found != length and not (found == 0 and name != "backward_seconds"):
                raise ValueError(f"{name} has {found} entries for {stages} stages, not {length}")


class Event(NamedTuple):
    """An action on a stream of its rank: when it starts and ends.

    A message is one event, on the sender's ``"communication"`` stream.
    """

    action: Action
    start_seconds: float
    end_seconds: float
    stream: Literal["compute", "communication"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step; tuples have one entry per pipeline rank.

    ``bubble_fraction``: the share of the step, over all ranks, in which no rank computes or
    steps. ``exposed_seconds``: how long a rank waits while the message it waits for is on the
    way. ``peak_activation_bytes``: the most that micro-batches in flight hold at once;
    ``peak_memory_bytes`` adds what is static. ``memory_bytes``: the held bytes whenever they
    change, as (second, bytes).
    """

    step_seconds: float
    bubble_fraction: float
    events: tuple[tuple[Event, ...], ...]
    exposed_seconds: tuple[float, ...]
    peak_activation_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    memory_bytes: tuple[tuple[tuple[float, int], ...], ...]


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Runs the table once. Raises ValueError if it deadlocks or does not fit the costs.

    >>> from autoparallel.cost_model.actions import parse_table
    >>> table = parse_table("0F0 0SEND_F0 0RECV_B0 0B0\\n1RECV_F0 1F0 1B0 1SEND_B0")
    >>> costs = StageCosts((1.0, 1.0), (2.0, 2.0), send_seconds=(0.5,))
    >>> simulate(Schedule("example", 1, (0, 1), table), costs).step_seconds
    7.0
    """
    if len(costs.forward_seconds) != schedule.num_stages:
        raise ValueError(
            f"costs of {len(costs.forward_seconds)} stages for a schedule of {schedule.num_stages}"
        )
    return _Simulation(schedule, costs).run()


class _Simulation:
    """The state of one run: clocks of ranks and channels, messages, memory."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        ranks = schedule.num_ranks
        self.schedule = schedule
        self.seconds = _action_seconds(costs)
        self.send = {True: costs.send_seconds,
                     False: costs.send_backward_seconds or costs.send_seconds}  # fmt: skip
        self.activation = costs.activation_bytes or (0,) * schedule.num_stages
        self.static = [0] * ranks
        for stage, num_bytes in enumerate(costs.static_bytes):
            self.static[schedule.stage_rank[stage]] += num_bytes
        self.clock = [0.0] * ranks
        self.busy = [0.0] * ranks
        self.exposed = [0.0] * ranks
        self.held = list(self.static)
        self.events: list[list[Event]] = [[] for _ in range(ranks)]
        self.memory: list[list[tuple[float, int]]] = [[(0.0, held)] for held in self.held]
        self.sent: dict[tuple[bool, int, int], float] = {}
        self.posted: dict[tuple[bool, int, int], float] = {}
        self.messages: dict[tuple[bool, int, int], tuple[float, float]] = {}
        self.channel: dict[tuple[int, int], float] = {}
        self.freed = _freed(schedule)

    def run(self) -> Timeline:
        table = self.schedule.table
        cursor = [0] * len(table)
        waiting: dict[tuple[bool, int, int] | tuple[str, int, int], int] = {}
        ready = list(range(len(table)))
        while ready:
            rank = ready.pop()
            row = table[rank]
            while cursor[rank] < len(row):
                missing, woken = self._perform(rank, row[cursor[rank]])
                if missing is not None:
                    waiting[missing] = rank
                    break
                cursor[rank] += 1
                if woken in waiting:
                    ready.append(waiting.pop(woken))
        stuck = [row[at] for row, at in zip(table, cursor, strict=True) if at < len(row)]
        if stuck:
            raise ValueError(f"the schedule deadlocks at {', '.join(map(str, stuck))}")
        return self._timeline()

    def _perform(
        self, rank: int, action: Action
    ) -> tuple[tuple[bool, int, int] | None, tuple[bool, int, int] | None]:
        """Does one action: (the message it must wait for, the message it brought about)."""
        kind, stage, m = action.kind, action.stage, action.microbatch
        if kind in (FORWARD, BACKWARD, INPUT_BACKWARD):
            message = (kind == FORWARD, stage, m)
            if message in self.posted and message not in self.messages:
                return message, None
            self._compute(rank, action, self.messages.get(message))
        elif kind in (RECV_FORWARD, RECV_BACKWARD):
            message = (kind == RECV_FORWARD, stage, m)
            self.posted[message] = self.clock[rank]
            return None, self._transfer(message)
        elif kind in self.seconds:
            self._compute(rank, action, None)
        else:
            forward = kind == SEND_FORWARD
            message = (forward, stage + 1 if forward else stage - 1, m)
            self.sent[message] = self.clock[rank]
            return None, self._transfer(message)
        return None, None

    def _transfer(self, message: tuple[bool, int, int]) -> tuple[bool, int, int] | None:
        """Puts a message on its channel once both sides are there."""
        if message not in self.sent or message not in self.posted:
            return None
        forward, stage, m = message
        source = stage - 1 if forward else stage + 1
        ranks = self.schedule.stage_rank
        pair = (ranks[source], ranks[stage])
        start = max(self.sent[message], self.posted[message], self.channel.get(pair, 0.0))
        seconds = self.send[forward]
        end = start + (seconds[min(source, stage)] if seconds else 0.0)
        self.channel[pair] = end
        self.messages[message] = (start, end)
        action = Action("SEND_F" if forward else "SEND_B", source, m)
        self.events[pair[0]].append(Event(action, start, end, "communication"))
        return message

    def _compute(self, rank: int, action: Action, message: tuple[float, float] | None) -> None:
        free = self.clock[rank]
        start = free
        if message is not None and message[1] > free:
            start = message[1]
            self.exposed[rank] += start - max(free, message[0])
        seconds = self.seconds.get(action.kind, ())
        duration = seconds[action.stage] if seconds else 0.0
        end = start + duration
        self.clock[rank] = end
        self.busy[rank] += duration
        self.events[rank].append(Event(action, start, end, "compute"))
        self._account(rank, action, start, end)

    def _account(self, rank: int, action: Action, start: float, end: float) -> None:
        num_bytes = self.activation[action.stage]
        if not num_bytes:
            return
        if action.kind == FORWARD:
            self.held[rank] += num_bytes
            self.memory[rank].append((start, self.held[rank]))
        if action in self.freed:
            self.held[rank] -= num_bytes
            self.memory[rank].append((end, self.held[rank]))

    def _timeline(self) -> Timeline:
        ends = [event.end_seconds for events in self.events for event in events]
        step = max(ends, default=0.0)
        peaks = tuple(max(held for _, held in changes) for changes in self.memory)
        total = step * len(self.clock)
        return Timeline(
            step_seconds=step,
            bubble_fraction=1 - sum(self.busy) / total if total else 0.0,
            events=tuple(tuple(sorted(events, key=_start)) for events in self.events),
            exposed_seconds=tuple(self.exposed),
            peak_activation_bytes=tuple(
                peak - static for peak, static in zip(peaks, self.static, strict=True)
            ),
            peak_memory_bytes=peaks,
            memory_bytes=tuple(map(tuple, self.memory)),
        )


def _start(event: Event) -> float:
    return event.start_seconds


def _action_seconds(costs: StageCosts) -> dict[str, Sequence[float]]:
    """The seconds of each compute action and of the step, by kind and stage."""
    weight = costs.weight_backward_seconds or [s / 2 for s in costs.backward_seconds]
    whole = costs.backward_seconds
    return {
        FORWARD: costs.forward_seconds,
        BACKWARD: whole,
        INPUT_BACKWARD: [s - w for s, w in zip(whole, weight, strict=True)],
        WEIGHT_BACKWARD: weight,
        "REDUCE": (),
        STEP: costs.step_seconds,
    }


def _freed(schedule: Schedule) -> frozenset[Action]:
    """The actions after which a micro-batch's activations are gone."""
    actions = [action for row in schedule.table for action in row]
    backwards = frozenset(a for a in actions if a.kind in (BACKWARD, WEIGHT_BACKWARD))
    return backwards or frozenset(a for a in actions if a.kind == FORWARD)
