"""A run of blocks on a mesh as an integer program, and its answer as layouts.

In: the tables of a mesh, a run, how much of it is recomputed, how many micro-batches are in
flight, a memory limit. Out: an ``ilp.Problem`` whose objective is the seconds per
micro-batch, a step's seconds divided by its micro-batches. Equal blocks share their
variables, weighted by their number; every distinct edge between kinds is kept.

Recomputed blocks run their forward twice and keep only what they read from outside, and
selectively recomputed ones what ``recompute`` says besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...cost_model.memory import reserve_bytes
from ..integer_programs.ilp import Alternative, Coupling, Memory, Problem, SharedBytes, Side
from .decisions import Decision, Floats
from .ladder import NOTHING, Rung
from .prices import Seconds
from .stage_model import Kept, StageModel
from .structure import Edge, Run, Weights

Solution = Mapping[str, tuple[int, ...]]
"""For each kind the choice of each of its decisions; for each shared parameter its own."""

GATHERED_BLOCKS = 2
"""Blocks whose parameters ZeRO 3 holds whole at once: the running and the next one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run is trained: ZeRO stage, micro-batches per step and in flight, blocks recomputed.

    ``rung`` says how many blocks of each of the run's classes are recomputed. ``limit_bytes``
    limits its memory; ``memory_weight`` is a price in seconds per byte. ``halves``: under a
    schedule that splits backwards, how many micro-batches at once wait for their backward, and
    how many for their weights' gradients only (``schedules.held``).
    """

    num_microbatches: int = 1
    zero: int = 0
    rung: Rung = NOTHING
    in_flight: int = 1
    limit_bytes: float | None = None
    memory_weight: float = 0.0
    halves: tuple[tuple[int, int], ...] = ()


class Assembly:
    """The decisions of a run in one list, and how to fill a problem for them."""

    def __init__(self, model: StageModel, run: Run) -> None:
        self.model = model
        self.run = run
        self.start: dict[str, int] = {}
        self.decisions: list[Decision] = []
        for kind in run.counts:
            self.start[kind] = len(self.decisions)
            self.decisions += model.kind(kind).decisions
        for name in run.shared:
            self.start[name] = len(self.decisions)
            self.decisions.append(model.shared(name))

    def position(self, name: str) -> int:
        """Where the decision of a member is in the list."""
        structure = self.model.structure
        if structure.graph[name].kind == "parameter" and structure.is_shared(name):
            return self.start[name]
        owner, _ = self.model.home(name)
        return self.start[owner] + self.model.kind(owner).where[name]

    def problem(self, setting: Setting) -> Problem:
        """The integer program."""
        weight = self.run.weights(setting.rung)
        costs = [
            self._own_cost(position, weight, setting) for position in range(len(self.decisions))
        ]
        self._add_boundaries(costs)
        couplings = []
        for kind, count in weight.kinds.items():
            for edge in self.model.kind(kind).edges:
                again = weight.repeated_inside(kind, self.model.repeats(edge))
                couplings.append(self._coupling(edge, count, again))
        for edge, count in weight.edges.items():
            again = weight.repeated(edge, self.model.repeats(edge))
            couplings.append(self._coupling(edge, count, again))
        memory = None
        if setting.limit_bytes is not None:
            memory = self._memory(setting, weight)
        return Problem(
            tuple(costs), tuple(couplings), memory, setting.memory_weight, self._sync(setting)
        )

    def _sync(self, setting: Setting) -> float:
        """The latencies of gradient synchronization, which no choice changes."""
        share = np.array((1.0,) * 6 + (1 / setting.num_microbatches,) * 2 + (0.0,) * 2)
        return float(
            sum(
                count * (np.array(self.model.block_sync(kind, setting.zero)) @ share)
                for kind, count in self.run.counts.items()
            )
        )

    def owner(self, position: int) -> str:
        return max(
            (name for name, start in self.start.items() if start <= position),
            key=lambda name: self.start[name],
        )

    def _own_cost(self, position: int, weight: Weights, setting: Setting) -> Floats:
        owner = self.owner(position)
        count = weight.kinds.get(owner, 1)
        again = weight.kinds_again.get(owner, 0)
        microbatches = setting.num_microbatches
        per = Seconds(
            count + again, count + again, count, count, count, count,
            count / microbatches, count / microbatches,
        )  # fmt: skip
        decision = self.decisions[position]
        partly = weight.kinds_selective.get(owner, 0)
        cost: Floats = decision.seconds[setting.zero] @ np.array(per)
        if not again:
            return cost
        spared: Floats = np.array([again - partly, partly]) @ decision.spared_seconds[:, :, 0]
        return cost - spared

    def _add_boundaries(self, costs: list[Floats]) -> None:
        model = self.model
        for (name, index), count in self.run.sent.items():
            seconds = model.boundary_seconds(name, index).sum(axis=1) * count
            costs[self.position(name)] += seconds[model.made(name, index).of_choice]
        for ref, first in self.run.received:
            seconds = model.receive_seconds(ref, first).sum(axis=1)
            costs[self.position(first.node)] += seconds[model.received(first).of_choice]
        if self.run.has_loss:
            name, index = self.loss
            seconds = model.boundary_seconds(name, index, whole=True).sum(axis=1)
            costs[self.position(name)] += seconds[model.made(name, index).of_choice]

    @property
    def loss(self) -> tuple[str, int]:
        loss = self.model.structure.graph.loss
        return self.model.structure.blocks.template[loss.name], loss.index

    def _source(self, edge: Edge) -> Side:
        options = self.model.source(edge)
        name = edge.name if edge.first is None else edge.first.node
        return Side(self.position(name), options.of_choice)

    def _coupling(self, edge: Edge, count: int, again: int) -> Coupling:
        merged = self.model.merged(edge)
        name = edge.name if edge.first is None else edge.first.node
        sides = tuple(
            Side(self.position(use.node), classes)
            for use, classes in zip(edge.uses, merged.uses, strict=True)
        )
        return Coupling(
            Side(self.position(name), merged.source),
            _distinct(sides),
            merged.forward * (count + again) + merged.backward * count,
        )

    def solution(self, choices: tuple[int, ...]) -> Solution:
        """The choices by kind and shared parameter."""
        found: dict[str, tuple[int, ...]] = {}
        for kind in self.run.counts:
            start = self.start[kind]
            found[kind] = choices[start : start + len(self.model.kind(kind).decisions)]
        for name in self.run.shared:
            found[name] = (choices[self.start[name]],)
        return found

    def choices(self, solution: Solution) -> tuple[int, ...]:
        """The inverse of ``solution``."""
        return tuple(choice for owner in self.start for choice in solution[owner])

    def _memory(self, setting: Setting, weight: Weights) -> Memory:
        linear = [
            decision.states[setting.zero, :, :3].sum(axis=1)
            * weight.kinds.get(self.owner(position), 1)
            for position, decision in enumerate(self.decisions)
        ]
        shared: list[SharedBytes] = []
        for kind, count in weight.kinds.items():
            model = self.model.kind(kind)
            again, partly = weight.kinds_again.get(kind, 0), weight.kinds_selective.get(kind, 0)
            kept = count - again
            if again > partly:
                fully = (again - partly) * setting.in_flight
                shared += self._saved(kind, model.read, float(fully))
            if kept:
                shared += self._saved(kind, model.saved, float(kept * setting.in_flight))
            if partly:
                shared += self._saved(kind, model.selected, float(partly * setting.in_flight))
        for edge, again in weight.edges_again.items():
            if edge.is_held:
                side = self._source(edge)
                held = self._held_bytes(edge) * (again * setting.in_flight)
                linear[side.decision] = linear[side.decision] + held[side.classes]
        return Memory(
            float(setting.limit_bytes or 0.0),
            float(constant_bytes(self.model, self.run) + reserve(self.model)),
            tuple(linear),
            tuple(shared),
            self._peaks(weight, setting.zero),
        )

    def _held_bytes(self, edge: Edge) -> Floats:
        spec = self.model.spec(edge)
        return np.array(
            [self.model.prices.local_bytes(spec, each) for each in self.model.source(edge).layouts],
            dtype=np.float64,
        )

    def _saved(self, kind: str, kept: Kept, factor: float) -> list[SharedBytes]:
        """What a kind's block keeps, one entry per storage."""
        holders: dict[str, dict[int, list[set[int]]]] = {}
        for number, choices in enumerate(kept):
            for index, parts in enumerate(choices):
                for root, num_bytes in parts:
                    own = holders.setdefault(root, {}).setdefault(number, [set() for _ in choices])
                    own[index].add(num_bytes)
        return [self._shared_bytes(kind, by_decision, factor) for by_decision in holders.values()]

    def _shared_bytes(
        self, kind: str, by_decision: Mapping[int, list[set[int]]], factor: float
    ) -> SharedBytes:
        sizes = sorted({size for sets in by_decision.values() for own in sets for size in own})
        sides = []
        for number, sets in by_decision.items():
            for rank in range(max(len(own) for own in sets)):
                classes = [
                    sizes.index(sorted(own)[rank]) if rank < len(own) else -1 for own in sets
                ]
                sides.append(Side(self.start[kind] + number, np.array(classes)))
        return SharedBytes(tuple(sides), np.array(sizes, dtype=np.float64) * factor)

    def _peaks(self, weight: Weights, zero: int) -> tuple[tuple[Alternative, ...], ...]:
        """Transient bytes: the largest op; the whole parameters and recomputed block."""
        working, blocks = [], []
        for kind in weight.kinds:
            start, model = self.start[kind], self.model.kind(kind)
            for number, sizes in enumerate(model.working_bytes):
                working.append(Alternative(((start + number, sizes),)))
            gathered = tuple(
                (start + number, GATHERED_BLOCKS * decision.states[zero, :, 3])
                for number, decision in enumerate(model.decisions)
            )
            partly = weight.kinds_selective.get(kind, 0)
            fully = weight.kinds_again.get(kind, 0) - partly
            if fully:
                blocks.append(Alternative(gathered, tuple(self._saved(kind, model.saved, 1.0))))
            elif partly:
                blocks.append(self._partly(kind, gathered))
            else:
                blocks.append(Alternative(gathered))
        return tuple(working), tuple(blocks)

    def _partly(self, kind: str, gathered: tuple[tuple[int, Floats], ...]) -> Alternative:
        """What a selectively recomputed block makes again: all that it keeps or needs, less
        what it has kept."""
        model = self.model.kind(kind)
        either = tuple(
            tuple((*own, *kept) for own, kept in zip(saved, selected, strict=True))
            for saved, selected in zip(model.saved, model.selected, strict=True)
        )
        less = [
            np.array([float(sum(size for _, size in own)) for own in kept])
            for kept in model.selected
        ]
        linear = tuple(
            (position, sizes - kept) for (position, sizes), kept in zip(gathered, less, strict=True)
        )
        return Alternative(linear, tuple(self._saved(kind, either, 1.0)))


def _distinct(sides: tuple[Side, ...]) -> tuple[Side, ...]:
    """The sides without those of one decision that always want the same."""
    found: list[Side] = []
    for side in sides:
        if not any(
            side.decision == other.decision and np.array_equal(side.classes, other.classes)
            for other in found
        ):
            found.append(side)
    return tuple(found)


def constant_bytes(model: StageModel, run: Run) -> int:
    """Bytes that no choice changes: constants, buffers and the batch's inputs of a run."""
    return model.structure.leaf_bytes(run)


def reserve(model: StageModel) -> int:
    """What a device gives to no tensor: its context and communication buffers."""
    num_groups = sum(size > 1 for size in model.prices.mesh.shape)
    return reserve_bytes(model.prices.device.kind, num_groups)


def fixed_bytes(model: StageModel, run: Run) -> float:
    """Bytes that every choice holds: constants, buffers, the largest op at its smallest."""
    sizes = [each for kind in run.counts for each in model.kind(kind).working_bytes]
    working = max((float(each.min()) for each in sizes), default=0.0)
    return constant_bytes(model, run) + reserve(model) + working
