"""The search's solvers with a cache beneath the functions that take the time.

In: a solver's parts and a ``Cache``. Out: a solver that looks up, before it works, a kind's
decision tables, the solutions of runs of blocks and the answers of integer programs; whatever
time limits have cut short is not kept. Each of these is a function of what its key holds, the
rest of a solver (which solutions were tried for which run) is found again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from ..cache.cache import (
    KINDS,
    MISSING,
    NO_CACHE,
    PROGRAMS,
    SOLUTIONS,
    Cache,
    UnkeyedError,
    graph_digest,
)
from ..cache.codec import Codec
from ..graph import Blocks, Graph
from ..integer_programs.ilp import Answer
from ..intra_op.elimination import Floats
from ..intra_op.families import Solved
from ..intra_op.intra_op import IntraOp
from ..intra_op.kind_tables import Rates
from ..pricing.assembly import Assembly, Setting, Solution
from ..pricing.basis import Basis
from ..pricing.prices import Prices
from ..pricing.stage_model import KindModel, StageModel
from ..pricing.structure import Run
from ..pricing.tables import CODEC, pack, unpack
from ..requests.request import Request


@dataclass(frozen=True, slots=True)
class KeptSolved:
    """What ``Solved`` says to those who ask: the least costs, and the ways to them.

    ``least`` is None where the tables would have been too wide. ``num_problems`` were solved.
    """

    least: Floats | None
    ways: tuple[Solution, ...]
    num_problems: int

    def solutions(self) -> Iterator[Solution]:
        return iter(self.ways)


_SOLUTIONS = Codec((KeptSolved,))
_PROGRAMS = Codec((Answer,))


def cache_for(graph: Graph, blocks: Blocks, request: Request, basis: Basis) -> Cache:
    """The cache for all that is solved of a graph; ``graph`` is as its precision has it.

    None is used where every price asked for must be heard of (``Basis.asked``).
    """
    if basis.cache.shelf is None or basis.asked is not None or basis.only is not None:
        return NO_CACHE
    try:
        own = graph_digest(graph, blocks)
    except UnkeyedError:
        basis.cache.faults["functions"] += 1
        return NO_CACHE
    used = basis.used
    factors = () if used is None else tuple(sorted(used.factors.items()))
    return basis.cache.under(own, request.precision, request.optimizer, used, factors)


@dataclass(frozen=True)
class CachedModel(StageModel):
    """A ``StageModel`` whose kinds' tables are kept."""

    cache: Cache = NO_CACHE

    def _make_kind(self, kind: str) -> KindModel:
        packed = self.cache.get(KINDS, CODEC, kind)
        if packed is not MISSING:
            return unpack(packed, partial(self._holder, kind))
        made = StageModel._make_kind(self, kind)
        if self.cache.shelf is not None:
            self.cache.put(pack(made), KINDS, CODEC, kind)
        return made


@dataclass
class CachedIntraOp(IntraOp):
    """An ``IntraOp`` whose solutions and programs are kept."""

    cache: Cache = NO_CACHE

    def _solve(self, runs: Sequence[Run], rates: Rates) -> Solved | None:
        family = runs[0].family
        if self._families.get(family, MISSING) is None or self.effort.left_seconds <= 0:
            return None
        key = (tuple((run.start, run.stop) for run in runs), rates)
        found = self.cache.get(SOLUTIONS, _SOLUTIONS, *key)
        if found is MISSING:
            before = self.effort.num_problems
            solved = IntraOp._solve(self, runs, rates)
            number = self.effort.num_problems - before
            if solved is None and self.effort.left_seconds <= 0:
                return None
            ways = tuple(solved.solutions()) if solved is not None else ()
            found = KeptSolved(None if solved is None else solved.least, ways, number)
            self.cache.put(found, SOLUTIONS, _SOLUTIONS, *key)
        else:
            self.effort.num_problems += found.num_problems
        if found.least is None:
            self._families[family] = None
            return None
        return cast(Solved, found)

    def _program(
        self, run: Run, setting: Setting, *, gap: float = 0.0, cutoff: float = np.inf,
        start: Solution | None = None,
    ) -> Answer | None:  # fmt: skip
        key = ((run.start, run.stop), setting, gap, cutoff, self.limits.solver.name)
        if self.effort.left_seconds <= 0:
            return None
        found: Answer = self.cache.get(PROGRAMS, _PROGRAMS, *key)
        if found is MISSING:
            made = IntraOp._program(self, run, setting, gap=gap, cutoff=cutoff, start=start)
            if made is not None and made.status in ("optimal", "cutoff"):
                self.cache.put(replace(made, seconds=0.0), PROGRAMS, _PROGRAMS, *key)
            return made
        self.effort.num_problems += 1
        self._pool(run).add(Assembly(self.model, run).solution(found.choices))
        return found


def cached_model(model: StageModel, cache: Cache) -> StageModel:
    """``model``, with its kinds' tables kept in ``cache``."""
    own = cache.under(*_key_of(model))
    if own.shelf is None:
        return model
    return CachedModel(
        model.structure, model.prices, model.restriction, model.link, model.merge, cache=own
    )


def _key_of(model: StageModel) -> tuple[object, ...]:
    """What a kind's tables follow from besides the graph and what ``cache_for`` names."""
    prices: Prices = model.prices
    return (
        model.structure.graph.batch_size, prices.mesh, prices.groups, prices.device.kind,
        prices.speed, prices.policy, prices.assumptions, model.restriction, model.merge,
    )  # fmt: skip


def cached_solver(solver: IntraOp, cache: Cache) -> IntraOp:
    """``solver``, with what it solves kept in ``cache``. Stages receive over the model's link."""
    model = cached_model(solver.model, cache)
    link = model.link
    if not isinstance(model, CachedModel):
        return solver
    own = model.cache.under(
        link, model.prices.cluster.joins_hosts(link), solver.zeros, solver.modes
    )
    return CachedIntraOp(model, solver.limits, solver.effort, cache=own)
