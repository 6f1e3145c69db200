"""The run of a schedule: the state of one simulation (see ``simulator``).

In: an action table, costs that fit it. Out: its timeline, or the seconds of its step alone.
"""

from __future__ import annotations

from operator import itemgetter

from .actions import (
    BACKWARD,
    FORWARD,
    GATHER,
    INPUT_BACKWARD,
    RECEIVES,
    RECV_BACKWARD,
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
from .link_contention import Arrival, Message, Ports
from .overlap import Collectives
from .stage_costs import (
    Line,
    StageCosts,
    action_seconds,
    inside_seconds,
    lines_of,
    part_of,
    slice_shares,
)
from .timeline import Event, Exposed, Stream, Timeline

NOTHING = -1
"""Number that means "no message". Smaller numbers stand for waiting until all replicas of a part
can sum gradients."""

NEEDS_MESSAGE = frozenset((FORWARD, BACKWARD, INPUT_BACKWARD))
"""Kinds of compute actions that wait for a message, if the neighbouring stage is on another
rank."""


class SimulatedRank:
    """State of one pipeline rank in a simulation: its row of actions, the index ``at`` of its next
    action, its clock, and its seconds and bytes so far."""

    def __init__(self, row: Row, zero: float, static_bytes: int) -> None:
        self.row = row
        self.at = 0
        self.clock = self.ended = zero
        self.busy = zero
        self.inside = zero
        self.messages = zero
        self.gradient_sync = zero
        self.gather = zero
        self.static = self.held = static_bytes
        self.events: list[Event] = []
        self.memory: list[tuple[float, int]] = [(zero, static_bytes)]
        self.collectives: Collectives | None = None
        self.beside: set[Action] = set()
        self.first_forwards: dict[int, Action] = {}
        self.last_backwards: dict[int, Action] = {}
        for action in row:
            if action.kind == FORWARD:
                self.first_forwards.setdefault(action.stage, action)
            elif action.kind in (BACKWARD, WEIGHT_BACKWARD):
                self.last_backwards[action.stage] = action

    def call(self, seconds: float) -> None:
        """Spend ``seconds`` of the rank's time on a call to send or to receive a message."""
        self.clock += seconds
        self.messages += seconds


class Simulation:
    """State of one simulation of a pipeline schedule. A message is identified by the number of the
    forward or backward that needs it."""

    def __init__(
        self,
        schedule: Schedule,
        costs: StageCosts,
        *,
        records: bool = True,
    ) -> None:
        stages = schedule.num_stages
        zeros = (0,) * stages
        self.schedule, self.costs = schedule, costs
        shares = costs.slowed_share or (1,) * schedule.num_stages
        self.hides = [share < 1 for share in shares]
        self.zero = 0 * costs.forward_seconds[0]
        self.shares = slice_shares(schedule, costs)
        self.seconds = action_seconds(costs)
        self.inside = inside_seconds(costs)
        self.lines, self.outgoing = lines_of(schedule, costs)
        self.is_chain = all(len(lines) < 2 for direction in self.lines for lines in direction)
        self.records, self.num_slices = records, schedule.num_slices
        self.activation = costs.activation_bytes or zeros
        static = [0] * schedule.num_ranks
        for stage, num_bytes in enumerate(costs.static_bytes):
            static[schedule.stage_rank[stage]] += num_bytes
        self.ranks = [
            SimulatedRank(row, self.zero, held)
            for row, held in zip(schedule.table, static, strict=True)
        ]
        trains = any(rank.last_backwards for rank in self.ranks)
        self.frees = (BACKWARD, WEIGHT_BACKWARD) if trains else (FORWARD,)
        number = 2 * stages * schedule.num_microbatches * schedule.num_slices
        self.takes_time = any(map(any, (costs.send_seconds, costs.send_backward_seconds)))
        self.ports = Ports(schedule.num_ranks, self.zero)
        self.sent: dict[tuple[int, int], tuple[float, int]] = {}
        self.partly: dict[int, tuple[int, float, float]] = {}
        self.posted: list[float | None] = [None] * number
        self.begun: list[float] = [self.zero] * number
        self.arrived: list[float | None] = [None] * number
        self.waiting: dict[int, int] = {}
        self.sums = bool(schedule.parts and costs.replica_sum_seconds)
        self.at_sum: dict[int, dict[int, float]] = {}

    def timeline(self, replicas: tuple[int, ...]) -> Timeline:
        self._run()
        return self._timeline(replicas or (1,) * len(self.ranks))

    def step_seconds(self) -> float:
        """Run the simulation; return the seconds at which the last rank completes the step."""
        self._run()
        return max(rank.ended for rank in self.ranks)

    def step_and_bubble(self) -> tuple[float, float]:
        """Run the simulation; return the seconds of the training step, and the bubble fraction: the
        share of all ranks' time in which they wait."""
        step, number = self.step_seconds(), len(self.ranks)
        busy = sum(rank.busy for rank in self.ranks)
        return step, 1 - busy / (step * number) if step else self.zero

    def _run(self) -> None:
        """Simulate the step: advance every rank as far as possible, deliver one message, and repeat
        until no messages are left. Raises ValueError if the schedule deadlocks."""
        ranks, waiting, advance, arrive = self.ranks, self.waiting, self._advance, self._arrive
        for rank in ranks:
            self._begin(rank)
        self.ready = ready = list(range(len(ranks)))
        while True:
            while ready:
                index = ready.pop()
                missing = advance(ranks[index])
                if missing != NOTHING:
                    waiting[missing] = index
            arrival = self.ports.next()
            if arrival is None:
                break
            arrive(arrival)
        stuck = [str(rank.row[rank.at]) for rank in ranks if rank.at < len(rank.row)]
        if stuck:
            raise ValueError(f"the schedule deadlocks at {', '.join(stuck)}")

    def _begin(self, rank: SimulatedRank) -> None:
        """Launch the all-gathers of sharded parameters of a rank's stages: before all of its
        actions or, for stages whose collectives overlap with compute, beside them."""
        costs = self.costs
        gathers = costs.gather_seconds
        stages = [s for s in rank.first_forwards if gathers and gathers[s]]
        books = Collectives(self.zero, self.zero)
        stopped = [stage for stage in stages if not self.hides[stage]]
        for stage in (*stopped, *(stage for stage in stages if self.hides[stage])):
            books.gather(stage, costs, self.zero)
        rank.events += books.events
        books.events = []
        if stopped:
            rank.clock = rank.ended = rank.gather = rank.busy = books.gathered[stopped[-1]][-1]
        if any(self.hides[stage] for stage in rank.last_backwards | rank.first_forwards):
            rank.collectives = books
            rank.beside = {rank.first_forwards[s] for s in stages if self.hides[s]}
            rank.beside |= {
                action
                for stage, action in rank.last_backwards.items()
                if self.hides[stage] and self._syncs(stage)
            }

    def _advance(self, rank: SimulatedRank) -> int:
        """Execute a rank's actions until none are left or the rank must wait. Return the number of
        the message that it waits for, ``NOTHING`` at the end of its row, and a smaller number if it
        waits for replicas."""
        row, at, length = rank.row, rank.at, len(rank.row)
        num_microbatches, num_slices = self.schedule.num_microbatches, self.num_slices
        posted, arrived = self.posted, self.arrived
        while at < length:
            action = row[at]
            kind, stage, m, part = action
            if kind in NEEDS_MESSAGE:
                number = 2 * ((stage * num_microbatches + m) * num_slices + part)
                if kind != FORWARD:
                    number += 1
                if posted[number] is None:
                    self._compute(rank, action, None, self.zero)
                elif (arrival := arrived[number]) is not None:
                    self._compute(rank, action, arrival, self.begun[number])
                else:
                    rank.at = at
                    return number
            elif kind in RECEIVES:
                unit = (stage * num_microbatches + m) * num_slices + part
                self._receive(rank, stage, 2 * unit + (kind == RECV_BACKWARD))
            elif kind in SENDS:
                rank.at = at
                self._send(rank, action)
            elif kind == WEIGHT_BACKWARD:
                self._compute(rank, action, None, self.zero)
            elif kind == REDUCE:
                if self.sums and not self._sum_replicas(rank, stage):
                    rank.at = at
                    return NOTHING - 1 - self.schedule.part(stage)
                self._reduce(rank, action)
            elif kind == STEP:
                self._step(rank, action)
            at += 1
        rank.at = at
        return NOTHING

    def _receive(self, rank: SimulatedRank, stage: int, number: int) -> None:
        """Post the receives for compute action ``number``; transfer messages already sent to it."""
        lines = self.lines[number & 1][stage]
        for line in lines:
            if line.receive_call:
                rank.call(line.receive_call)
        self.posted[number] = rank.clock
        for line in lines:
            sent = self.sent.pop((number, line.source), None)
            if sent is not None:
                self._transfer(line, number, max(sent[0], rank.clock), sent[1])

    def _send(self, rank: SimulatedRank, action: Action) -> None:
        """Send a stage's results (activations or gradients) to stages on other ranks."""
        kind, stage, m, part = action
        backward = kind == SEND_BACKWARD
        for line in self.outgoing[backward][stage]:
            unit = (line.target * self.schedule.num_microbatches + m) * self.num_slices + part
            number = 2 * unit + backward
            posted = self.posted[number]
            if posted is None:
                self.sent[number, stage] = rank.clock, rank.at
            else:
                self._transfer(line, number, max(rank.clock, posted), rank.at)
            if line.send_call:
                rank.call(line.send_call)

    def _transfer(self, line: Line, number: int, ready: float, place: int) -> None:
        """Start the transfer of message ``number`` over ``line`` at time ``ready``, when its send
        and receive are both posted; if messages take no time, it arrives at once. ``place``: index
        of the send action in the sender's row."""
        occupied = line.occupied
        if self.shares:
            occupied = occupied * self.shares[SEND_FORWARD][number // 2 % self.num_slices]
        message = Message(
            line.sender, line.receiver, number, line.source, place, line.latency, occupied
        )
        if self.takes_time:
            self.ports.add(ready, message)
        else:
            self._arrive(Arrival(message, ready, ready, ready))

    def _arrive(self, arrival: Arrival) -> None:
        """Record a message's arrival; resume its receiver if no other message is missing there."""
        message, start, _, end = arrival
        number = message.number
        if self.records:
            self._record(arrival)
        if self.is_chain:
            self.begun[number], self.arrived[number] = start, end
        elif not self._is_last(number, start, end):
            return
        index = self.waiting.pop(number, None)
        if index is not None:
            self.ready.append(index)

    def _record(self, arrival: Arrival) -> None:
        """Add a message that has arrived to the events of its sender in the timeline."""
        message, start, left, _ = arrival
        unit, part = divmod(message.number // 2, self.num_slices)
        stage, m = divmod(unit, self.schedule.num_microbatches)
        backward = message.number & 1
        action = Action(SEND_BACKWARD if backward else SEND_FORWARD, message.source, m, part)
        stream: Stream = "send backward" if backward else "send forward"
        self.ranks[message.sender].events.append(Event(action, start, left, stream, stage))

    def _is_last(self, number: int, start: float, end: float) -> bool:
        """Record that a message for compute action ``number``, sent from ``start`` on, arrived at
        ``end``; return true if it is the last message that the action needs."""
        stage = number // 2 // self.num_slices // self.schedule.num_microbatches
        needed = len(self.lines[number & 1][stage])
        if needed > 1:
            come, latest, begun = self.partly.get(number, (0, end, start))
            if end < latest:
                start, end = begun, latest
            self.partly[number] = (come + 1, end, start)
            if come + 1 < needed:
                return False
        self.begun[number], self.arrived[number] = start, end
        return True

    def _compute(
        self, rank: SimulatedRank, action: Action, arrival: float | None, begun: float
    ) -> None:
        """Simulate a forward or backward, which starts when the rank is free and, if it needs a
        message, at the message's ``arrival``. ``begun``: time at which the message was sent."""
        kind, stage, _, part = action
        free = start = rank.clock
        if arrival is not None and arrival > free:
            start = arrival
            rank.messages += arrival - (begun if begun > free else free)
        work = self.seconds[kind][stage]
        if self.shares:
            work = work * self.shares[kind][part]
        beside = rank.collectives
        if beside is None or (beside.busy_until <= start and action not in rank.beside):
            end = start + work
            rank.busy += work
        else:
            start, end = self._beside(rank, beside, action, start, work)
        rank.clock = rank.ended = end
        if not self.records:
            return
        rank.events.append(Event(action, start, end, "compute"))
        self._record_states(rank, action, start, end)
        if self.inside:
            inside = self.inside[kind][stage]
            rank.inside += inside * self.shares[kind][part] if self.shares else inside
        num_bytes = self.activation[stage]
        if self.shares:
            num_bytes = part_of(num_bytes, self.schedule.slices, part)
        if num_bytes:
            if kind == FORWARD:
                rank.held += num_bytes
                rank.memory.append((start, rank.held))
            if kind in self.frees:
                rank.held -= num_bytes
                rank.memory.append((end, rank.held))

    def _record_states(self, rank: SimulatedRank, action: Action, start: float, end: float) -> None:
        """Add to the timeline the all-gathers of parameters, or the sums of gradients, that run
        during a forward, or backward, from ``start`` to ``end``, and copies to and from the
        host."""
        kind, stage, m, part = action
        own = self.costs
        copies = own.forward_copies_seconds if kind == FORWARD else own.backward_copies_seconds
        if kind != WEIGHT_BACKWARD and copies and copies[stage]:
            rank.events.append(Event(action, start, min(start + copies[stage], end), "host copies"))
        forward, backward = own.forward_states_seconds, own.backward_states_seconds
        if kind == FORWARD and forward and forward[stage]:
            end = min(start + forward[stage], end)
            gather = Action(GATHER, stage, m, part)
            rank.events.append(Event(gather, start, end, "parameter gather"))
        elif kind in (BACKWARD, INPUT_BACKWARD) and backward and backward[stage]:
            start = max(start, end - backward[stage])
            sync = Action(REDUCE, stage, m, part)
            rank.events.append(Event(sync, start, end, "gradient sync"))

    def _beside(
        self, rank: SimulatedRank, beside: Collectives, action: Action, start: float, work: float
    ) -> tuple[float, float]:
        """Return the start and end of a forward or backward of ``work`` seconds, which waits for,
        starts, or is slowed down by the collectives ``beside`` it."""
        arrived = start
        if action not in rank.beside:
            end = beside.finish(start, work)
        elif action.kind == FORWARD:
            start, end, waited = beside.first_forward(action.stage, self.costs, start, work)
            rank.gather += waited
        else:
            end = beside.last_backward(action.stage, self.costs, start, work)
        rank.busy += end - arrived
        return start, end

    def _syncs(self, stage: int) -> bool:
        seconds = self.costs.gradient_sync_seconds
        return bool(seconds) and seconds[stage] > 0

    def _sum_replicas(self, rank: SimulatedRank, stage: int) -> bool:
        """Sum the gradients of all replicas of a stage (stages that compute the same part of the
        model), if each replica's rank has reached this point; otherwise return false. The last
        wakes the others."""
        come = self.at_sum.setdefault(self.schedule.part(stage), {})
        come.setdefault(stage, rank.clock)
        if len(come) < len(self.schedule.replicas(stage)):
            return False
        start, seconds = max(come.values()), self.costs.replica_sum_seconds[stage]
        rank.gradient_sync += start + seconds - rank.clock
        rank.busy += seconds
        rank.clock = rank.ended = start + seconds
        rank.events.append(Event(Action(REDUCE, stage), start, rank.clock, "gradient sync"))
        waiting = NOTHING - 1 - self.schedule.part(stage)
        if waiting in self.waiting:
            self.ready.append(self.waiting.pop(waiting))
        return True

    def _reduce(self, rank: SimulatedRank, action: Action) -> None:
        """Sum a stage's gradients over its devices, unless this overlapped the last backward."""
        if not self._syncs(action.stage) or self.hides[action.stage]:
            return
        start = rank.clock
        seconds = self.costs.gradient_sync_seconds[action.stage]
        rank.clock = rank.ended = start + seconds
        rank.gradient_sync += seconds
        rank.busy += seconds
        rank.events.append(Event(action, start, rank.clock, "gradient sync"))

    def _step(self, rank: SimulatedRank, action: Action) -> None:
        """Run the optimizer for a stage, after its gradients are summed."""
        start, beside = rank.clock, rank.collectives
        seconds = self.costs.step_seconds
        work = seconds[action.stage] if seconds else self.zero
        if beside is None:
            end = start + work
        else:
            start = max(start, beside.reduced.get(action.stage, start))
            end = beside.finish(start, work)
        rank.gradient_sync += start - rank.clock
        rank.busy += end - rank.clock
        rank.clock = rank.ended = end
        rank.events.append(Event(action, start, end, "compute"))

    def _timeline(self, replicas: tuple[int, ...]) -> Timeline:
        ranks = self.ranks
        for rank in ranks:
            if rank.collectives is not None:
                rank.events += rank.collectives.events
            rank.events.sort(key=itemgetter(1))
        step = max((e.end_seconds for rank in ranks for e in rank.events), default=self.zero)
        peaks = tuple(max(held for _, held in rank.memory) for rank in ranks)
        total = step * sum(replicas)
        busy = sum(rank.busy * count for rank, count in zip(ranks, replicas, strict=True))
        return Timeline(
            step_seconds=step,
            bubble_fraction=1 - busy / total if total else self.zero,
            events=tuple(tuple(rank.events) for rank in ranks),
            exposed=tuple(
                Exposed(rank.inside, rank.messages, rank.gradient_sync, rank.gather)
                for rank in ranks
            ),
            slowdown_seconds=tuple(
                rank.collectives.lost_seconds if rank.collectives else self.zero for rank in ranks
            ),
            peak_activation_bytes=tuple(
                peak - rank.static for peak, rank in zip(peaks, ranks, strict=True)
            ),
            peak_memory_bytes=peaks,
            memory_bytes=tuple(tuple(rank.memory) for rank in ranks),
            replicas=replicas,
        )
