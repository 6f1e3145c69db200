"""The orders that the zero-bubble paper finds by search: its ZB-1p and ZB-2p.

Qi et al. 2023 (arXiv:2401.10241), section 3.1: a schedule is built in rounds, one forward and
one input backward per rank, and weight backwards go where a rank would wait. Where it would
wait for less than a weight backward takes, one goes there anyway if no other rank has idled as
long. Eight ways to decide the rest are tried. What the paper leaves open is as in the authors'
program (sail-sg/zero-bubble-pipeline-parallelism, commit 6229e79, pipeline_parallel/
auto_schedule.py, ``manual_order``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from autoparallel.cost_model.simulator.actions import (
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
    Schedule,
    Table,
)
from autoparallel.planner.schedules.messages import complete


class Times(NamedTuple):
    """Of a micro-batch on one rank, and of a message."""

    forward: float
    inputs: float
    weights: float
    send: float


class Memory(NamedTuple):
    """What a forward keeps, how much of it is left between I and W, and a rank's limit."""

    kept: float
    waits: float
    limit: float


class Ways(NamedTuple):
    """``early``: no forward too many before the first backward. ``backwards_first``: a forward
    may wait if the next rank's backward comes soon. ``fills``: small gaps are filled as well."""

    early: bool
    backwards_first: bool
    fills: bool


def search(num_ranks: int, num_microbatches: int, times: Times, memory: Memory) -> Schedule:
    """The best of all ways, by the longest span of a rank from its first action to its last."""
    found = []
    for ways in product((True, False), repeat=3):
        try:
            found.append(_Order(num_ranks, num_microbatches, times, memory, Ways(*ways)).built())
        except MemoryError:
            continue
    table = min(found, key=lambda each: each[0])[1]
    return Schedule("searched", num_microbatches, *complete(table, ahead=2))


@dataclass
class _Rank:
    """What a rank has done: counts, actions, when it ends, bytes it holds, how long it idled."""

    f: int = 0
    i: int = 0
    w: int = 0
    now: float = 0.0
    held: float = 0.0
    idle: float = 0.0
    start: float = 0.0


class _Order:
    def __init__(
        self, num_ranks: int, num_microbatches: int, times: Times, memory: Memory, ways: Ways
    ) -> None:
        self.count, self.times, self.memory, self.ways = num_microbatches, times, memory, ways
        self.ranks = [_Rank() for _ in range(num_ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.ends: dict[Action, float] = {}

    def built(self) -> tuple[float, Table]:
        """(the longest span, the rows)."""
        self._warm_up()
        for m in range(1, self.count):
            self._forwards()
            self._input_backwards(m)
        for at, rank in enumerate(self.ranks):
            while rank.w < self.count:
                self._weights(at)
        return max(r.now - r.start for r in self.ranks), tuple(map(tuple, self.rows))

    def _warm_up(self) -> None:
        """Forwards until the first backward can start, and the first backward."""
        last = len(self.ranks) - 1
        for at in range(last + 1):
            self._forward(at)
        more, back = [0] * (last + 1), self.ranks[last].now + self.times.inputs
        for at in reversed(range(last)):
            rank, came = self.ranks[at], back + self.times.send
            now, held = rank.now, rank.held
            while rank.f + more[at] < self.count and held + self.memory.kept <= self.memory.limit:
                if now + self.times.forward > came if self.ways.early else now >= came:
                    break
                now, held = now + self.times.forward, held + self.memory.kept
                more[at] += 1
            back = max(now, came) + self.times.inputs
        for at in range(1, last + 1):
            if 1 + more[at] < self.count:
                more[at] = min(more[at], max(0, more[at - 1] - 1))
        for at, number in enumerate(more):
            for _ in range(number):
                self._forward(at)
        for at in reversed(range(last + 1)):
            self._inputs(at)

    def _forwards(self) -> None:
        wanted = [self._wants_forward(at) for at in range(len(self.ranks))]
        for at in reversed(range(len(wanted) - 1)):
            wanted[at] = wanted[at] and wanted[at + 1]
        for at, rank in enumerate(self.ranks):
            if wanted[at]:
                self._make_room(at, self.memory.kept)
                if at:
                    self._fill(at, self.ends[Action(FORWARD, at - 1, rank.f)] + self.times.send)
                self._forward(at)

    def _input_backwards(self, m: int) -> None:
        for at in reversed(range(len(self.ranks))):
            rank = self.ranks[at]
            if at + 1 < len(self.ranks):
                came = self.ends[Action(INPUT_BACKWARD, at + 1, m)] + self.times.send
                self._fill(at, came)
            while at == 0 and rank.f == self.count and rank.w < rank.i:
                self._weights(at)
            self._inputs(at)

    def _wants_forward(self, at: int) -> bool:
        rank, times = self.ranks[at], self.times
        if rank.f >= self.count:
            return False
        if not self.ways.backwards_first or at + 1 == len(self.ranks):
            return True
        after = self.ranks[at + 1]
        if rank.f < after.f + 2:
            return True
        came = after.now + times.forward + times.inputs + times.send
        if rank.now >= came:
            return False
        over = rank.held + self.memory.kept - self.memory.limit
        weights = 0
        while over > 0 and rank.w + weights < rank.i:
            over, weights = over - self.memory.waits, weights + 1
        fits = rank.now + times.forward + weights * times.weights <= came
        return fits or came - rank.now > self._most_idle() - rank.idle

    def _fill(self, at: int, until: float) -> None:
        """Weight backwards while the rank waits."""
        rank = self.ranks[at]
        while rank.w < rank.i and rank.now + self.times.weights <= until:
            self._weights(at)
        if rank.w < rank.i and rank.now < until:
            is_small = until - rank.now <= self._most_idle() - rank.idle
            if self.ways.fills or not is_small:
                self._weights(at)

    def _make_room(self, at: int, num_bytes: float) -> None:
        rank = self.ranks[at]
        while rank.held + num_bytes > self.memory.limit:
            if rank.w >= rank.i:
                raise MemoryError
            self._weights(at)

    def _most_idle(self) -> float:
        return max(rank.idle for rank in self.ranks)

    def _forward(self, at: int) -> None:
        rank = self.ranks[at]
        before = self.ends[Action(FORWARD, at - 1, rank.f)] + self.times.send if at else 0.0
        start = max(rank.now, before)
        if not rank.f:
            rank.start = start
        self._put(at, Action(FORWARD, at, rank.f), start, self.times.forward)
        rank.f += 1
        rank.held += self.memory.kept

    def _inputs(self, at: int) -> None:
        rank, before = self.ranks[at], 0.0
        if at + 1 < len(self.ranks):
            before = self.ends[Action(INPUT_BACKWARD, at + 1, rank.i)] + self.times.send
        start = max(rank.now, before)
        self._put(at, Action(INPUT_BACKWARD, at, rank.i), start, self.times.inputs)
        rank.i += 1
        rank.held -= self.memory.kept - self.memory.waits

    def _weights(self, at: int) -> None:
        rank = self.ranks[at]
        self._put(at, Action(WEIGHT_BACKWARD, at, rank.w), rank.now, self.times.weights)
        rank.w += 1
        rank.held -= self.memory.waits

    def _put(self, at: int, action: Action, start: float, seconds: float) -> None:
        rank = self.ranks[at]
        rank.idle += start - rank.now if rank.f else 0.0
        rank.now = self.ends[action] = start + seconds
        self.rows[at].append(action)
