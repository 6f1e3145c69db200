"""What a run of blocks costs on a mesh with given layouts, from the tables.

In: an assembly and its choices. Out: seconds per micro-batch and per step, bytes on the
worst rank, for any number of equal blocks, any ZeRO stage and any part recomputed: all are
sums of the same few figures, taken once per solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..plan import Recompute
from ..schedules.held import held_bytes
from .assembly import (
    GATHERED_BLOCKS,
    Assembly,
    Setting,
    constant_bytes,
    reserve,
)
from .decisions import ZEROS, Floats
from .ladder import Ladder, Rungs, num_rungs, only, rungs
from .ladder_front import MOST_RUNGS, Blocks, front
from .prices import Seconds
from .recompute import AGAIN
from .stage_model import StageModel
from .structure import Edge, Run, Use, Weights
from .whole_stage import StageCost as StageCost
from .whole_stage import together as together

STATES = ("parameters", "gradients", "optimizer")
SECONDS = len(Seconds._fields)


@dataclass(frozen=True, slots=True)
class _KindFigures:
    """Of one block: seconds by ZeRO stage, states by ZeRO stage, bytes.

    ``spared_seconds[mode]`` (``AGAIN``) is what recomputation does not run again, of device, of
    host and of conversions inside; ``selected_bytes`` what the selective one keeps, of which
    ``overlap_bytes`` are of ``saved_bytes``, and ``read_bytes`` are parts of the batch, which the
    full one keeps too.
    """

    seconds: Floats
    states: Floats
    saved_bytes: float
    working_bytes: float
    spared_seconds: Floats
    selected_bytes: float
    overlap_bytes: float
    read_bytes: float

    def again_seconds(self, mode: int) -> float:
        """What recomputation in a mode takes on the device, without what is read from outside."""
        spared = float(self.spared_seconds[mode, ::2].sum())
        return float(self.seconds[0, :2].sum()) - spared


class Figures:
    """A solution's figures on a mesh, from which any run of its family is priced."""

    def __init__(self, assembly: Assembly, choices: tuple[int, ...]) -> None:
        self.model: StageModel = assembly.model
        self.assembly = assembly
        self.choices = choices
        self.kinds = {kind: self._kind(kind) for kind in assembly.run.counts}
        self._ladders: dict[object, Ladder] = {}
        self._late: dict[str, tuple[Floats, float]] = {}
        self._priced: dict[tuple[int, Setting], StageCost] = {}
        self._per_byte: dict[tuple[Recompute, ...], tuple[float, float]] = {}
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
        if own not in model.priced:
            model.priced[own] = self._kind_figures(kind, own)
        found: _KindFigures = model.priced[own]
        return found

    def _kind_figures(self, kind: str, own: tuple[int, ...]) -> _KindFigures:
        model = self.model.kind(kind)
        pairs = list(zip(model.decisions, own, strict=True))
        seconds = sum((d.seconds[:, c] for d, c in pairs), np.zeros((len(ZEROS), SECONDS)))
        for zero in ZEROS:
            seconds[zero] += self.model.block_sync(kind, zero)
        spared = np.zeros((len(AGAIN), 3))
        for decision, choice in pairs:
            spared[:, :2] += decision.spared_seconds[:, choice]
        for edge in model.edges:
            forward, backward, _ = self._edge(edge)
            seconds[:, 1] += forward
            seconds[:, 3] += backward
            spared[:, 2] += forward * ~np.array(self.model.repeats(edge))
        held = [model.held(number, choice) for number, choice in enumerate(own)]
        saved = {part for parts, _, _, _ in held for part in parts}
        selected = {part for _, _, parts, _ in held for part in parts}
        read = {part for _, _, _, parts in held for part in parts}
        return _KindFigures(
            seconds,
            sum((d.states[:, c] for d, c in pairs), np.zeros((len(ZEROS), 4))),
            float(sum(size for _, size in saved)),
            float(max((size for _, size, _, _ in held), default=0)),
            spared,
            float(sum(size for _, size in selected)),
            float(sum(size for _, size in saved & selected)),
            float(sum(size for _, size in read)),
        )

    def edge(self, edge: Edge) -> tuple[float, float, float]:
        """Seconds forward and backward of an edge's conversions, bytes of its value if they
        count here."""
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
            float(held if edge.is_held else 0),
        )

    def unrecomputed(self) -> tuple[Floats, Floats, Floats, Floats]:
        """With nothing recomputed, seconds per micro-batch and per step and bytes of states: of a
        block ``[kind, figure, zero]``, of the shared parameters ``[figure, zero]``; bytes that a
        block keeps ``[kind]``; transient bytes ``[zero]``."""
        kinds = list(self.kinds.values())
        shared = np.zeros((3, len(ZEROS)))
        for decision, choice in self._shared:
            shared += _in_all(decision.seconds[:, choice], decision.states[:, choice])
        return (
            np.stack([_in_all(kind.seconds, kind.states) for kind in kinds]),
            shared,
            np.array([kind.saved_bytes for kind in kinds]),
            max(kind.working_bytes for kind in kinds) + self._gathered(kinds).max(axis=1),
        )

    def edge_seconds(self, edge: Edge) -> float:
        """Forward and backward of an edge's conversions."""
        return sum(self.edge(edge)[:2])

    def sent_seconds(self, name: str, index: int) -> float:
        """Forward and backward of a value that is sent."""
        return float(self._at_boundary(name, index, whole=False).sum())

    def end_seconds(self, run: Run) -> float:
        """Forward and backward of what is received, and of the loss."""
        loss = self._at_boundary(*self.assembly.loss, whole=True).sum() if run.has_loss else 0.0
        return float(loss) + sum(self._receive(run))

    def ladder(self, run: Run) -> Ladder:
        """The run at every rung, made once."""
        found = self._ladders.get(run.key)
        if found is None:
            found = self._ladder(run)
            self._ladders[run.key] = found
        return found

    def _ladder(self, run: Run, on: Rungs | None = None) -> Ladder:
        classes = run.block_classes
        own = np.array([self._block(each.kind, each.edges) for each in classes])
        again, partly, saved, held, selected = own.T
        kinds = [self.kinds[each.kind] for each in classes]
        if on is None and num_rungs(*run.class_counts) <= MOST_RUNGS:
            on = rungs(*run.class_counts)
        elif on is None:
            blocks = Blocks(
                np.array([again, partly]),
                np.array([held - saved, selected - saved]),
                np.array(self._made_again(kinds)),
            )
            on = front(*run.class_counts, blocks)
        return Ladder(
            on,
            on.sums(again, partly),
            on.sums(held - saved, selected - saved),
            self._transients(kinds, on),
        )

    def _block(self, kind: str, edges: tuple[Edge, ...]) -> tuple[float, ...]:
        """Of one block: seconds to run it again, fully and selectively; bytes kept in each mode."""
        own, read = self.kinds[kind], [(edge, self.edge(edge)) for edge in edges]
        held = sum(figures[2] for _, figures in read)
        again, partly = (
            own.again_seconds(mode)
            + sum(figures[0] for edge, figures in read if self.model.repeats(edge)[mode])
            for mode in range(len(AGAIN))
        )
        return (
            again, partly, own.saved_bytes, held + own.read_bytes, held + own.selected_bytes
        )  # fmt: skip

    def _transients(self, kinds: Sequence[_KindFigures], on: Rungs) -> Floats:
        """Per ZeRO stage and rung: the largest op, whole parameters and a block made again."""
        whole = self._gathered(kinds)
        working = max(kind.working_bytes for kind in kinds)
        most = np.maximum(whole.max(axis=1)[:, None], on.most(*self._made_again(kinds)))
        found: Floats = working + most
        return found

    @staticmethod
    def _gathered(kinds: Sequence[_KindFigures]) -> Floats:
        """Whole parameters of blocks of some kinds, ``[zero, kind]``."""
        return np.array([GATHERED_BLOCKS * kind.states[:, 3] for kind in kinds]).T

    @classmethod
    def _made_again(cls, kinds: Sequence[_KindFigures]) -> tuple[Floats, Floats]:
        """The same with what a block of the kind holds when it is run again, fully and
        selectively."""
        back = cls._gathered(kinds) + [kind.saved_bytes for kind in kinds]
        return back, back - [kind.overlap_bytes for kind in kinds]

    def seconds_per_byte(self, modes: tuple[Recompute, ...]) -> tuple[float, float]:
        """The cheapest second per byte that recomputing a block costs, and the share of what
        is kept that it can save, at most: over the kinds, without what is read from outside."""
        if modes not in self._per_byte:
            rates, shares = [], []
            for kind in self.kinds.values():
                saved = kind.saved_bytes
                if "full" in modes and saved > 0:
                    rates.append(kind.again_seconds(0) / saved)
                    shares.append(1.0)
                less = saved - kind.selected_bytes
                if "selective" in modes and less > 0:
                    rates.append(kind.again_seconds(1) / less)
                    shares.append(less / saved)
            self._per_byte[modes] = min(rates, default=0.0), max(shares, default=0.0)
        return self._per_byte[modes]

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
        seconds = np.zeros((len(ZEROS), SECONDS))
        for kind, count in run.counts.items():
            seconds += count * self.kinds[kind].seconds
        for decision, choice in self._shared:
            seconds += decision.seconds[:, choice]
        return seconds

    def price(self, run: Run, setting: Setting) -> StageCost:
        """The cost of a run in a setting; the run is of this solution's family."""
        found = self._priced.get((run.key, setting))
        if found is None:
            found = self._priced[run.key, setting] = self._price(run, setting)
        return found

    def _price(self, run: Run, setting: Setting) -> StageCost:
        splits = bool(setting.halves)
        seconds = self._seconds(run, run.weights(setting.rung), setting.zero, splits=splits)
        ladder = self._ladder(run, only(setting.rung, len(run.block_classes)))
        kept = sum(count * self.kinds[kind].saved_bytes for kind, count in run.counts.items())
        kept += float(ladder.kept_bytes[0])
        memory = dict(zip(STATES, self._states(run)[setting.zero].tolist(), strict=False))
        memory["activations"] = kept * setting.in_flight
        late = None
        if splits:
            late, late_bytes = self.late(run)
            memory["activations"] = held_bytes(setting.halves, kept, late_bytes)
        memory["transient"] = float(ladder.transient_bytes[setting.zero][0])
        memory["buffers"] = float(constant_bytes(self.model, run))
        memory["reserve"] = float(reserve(self.model))
        return StageCost(Seconds(*seconds.tolist()), self._receive(run), memory, kept, late)

    def late(self, run: Run) -> tuple[float, float]:
        """Seconds of the gradients of a run's weights, and bytes kept for them."""
        own = [(count, *self._late_of(kind)) for kind, count in run.counts.items()]
        seconds = sum(n * float(late.max()) for n, late, _ in own)
        return seconds, sum(n * size for n, _, size in own)

    def _late_of(self, kind: str) -> tuple[Floats, float]:
        """Of a block: seconds of the device and of the host, and bytes."""
        if kind not in self._late:
            start, number = self.assembly.start[kind], len(self.model.kind(kind).decisions)
            choices = enumerate(self.choices[start : start + number])
            found = [self.model.late(kind, at, choice) for at, choice in choices]
            parts = {part for _, _, own in found for part in own}
            seconds = np.array([own[:2] for own in found]).sum(axis=0)
            self._late[kind] = seconds, float(sum(n for _, n in parts))
        return self._late[kind]

    def _seconds(self, run: Run, weight: Weights, zero: int, *, splits: bool) -> Floats:
        seconds: Floats = self._own_seconds(run)[zero] + self._edge_seconds(run, weight)
        for kind, count in weight.kinds_again.items():
            partly = weight.kinds_selective.get(kind, 0)
            spared = np.array([count - partly, partly]) @ self.kinds[kind].spared_seconds
            seconds[2:4] += count * self.kinds[kind].seconds[zero, :2] - spared[[0, 2]]
        seconds[8:] = self._issued(weight, zero, splits=splits)
        return seconds

    def _issued(self, weight: Weights, zero: int, *, splits: bool) -> Floats:
        """Forward and backward, until each block is both computed and issued; of a backward that
        ``splits`` until each half is."""
        found = np.zeros(2)
        for kind, count in weight.kinds.items():
            own = self.kinds[kind].seconds[zero, [0, 8, 2, 9]]
            full, some = self.kinds[kind].spared_seconds[:, :2]
            if splits:
                late, _ = self._late_of(kind)
                own[2:] -= late
                found[1] += count * max(late)
            again = weight.kinds_again.get(kind, 0)
            partly = weight.kinds_selective.get(kind, 0)
            found[0] += count * max(own[:2])
            found[1] += (count - again) * max(own[2:])
            found[1] += (again - partly) * max(own[2:] + own[:2] - full)
            found[1] += partly * max(own[2:] + own[:2] - some)
        return found

    def _edge_seconds(self, run: Run, weight: Weights) -> Floats:
        """Seconds of what passes between blocks and at the stage's ends."""
        seconds = np.zeros(SECONDS)
        for edge, count in weight.edges.items():
            forward, backward, _ = self.edge(edge)
            seconds[1] += count * forward
            again = weight.repeated(edge, self.model.repeats(edge)) if weight.edges_again else 0
            seconds[3] += count * backward + again * forward
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


def _in_all(seconds: Floats, states: Floats) -> Floats:
    """By ZeRO stage the seconds per micro-batch and per step, and the bytes of states."""
    found: Floats = np.stack(
        [seconds[:, :6].sum(axis=1), seconds[:, 6:8].sum(axis=1), states[:, :3].sum(axis=1)]
    )
    return found
