"""The fastest plan in which unlike devices take unequal shares of the batch, by trying all.

In: a brute force (its graph, cluster and request). Out: the least seconds of a step of one stage
whose axis "dp" gives each coordinate rows of its own, over every order of the hosts, number of
rows of a micro-batch, mesh, division of the rows, layout of every node that keeps a coordinate to
its own rows, ZeRO stage, and every block as it is, selectively or fully recomputed.

A coordinate runs the graph of a batch that, split evenly, gives it as many rows, priced on its own
devices and held in their own memory. All wait for the slowest, in a micro-batch and at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from brute_force import BruteForce, host_orders, reordered
from brute_force_layouts import Floats, Ints, Option
from brute_force_stage import Modes, Stage

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.precision import with_precision
from autoparallel.planner.costs.price_cache import PriceCache
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Ref
from autoparallel.planner.graph.layout import Layout, Mesh, shard

ALONE = ((1, 0),)
"""What one stage holds: one micro-batch."""


@dataclass(frozen=True)
class Shared:
    """The fastest of all: seconds of a step, and what it is."""

    step_seconds: float
    rows: int
    mesh: Mesh
    shares: tuple[int, ...]
    zero: int
    modes: Modes

    @property
    def summary(self) -> str:
        modes = " ".join(self.modes)
        return f"{self.mesh} shares {self.shares} zero={self.zero} recompute {modes}"


def divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to give ``parts`` coordinates at least one row each."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in divisions(total - first, parts - 1):
            yield (first, *rest)


def best_shared(force: BruteForce, below: float = math.inf) -> Shared | None:
    """The fastest that takes less than ``below`` seconds."""
    found: Shared | None = None
    if not force.graph.batch_dims:
        return None
    for order in host_orders(force.cluster):
        cluster, _ = reordered(force.cluster, order)
        own = replace(force, cluster=cluster, cache=PriceCache(), stages={}, ways={})
        for mesh in own.meshes(range(cluster.num_devices)):
            if mesh.axes[0] == "dp" and mesh.shape[0] > 1:
                space = SharedSpace(own, mesh)
                for rows in own.rows():
                    bar = below if found is None else found.step_seconds
                    found = space.best(rows, bar) or found
    return found


@dataclass
class SharedSpace:
    """All that one mesh over every device can do."""

    force: BruteForce
    mesh: Mesh
    stages: dict[tuple[int, int], Stage] = field(default_factory=dict)

    def ranks(self, coordinate: int) -> tuple[int, ...]:
        size = self.mesh.size // self.mesh.shape[0]
        return tuple(range(coordinate * size, (coordinate + 1) * size))

    def limit(self, coordinate: int) -> float:
        limit = self.force.request.memory_limit_bytes
        if limit is not None:
            return float(limit)
        devices = [self.force.cluster.device(rank) for rank in self.ranks(coordinate)]
        return float(min(device.usable_memory_bytes for device in devices))

    def stage(self, coordinate: int, rows: int) -> Stage:
        """What a coordinate with so many rows can do."""
        if (coordinate, rows) not in self.stages:
            force, request = self.force, self.force.request
            prices = Prices(
                self.mesh,
                force.cluster,
                tuple(range(self.mesh.size)),
                request.precision,
                request.optimizer,
                rules,
                force.cache,
                own=self.ranks(coordinate),
                states=request.states,
            )
            graph = with_precision(force.graph, request.precision)
            graph = graph.with_batch_size(rows * self.mesh.shape[0])
            span = (0, len(force.blocks.blocks))
            self.stages[coordinate, rows] = Stage(
                graph, force.blocks, prices, span, batch_axes=(0,), reduce=False
            )
        return self.stages[coordinate, rows]

    def best(self, rows: int, below: float) -> Shared | None:
        """The fastest division of ``rows`` that takes less than ``below`` seconds."""
        found: Shared | None = None
        for shares in divisions(rows, self.mesh.shape[0]):
            stages = [self.stage(at, own) for at, own in enumerate(shares)]
            which = same_assignments(stages)
            for zero in stages[0].zeros:
                for modes in stages[0].recomputations:
                    seconds = self._seconds(stages, which, zero, modes, rows)
                    least = float(seconds.min(initial=math.inf))
                    if least < below:
                        found, below = Shared(least, rows, self.mesh, shares, zero, modes), least
                    if np.isfinite(seconds).all():  # none has to be recomputed
                        break
        return found

    def _seconds(
        self, stages: Sequence[Stage], which: Sequence[Ints], zero: int, modes: Modes, rows: int
    ) -> Floats:
        """By assignment the seconds of a step; infinite where some coordinate has no room."""
        number = len(which[0])
        micro, end, fits = np.zeros(number), np.zeros(number), np.ones(number, dtype=bool)
        for coordinate, (stage, own) in enumerate(zip(stages, which, strict=True)):
            figures = stage.seconds(zero, modes)[own]
            micro = np.maximum(micro, figures[:, 0] + figures[:, 1])
            end = np.maximum(end, figures[:, 4])
            fits &= stage.num_bytes(zero, modes, ALONE)[own] <= self.limit(coordinate)
        count = self.force.request.global_batch // rows
        found: Floats = np.where(fits, count * micro + end, np.inf)
        return found


def same_assignments(stages: Sequence[Stage]) -> list[Ints]:
    """For each stage the numbers of the assignments that all have and that keep rows apart."""
    tables = [
        {
            key: {_text(each): at for at, each in enumerate(own)}
            for key, own in stage.options.items()
        }
        for stage in stages
    ]
    common = {
        key: [
            text
            for text, at in table.items()
            if is_apart(stages[0], key, stages[0].options[key][at])
            and all(text in other[key] for other in tables)
        ]
        for key, table in tables[0].items()
    }
    found = []
    for stage, table in zip(stages, tables, strict=True):
        sizes = [len(own) for own in stage.options.values()]
        chosen = [[table[key][text] for text in common[key]] for key in stage.options]
        grid = np.meshgrid(*(np.array(own, dtype=np.int64) for own in chosen), indexing="ij")
        found.append(np.ravel_multi_index([each.ravel() for each in grid], sizes))
    return found


def _text(option: Option) -> str:
    return repr((option.layout.inputs, option.layout.outputs, sorted(option.held.items())))


def is_apart(stage: Stage, key: str, option: Option) -> bool:
    """Whether axis 0 splits every value along the batch alone, and no other axis does."""
    node, graph = stage.graph[key], stage.graph
    refs = [*node.inputs, *(Ref(node.name, index) for index in range(len(node.outputs)))]
    layouts = [*option.layout.inputs, *option.layout.outputs]
    if node.kind == "parameter":
        refs = refs[len(node.inputs) :]
    pairs = [*zip(refs, layouts, strict=True), *((Ref(n), own) for n, own in option.held.items())]
    return all(_has_own_rows(graph.batch_dims[ref.name][ref.index], own) for ref, own in pairs)


def _has_own_rows(dim: int | None, layout: Layout) -> bool:
    if dim is None:
        return not layout[0].is_shard
    return layout[0] == shard(dim) and shard(dim) not in layout[1:]
