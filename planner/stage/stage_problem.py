"""Problem of choosing the layouts of a stage: its decisions, and its terms as an integer program.

In: the terms of a mesh, a run of blocks, its recomputation, the micro-batches in flight, a memory
limit. Out: the decisions in one list, and an ``ilp.Problem`` whose objective is the seconds per
micro-batch, that is, a step's seconds divided by its micro-batches. Equal blocks share their
decisions; a term counts as often as it occurs.

Recomputed blocks run their forward twice and keep only the values they read from outside; selective
recomputation keeps some further values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...cost_model.ops.memory import reserve_bytes
from ..costs.seconds import State, objective_weights
from ..integer_programs.ilp import Alternative, Coupling, Memory, Problem, SharedBytes
from ..integer_programs.ilp import Side as DecisionSide
from ..kernels.recompute import BLOCK_MODES, has_tiles, is_offloaded, without_offload
from ..plan import Recompute
from .decisions import Decision
from .kind_model import GATHERED_BLOCKS
from .recompute_policy import NO_RECOMPUTE, RecomputePolicy
from .stage_model import Kept, StageModel
from .structure import Occurrences, Row, Run
from .terms import SECONDS, Floats, Term, byte_weights, time_weights

Solution = Mapping[str, tuple[int, ...]]
"""Choices by kind of block (one per decision), and the choice of each shared parameter."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Options under which a stage is priced: choice of ZeRO (``zero``, its number in
    ``Prices.shardings``), micro-batches per step and in flight, and recomputation.

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

    def position(self, name: str) -> int:
        """Return the index in ``decisions`` of the decision that lays out node ``name``."""
        structure = self.model.structure
        if structure.graph[name].kind == "parameter" and structure.is_shared(name):
            return self.start[name]
        owner, _ = self.model.home(name)
        return self.start[owner] + self.model.kind(owner).where[name]

    def linearized(self, setting: StageOptions) -> Problem:
        """Build the integer program that chooses the layouts of these blocks under ``setting``: the
        linearization of the terms of the stage's cost."""
        seconds = objective_weights(setting.num_microbatches)
        costs = [np.zeros(len(decision.choices)) for decision in self.decisions]
        held = [np.zeros(len(decision.choices)) for decision in self.decisions]
        couplings: list[Coupling] = []
        constant = self.model.least_wait(self.run, setting.zero, setting.num_microbatches)
        for row, occurrences in self.model.rows(self.run, setting.policy):
            weights = time_weights(seconds, occurrences)
            sizes = byte_weights(occurrences, setting.in_flight)
            for number, decision in enumerate(self.model.decisions(row)):
                position = self.start[str(row)] + number
                costs[position] += decision.amounts.weighted(weights, (setting.zero,))[0]
                held[position] += decision.amounts.weighted(sizes, (setting.zero,))[0]
            for term in self.model.terms(row):
                if term.maker is not None:
                    couplings.append(self._coupling(term, term.weighted(weights)))
                    continue
                (use,) = term.uses
                costs[self.position(use.node)] += term.weighted(weights)[0, use.classes]
                held[self.position(use.node)] += term.weighted(sizes)[0, use.classes]
            if self.model.is_block(row):
                own = self.model.kind(str(row)).constant[setting.zero]
                constant += float(own @ weights[SECONDS])
        memory = None
        if setting.limit_bytes is not None:
            memory = self._memory(setting, tuple(held))
        return Problem(tuple(costs), tuple(couplings), memory, setting.memory_weight, constant)

    def _coupling(self, term: Term, cost: Floats) -> Coupling:
        assert term.maker is not None
        maker, *uses = (
            DecisionSide(self.position(side.node), side.classes)
            for side in (term.maker, *term.uses)
        )
        return Coupling(maker, tuple(uses), cost)

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

    def _memory(self, setting: StageOptions, linear: tuple[Floats, ...]) -> Memory:
        """Return the bytes per device of the choices: ``linear`` of each choice, and of storages
        that several decisions keep."""
        rows = self.run.occurrences(setting.policy)
        shared: list[SharedBytes] = []
        for kind in self.kinds:
            for mode, count in zip(BLOCK_MODES, rows[kind], strict=True):
                if count and not is_offloaded(mode):
                    kept = self.model.kind(kind).parts(mode)
                    shared += self._saved(kind, kept, float(count * setting.in_flight))
        return Memory(
            float(setting.limit_bytes or 0.0),
            float(constant_bytes(self.model, self.run) + context_bytes(self.model)),
            linear,
            tuple(shared),
            self._peaks(rows, setting.zero),
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
                sides.append(DecisionSide(self.start[kind] + number, np.array(classes)))
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
            modes = [m for m, count in zip(BLOCK_MODES, rows[kind], strict=True) if count]
            is_tiled = all(map(has_tiles, modes))
            largest = model.working_again if is_tiled else model.working_bytes
            for number, sizes in enumerate(largest):
                working.append(Alternative(((start + number, sizes),)))
            gathered = tuple(
                (start + number, GATHERED_BLOCKS * decision.amounts.states[zero, :, State.GATHERED])
                for number, decision in enumerate(model.decisions)
            )
            blocks += [self._alternative(kind, mode, gathered) for mode in modes]
        return tuple(working), tuple(blocks)

    def _alternative(
        self, kind: str, mode: Recompute, gathered: tuple[tuple[int, Floats], ...]
    ) -> Alternative:
        """Return the transient bytes of a block, by choice: recomputed values, values that wait in
        host memory until it runs, and the ``gathered`` parameters."""
        model, base = self.model.kind(kind), without_offload(mode)
        kept = model.parts(base)
        moved = self._saved(kind, kept, 1.0) if is_offloaded(mode) else []
        if base == "none":
            return Alternative(gathered, tuple(moved))
        made = model.again if has_tiles(base) else model.parts("none")
        if base == "full":
            return Alternative(gathered, (*self._saved(kind, made, 1.0), *moved))
        either = tuple(
            tuple((*own, *also) for own, also in zip(saved, selected, strict=True))
            for saved, selected in zip(made, kept, strict=True)
        )
        less = [
            np.array([float(sum(size for _, size in own)) for own in choices]) for choices in kept
        ]
        linear = tuple(
            (position, sizes - own) for (position, sizes), own in zip(gathered, less, strict=True)
        )
        return Alternative(linear, (*self._saved(kind, either, 1.0), *moved))


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
    sizes = [each for kind in run.counts for each in model.kind(kind).working_again]
    working = max((float(each.min()) for each in sizes), default=0.0)
    return constant_bytes(model, run) + context_bytes(model) + working
