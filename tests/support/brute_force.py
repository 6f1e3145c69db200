"""The fastest plan by trying everything: the oracle that the planner must equal.

In: a small graph, its blocks, a cluster, a request. Out: the plan of least simulated step time
that fits, over

- every number of rows of a micro-batch that divides the batch,
- every order of the hosts, where they differ,
- every number of stages, every cut of the blocks, every tiling of the ranks, in order, by
  submeshes: neighbours within a host, or whole hosts; where hosts are of different sizes, within
  a host a divisor of any host's size or all that is left, and from there on whole hosts,
- every mesh dp × tp of a submesh, "tp" never across hosts unless some host gives a part that
  nothing divides; "dp" must divide the micro-batch's rows and splits the batch, all else is free,
- every layout of every node that the rules offer, equal blocks of a stage alike,
- every ZeRO stage (0 to 3, where there is a "dp"), over all ranks or within a host, one per stage,
- every block of a stage as it is, selectively or fully recomputed,
- every schedule of ``request.SCHEDULES``.

Ways of a stage that are no better in any of the figures the simulator sees (forward,
backward, receive forward and backward, gathers before the step, end of step; of a split
backward either half) are left out; and a pipeline is not simulated when a bound on its step
from below already exceeds the best known. Leaving out is exact where the simulated step does
not get shorter when a figure grows: up to two stages, and in longer ones but for messages that
share a port (``test_free_ports``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import Any

import numpy as np
from brute_force_stage import Floats, Held, Modes, Stage

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.simulator.simulator import simulate
from autoparallel.cost_model.simulator.stage_costs import StageCosts
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.precision import with_precision
from autoparallel.planner.costs.price_cache import PriceCache
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.evaluate.step import message_seconds
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import (
    BlockPlan,
    ModelInfo,
    Plan,
    Prediction,
    SolverInfo,
    StagePlan,
    StagePrediction,
)
from autoparallel.planner.requests.request import SCHEDULES, Request
from autoparallel.planner.schedules.schedules import build_schedule

IN_FLIGHT = {
    "gpipe": lambda stages, count, stage: count,
    "1f1b": lambda stages, count, stage: min(count, stages - stage),
    "eager-1f1b": lambda stages, count, stage: min(count, 2 * (stages - stage) - 1),
}


def held(schedule: str, stages: int, count: int, stage: int) -> Held:
    """What a stage holds at some time: (micro-batches whose backward is to come, those of which
    only the gradients of weights are), every such pair there is."""
    if stages == 1:
        return ((1, 0),)
    if schedule in IN_FLIGHT:
        return ((IN_FLIGHT[schedule](stages, count, stage), 0),)
    row = build_schedule(schedule, stages, count).table[stage]
    pairs = {(0, 0)}
    done = dict.fromkeys("FIW", 0)
    for action in row:
        if action.kind in done:
            done[action.kind] += 1
            pairs.add((done["F"] - done["I"], done["I"] - done["W"]))
    return tuple(sorted(pairs))


@dataclass(frozen=True)
class Way:
    """One way to run one stage, with its five figures. ``gather``: the part of the end that may run
    while the stage waits for its first forward (``Stage.first_gather``)."""

    figures: tuple[float, ...]
    stage: Stage
    ranks: tuple[int, ...]
    zero: int
    modes: Modes
    which: int
    gather: float = 0.0

    @property
    def stops(self) -> bool:
        """Whether its ranks do nothing else while parameters are gathered: receive nothing."""
        return self.stage.prices.device.slowed_share("all_gather") == 1

    @property
    def summary(self) -> str:
        mesh = self.stage.prices.mesh
        sizes = ",".join(f"{n}={s}" for n, s in zip(mesh.axes, mesh.shape, strict=True))
        return (
            f"blocks {self.stage.start}-{self.stage.stop - 1} on {sizes} zero={self.zero} "
            f"recompute {' '.join(self.modes)}"
        )


@dataclass(frozen=True)
class Best:
    """The fastest plan of all."""

    step_seconds: float
    rows: int
    num_microbatches: int
    schedule: str
    ways: tuple[Way, ...]
    ranks: tuple[int, ...] = ()

    @property
    def summary(self) -> str:
        stages = " | ".join(way.summary for way in self.ways)
        return f"{stages}; {self.num_microbatches} × {self.rows} rows, {self.schedule}"

    def plan(self, cluster: Cluster, request: Request) -> Plan:
        """As a plan, without predictions."""
        stages = tuple(
            StagePlan(
                blocks=tuple(
                    BlockPlan(block.name, block.kind, mode)
                    for block, mode in zip(way.stage.blocks, way.modes, strict=True)
                ),
                devices=tuple(self.ranks[r] if self.ranks else r for r in way.ranks),
                mesh=way.stage.prices.mesh,
                zero=way.stage.shardings[way.zero][0],
                layouts=way.stage.layouts(way.which),
                prediction=StagePrediction({}, {}),
                shard_degree=way.stage.shardings[way.zero][1],
            )
            for way in self.ways
        )
        info = ModelInfo(
            "", {}, "", 0, request.global_batch, None, request.precision, request.optimizer
        )
        return Plan(
            info,
            cluster,
            self.num_microbatches,
            self.schedule,
            stages,
            Prediction(0.0, 0.0, 0.0, 0.0, 0, {}),
            (),
            SolverInfo(0.0, 0, {}),
        )


@dataclass
class BruteForce:
    """Everything there is to try. ``limits``: bytes per rank. ``free``: "dp" may do anything.
    ``positions``: by value the dimensions of which "cp" splits one."""

    graph: Graph
    blocks: Blocks
    cluster: Cluster
    request: Request
    free: bool = False
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    schedules: Sequence[str] = SCHEDULES
    cache: PriceCache = field(default_factory=PriceCache)
    tables: dict[Any, Any] = field(default_factory=dict)
    stages: dict[Any, Stage] = field(default_factory=dict)
    ways: dict[Any, list[Way]] = field(default_factory=dict)
    num_simulated: int = 0
    num_assignments: int = 0

    def best(self, below: float = math.inf) -> Best | None:
        """The fastest plan that takes less than ``below`` seconds."""
        found: Best | None = None
        for order in host_orders(self.cluster):
            cluster, ranks = reordered(self.cluster, order)
            own = replace(self, cluster=cluster, cache=PriceCache(), stages={}, ways={})
            better = own.best_in_order(below if found is None else found.step_seconds)
            if better is not None:
                found = replace(better, ranks=ranks)
        return found

    def best_in_order(self, below: float) -> Best | None:
        """The fastest plan whose stages take the ranks in order."""
        found: Best | None = None
        for rows in self.rows():
            for stages in self.pipelines():
                for schedule in self.schedules if len(stages) > 1 else self.schedules[:1]:
                    bar = below if found is None else found.step_seconds
                    better = self._pipeline(rows, schedule, stages, bar)
                    found = better or found
        return found

    def rows(self) -> list[int]:
        batch = self.request.global_batch
        if not self.graph.batch_dims:
            return [batch]
        return [rows for rows in range(1, batch + 1) if batch % rows == 0]

    def pipelines(self) -> Iterator[tuple[tuple[int, int, int, int], ...]]:
        """Stages as (first block, last block + 1, first rank, ranks): every cut and tiling."""
        blocks = len(self.blocks.blocks)

        def extend(block: int, rank: int) -> Iterator[tuple[tuple[int, int, int, int], ...]]:
            if block == blocks or rank == self.cluster.num_devices:
                if block == blocks and rank == self.cluster.num_devices:
                    yield ()
                return
            for size in submeshes(self.cluster, rank):
                for stop in range(block + 1, blocks + 1):
                    for rest in extend(stop, rank + size):
                        yield ((block, stop, rank, size), *rest)

        yield from extend(0, 0)

    def meshes(self, ranks: Sequence[int]) -> list[Mesh]:
        found = meshes(self.cluster, ranks)
        if self.request.offload != "parameters":
            return found
        return [mesh for mesh in found if mesh.axes[0] == "dp" and mesh.shape[0] > 1]

    def splits_rows(self, rows: int, mesh: Mesh) -> bool:
        """Whether the axis "dp" divides the rows of a micro-batch."""
        return not self.graph.batch_dims or mesh.axes[0] != "dp" or rows % mesh.shape[0] == 0

    def _pipeline(
        self, rows: int, schedule: str, stages: Sequence[tuple[int, int, int, int]], bar: float
    ) -> Best | None:
        count = self.request.global_batch // rows
        sets = []
        for index, stage in enumerate(stages):
            own = self._ways(rows, stage, held(schedule, len(stages), count, index))
            own = [way for way in own if bound([way], count) < bar]
            if not own:
                return None
            sets.append(own)
        tries = [(bound(ways, count), number, ways) for number, ways in enumerate(product(*sets))]
        tries.sort(key=lambda each: each[:2])
        best = None
        for least, _, ways in tries:
            if least >= bar:
                break
            seconds = self.simulate(schedule, count, ways)
            assert seconds >= least * (1 - 1e-12)
            if seconds < bar:
                bar, best = seconds, Best(seconds, rows, count, schedule, ways)
        return best

    def simulate(
        self,
        schedule: str,
        count: int,
        ways: Sequence[Way],
        beside: Sequence[tuple[float, ...]] = (),
    ) -> float:
        """The step. ``beside``: of each stage what of its end runs beside its first forward and
        its last backward (``Stage.of_step``). Without it the first forward waits for all gathers,
        and all else of the end comes last: for one stage this takes as long, and for several never
        longer, if calls for messages take no time."""
        self.num_simulated += 1
        stages = len(ways)
        if stages == 1 and not beside:
            forward, backward, _, _, end = ways[0].figures
            return count * (forward + backward) + end
        key = ("table", schedule, stages, count)
        if key not in self.tables:
            self.tables[key] = build_schedule(schedule, stages, count)
        forward, backward, receive, receive_backward, end, *late = zip(
            *(way.figures for way in ways), strict=True
        )
        message = message_seconds(self.cluster)
        costs = StageCosts(
            forward,
            backward,
            send_seconds=receive[1:],
            send_backward_seconds=receive_backward[1:],
            step_seconds=[own - way.gather for own, way in zip(end, ways, strict=True)],
            gather_seconds=[way.gather for way in ways],
            slowed_share=[float(way.stops) for way in ways],
            send_latency_seconds=[message.latency] * (stages - 1),
            send_call_seconds=[message.call] * (stages - 1),
            receive_call_seconds=[message.call] * (stages - 1),
            weight_backward_seconds=late[0] if late else (),
        )
        if beside:
            gather, sync, share, groups, end = zip(*beside, strict=True)
            costs = replace(
                costs,
                gather_seconds=gather,
                gradient_sync_seconds=sync,
                step_seconds=end,
                slowed_share=share,
                buckets=groups,
            )
        return simulate(self.tables[key], costs).step_seconds

    def _ways(self, rows: int, stage: tuple[int, int, int, int], in_flight: Held) -> list[Way]:
        """The ways of a stage that fit, on every mesh, without those worse in everything."""
        start, stop, first, size = stage
        ranks = tuple(range(first, first + size))
        limit = self.request.memory_limit_bytes
        if limit is None:
            limit = min(self.cluster.device(rank).usable_memory_bytes for rank in ranks)
        key = (rows, stage, in_flight)
        if key not in self.ways:
            found: list[Way] = []
            for mesh in self.meshes(ranks):
                if not self.splits_rows(rows, mesh):
                    continue
                space = self.stage(rows, mesh, ranks, (start, stop))
                for points in space.points(in_flight, limit):
                    for row in front(_small(points.seconds, points.gathers)):
                        own = tuple(points.seconds[row].tolist())
                        which, gather = int(points.which[row]), float(points.gathers[row])
                        found.append(
                            Way(own, space, ranks, points.zero, points.modes, which, gather)
                        )
            figures = np.array([way.figures for way in found])
            gathers = np.array([way.gather for way in found])
            kept = front(_small(figures, gathers)) if found else []
            self.ways[key] = [found[row] for row in kept]
        return self.ways[key]

    def stage(self, rows: int, mesh: Mesh, ranks: tuple[int, ...], span: tuple[int, int]) -> Stage:
        request = self.request
        prices = Prices(
            mesh,
            self.cluster,
            ranks,
            request.precision,
            request.optimizer,
            rules,
            self.cache,
            states=request.states,
        )
        link = self.cluster.entry_link(ranks[0], len(ranks)) if ranks[0] else None
        key = (rows, span, mesh, prices.groups, prices.speed, link)
        if key not in self.stages:
            graph = with_precision(self.graph, request.precision)
            if graph.batch_size != rows:
                graph = graph.with_batch_size(rows)
            batch_axes = [
                axis
                for axis, name in enumerate(mesh.axes)
                if name == "dp" and mesh.shape[axis] > 1 and not self.free
            ]
            cuts = {mesh.axes.index("cp"): self.positions} if "cp" in mesh.axes else {}
            self.stages[key] = Stage(
                graph,
                self.blocks,
                prices,
                span,
                batch_axes=batch_axes,
                cuts=cuts,
                modes=request.recomputations,
            )
            self.num_assignments += self.stages[key].num_assignments
        return self.stages[key]


def host_orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """The orders of the hosts that differ in what stands where."""
    numbers = range(len(cluster.hosts))
    orders = {tuple(repr(cluster.hosts[i]) for i in o): o for o in permutations(numbers)}
    return list(orders.values())


def reordered(cluster: Cluster, order: Sequence[int]) -> tuple[Cluster, tuple[int, ...]]:
    """The cluster with its hosts in this order, and the given rank of each of its ranks."""
    ranks = [rank for host in order for rank, owner in enumerate(cluster.host_of) if owner == host]
    return replace(cluster, hosts=tuple(cluster.hosts[host] for host in order)), tuple(ranks)


def submeshes(cluster: Cluster, rank: int) -> list[int]:
    """How many ranks a stage that begins at ``rank`` may have."""
    host = cluster.host_of[rank]
    sizes = [each.num_devices for each in cluster.hosts]
    offset = rank - cluster.host_of.index(host)
    left = sizes[host] - offset
    if len(set(sizes)) == 1:
        found = set(range(1, left + 1))
        reaches_on = offset == 0
    else:
        found = {n for n in range(1, left + 1) if any(size % n == 0 for size in sizes)} | {left}
        reaches_on = True
    if reaches_on:
        later = sizes[host + 1 :]
        found |= {left + sum(later[: count + 1]) for count in range(len(later))}
    return sorted(found)


def meshes(cluster: Cluster, ranks: Sequence[int]) -> list[Mesh]:
    """Every dp × tp, axes of one rank left out."""
    parts = math.gcd(*Counter(cluster.host_of[rank] for rank in ranks).values())
    found = []
    for tp in range(1, len(ranks) + 1):
        if len(ranks) % tp == 0 and (parts == 1 or parts % tp == 0):
            dp = len(ranks) // tp
            axes = [(name, size) for name, size in (("dp", dp), ("tp", tp)) if size > 1]
            found.append(Mesh(*map(tuple, zip(*(axes or [("dp", 1)]), strict=True))))
    return found


def bound(ways: Sequence[Way], count: int) -> float:
    """Lower bound of a step: the way to some stage, all of its work, the way back or its end.

    On its way to stage i the first micro-batch passes the forwards before i, and waits for gathers.
    After the last backward of i come the backwards before it, and the end of the first stage.
    """
    least = there = back = 0.0
    first_end = ways[0].figures[4] - ways[0].gather
    for index, way in enumerate(ways):
        forward, backward, receive, receive_backward, end, *late = way.figures
        end -= way.gather
        if index:
            there += receive
            back += receive_backward
        there = max(there, way.gather)
        tail = max(end, back + first_end) if index and not late else end
        least = max(least, there + count * (forward + backward) + tail)
        there += forward
        back += backward
    return least


def _small(figures: Floats, gathers: Floats) -> Floats:
    """Figures of a stage of which each is better if it is smaller: a split backward counts as two
    halves, and the end of the step without its gathers, which are a figure of their own."""
    found = np.column_stack([figures, gathers])
    found[:, 4] -= gathers
    if figures.shape[1] > 5:
        found[:, 1] -= found[:, 5]
    return found


def front(points: Floats) -> list[int]:
    """The rows that no other row is at most equal to in every column; of equal ones the first."""
    order = np.argsort(points.sum(axis=1), kind="stable")
    kept: list[int] = []
    while len(order):
        first = order[0]
        kept.append(int(first))
        order = order[(points[order] < points[first]).any(axis=1)]
    return kept
