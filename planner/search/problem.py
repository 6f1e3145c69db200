"""Problem of a search: a graph, a cluster and a request, and the facts that follow from them alone.

In: a graph with its blocks, a cluster, a request, sharding rules, measured prices. Out: the numbers
of stages and micro-batch sizes to try, the classes of runs, the limits of a stage, prices of
meshes. ``GraphTables`` are shared by searches of one model, whatever the cluster, memory and
features: the key of every table has all that it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

from ...cost_model.cluster.cluster import Cluster
from ..costs.basis import Basis
from ..costs.choices import Restriction
from ..costs.precision import with_precision
from ..costs.price_cache import ByIdentity, PriceCache, find
from ..costs.prices import Prices, Rules
from ..graph.graph import Blocks, Graph
from ..graph.layout import Mesh
from ..inter_op.inter_op import StageChoice
from ..inter_op.submesh import Proposals, proposals, restriction
from ..intra_op.intra_op import Limits
from ..intra_op.pulp_solver import find_solver
from ..plan import Precision
from ..requests.options import microbatch_rows, stage_numbers
from ..requests.pins import Pins, by_template
from ..requests.request import Request
from ..schedules.held import HalfPairs, half_pairs
from ..stage.range_classes import RunClasses, run_classes, stage_begins, without_inner
from ..stage.structure import Structure
from .space import place_key


@dataclass
class GraphTables:
    """Cost tables of a graph in one number format. ``graphs``: structures by micro-batch size."""

    structure: Structure
    graphs: dict[int, Structure] = field(default_factory=dict)
    cache: PriceCache = field(default_factory=PriceCache)

    @staticmethod
    def of(graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        return GraphTables(Structure(with_precision(graph, precision), blocks))

    def at(self, rows: int) -> Structure:
        """Return the structure of the graph at a micro-batch size of ``rows`` rows (samples)."""
        return find(self.graphs, rows, lambda: self.structure.at_batch(rows))


@dataclass
class SharedTables:
    """Cost tables of all graphs searched so far, keyed by the identity of the graphs."""

    _known: ByIdentity[GraphTables] = field(default_factory=ByIdentity)

    def of(self, graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        make = partial(GraphTables.of, graph, blocks, precision)
        return self._known.find((precision,), (graph, blocks), make)


@dataclass(frozen=True)
class SearchProblem:
    """Problem of a search for one order of the hosts, which the search does not change."""

    tables: GraphTables
    cluster: Cluster
    request: Request
    rules: Rules
    basis: Basis

    @property
    def structure(self) -> Structure:
        return self.tables.structure

    @cached_property
    def limits(self) -> Limits:
        """Return the limits of a stage on devices whose memory is that of the whole cluster."""
        request, limit = self.request, self.request.memory_limit_bytes
        return Limits(
            float(self.cluster.usable_memory_bytes if limit is None else limit),
            request.zeros,
            request.recompute,
            request.gap,
            request.features.recompute,
            find_solver(request.solver),
            request.intra_op != "ilp",
        )

    def limits_on(self, ranks: Sequence[int]) -> Limits:
        """Return a stage's limits: its devices' memory, unless the request limits the memory."""
        if self.request.memory_limit_bytes is not None:
            return self.limits
        device = self.cluster.slowest_device(ranks)
        return replace(self.limits, memory_bytes=float(device.usable_memory_bytes))

    @cached_property
    def pins(self) -> Pins:
        own = self.structure
        return by_template(own.graph, own.blocks, self.request.pins)

    def restriction(self, mesh: Mesh) -> Restriction:
        """Return the layouts that the request allows on a mesh."""
        own = restriction(mesh, self.request.forced)
        return replace(own, pins=self.pins, features=self.request.features)

    def prices(
        self, rows: int, mesh: Mesh, ranks: tuple[int, ...], own: tuple[int, ...] = ()
    ) -> Prices:
        """Return the prices of a mesh on ``ranks``, with ``own`` as in ``MeshPrices``."""
        request, asked = self.request, self.basis.asked
        return Prices(
            mesh,
            self.cluster,
            ranks,
            request.precision,
            request.optimizer,
            self.rules,
            self.tables.cache,
            profile=self.basis.used,
            asked=asked.of(self.num_microbatches(rows)) if asked is not None else None,
            own=own,
            assumptions=self.basis.assumptions,
            states=request.states,
        )

    @cached_property
    def classes(self) -> RunClasses:
        return without_inner(run_classes(self.structure), self._begins)

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """Return the positions of blocks at which the request requires a stage to begin."""
        own = self.structure
        return tuple(stage_begins(own.graph, own.blocks, self.request.stage_at))

    def begins_as_asked(self, stages: Sequence[StageChoice]) -> bool:
        """Return whether stages begin at all blocks at which the request requires it."""
        return {choice.start for choice in stages}.issuperset(self._begins)

    @cached_property
    def mesh_proposals(self) -> Proposals:
        """Return the proposer of meshes with further axes than dp and tp."""
        return proposals(self.structure.graph, self.cluster, self.request, self.rules)

    @cached_property
    def stage_numbers(self) -> tuple[int, ...]:
        """Return the numbers of stages to try. Raises ``UsageError`` if none is possible."""
        blocks, least = self.structure.blocks.blocks, len({0, *self._begins})
        return stage_numbers(self.request, self.cluster, len(blocks), least_stages=least)

    @cached_property
    def microbatch_rows(self) -> tuple[int, ...]:
        """Return the micro-batch sizes to try, the most promising first. Raises ``UsageError``."""
        return microbatch_rows(self.structure.graph, self.request, self.cluster)

    @cached_property
    def place_key(self) -> Callable[[int, int], Hashable]:
        return cache(place_key(self.cluster))

    def num_microbatches(self, rows: int) -> int:
        return self.request.global_batch // rows

    @property
    def in_flight_schedule(self) -> str:
        """Return a proposal's default schedule: "1f1b" (least memory) if allowed."""
        return "1f1b" if "1f1b" in self.request.schedules else self.request.schedules[0]

    def held(self, schedule: str, num_stages: int, rows: int, depth: int) -> HalfPairs:
        """Return a stage's micro-batches in flight; ``depth``: its stages to the end."""
        return half_pairs(schedule, depth, num_stages, self.num_microbatches(rows))

    def least_held(self, rows: int, left: int) -> int:
        """Return the least micro-batches in flight, over schedules, of a stage with ``left`` stages
        to the end."""
        names = self.request.schedules
        if "1f1b" in names:  # the least of all schedules with one stage per rank
            names = ("1f1b",)
        return min(self.held(name, 2, rows, left)[0][0] for name in names)
