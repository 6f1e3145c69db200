"""Assembly of a run of blocks into an integer program, and of its answer into layouts.

In: the tables of a mesh, a run, its recomputation, the micro-batches in flight, a memory limit.
Out: an ``ilp.Problem`` whose objective is the seconds per micro-batch, that is, a step's seconds
divided by its micro-batches. Equal blocks share their variables, weighted by their number; every
distinct edge between kinds is kept.

Recomputed blocks run their forward twice and keep only the values they read from outside; selective
recomputation keeps some further values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...cost_model.ops.memory import reserve_bytes
from ..costs.seconds import HELD, State, objective_weights
from ..integer_programs.ilp import Alternative, Coupling, Memory, Problem, SharedBytes, Side
from .decisions import Decision, Floats
from .recompute_policy import NO_RECOMPUTE, RecomputePolicy
from .stage_model import Kept, StageModel
from .structure import Edge, Occurrences, Row, Run

Solution = Mapping[str, tuple[int, ...]]
"""Choices by kind of block (one per decision), and the choice of each shared parameter."""

GATHERED_BLOCKS = 2
"""Number of blocks whose parameters ZeRO 3 holds whole at once: the running block and the next."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Options under which a stage is priced: ZeRO stage, micro-batches per step and in flight, and
    recomputation.

    ``policy``: number of recomputed blocks of each class of equal blocks. ``limit_bytes`` limits
    the memory per device; ``memory_weight`` is a price in seconds per byte. ``halves``: under a
    schedule with split backwards, the largest pairs (micro-batches before their backward,
    micro-batches with deferred weight gradients) held at one time.
    """

    num_microbatches: int = 1
    zero: int = 0
    policy: RecomputePolicy = NO_RECOMPUTE
    in_flight: int = 1
    limit_bytes: float | None = None
    memory_weight: float = 0.0
    halves: tuple[tuple[int, int], ...] = ()


class StageProblem:
    """Problem of choosing the layouts of consecutive blocks (``run``): the decisions (groups of
    nodes laid out together) in one list, to be converted to an integer program. Blocks of one kind
    share their decisions."""

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

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.run.counts)

    def _edges(self, kind: str) -> tuple[Edge, ...]:
        return self.model.kind(kind).edges

    def position(self, name: str) -> int:
        """Return the index in ``decisions`` of the decision that lays out node ``name``."""
        structure = self.model.structure
        if structure.graph[name].kind == "parameter" and structure.is_shared(name):
            return self.start[name]
        owner, _ = self.model.home(name)
        return self.start[owner] + self.model.kind(owner).where[name]

    def problem(self, setting: StageOptions) -> Problem:
        """Build the integer program that chooses the layouts of these blocks under ``setting``."""
        rows = self.run.occurrences(setting.policy)
        costs = [self._own_cost(position, rows, setting) for position in range(len(self.decisions))]
        for boundary, count in self.model.boundaries(self.run):
            costs[self.position(boundary.node)] += count * boundary.seconds.sum(axis=1)
        inside = [(edge, rows[kind]) for kind in self.kinds for edge in self._edges(kind)]
        between = [(row, own) for row, own in rows.items() if isinstance(row, Edge)]
        couplings = [self._coupling(edge, own) for edge, own in (*inside, *between)]
        memory = None
        if setting.limit_bytes is not None:
            memory = self._memory(setting, rows)
        return Problem(
            tuple(costs), tuple(couplings), memory, setting.memory_weight, self._sync(setting)
        )

    def _sync(self, setting: StageOptions) -> float:
        """Return the seconds per micro-batch that no choice changes: latencies of gradient sums and
        gathers, and waits for the collectives of the first and last block."""
        share = objective_weights(setting.num_microbatches)
        wait = self.model.least_wait(self.run, setting.zero, setting.num_microbatches)
        return wait + float(
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

    def _own_cost(
        self, position: int, rows: Mapping[Row, Occurrences], setting: StageOptions
    ) -> Floats:
        decision, (kept, *recomputed) = self.decisions[position], rows[self.owner(position)]
        weights = objective_weights(setting.num_microbatches)
        weights = (kept + sum(recomputed)) * weights
        cost: Floats = decision.seconds[setting.zero] @ weights
        return cost + np.array(recomputed) @ decision.recompute_seconds

    def _source(self, edge: Edge) -> Side:
        options = self.model.source(edge)
        name = edge.name if edge.first is None else edge.first.node
        return Side(self.position(name), options.of_choice)

    def _coupling(self, edge: Edge, occurrences: Occurrences) -> Coupling:
        count = sum(occurrences)
        again = int(np.dot(occurrences[1:], self.model.repeats(edge)))
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
        """Convert choices, one per entry of ``decisions``, to choices by kind of block."""
        found: dict[str, tuple[int, ...]] = {}
        for kind in self.run.counts:
            start = self.start[kind]
            found[kind] = choices[start : start + len(self.model.kind(kind).decisions)]
        for name in self.run.shared:
            found[name] = (choices[self.start[name]],)
        return found

    def choices(self, solution: Solution) -> tuple[int, ...]:
        """Convert choices by kind of block to a choice per entry of ``decisions``."""
        return tuple(choice for owner in self.start for choice in solution[owner])

    def _memory(self, setting: StageOptions, rows: Mapping[Row, Occurrences]) -> Memory:
        linear = [
            decision.states[setting.zero, :, HELD].sum(axis=1) * sum(rows[self.owner(position)])
            for position, decision in enumerate(self.decisions)
        ]
        shared: list[SharedBytes] = []
        for kind in self.kinds:
            model, (kept, full, selective) = self.model.kind(kind), rows[kind]
            if full:
                shared += self._saved(kind, model.read, float(full * setting.in_flight))
            if kept:
                shared += self._saved(kind, model.saved, float(kept * setting.in_flight))
            if selective:
                shared += self._saved(kind, model.selected, float(selective * setting.in_flight))
        for edge, (_, *recomputed) in rows.items():
            if isinstance(edge, Edge) and edge.is_held and any(recomputed):
                side = self._source(edge)
                held = self._held_bytes(edge) * (sum(recomputed) * setting.in_flight)
                linear[side.decision] = linear[side.decision] + held[side.classes]
        return Memory(
            float(setting.limit_bytes or 0.0),
            float(constant_bytes(self.model, self.run) + context_bytes(self.model)),
            tuple(linear),
            tuple(shared),
            self._peaks(rows, setting.zero),
        )

    def _held_bytes(self, edge: Edge) -> Floats:
        spec = self.model.spec(edge)
        return np.array(
            [self.model.prices.local_bytes(spec, each) for each in self.model.source(edge).layouts],
            dtype=np.float64,
        )

    def _saved(self, kind: str, kept: Kept, factor: float) -> list[SharedBytes]:
        """Return the storages (memory of a tensor and its views) that a block keeps, with bytes by
        layout choice, times ``factor``. ``kept``: (storage, bytes) by decision and choice."""
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

    def _peaks(
        self, rows: Mapping[Row, Occurrences], zero: int
    ) -> tuple[tuple[Alternative, ...], ...]:
        """Return two groups of alternatives of transient bytes, by layout choice: for each op its
        working memory; for each kind of block its gathered weights and recomputed values. The
        largest of each group counts."""
        working, blocks = [], []
        for kind in self.kinds:
            start, model = self.start[kind], self.model.kind(kind)
            _, full, selective = rows[kind]
            for number, sizes in enumerate(model.working_bytes):
                working.append(Alternative(((start + number, sizes),)))
            gathered = tuple(
                (start + number, GATHERED_BLOCKS * decision.states[zero, :, State.GATHERED])
                for number, decision in enumerate(model.decisions)
            )
            if full:
                blocks.append(Alternative(gathered, tuple(self._saved(kind, model.saved, 1.0))))
            elif selective:
                blocks.append(self._made_again(kind, gathered))
            else:
                blocks.append(Alternative(gathered))
        return tuple(working), tuple(blocks)

    def _made_again(self, kind: str, gathered: tuple[tuple[int, Floats], ...]) -> Alternative:
        """Return the transient bytes of a selectively recomputed block, by choice: the recomputed
        values and the ``gathered`` parameters."""
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
    """Return the uses of a value without duplicates (one decision with equal layout classes)."""
    found: list[Side] = []
    for side in sides:
        if not any(
            side.decision == other.decision and np.array_equal(side.classes, other.classes)
            for other in found
        ):
            found.append(side)
    return tuple(found)


def constant_bytes(model: StageModel, run: Run) -> int:
    """Return the bytes per rank of the constants, buffers and batch inputs of a stage's blocks
    (``run``), which no choice changes."""
    return model.structure.leaf_bytes(run, model.prices.mesh.row_parts)


def context_bytes(model: StageModel) -> int:
    """Return the bytes of a device that hold no tensor: CUDA context and communication buffers."""
    num_groups = sum(size > 1 for size in model.prices.mesh.shape)
    return reserve_bytes(model.prices.device.kind, num_groups)


def fixed_bytes(model: StageModel, run: Run) -> float:
    """Return the bytes per device that a stage's blocks (``run``) take whatever the choices:
    constants, buffers, CUDA context, and the largest op in its smallest layout."""
    sizes = [each for kind in run.counts for each in model.kind(kind).working_bytes]
    working = max((float(each.min()) for each in sizes), default=0.0)
    return constant_bytes(model, run) + context_bytes(model) + working
