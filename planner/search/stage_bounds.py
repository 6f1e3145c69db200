"""What the stages of a large space take at least: by class of runs, place and role.

In: the meshes of a place, the series of runs, micro-batches per step and in flight. Out: for each
class of runs the figures Q, W, E, R and F of ``search_bound``, and of each form of a pipeline's
bound what a stage adds to it, the least over the place's meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ..pricing.seconds import Seconds
from ..pricing.stage_model import StageModel
from .costs import MANY, MeshCosts
from .runs import Floats, Ints, Series, at_least

FORWARD_COMPUTE = Seconds._fields.index("forward_compute")
BACKWARD_COMPUTE = Seconds._fields.index("backward_compute")

Form = Literal["largest", "filling", "turning"]
"""Of a bound: the stage of the most work; that after the way to it; or with the way back."""


@dataclass
class StageBounds:
    """Bounds of every class of runs on one place in one role, ``held`` micro-batches in flight.

    By mesh: ``micro`` are Q, ``share`` W, ``alone`` E, ``received`` R; ``splits``: gradients of
    weights may be put off. ``computed``, if known, are bounds of W without messages (of
    ``memory_bounds``); ``plain`` has the bounds that are the same without memory.
    """

    meshes: Sequence[MeshCosts]
    series: tuple[Series, ...]
    numbers: Ints
    count: int
    first: bool
    held: int
    splits: bool = False
    computed: Sequence[Floats] = ()
    plain: StageBounds | None = None
    _raised: set[tuple[str, int, int]] = field(default_factory=set)

    @cached_property
    def share(self) -> list[Floats]:
        return [mesh.least(self.series, self.count) for mesh in self.meshes]

    @cached_property
    def micro(self) -> list[Floats]:
        return [mesh.least(self.series, MANY) for mesh in self.meshes]

    @cached_property
    def sooner(self) -> list[Floats]:
        """Q without gradients of weights: by the most seconds and the largest share they have."""
        if not self.splits or self.first:
            return self.micro
        if self.plain is not None and not self._raised:
            return self.plain.sooner
        found = []
        for mesh, micro in zip(self.meshes, self.micro, strict=True):
            least = micro.copy()
            for number in self.numbers.tolist():
                counts = mesh.runs.run(number).counts
                most = {kind: mesh.solver.model.most_late(kind) for kind in counts}
                share = max(share for share, _ in most.values())
                seconds = sum(count * most[kind][1] for kind, count in counts.items())
                own = micro[number]
                least[number] = max(own * (1 - share), own - seconds, 0.0)
            found.append(least)
        return found

    @cached_property
    def forward(self) -> list[Floats]:
        """By mesh the least that a forward computes."""
        if self.plain is not None:
            return self.plain.forward
        return [self._computed(mesh, FORWARD_COMPUTE) for mesh in self.meshes]

    @cached_property
    def backward(self) -> list[Floats]:
        """By mesh the least that a whole backward computes."""
        if self.plain is not None:
            return self.plain.backward
        return [self._computed(mesh, BACKWARD_COMPUTE) for mesh in self.meshes]

    def _computed(self, mesh: MeshCosts, which: int) -> Floats:
        found = np.zeros(len(mesh.runs.classes.firsts))
        of_kind = {
            kind: least_compute(mesh.solver.model, kind, which)
            for series in self.series
            for kind in mesh.runs.run(series.classes[-1]).counts
        }
        blocks = mesh.runs.structure.blocks.blocks
        total = np.append(0.0, np.cumsum([of_kind.get(block.kind, 0.0) for block in blocks]))
        starts, stops = np.array(mesh.runs.classes.firsts).T
        found[self.numbers] = (total[stops] - total[starts])[self.numbers]
        return found

    def in_flight(self, held: int, computed: Sequence[Floats] = ()) -> StageBounds:
        """These with so many micro-batches in flight, and maybe bounds of what fits then."""
        return replace(self, held=held, computed=computed, plain=self, _raised=set())

    def passes(self, *, both: bool) -> Floats:
        """By class the least that a forward computes, or both passes one by one."""
        forward = self._least(self.forward)
        return forward + self._least(self.backward) if both else forward

    def filling(self) -> tuple[Floats, Floats]:
        """By class the forward of the first micro-batch, and more for all that a stage does."""
        once = self._least(self.forward)
        _, every = self.largest()
        rest = every - np.where(np.isfinite(once), once, 0.0)
        return once, np.maximum(rest, 0.0)

    @cached_property
    def alone(self) -> list[Floats]:
        if not self.first:
            return self.micro
        return [mesh.least(self.series, 1) for mesh in self.meshes]

    @cached_property
    def received(self) -> list[Floats]:
        if self.plain is not None:
            return self.plain.received
        return [mesh.most_received(self.series) for mesh in self.meshes]

    def turning(self) -> tuple[Floats, Floats]:
        """By class what a stage takes once, and more for all other micro-batches."""
        more = self.count - 1
        micro = self.sooner
        alone = self.alone if self.first else micro
        once = [np.maximum(a, q) for a, q in zip(alone, micro, strict=True)]
        rest = [more * np.maximum(q - r, 0.0) for q, r in zip(micro, self.received, strict=True)]
        if self.first:
            share = self.share
            if self.computed:
                share = [np.maximum(c, w) for c, w in zip(self.computed, share, strict=True)]
            whole = [self.count * each for each in share]
            rest = [
                np.maximum(np.where(np.isfinite(w), w, 0.0) - np.where(np.isfinite(o), o, 0.0), r)
                for w, o, r in zip(whole, once, rest, strict=True)
            ]
        return self._least(once), self._least(rest)

    def largest(self) -> tuple[Floats, Floats]:
        """By class nothing, and all that a stage takes."""
        own = [w - r for w, r in zip(self.share, self.received, strict=True)]
        if self.computed:
            own = [np.maximum(c, w) for c, w in zip(self.computed, own, strict=True)]
        every = self._least([self.count * np.maximum(each, 0.0) for each in own])
        return np.where(np.isfinite(every), 0.0, np.inf), every

    def _least(self, every: list[Floats]) -> Floats:
        found = np.full(len(self.meshes[0].runs.classes.firsts), np.inf)
        found[self.numbers] = np.minimum.reduce(every)[self.numbers]
        return found

    def raise_by_memory(self, number: int, form: Form) -> int:
        """Bounds a class with its memory on the meshes that may be its best; on how many.

        Only what counts: W but where Q does, which is for a later stage of a pipeline that turns.
        """
        forms = [("share", self.count)] if self.first or form != "turning" else []
        forms += [("micro", MANY)] if form == "turning" else []
        raised = 0
        for name, count in forms:
            every: list[Floats] = getattr(self, name)
            while True:
                known = [float(each[number]) for each in every]
                if name == "share" and self.computed:
                    own = zip(known, self.computed, strict=True)
                    known = [max(w, float(c[number])) for w, c in own]
                at = known.index(min(known))
                if (name, at, number) in self._raised:
                    break
                self._raised.add((name, at, number))
                self._raise(every, at, number, count)
                raised += 1
        return raised

    def _raise(self, every: list[Floats], at: int, number: int, count: int) -> None:
        """A run takes at least what a shorter one of its series does."""
        mesh = self.meshes[at]
        found = mesh.solver.memory_bound_seconds(mesh.runs.run(number), count, self.held)
        if found <= every[at][number]:
            return
        every[at] = every[at].copy()
        every[at][number] = found
        for series in self.series:
            own = list(series.classes)
            if number in own:
                every[at][own] = at_least(series.lengths, every[at][own], 0.0)


def least_compute(model: StageModel, kind: str, which: int) -> float:
    """What a block's pass computes at least, each op in the layout in which it is fastest."""
    decisions = model.kind(kind).decisions
    return sum(float(each.seconds[:, :, which].min()) for each in decisions)


FORMS: Mapping[Form, Callable[[StageBounds], tuple[Floats, Floats]]] = {
    "largest": StageBounds.largest,
    "filling": StageBounds.filling,
    "turning": StageBounds.turning,
}
