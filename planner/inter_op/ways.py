"""Every way to run a stage on a mesh that some pipeline may need: five figures each.

In: a stage's run of blocks, its mesh's tables, ZeRO stages and recompute modes to choose from,
micro-batches in flight, a memory limit. Out: of all layouts, ZeRO stages and rungs that fit,
those of which no other is at most equal in every figure that the simulator sees: forward,
backward, receive forward, receive backward, end of the step; for a schedule that splits
backwards the first half in place of the whole, and the gradients of weights as a sixth.

Made of the kinds' ways (``ways_kind``) as ``stage_cost`` makes a stage's price of a solution,
for all solutions at once; a test holds the two together. They are combined kind by kind: what
takes longer than a given step, with the fastest ways of the kinds that are to come and nothing
between kinds, goes no further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..intra_op.closing import allowed_rungs
from ..intra_op.intra_op import IntraOp, StageAnswer
from ..pricing.assembly import GATHERED_BLOCKS, Assembly, Setting, constant_bytes, reserve
from ..pricing.decisions import Floats
from ..pricing.ladder import Ints, Rungs
from ..pricing.stage_cost import Figures
from ..pricing.stage_model import StageModel
from ..pricing.structure import Edge, Run
from ..schedules.held import Halves, is_split, most_held
from .ways_below import below
from .ways_kind import (
    KindWays,
    distinct,
    distinct_sum,
    front,
    kind_ways,
    outside,
    undominated,
)

NO_BAR = (1, float("inf"))

MOST_CELLS = 4_000_000
"""Ways times rungs that are priced at once."""


def setting_of(base: Setting, held: Halves) -> Setting:
    """A setting in which a stage holds so much."""
    return replace(base, in_flight=most_held(held), halves=held if is_split(held) else ())


def held_of(held: Halves, kept_bytes: Floats, late_bytes: Floats) -> Floats:
    """``schedules_held.held_bytes`` of many."""
    every = [waiting * kept_bytes + late * late_bytes for waiting, late in held]
    found: Floats = np.maximum.reduce(every)
    return found


@dataclass(frozen=True)
class Points:
    """Ways of one mesh, run and ZeRO stage: ``seconds[way]`` are the figures.

    ``choices[way, decision]`` in the order of ``Assembly``; ``rungs[way]`` numbers ``on``.
    """

    solver: IntraOp
    run: Run
    zero: int
    on: Rungs
    seconds: Floats
    choices: Ints
    rungs: Ints

    def answer(self, way: int, num_microbatches: int, held: Halves) -> StageAnswer:
        """A way as the stage solver would give it."""
        assembly = Assembly(self.solver.model, self.run)
        choices = tuple(self.choices[way].tolist())
        figures = Figures(assembly, choices)
        rung = self.on[int(self.rungs[way])]
        setting = setting_of(Setting(num_microbatches, self.zero, rung), held)
        cost = figures.price(self.run, setting)
        return StageAnswer(
            self.run, figures, assembly.solution(choices), setting,
            cost.objective(num_microbatches), 0.0,
        )  # fmt: skip


@dataclass
class MeshWays:
    """The ways of runs on one mesh; what kinds can do is found once."""

    solver: IntraOp
    _kinds: dict[str, KindWays] = field(default_factory=dict)
    _pruned: dict[tuple[str, int, bool, bool], KindWays] = field(default_factory=dict)

    @property
    def model(self) -> StageModel:
        return self.solver.model

    def all(self, kind: str) -> KindWays:
        if kind not in self._kinds:
            self._kinds[kind] = kind_ways(self.model, kind)
        return self._kinds[kind]

    def kind(self, kind: str, zero: int, *, time_only: bool, splits: bool) -> KindWays:
        key = (kind, zero, time_only, splits)
        if key not in self._pruned:
            self._pruned[key] = undominated(
                self.all(kind), outside(self.model, kind), zero,
                time_only=time_only, splits=splits,
            )  # fmt: skip
        return self._pruned[key]

    def points(
        self,
        run: Run,
        held: Halves,
        limit_bytes: float,
        bar: tuple[int, float] = NO_BAR,
        *,
        every: bool = False,
    ) -> list[Points]:
        """Per ZeRO stage the ways that fit and can be of use. Raises ``TooManyError``.

        ``bar``: so many micro-batches in so many seconds; what takes longer is left out.
        ``every``: the ways that others are better in everything are not.
        """
        found = []
        on = allowed_rungs(run, self.solver.limits.recompute, self.solver.limits.modes)
        is_free = not on.full[0].any() and not on.selective[0].any()
        for zero in self.solver.zeros:
            fits = is_free and not every and self._most_bytes(run, zero, held) <= limit_bytes
            space = _Space(self, run, zero, held, bar, time_only=fits, every=every)
            if space.num:
                found.append(space.unlimited(on) if fits else space.within(on, limit_bytes))
        return [each for each in found if len(each.seconds)]

    def _most_bytes(self, run: Run, zero: int, held: Halves) -> float:
        """What no way holds more than, nothing recomputed."""
        kinds = {kind: self.all(kind) for kind in run.counts}
        total = float(constant_bytes(self.model, run) + reserve(self.model))
        for kind, count in run.counts.items():
            own = kinds[kind]
            states = own.states[:, zero, :3].sum(axis=1)
            kept = held_of(held, own.saved, own.late[:, 2])
            total += count * float((states + kept).max())
        for name in run.shared:
            total += float(self.model.shared(name).states[zero, :, :3].sum(axis=1).max())
        working = max(float(own.working.max()) for own in kinds.values())
        whole = max(float(own.states[:, zero, 3].max()) for own in kinds.values())
        return total + working + GATHERED_BLOCKS * whole


class _Space:
    """All combinations of the kinds' ways of a run at one ZeRO stage, priced."""

    def __init__(
        self,
        mesh: MeshWays,
        run: Run,
        zero: int,
        held: Halves,
        bar: tuple[int, float],
        *,
        time_only: bool,
        every: bool = False,
    ) -> None:
        self.kept = distinct if every else front
        self.mesh, self.run, self.zero, self.held = mesh, run, zero, held
        self.splits = is_split(held)
        self.model = mesh.model
        self.kinds = {
            kind: mesh.all(kind)
            if every
            else mesh.kind(kind, zero, time_only=time_only, splits=self.splits)
            for kind in run.counts
        }
        rows = below(self._works(bar[0]), bar[1])
        self.num = rows.shape[1]
        self.row: dict[str, Ints] = dict(zip((*run.counts, *run.shared), rows, strict=True))
        self.edges: dict[Edge, tuple[Floats, Floats, Floats]] = {
            edge: self._edge(edge)
            for edge in run.edges
            if edge.origin != "parameter" or edge.name in run.shared
        }
        self.own = self._own_seconds()

    def _works(self, count: int) -> list[Floats]:
        """What each way of each kind, and of each shared parameter, adds to a step alone."""
        each = np.array([count] * 6 + [1] * 2, dtype=np.float64)
        found: list[Floats] = [
            number * (self.kinds[kind].seconds[:, self.zero, :8] @ each)
            for kind, number in self.run.counts.items()
        ]
        shared = [self.model.shared(name).seconds[self.zero] for name in self.run.shared]
        return found + [seconds[:, :8] @ each for seconds in shared]

    def _chosen(self, node: str) -> Ints:
        """The choice of a member's decision, by way."""
        structure = self.model.structure
        if structure.graph[node].kind == "parameter" and structure.is_shared(node):
            return self.row[node]
        kind, _ = self.model.home(node)
        found: Ints = self.kinds[kind].choices[self.row[kind], self.model.kind(kind).where[node]]
        return found

    def _edge(self, edge: Edge) -> tuple[Floats, Floats, Floats]:
        """Seconds forward and backward of an edge's conversions, bytes of its value."""
        model = self.model
        maker = edge.name if edge.first is None else edge.first.node
        options = model.source(edge)
        rows = options.of_choice[self._chosen(maker)]
        _, columns = model.targets(edge)
        wanted = [
            column[self._chosen(use.node)] for use, column in zip(edge.uses, columns, strict=True)
        ]
        forward, backward = model.conversions(edge)
        sizes = [model.prices.local_bytes(model.spec(edge), each) for each in options.layouts]
        held = np.array(sizes, dtype=np.float64)[rows] * edge.is_held
        return distinct_sum(forward, rows, wanted), distinct_sum(backward, rows, wanted), held

    def _of(self, kind: str, column: Floats) -> Floats:
        found: Floats = column[self.row[kind]]
        return found

    def _own_seconds(self) -> Floats:
        """``[field, way]`` with nothing recomputed; the issue of both passes left out."""
        run, model = self.run, self.model
        total = np.zeros((10, self.num))
        for kind, count in run.counts.items():
            total += count * self._of(kind, self.kinds[kind].seconds[:, self.zero]).T
        for name in run.shared:
            total += model.shared(name).seconds[self.zero][self.row[name]].T
        for edge, count in run.edges.items():
            if edge in self.edges:
                forward, backward, _ = self.edges[edge]
                total[1] += count * forward
                total[3] += count * backward
        for (name, index), count in run.sent.items():
            total[1:4:2] += count * self._boundary(name, index, whole=False)
        if run.has_loss:
            loss = model.structure.graph.loss
            template = model.structure.blocks.template[loss.name]
            total[1:4:2] += self._boundary(template, loss.index, whole=True)
        return total

    def _boundary(self, name: str, index: int, *, whole: bool) -> Floats:
        table = self.model.boundary_seconds(name, index, whole=whole)
        found: Floats = table[self.model.made(name, index).of_choice[self._chosen(name)]].T
        return found

    @cached_property
    def received(self) -> Floats:
        """``[direction, way]``."""
        total = np.zeros((2, self.num))
        for ref, first in self.run.received:
            table = self.model.receive_seconds(ref, first)
            total += table[self.model.received(first).of_choice[self._chosen(first.node)]].T
        return total

    @cached_property
    def states(self) -> Floats:
        """Bytes of parameters, gradients and optimizer, and of constants, by way."""
        total = np.zeros(self.num)
        for kind, count in self.run.counts.items():
            total += count * self._of(kind, self.kinds[kind].states[:, self.zero, :3].sum(axis=1))
        for name in self.run.shared:
            total += self.model.shared(name).states[self.zero, :, :3].sum(axis=1)[self.row[name]]
        found: Floats = total + float(constant_bytes(self.model, self.run) + reserve(self.model))
        return found

    def _per_class(self, figures: Mapping[str, Floats]) -> Floats:
        """``[class, way]`` of a figure of each kind's ways."""
        return np.array([self._of(each.kind, figures[each.kind]) for each in self.run.classes[0]])

    def _repeated(self, mode: int) -> Floats:
        """``[class, way]``: of what a block reads, seconds forward where it is recomputed."""
        return self._class_edges(0, lambda edge: self.model.repeats(edge)[mode])

    def _read_bytes(self) -> Floats:
        """``[class, way]``: of what a block reads."""
        return self._class_edges(2, lambda edge: True)

    def _class_edges(self, which: int, counts: Callable[[Edge], bool]) -> Floats:
        """``[class, way]``: a figure of the edges that count."""
        none = np.zeros(self.num)
        counted = {edge: own[which] for edge, own in self.edges.items() if counts(edge)}
        classes = self.run.classes[0]
        return np.array(
            [sum((counted[e] for e in own.edges if e in counted), none) for own in classes]
        )

    @cached_property
    def _counts(self) -> Floats:
        return np.array(self.run.class_counts[0], dtype=np.float64)

    def kept_bytes(self, on: Rungs, some: Ints) -> Floats:
        """``[rung, way]`` of a micro-batch."""
        saved = self._per_class({k: w.saved for k, w in self.kinds.items()})[:, some]
        chosen = self._per_class({k: w.selected for k, w in self.kinds.items()})[:, some]
        others = self._read_bytes()[:, some]
        read = others + self._per_class({k: w.read for k, w in self.kinds.items()})[:, some]
        full, partly = on.full.astype(float), on.selective.astype(float)
        found: Floats = self._counts @ saved + full @ (read - saved)
        return found + partly @ (others + chosen - saved)

    def transient_bytes(self, on: Rungs, some: Ints) -> Floats:
        """``[rung, way]``: the largest op; whole parameters, or a block that is made again."""
        kinds = self.kinds.items()
        working = np.max([self._of(k, w.working)[some] for k, w in kinds], axis=0)
        whole = GATHERED_BLOCKS * self._per_class({k: w.states[:, self.zero, 3] for k, w in kinds})
        back = whole + self._per_class({k: w.saved for k, w in kinds})
        partly = back - self._per_class({k: w.both for k, w in kinds})
        again = on.most(back[:, some].T, partly[:, some].T).T
        found: Floats = working + np.maximum(whole[:, some].max(axis=0), again)
        return found

    def figures(self, on: Rungs, some: Ints) -> Floats:
        """``[rung, way, figure]``."""
        kinds = self.kinds
        own, zero = self.own[:, some], self.zero
        field = [
            self._per_class({k: w.seconds[:, zero, at] for k, w in kinds.items()})[:, some]
            for at in range(10)
        ]
        if self.splits:
            for at, of in ((2, 0), (9, 1)):
                field[at] -= self._per_class({k: w.late[:, of] for k, w in kinds.items()})[:, some]
        computed, passed = self._counts @ field[2], own[3] + own[5]
        again = [on.full.astype(float), on.selective.astype(float)]
        issued = (self._counts - sum(again)) @ np.maximum(field[2], field[9])
        for mode, blocks in enumerate(again):
            spared = [
                self._per_class({k: w.spared_seconds[mode, :, at] for k, w in kinds.items()})
                for at in range(3)
            ]
            device, host, sent = (each[:, some] for each in spared)
            computed = computed + blocks @ (field[0] - device)
            passed = passed + blocks @ (field[1] - sent + self._repeated(mode)[:, some])
            issued += blocks @ np.maximum(field[2] + field[0] - device, field[9] + field[8] - host)
        backward = np.maximum(computed, issued) + passed
        forward = np.maximum(own[0], self._counts @ np.maximum(field[0], field[8]))
        forward = forward + own[1] + own[4]
        rest = [forward, *self.received[:, some], own[6] + own[7]]
        if self.splits:
            rest.append(self.late[0][some])
        same = [np.broadcast_to(each, backward.shape) for each in rest]
        return np.stack([same[0], backward, *same[1:]], axis=2)

    @cached_property
    def late(self) -> Floats:
        """Seconds of the gradients of weights and bytes kept for them, by way."""
        total = np.zeros((2, self.num))
        for kind, count in self.run.counts.items():
            own = self._of(kind, self.kinds[kind].late)
            total += count * np.stack([own[:, :2].max(axis=1), own[:, 2]])
        return total

    def unlimited(self, on: Rungs) -> Points:
        """Where memory does not bind: the rung that recomputes least."""
        first = Rungs(on.full[:1], on.selective[:1])
        every = np.arange(self.num)
        seconds = self.figures(first, every)[0]
        kept = front(seconds)
        return self._points(first, seconds[kept], every[kept], np.zeros(len(kept), dtype=np.int64))

    def within(self, on: Rungs, limit_bytes: float) -> Points:
        """The ways that fit."""
        seconds: list[Floats] = []
        ways: list[Ints] = []
        rungs: list[Ints] = []
        at_once = max(1, MOST_CELLS // (len(on.full) * 16))
        left = np.arange(self.num)
        if not on.full[0].any() and not on.selective[0].any():
            first = Rungs(on.full[:1], on.selective[:1])
            fits = self._fits(first, left, limit_bytes)[0]
            seconds.append(self.figures(first, left[fits])[0])
            ways.append(left[fits])
            rungs.append(np.zeros(int(fits.sum()), dtype=np.int64))
            left = left[~fits]
        for begin in range(0, len(left), at_once):
            some = left[begin : begin + at_once]
            rung, way = np.nonzero(self._fits(on, some, limit_bytes))
            own = self.figures(on, some)[rung, way]
            kept = self.kept(own)
            seconds.append(own[kept])
            ways.append(some[way[kept]])
            rungs.append(rung[kept])
        every = np.concatenate(seconds)
        kept = self.kept(every)
        return self._points(
            on, every[kept], np.concatenate(ways)[kept], np.concatenate(rungs)[kept]
        )

    def _fits(self, on: Rungs, some: Ints, limit_bytes: float) -> np.ndarray:
        kept = held_of(self.held, self.kept_bytes(on, some), self.late[1][some])
        found: np.ndarray = self.states[some] + kept + self.transient_bytes(on, some) <= limit_bytes
        return found

    def _points(self, on: Rungs, seconds: Floats, ways: Ints, rungs: Ints) -> Points:
        columns = [ways_of.choices[self.row[kind][ways]] for kind, ways_of in self.kinds.items()]
        columns += [self.row[name][ways][:, None] for name in self.run.shared]
        return Points(
            self.mesh.solver, self.run, self.zero, on, seconds, np.concatenate(columns, axis=1),
            rungs,
        )  # fmt: skip
