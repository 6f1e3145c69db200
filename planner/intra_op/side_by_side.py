"""The figures of several solutions of a family as arrays, for any of its runs at once.

In: solutions' figures, a run. Out: by solution what the run costs with nothing recomputed. All
are sums over the kinds of blocks and over what passes between them, by how often each occurs:
so a run of any length takes as long, and no solution is gone through by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from ..pricing.stage_cost import Figures
from ..pricing.structure import Run
from .elimination import Floats


@dataclass(frozen=True, slots=True)
class Unrecomputed:
    """A run with nothing recomputed, ``[solution, zero]``: seconds per micro-batch and per step,
    bytes of states and transient ones; ``kept_bytes[solution]`` of a micro-batch."""

    microbatch_seconds: Floats
    step_seconds: Floats
    states_bytes: Floats
    kept_bytes: Floats
    transient_bytes: Floats


@dataclass(frozen=True, slots=True)
class _PerBlock:
    """Of one block, ``[solution, kind, zero]``, and bytes kept ``[solution, kind]``; what no
    number of blocks changes, ``[solution, zero]``."""

    microbatch_seconds: Floats
    step_seconds: Floats
    states_bytes: Floats
    kept_bytes: Floats
    shared: tuple[Floats, Floats, Floats]
    transient_bytes: Floats


@dataclass
class SideBySide:
    """Solutions of one family in the order in which they were added."""

    solutions: list[Figures] = field(default_factory=list)
    _stacked: _PerBlock | None = None
    _passing: dict[Hashable, list[float]] = field(default_factory=dict)
    _known: dict[int, tuple[int, Unrecomputed]] = field(default_factory=dict)

    def add(self, figures: Figures) -> None:
        self.solutions.append(figures)
        self._stacked = None

    def unrecomputed(self, run: Run) -> Unrecomputed:
        """What a run of the family costs with nothing recomputed."""
        number, found = self._known.get(run.key, (0, None))
        if found is None or number < len(self.solutions):
            found = self._unrecomputed(run)
            self._known[run.key] = len(self.solutions), found
        return found

    def _unrecomputed(self, run: Run) -> Unrecomputed:
        own = self._per_block()
        counts = np.array([run.counts[kind] for kind in self.solutions[0].kinds], dtype=np.float64)
        micro, step, states = (
            np.einsum("k,skz->sz", counts, each) + more
            for each, more in zip(
                (own.microbatch_seconds, own.step_seconds, own.states_bytes), own.shared,
                strict=True,
            )
        )  # fmt: skip
        return Unrecomputed(
            micro + self._passing_seconds(run)[:, None], step, states, own.kept_bytes @ counts,
            own.transient_bytes,
        )  # fmt: skip

    def _per_block(self) -> _PerBlock:
        if self._stacked is None:
            every = [figures.unrecomputed() for figures in self.solutions]
            kinds, shared, kept, transient = (np.stack(own) for own in zip(*every, strict=True))
            micro, step, states = np.moveaxis(shared, 1, 0)
            self._stacked = _PerBlock(
                kinds[:, :, 0], kinds[:, :, 1], kinds[:, :, 2], kept, (micro, step, states),
                transient,
            )  # fmt: skip
        return self._stacked

    def _passing_seconds(self, run: Run) -> Floats:
        """By solution the seconds of what passes between blocks and at the run's ends."""
        found = self._each("ends", Figures.end_seconds, run)  # the same for all of a family
        for edge, count in run.edges.items():
            found = found + count * self._each(edge, Figures.edge_seconds, edge)
        for sent, count in run.sent.items():
            found = found + count * self._each(sent, Figures.sent_seconds, *sent)
        return found

    def _each(self, key: Hashable, seconds: Callable[..., float], *of: object) -> Floats:
        """The same figure of every solution; each is made once."""
        found = self._passing.setdefault(key, [])
        found += [seconds(figures, *of) for figures in self.solutions[len(found) :]]
        return np.array(found)
