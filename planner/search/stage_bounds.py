"""What the stages of a large space take at least: by class of runs, place and role.

In: the meshes of a place, the series of runs, micro-batches per step and in flight. Out: for each
class of runs the figures Q, W, E, R, F and C of ``bound``, and of each form of a pipeline's
bound what a stage adds to it, the least over the place's meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from ..pricing.run_classes import Floats, Ints, Series
from ..pricing.seconds import Seconds
from ..pricing.stage_model import StageModel
from .costs import MANY, MeshCosts

FORWARD_COMPUTE = Seconds._fields.index("forward_compute")
BACKWARD_COMPUTE = Seconds._fields.index("backward_compute")

Form = Literal["largest", "filling", "turning"]
"""Of a bound: the stage of the most work; that after the way to it; or with the way back."""


@dataclass
class StageBounds:
    """Bounds of every class of runs on one place in one role, whatever is in flight.

    By mesh: ``micro`` are Q, ``share`` W, ``alone`` E, ``received`` R; ``splits``: gradients of
    weights may be put off.
    """

    meshes: Sequence[MeshCosts]
    series: tuple[Series, ...]
    numbers: Ints
    count: int
    first: bool
    splits: bool = False

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
        return [self._computed(mesh, FORWARD_COMPUTE) for mesh in self.meshes]

    @cached_property
    def backward(self) -> list[Floats]:
        """By mesh the least that a whole backward computes."""
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

    @cached_property
    def alone(self) -> list[Floats]:
        if not self.first:
            return self.micro
        return [mesh.least(self.series, 1) for mesh in self.meshes]

    @cached_property
    def received(self) -> list[Floats]:
        return [mesh.most_received(self.series) for mesh in self.meshes]

    def least(self, every: Sequence[Floats]) -> Floats:
        """By class of this role the least of the meshes'."""
        found = np.full(len(self.meshes[0].runs.classes.firsts), np.inf)
        found[self.numbers] = np.minimum.reduce(every)[self.numbers]
        return found


@dataclass(frozen=True)
class HeldBounds:
    """What a stage adds to each form of a bound, so many micro-batches in flight.

    By mesh, of what fits in memory: ``fitting(count)`` are the seconds of a micro-batch without
    messages, with a share of the step's end among so many (``memory_bounds``); None where that is
    not known.
    """

    plain: StageBounds
    fitting: Callable[[int], Sequence[Floats | None]]

    def computed(self, count: int) -> list[Floats]:
        """By mesh what a micro-batch takes without messages."""
        plain, found = self.plain, []
        for at, own in enumerate(self.fitting(count)):
            if own is None:
                every = plain.share if count == plain.count else plain.micro
                own = np.maximum(every[at] - plain.received[at], 0.0)
            found.append(own)
        return found

    def largest(self) -> tuple[Floats, Floats]:
        """By class nothing, and all that a stage does."""
        every = self.plain.count * self.plain.least(self.computed(self.plain.count))
        return np.where(np.isfinite(every), 0.0, np.inf), every

    def filling(self) -> tuple[Floats, Floats]:
        """By class the forward of the first micro-batch, and more for all that a stage does."""
        once = self.plain.least(self.plain.forward)
        _, every = self.largest()
        rest = every - np.where(np.isfinite(once), once, 0.0)
        return once, np.maximum(rest, 0.0)

    def turning(self) -> tuple[Floats, Floats]:
        """By class what a stage takes once, and more for all other micro-batches."""
        plain, more = self.plain, self.plain.count - 1
        micro = plain.sooner
        alone = plain.alone if plain.first else micro
        once = [np.maximum(a, q) for a, q in zip(alone, micro, strict=True)]
        own = zip(self.computed(MANY), plain.micro, plain.received, strict=True)
        rest = [
            more * np.maximum(np.maximum(c, q - r), 0.0) if more else np.zeros(len(q))
            for c, q, r in own
        ]
        if plain.first:
            whole = [plain.count * each for each in self.computed(plain.count)]
            rest = [
                np.maximum(w - np.where(np.isfinite(o), o, 0.0), r)
                for w, o, r in zip(whole, once, rest, strict=True)
            ]
        return plain.least(once), plain.least(rest)


def least_compute(model: StageModel, kind: str, which: int) -> float:
    """What a block's pass computes at least, each op in the layout in which it is fastest."""
    decisions = model.kind(kind).decisions
    return sum(float(each.seconds[:, :, which].min()) for each in decisions)


FORMS: Mapping[Form, Callable[[HeldBounds], tuple[Floats, Floats]]] = {
    "largest": HeldBounds.largest,
    "filling": HeldBounds.filling,
    "turning": HeldBounds.turning,
}
