"""A second simulator, slow and plain, that knows every device: what the fast one must equal.

Time goes from one completion to the next; at each, everything that can start starts. Every
device of every replica runs its own program and has a port to send by and one to receive by;
a collective of a pipeline rank starts once all of its replicas are ready. Nothing is shared
with ``cost_model.simulator.simulator`` but its arguments.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from fractions import Fraction

from autoparallel.cost_model.simulator.actions import Schedule
from autoparallel.cost_model.simulator.stage_costs import ONE_BUCKET, Buckets, StageCosts

Device = tuple[int, int]  # pipeline rank, replica


def equal(number: int) -> Buckets:
    """So many equal buckets, exactly."""
    return Buckets(*((Fraction(1, number),) * number for _ in range(4)))


@dataclass
class Expanded:
    """What came out: the step, and when each device did each action."""

    step_seconds: Fraction
    ends: dict[tuple[Device, str], Fraction]


def beside_compute(costs: StageCosts, slowdown, buckets=()) -> StageCosts:
    """The costs with collectives beside compute, which take ``slowdown`` times as long there."""
    stages = len(costs.forward_seconds)
    return replace(costs, slowed_share=[1 - 1 / slowdown] * stages, buckets=buckets)


def expand(schedule: Schedule, costs: StageCosts, replicas: int) -> Expanded:
    """Runs every device of ``replicas`` copies."""
    return _Engine(schedule, costs, replicas).run()


@dataclass
class _Queue:
    """Things that run one after the other, each once all ``needed`` are there."""

    order: list = field(default_factory=list)
    there: dict = field(default_factory=lambda: defaultdict(int))
    left: dict = field(default_factory=dict)
    running: object = None
    done: set = field(default_factory=set)


class _Engine:
    def __init__(self, schedule, costs, replicas):
        self.schedule, self.costs, self.replicas = schedule, costs, replicas
        self.slowdown = 1 / (1 - costs.slowed_share[0]) if costs.slowed_share else None
        self.buckets = costs.buckets
        self.places, self.met = {}, defaultdict(int)
        self.ready, self.arrived, self.calling = {}, set(), {}
        self.flows, self.left_over, self.rates = defaultdict(list), {}, {}
        self.flying, self.inflow, self.marks = [], {}, {}
        self.entered, self.served = defaultdict(Fraction), defaultdict(Fraction)
        self.devices = [(p, r) for p in range(schedule.num_ranks) for r in range(replicas)]
        self.queues: dict[object, _Queue] = defaultdict(_Queue)
        self.programs = {device: self._program(*device) for device in self.devices}
        self.at = dict.fromkeys(self.devices, 0)
        self.left: dict[Device, Fraction | None] = dict.fromkeys(self.devices, None)
        self.ends: dict[tuple[Device, str], Fraction] = {}
        self.now = Fraction(0)

    def _cost(self, name, stage):
        values = getattr(self.costs, name)
        return Fraction(values[stage]) if values else Fraction(0)

    def _buckets(self, stage):
        return self.buckets[stage] if self.buckets else ONE_BUCKET

    def _program(self, rank, replica):
        """(what, key, seconds): work, wait for a key of a queue, or be there for one."""
        row = self.schedule.table[rank]
        steps, overlap = [], self.slowdown is not None
        forwards = [a for a in row if a.kind == "F"]
        first = {a.stage: a for a in reversed(forwards)}
        last = {a.stage: a for a in row if a.kind in "BW"}
        gathers = {}
        for stage in dict.fromkeys(a.stage for a in forwards):
            whole = self._cost("gather_seconds", stage)
            if whole:
                gathers[stage] = []
                for part, share in enumerate(self._buckets(stage).gathered):
                    key = ("gather", rank), (stage, part)
                    self._enqueue(key, whole * share)
                    steps.append(("there", key, None))
                    gathers[stage].append(key)
        if not overlap:
            steps += [("wait", key, None) for keys in gathers.values() for key in keys]
        for action in row:
            steps += self._action(action, rank, replica, first, last, gathers)
        return steps

    def _enqueue(self, key, seconds):
        queue = self.queues[key[0]]
        if key[1] not in queue.left:
            queue.order.append(key[1])
            queue.left[key[1]] = seconds

    def _action(self, action, rank, replica, first, last, gathers):
        kind, stage, m, _ = action
        ranks, overlap = self.schedule.stage_rank, self.slowdown is not None
        work = {"F": "forward_seconds", "B": "backward_seconds", "STEP": "step_seconds"}
        sync, buckets = self._cost("gradient_sync_seconds", stage), self._buckets(stage)
        parts = list(zip(buckets.backward, buckets.summed, strict=True))[::-1]
        keys = [(("sync", rank), (stage, part)) for part in range(len(parts))]
        if kind in ("RECV_F", "RECV_B"):
            source = stage - 1 if kind == "RECV_F" else stage + 1
            key = (kind[-1], source, m)
            call = self._of_message("receive_call_seconds", *key)
            return [("call", None, call), ("both", (key, replica), None)]
        if kind in ("SEND_F", "SEND_B"):
            key = (kind[-1], stage, m)
            self.places[key, replica] = self.schedule.table[rank].index(action)
            call = self._of_message("send_call_seconds", *key)
            return [("both", (key, replica), None), ("call", None, call)]
        if kind == "REDUCE":
            if overlap or not sync:
                return []
            for key, (_, share) in zip(keys, parts, strict=True):
                self._enqueue(key, sync * share)
            return [("there", key, None) for key in keys] + [("wait", key, None) for key in keys]
        seconds = self._cost(work[kind], stage)
        steps = []
        if kind == "F" and stage and ranks[stage - 1] != rank:
            steps.append(("arrived", (("F", stage - 1, m), replica), None))
        if kind == "B" and stage + 1 < len(ranks) and ranks[stage + 1] != rank:
            steps.append(("arrived", (("B", stage + 1, m), replica), None))
        if overlap and kind == "F" and first[stage] == action and stage in gathers:
            for key, share in zip(gathers[stage], buckets.forward, strict=True):
                steps += [("wait", key, None), ("work", None, seconds * share)]
        elif overlap and kind == "B" and last[stage] == action and sync:
            for key, (share, part) in zip(keys, parts, strict=True):
                self._enqueue(key, sync * part)
                steps += [("work", None, seconds * share), ("there", key, None)]
        else:
            if overlap and kind == "STEP" and sync:
                steps += [("wait", key, None) for key in keys]
            steps.append(("work", None, seconds))
        return [*steps, ("end", str(action), None)]

    def _of_message(self, name, direction, source, m):
        """A cost of a message: both directions have one entry per pair of stages."""
        values = getattr(self.costs, name)
        if name == "send_seconds" and direction == "B":
            values = self.costs.send_backward_seconds or values
        return Fraction(values[source if direction == "F" else source - 1]) if values else 0

    def _ends(self, message):
        """The devices that send and receive a message."""
        (direction, source, _), replica = message
        target = source + 1 if direction == "F" else source - 1
        ranks = self.schedule.stage_rank
        return (ranks[source], replica), (ranks[target], replica)

    def _latency(self, message):
        key, _ = message
        return min(
            self._of_message("send_latency_seconds", *key), self._of_message("send_seconds", *key)
        )

    def _occupies(self, message):
        return self._of_message("send_seconds", *message[0]) - self._latency(message)

    def _move_messages(self):
        """Everything of messages that happens now, but what only time moves; if anything did."""
        changed = False
        for queue in self.flows.values():
            if queue and self.left_over[queue[0]] == 0:
                message = queue.pop(0)
                self.flying.append((self.now + self._latency(message), message, None))
                self.rates.pop(message, None)
                changed = True
        for message in sorted(self.ready, key=lambda m: (self.ready[m], self.places[m])):
            del self.ready[message]
            self.flows[self._ends(message)].append(message)
            self.left_over[message] = self._occupies(message)
            changed = True
        if changed:
            return True
        heads = [queue[0] for queue in self.flows.values() if queue]
        for head in heads:
            rate = Fraction(1, sum(self._ends(m)[0] == self._ends(head)[0] for m in heads))
            if self.rates.get(head) != rate:
                self.rates[head] = rate
                self.flying.append((self.now + self._latency(head), head, rate))
        for change in [each for each in self.flying if each[0] == self.now]:
            self.flying.remove(change)
            _, message, rate = change
            self.inflow.pop(message, None)
            if rate is not None:
                self.inflow[message] = rate
            else:
                self.marks[message] = self.entered[self._ends(message)[1]]
            changed = True
        return self._pour() or changed

    def _pour(self):
        """Takes out of its port's queue what has passed it; whether anything has."""
        passed = [m for m, mark in self.marks.items() if self.served[self._ends(m)[1]] >= mark]
        for message in passed:
            del self.marks[message]
            self.arrived.add(message)
        return bool(passed)

    def _rates(self):
        """Of each device's receiving port: seconds of messages that enter and that pass, in one."""
        entering = dict.fromkeys(self.devices, Fraction(0))
        for message, rate in self.inflow.items():
            entering[self._ends(message)[1]] += rate
        return {
            device: (rate, 1 if self.entered[device] > self.served[device] else min(rate, 1))
            for device, rate in entering.items()
        }

    def _needed(self, name):
        return self.replicas

    def run(self):
        while True:
            while self._start():
                pass
            rates = {d: self._rate(d) for d in self.devices if self.left[d] is not None}
            waits = [self.left[d] / rate for d, rate in rates.items()]
            waits += [self.left_over[m] / rate for m, rate in self.rates.items()]
            for device, (entering, passing) in self._rates().items():
                queued = self.entered[device] - self.served[device]
                waits += [queued / (passing - entering)] if queued and passing > entering else []
            for message, mark in self.marks.items():
                waits.append(mark - self.served[self._ends(message)[1]])
            waits += [end - self.now for end in self.calling.values()]
            waits += [came - self.now for came, _, _ in self.flying]
            waits += [q.left[q.running] for q in self.queues.values() if q.running is not None]
            if not waits:
                break
            self._flow(min(waits))
            self._pass(min(waits), rates)
        stuck = [d for d in self.devices if self.at[d] < len(self.programs[d])]
        assert not stuck, f"deadlock at {stuck}"
        return Expanded(self.now, self.ends)

    def _flow(self, seconds):
        for device, (entering, passing) in self._rates().items():
            self.entered[device] += entering * seconds
            self.served[device] += passing * seconds
        for message, rate in self.rates.items():
            self.left_over[message] -= rate * seconds

    def _pass(self, seconds, rates):
        self.now += seconds
        for device, rate in rates.items():
            self.left[device] -= seconds * rate
        for queue in self.queues.values():
            if queue.running is not None:
                queue.left[queue.running] -= seconds

    def _rate(self, device):
        streams = [self.queues.get((name, device[0])) for name in ("sync", "gather")]
        busy = any(queue is not None and queue.running is not None for queue in streams)
        return 1 / Fraction(self.slowdown) if busy and self.slowdown is not None else Fraction(1)

    def _start(self):
        """One round of everything that needs no time; whether anything happened."""
        changed = False
        for name, queue in self.queues.items():
            if queue.running is not None and queue.left[queue.running] == 0:
                queue.done.add(queue.running)
                queue.running, changed = None, True
            if queue.running is None and queue.order:
                head = self._head(name, queue)
                if head is not None:
                    queue.order.remove(head)
                    queue.running, changed = head, True
        for device in self.devices:
            changed |= self._advance(device)
        return changed or self._move_messages()

    def _head(self, name, queue):
        """Collectives go in the order in which all are ready."""
        ready = [key for key in queue.there if key in queue.order]
        return next((key for key in ready if queue.there[key] == self._needed(name)), None)

    def _advance(self, device):
        program, moved = self.programs[device], False
        while self.at[device] < len(program):
            what, key, seconds = program[self.at[device]]
            if what == "work":
                if self.left[device] is None:
                    self.left[device] = seconds
                    moved = True
                if self.left[device] > 0:
                    return moved
                self.left[device] = None
            elif what == "call":
                moved |= device not in self.calling
                if self.calling.setdefault(device, self.now + seconds) > self.now:
                    return moved
                del self.calling[device]
            elif what == "arrived":
                if key not in self.arrived:
                    return moved
            elif what == "both":
                self.met[key] += 1
                if self.met[key] == 2:
                    self.ready[key] = self.now
            elif what == "wait" and key[1] not in self.queues[key[0]].done:
                return moved
            elif what == "there":
                self.queues[key[0]].there[key[1]] += 1
            elif what == "end":
                self.ends[device, key] = self.now
            self.at[device] += 1
            moved = True
        return moved
