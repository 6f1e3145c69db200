"""Solvers of stages, made on demand, and the costs of stages that they give.

In: the problem of a search. Out: for a micro-batch size and a mesh of devices the solver of the
stages on it, which submeshes of equal cost share; the costs of all stages at a micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...cost_model.cluster.cluster import Link
from ..costs.price_cache import find
from ..graph.layout import Mesh
from ..inter_op.heterogeneous import inner_size
from ..inter_op.inter_op import Floats, Table
from ..inter_op.submesh import meshes, submesh_sizes
from ..intra_op.intra_op import IntraOp
from ..requests.goal import Budget
from ..stage.stage_model import StageModel
from .costs import Costs, Runs
from .problem import SearchProblem


@dataclass
class StageSolvers:
    """Solvers and costs of the stages of a problem. ``shared``: solvers by prices and limits, used
    by the searches of all orders of the hosts."""

    problem: SearchProblem
    budget: Budget
    shared: dict[object, IntraOp]
    _on_meshes: dict[object, IntraOp] = field(default_factory=dict)
    _costs: dict[int, Costs] = field(default_factory=dict)

    def costs(self, rows: int) -> Costs:
        """Return the costs of stages at micro-batches of ``rows`` rows."""
        if rows not in self._costs:
            own = self.problem
            runs = Runs(own.tables.at(rows), own.classes, own.num_microbatches(rows))
            solvers, held = partial(self.on_submesh, rows), partial(own.least_held, rows)
            self._costs[rows] = Costs(runs, own.place_key, solvers, held, self.budget)
        return self._costs[rows]

    def on_submesh(self, rows: int, first: int, size: int) -> list[IntraOp]:
        """Return a solver for each allowed mesh on a submesh of ``size`` devices."""
        problem, request = self.problem, self.problem.request
        inner = inner_size(problem.cluster, first, size)
        proposed = problem.mesh_proposals.meshes(size, inner, rows)
        has_rows = rows > 1 or bool(problem.structure.graph.batch_dims)
        return [
            self.on_mesh(rows, mesh, first)
            for mesh in (*meshes(size, inner, request.forced), *proposed)
            if request.features.allows_mesh(mesh, request.max_tp)
            and (not has_rows or self._can_split(rows, mesh.row_parts))
        ]

    def _can_split(self, rows: int, parts: int) -> bool:
        """Return whether a micro-batch splits evenly into parts, of the requested size if set."""
        size = self.problem.request.microbatch_size
        return rows % parts == 0 and size in (None, rows // parts)

    def on_mesh(self, rows: int, mesh: Mesh, first: int, *, link: Link | None = None) -> IntraOp:
        """Return the solver of stages on a mesh from device ``first`` on. Its stages receive values
        over ``link``, by default the link from the devices before. Cached."""
        key = (rows, mesh, first, link)
        return find(self._on_meshes, key, lambda: self._on_mesh(rows, mesh, first, link))

    def _on_mesh(self, rows: int, mesh: Mesh, first: int, link: Link | None) -> IntraOp:
        """Return the solver, which all meshes with equal prices and limits share."""
        problem, ranks = self.problem, tuple(range(first, first + mesh.size))
        prices, limits = problem.prices(rows, mesh, ranks), problem.limits_on(ranks)
        if link is None:
            link = problem.cluster.entry_link(first, mesh.size)
        key = (rows, mesh, prices.groups, prices.speed, prices.shard_groups, limits, link)
        if key not in self.shared:
            model = StageModel(problem.tables.at(rows), prices, problem.restriction(mesh), link)
            self.shared[key] = IntraOp(model, limits, self.budget)
        return self.shared[key]

    def table(self, rows: int) -> Table:
        """Return a table of exact costs of every stage, computed on demand, for small clusters."""
        number, cluster = len(self.problem.structure.blocks.blocks), self.problem.cluster
        sizes, matrix = partial(submesh_sizes, cluster), _Exact(self.costs(rows)).matrix
        return Table(number, cluster.num_devices, sizes, matrix)

    @property
    def excess_bytes(self) -> list[float]:
        """Return, for each stage that did not fit, its bytes over the memory limit."""
        return [over for s in self.shared.values() for over in s.excess_bytes.values()]


@dataclass
class _Exact:
    """Matrices of exact stage costs of a ``Table`` at one micro-batch size, made on demand."""

    costs: Costs
    made: dict[object, Floats] = field(default_factory=dict)

    def matrix(self, left: int, first: int, size: int) -> Floats:
        """Return t[k, i], seconds of a stage of blocks k to i − 1, ``left`` stages from the end."""
        is_first, is_last = first == 0, left == 1
        place = self.costs.place(first, size)
        held = self.costs.in_flight(left, is_first)
        key = (place, is_first, is_last, held)
        if key not in self.made:
            own, runs = self.costs.places[place], self.costs.runs
            seconds = np.full(len(runs.classes.firsts) + 1, np.inf)
            for number in runs.role(is_first, is_last).tolist():
                own.price(number, held, is_first, is_last)
                seconds[number] = own.exact[held].objective[number]
            size = runs.classes.num_blocks
            rows = slice(0, 1) if is_first else slice(1, size)
            stops = slice(size, size + 1) if is_last else slice(1, size)
            cost = np.full((size + 1, size + 1), np.inf)
            cost[rows, stops] = seconds[runs.classes.numbers[rows, stops]]
            self.made[key] = cost
        return self.made[key]
