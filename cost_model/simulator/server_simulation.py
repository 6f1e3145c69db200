"""Rates of workers that train with parameter servers: a simulation of pushes, pulls and compute.

In: each worker's compute of an iteration, the bytes of every block on every server, the rates
of the ranks' links, the consistency. Out: when each worker has finished each iteration.

A worker waits in its forward for the weights of each block, as its backward leaves a block it
pushes the block's gradients, server by server one message at a time, and asks for the weights of
the next iteration in the order of first use. A server applies one push after the other, and
forwards it to its replica before it acknowledges it. Transfers that share a port share its rate by
max-min fairness (Bertsekas and Gallager, Data Networks, section 6.5.2), as TCP connections do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from .consistency import Clocks

Process = Generator[tuple[Any, ...], None, None]


@dataclass(frozen=True, slots=True)
class ServerJob:
    """Workers and parameter servers to simulate. ``worker_ranks`` and ``server_ranks`` are the
    ranks whose network ports workers and servers use, at ``bytes_per_second`` by rank.

    ``forward[w][b]`` and ``backward[w][b]`` are the seconds of worker ``w`` in block (layer) ``b``,
    in an iteration's first forward and last backward; ``between[w]`` its seconds of compute between
    these two. Server ``k`` holds ``block_bytes[b][k]`` bytes of block ``b`` and takes
    ``update_seconds[b][k]`` to apply one push of gradients to them (under bsp, all pushes of an
    iteration). ``replica[k]`` is the server to which ``k`` forwards its pushes, None without
    replicas. ``bound``: iterations that a worker may be ahead of the slowest, None if unbounded.
    """

    worker_ranks: tuple[int, ...]
    server_ranks: tuple[int, ...]
    forward: tuple[tuple[float, ...], ...]
    between: tuple[float, ...]
    backward: tuple[tuple[float, ...], ...]
    block_bytes: tuple[tuple[float, ...], ...]
    update_seconds: tuple[tuple[float, ...], ...]
    bytes_per_second: tuple[float, ...]
    latency_seconds: float
    bound: int | None
    replica: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Result of a simulation: ``finished[w]`` has, for each iteration of worker ``w``, the time
    (seconds) at which the servers had acknowledged all its pushes of gradients."""

    finished: tuple[tuple[float, ...], ...]

    def iterations_per_second(self) -> float:
        """Return the iterations per second, summed over the workers and measured from the end of
        the simulation's first quarter on."""
        end = min(times[-1] for times in self.finished)
        begin = end / 4
        done = sum(_done(times, end) - _done(times, begin) for times in self.finished)
        return done / (end - begin)


def _done(times: Sequence[float], at: float) -> float:
    """Return the number of iterations that are done at time ``at``, with the fraction of the
    running iteration. ``times``: time at which each iteration ends."""
    before = 0.0
    for index, time in enumerate(times):
        if time > at:
            return index + (at - before) / (time - before)
        before = time
    return float(len(times))


def simulate_servers(job: ServerJob, iterations: int) -> ServerTimes:
    """Simulate training until each worker has done ``iterations`` iterations; with unbounded
    staleness fast workers do more. Return the times at which iterations end."""
    return _Simulation(job, iterations).run()


class _Simulation:
    """Event simulation of workers and parameter servers as generators, which wait for seconds to
    pass, for transfers of bytes or for conditions."""

    def __init__(self, job: ServerJob, iterations: int) -> None:
        self.job, self.iterations = job, iterations
        self.now = 0.0
        self._timers: list[tuple[float, int, Process]] = []
        self._numbers = count()
        self._transfers: dict[int, _Transfer] = {}
        self._waiting: list[tuple[Callable[[], bool], Process]] = []
        self._ready: list[Process] = []
        workers = range(len(job.worker_ranks))
        self.clocks = {key: Clocks(workers, job.bound) for key in self._keys()}
        self.free_at = [0.0] * len(job.server_ranks)
        self.pulled = [dict.fromkeys(self._keys(), 1) for _ in workers]
        self.queues = [[list[int]() for _ in job.server_ranks] for _ in workers]
        self.acknowledged = [dict.fromkeys(self._keys(), 0) for _ in workers]
        self.finished: list[list[float]] = [[] for _ in workers]

    def _keys(self) -> list[tuple[int, int]]:
        """Return the pairs (block, server) whose server holds weights of the block (layer)."""
        sizes = self.job.block_bytes
        return [(b, k) for b, row in enumerate(sizes) for k, size in enumerate(row) if size]

    def run(self) -> ServerTimes:
        job = self.job
        for worker in range(len(job.worker_ranks)):
            self._ready.append(self._worker(worker))
            self._ready.append(self._recorder(worker))
            for server in range(len(job.server_ranks)):
                self._ready.append(self._pusher(worker, server))
                self._ready.append(self._puller(worker, server))
        while not self._is_over():
            self._resume()
            if not self._is_over():
                self._advance()
        return ServerTimes(tuple(tuple(times) for times in self.finished))

    def _is_over(self) -> bool:
        return all(len(times) >= self.iterations for times in self.finished)

    def _resume(self) -> None:
        """Resume each generator that need not wait any more, until all of them wait."""
        while self._ready:
            process = self._ready.pop()
            self._step(process)
            if not self._ready:
                held: list[tuple[Callable[[], bool], Process]] = []
                waiting: list[tuple[Callable[[], bool], Process]] = []
                for each in self._waiting:
                    (held if each[0]() else waiting).append(each)
                self._waiting = waiting
                self._ready = [process for _, process in reversed(held)]

    def _step(self, process: Process) -> None:
        try:
            kind, *values = next(process)
        except StopIteration:
            return
        if kind == "seconds":
            heappush(self._timers, (self.now + values[0], next(self._numbers), process))
        elif kind == "until":
            self._waiting.append((values[0], process))
        else:
            source, target, size = values
            number = next(self._numbers)
            self._transfers[number] = _Transfer(source, target, process, left=size)
            self._share()

    def _share(self) -> None:
        """Set the rates of all transfers by max-min fairness: port by port, beginning with the most
        crowded, a port divides its free rate equally among its transfers."""
        open_ = dict(self._transfers)
        rates = self.job.bytes_per_second
        left = {}
        users: dict[tuple[str, int], set[int]] = {}
        for number, each in open_.items():
            for port in (("out", each.source), ("in", each.target)):
                users.setdefault(port, set()).add(number)
                left[port] = rates[port[1]]
        while open_:
            port = min(users, key=lambda port: left[port] / len(users[port]))
            rate = left[port] / len(users[port])
            for number in tuple(users[port]):
                each = open_.pop(number)
                self._transfers[number].rate = rate
                for other in (("out", each.source), ("in", each.target)):
                    left[other] -= rate
                    users[other].discard(number)
                    if not users[other]:
                        del users[other]

    def _advance(self) -> None:
        """Advance the simulated time to the moment at which the next transfer or wait ends."""
        moments = [self.now + each.left / each.rate for each in self._transfers.values()]
        if self._timers:
            moments.append(self._timers[0][0])
        assert moments, "workers and servers wait for each other"
        moment = min(moments)
        passed = moment - self.now
        ended = []
        for number, each in self._transfers.items():
            if self.now + each.left / each.rate <= moment:
                ended.append(number)
            each.left -= each.rate * passed
        self.now = moment
        for number in ended:
            self._ready.append(self._transfers.pop(number).process)
        if ended:
            self._share()
        while self._timers and self._timers[0][0] <= self.now:
            self._ready.append(heappop(self._timers)[2])

    def _is_here(self, worker: int, block: int, iteration: int) -> bool:
        here, servers = self.pulled[worker], range(len(self.job.server_ranks))
        return all(here.get((block, k), iteration + 1) > iteration for k in servers)

    def _worker(self, worker: int) -> Process:
        job = self.job
        blocks = range(len(job.block_bytes))
        iteration = 0
        while True:
            for block in blocks:
                yield ("until", lambda b=block, i=iteration: self._is_here(worker, b, i))
                yield ("seconds", job.forward[worker][block])
            yield ("seconds", job.between[worker])
            for block in reversed(blocks):
                yield ("seconds", job.backward[worker][block])
                for server, size in enumerate(job.block_bytes[block]):
                    if size:
                        self.queues[worker][server].append(block)
            iteration += 1

    def _recorder(self, worker: int) -> Process:
        """Record for each iteration of ``worker`` when all its pushes were acknowledged."""
        acknowledged = self.acknowledged[worker]
        while True:
            number = len(self.finished[worker])
            yield ("until", lambda n=number: min(acknowledged.values()) > n)
            self.finished[worker].append(self.now)

    def _pusher(self, worker: int, server: int) -> Process:
        job, queue = self.job, self.queues[worker][server]
        source, target = job.worker_ranks[worker], job.server_ranks[server]
        replica = job.replica[server] if job.replica else None
        while True:
            yield ("until", lambda: bool(queue))
            block = queue.pop(0)
            size = job.block_bytes[block][server]
            if source != target:
                yield ("seconds", job.latency_seconds)
                yield ("transfer", source, target, size)
            if replica is not None and job.server_ranks[replica] != target:
                yield ("seconds", job.latency_seconds)
                yield ("transfer", target, job.server_ranks[replica], size)
                yield ("seconds", job.latency_seconds)
            yield from self._apply(worker, block, server)
            if source != target:
                yield ("seconds", job.latency_seconds)
            self.acknowledged[worker][block, server] += 1

    def _apply(self, worker: int, block: int, server: int) -> Process:
        """Spend the seconds in which ``server`` applies a worker's push to its weights of
        ``block``; under bsp, all pushes of an iteration are applied when the last one arrives."""
        clocks = self.clocks[block, server]
        before = clocks.slowest
        is_alone = self.job.bound != 0
        after = min(clocks.clock(w) + (w == worker) for w in clocks.workers)
        if is_alone or after > before:
            start = max(self.now, self.free_at[server])
            self.free_at[server] = start + self.job.update_seconds[block][server]
            yield ("seconds", self.free_at[server] - self.now)
        clocks.push(worker)

    def _puller(self, worker: int, server: int) -> Process:
        job = self.job
        source, target = job.server_ranks[server], job.worker_ranks[worker]
        blocks = [b for b, row in enumerate(job.block_bytes) if row[server]]
        iteration = 0
        while blocks:  # a server of a small model may hold nothing
            iteration += 1
            for block in blocks:
                key = (block, server)
                yield ("until", lambda k=key, i=iteration: self.acknowledged[worker][k] >= i)
                if source != target:
                    yield ("seconds", job.latency_seconds)
                yield ("until", lambda k=key: self.clocks[k].may_begin(worker))
                if source != target:
                    yield ("seconds", job.latency_seconds)
                    yield ("transfer", source, target, job.block_bytes[block][server])
                self.pulled[worker][key] = iteration + 1


@dataclass(slots=True)
class _Transfer:
    source: int
    target: int
    process: Process
    left: float
    rate: float = 0.0
