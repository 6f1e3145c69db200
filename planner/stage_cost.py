"""What a run of blocks costs on a mesh with given layouts, from the tables.

In: an assembly and its choices. Out: seconds per micro-batch and per step, bytes on the
worst rank, for any number of equal blocks, any ZeRO stage and any part recomputed: all are
sums of the same few figures, taken once per solution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .assembly import (
    GATHERED_BLOCKS,
    Assembly,
    Setting,
    constant_bytes,
    reserve,
)
from .decisions import ZEROS, Floats
from .prices import Seconds
from .stage_model import StageModel
from .structure import Edge, Run, Use, Weights

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage's seconds and bytes. ``seconds`` per micro-batch and, the last two, per step.

    ``receive_seconds`` are the transfers from earlier stages (forward, backward), per
    micro-batch. ``memory_bytes`` by category, see ``StagePrediction``.
    """

    seconds: Seconds
    receive_seconds: tuple[float, float]
    memory_bytes: Mapping[str, float]
    activation_bytes: float

    @property
    def forward_seconds(self) -> float:
        own = self.seconds
        return own.forward_compute + own.forward_communication + own.forward_states

    @property
    def backward_seconds(self) -> float:
        own = self.seconds
        return own.backward_compute + own.backward_communication + own.backward_states

    @property
    def microbatch_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + sum(self.receive_seconds)

    @property
    def step_seconds(self) -> float:
        return self.seconds.gradient_sync + self.seconds.optimizer

    def objective(self, num_microbatches: int) -> float:
        """Seconds per micro-batch with the step's share: what the solvers minimize."""
        return self.microbatch_seconds + self.step_seconds / num_microbatches

    @property
    def total_bytes(self) -> float:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True)
class _KindFigures:
    """Of one block: seconds by ZeRO stage, states by ZeRO stage, bytes."""

    seconds: Floats
    states: Floats
    saved_bytes: float
    working_bytes: float


@dataclass(frozen=True)
class Ladder:
    """A run's objective and bytes for every number of recomputed blocks (the level).

    Per ZeRO stage: ``microbatch_seconds``, ``step_seconds`` with nothing recomputed and
    ``static_bytes``; ``transient_bytes[zero][level]``. Per level: ``again_seconds``, forwards
    run twice, and ``kept_bytes`` of one micro-batch.
    """

    microbatch_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    static_bytes: tuple[float, ...]
    transient_bytes: tuple[Floats, ...]
    again_seconds: Floats
    kept_bytes: Floats

    def objective(self, zero: int, level: int, num_microbatches: int) -> float:
        """Seconds per micro-batch with the step's share."""
        own = self.microbatch_seconds[zero] + self.step_seconds[zero] / num_microbatches
        return own + float(self.again_seconds[level])

    def total_bytes(self, zero: int, in_flight: int) -> Floats:
        """Bytes for every level."""
        kept: Floats = self.kept_bytes * in_flight
        return kept + self.static_bytes[zero] + self.transient_bytes[zero]


class Figures:
    """A solution's figures on a mesh, from which any run of its family is priced."""

    def __init__(self, assembly: Assembly, choices: tuple[int, ...]) -> None:
        self.model: StageModel = assembly.model
        self.assembly = assembly
        self.choices = choices
        self.kinds = {kind: self._kind(kind) for kind in assembly.run.counts}
        self._ladders: dict[object, Ladder] = {}
        self.edges: dict[Edge, tuple[float, float, float]] = {}
        self._shared = [
            (assembly.decisions[assembly.start[name]], choices[assembly.start[name]])
            for name in assembly.run.shared
        ]

    def _choice(self, name: str) -> int:
        return self.choices[self.assembly.position(name)]

    def _kind(self, kind: str) -> _KindFigures:
        model, start = self.model.kind(kind), self.assembly.start[kind]
        own = self.choices[start : start + len(model.decisions)]
        pairs = list(zip(model.decisions, own, strict=True))
        seconds = sum((d.seconds[:, c] for d, c in pairs), np.zeros((len(ZEROS), 8)))
        for zero in ZEROS:
            seconds[zero] += self.model.block_sync(kind, zero)
        for edge in model.edges:
            forward, backward, _ = self._edge(edge)
            seconds[:, 1] += forward
            seconds[:, 3] += backward
        saved = {part for parts, choice in zip(model.saved, own, strict=True)
                 for part in parts[choice]}  # fmt: skip
        working = [sizes[c] for sizes, c in zip(model.working_bytes, own, strict=True)]
        return _KindFigures(
            seconds,
            sum((d.states[:, c] for d, c in pairs), np.zeros((len(ZEROS), 4))),
            float(sum(size for _, size in saved)),
            float(max(working, default=0.0)),
        )

    def edge(self, edge: Edge) -> tuple[float, float, float]:
        """Seconds forward and backward of an edge's conversions, bytes of its value."""
        found = self.edges.get(edge)
        if found is None:
            found = self._edge(edge)
            self.edges[edge] = found
        return found

    def _edge(self, edge: Edge) -> tuple[float, float, float]:
        model = self.model
        forward, backward = model.conversions(edge)
        options = model.source(edge)
        maker = edge.name if edge.first is None else edge.first.node
        row = options.of_choice[self._choice(maker)]
        _, columns = model.targets(edge)
        wanted = {
            int(column[self._choice(use.node)])
            for use, column in zip(edge.uses, columns, strict=True)
        }
        held = model.prices.local_bytes(model.spec(edge), options.layouts[row])
        return (
            float(sum(forward[row, each] for each in sorted(wanted))),
            float(sum(backward[row, each] for each in sorted(wanted))),
            float(held if edge.origin != "parameter" else 0),
        )

    def ladder(self, run: Run) -> Ladder:
        """The run at every level, made once."""
        found = self._ladders.get(run.key)
        if found is None:
            found = self._ladder(run)
            self._ladders[run.key] = found
        return found

    def _ladder(self, run: Run) -> Ladder:
        own = [self.kinds[run.kinds[offset]] for offset in run.recompute_order]
        edges = [
            [self.edge(edge) for edge in run.edges_of[offset]] for offset in run.recompute_order
        ]
        again = [
            kind.seconds[0, :2].sum() + sum(edge[0] for edge in read)
            for kind, read in zip(own, edges, strict=True)
        ]
        less = [
            sum(edge[2] for edge in read) - kind.saved_bytes
            for kind, read in zip(own, edges, strict=True)
        ]
        kept = sum(kind.saved_bytes for kind in own)
        received = sum(self._receive(run))
        seconds = self._edge_seconds(run, run.weights(0)) + self._own_seconds(run)
        static = constant_bytes(self.model, run) + reserve(self.model)
        return Ladder(
            tuple((seconds[:, :6].sum(axis=1) + received).tolist()),
            tuple(seconds[:, 6:].sum(axis=1).tolist()),
            tuple((self._states(run)[:, :3].sum(axis=1) + static).tolist()),
            tuple(self._transients(own, zero) for zero in ZEROS),
            np.concatenate([[0.0], np.cumsum(again)]),
            kept + np.concatenate([[0.0], np.cumsum(less)]),
        )

    def _transients(self, order: Sequence[_KindFigures], zero: int) -> Floats:
        whole = [GATHERED_BLOCKS * kind.states[zero, 3] for kind in order]
        back = [block + kind.saved_bytes for block, kind in zip(whole, order, strict=True)]
        working = max(kind.working_bytes for kind in order)
        most = np.maximum.accumulate(np.concatenate([[max(whole)], back]))
        found: Floats = working + most
        return found

    def _states(self, run: Run) -> Floats:
        """Bytes of the states by ZeRO stage."""
        states = np.zeros((len(ZEROS), 4))
        for kind, count in run.counts.items():
            states += count * self.kinds[kind].states
        for decision, choice in self._shared:
            states += decision.states[:, choice]
        return states

    def _own_seconds(self, run: Run) -> Floats:
        """Seconds of the blocks and shared parameters by ZeRO stage, nothing recomputed."""
        seconds = np.zeros((len(ZEROS), 8))
        for kind, count in run.counts.items():
            seconds += count * self.kinds[kind].seconds
        for decision, choice in self._shared:
            seconds += decision.seconds[:, choice]
        return seconds

    def price(self, run: Run, setting: Setting) -> StageCost:
        """The cost of a run in a setting; the run is of this solution's family."""
        seconds = self._seconds(run, run.weights(setting.level), setting.zero)
        ladder = self.ladder(run)
        kept = float(ladder.kept_bytes[setting.level])
        memory = dict(zip(STATES, self._states(run)[setting.zero].tolist(), strict=False))
        memory["activations"] = kept * setting.in_flight
        memory["transient"] = float(ladder.transient_bytes[setting.zero][setting.level])
        memory["buffers"] = float(constant_bytes(self.model, run))
        memory["reserve"] = float(reserve(self.model))
        return StageCost(Seconds(*seconds.tolist()), self._receive(run), memory, kept)

    def _seconds(self, run: Run, weight: Weights, zero: int) -> Floats:
        seconds: Floats = self._own_seconds(run)[zero] + self._edge_seconds(run, weight)
        for kind, count in weight.kinds_again.items():
            seconds[2:4] += count * self.kinds[kind].seconds[zero, :2]
        return seconds

    def _edge_seconds(self, run: Run, weight: Weights) -> Floats:
        """Seconds of what passes between blocks and at the stage's ends."""
        seconds = np.zeros(8)
        for edge, count in weight.edges.items():
            forward, backward, _ = self.edge(edge)
            seconds[1] += count * forward
            seconds[3] += count * backward + weight.edges_again.get(edge, 0) * forward
        for (name, index), count in run.sent.items():
            seconds[1:4:2] += count * self._at_boundary(name, index, whole=False)
        if run.has_loss:
            seconds[1:4:2] += self._at_boundary(*self.assembly.loss, whole=True)
        return seconds

    def _at_boundary(self, name: str, index: int, *, whole: bool) -> Floats:
        table = self.model.boundary_seconds(name, index, whole=whole)
        found: Floats = table[self.model.made(name, index).of_choice[self._choice(name)]]
        return found

    def _receive(self, run: Run) -> tuple[float, float]:
        total = np.zeros(2)
        for ref, first in run.received:
            table = self.model.receive_seconds(ref, first)
            total += table[self._received_class(first)]
        return float(total[0]), float(total[1])

    def _received_class(self, first: Use) -> int:
        return int(self.model.received(first).of_choice[self._choice(first.node)])
