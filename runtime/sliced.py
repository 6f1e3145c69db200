"""Running a stage slice by slice of the sequences: what TeraPipe does.

In: the plan, a stage's whole program, where positions are. Out: a program per slice, and an
executor whose unit is a slice of a micro-batch: unit ``m * num_slices + j`` is slice ``j`` of
micro-batch ``m``. The keys and values that a slice's attention has seen are the next slice's
input; their gradient comes back from that slice's backward, which therefore runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..passes.program import Program
from ..passes.random_ops import Draws
from ..passes.stage_cut import Boundary, boundaries
from ..passes.stage_program import OfSlice, StageProgram
from ..planner.arranged.sequence_places import find_places
from ..planner.arranged.sequence_slices import Carried, SequenceSlice, sequence_slice, slice_bounds
from ..planner.graph import Graph
from ..planner.plan import Plan
from .executor import StageExecutor
from .stage import StageModule


def slices_of(program: Program, plan: Plan) -> tuple[SequenceSlice, ...]:
    """What each slice of the plan runs; none where sequences are whole.

    Raises PlanError AP548 where slices would not give the same result.
    """
    if not plan.slices:
        return ()
    places = find_places(program.graph)
    return tuple(
        sequence_slice(program.graph, program.blocks, plan, places, bounds)
        for bounds in slice_bounds(plan.slices)
    )


def boundaries_of(slices: Sequence[SequenceSlice]) -> tuple[tuple[Boundary, ...], ...]:
    """The values that cross stages, of each slice."""
    return tuple(boundaries(each.graph, each.blocks, each.plan) for each in slices)


def slice_programs(
    slices: Sequence[SequenceSlice],
    whole: Graph,
    index: int,
    build: Callable[[SequenceSlice, OfSlice], StageProgram],
) -> tuple[StageProgram, ...]:
    """The programs of stage ``index``, without what they take from the slice before."""
    found, draws = [], Draws()
    for each in slices:
        kept = tuple(carried.made for carried in each.carried[index])
        program = build(each, OfSlice(whole, kept, draws))
        earlier = {carried.earlier for carried in each.carried[index]}
        inputs = {name: held for name, held in program.inputs.items() if name not in earlier}
        found.append(replace(program, inputs=inputs))
    return tuple(found)


@dataclass(slots=True)
class _Sequence:
    """What passes from slice to slice of a micro-batch: keys and values, and their gradients."""

    made: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class SlicedExecutor(StageExecutor):
    """A ``StageExecutor`` of slices; its micro-batch arguments are units but for ``loss``."""

    def __init__(
        self,
        stage: StageModule,
        programs: Sequence[StageProgram],
        carried: Sequence[Carried],
        *,
        num_microbatches: int,
        constants: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(stage, num_microbatches=num_microbatches, constants=constants, seed=seed)
        stage.run_slices(programs)
        self._programs = tuple(programs)
        self._carried = tuple(carried)
        self._sequences: dict[int, _Sequence] = {}

    def begin_step(self, batch: Mapping[str, Tensor], *, forgets_gradients: bool = True) -> None:
        self._sequences.clear()
        super().begin_step(batch, forgets_gradients=forgets_gradients)

    def _unit_programs(self) -> Sequence[StageProgram]:
        return self._programs

    def forward(self, unit: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a slice forward; returns the values that other stages get, by key."""
        microbatch, part = divmod(unit, len(self._programs))
        sequence = self._sequences.setdefault(microbatch, _Sequence())
        program = self._programs[part]
        program.draws.microbatch = microbatch
        requires_grad = {b.key: b.spec.requires_grad for b in program.receives}
        leaves = {k: v.detach().requires_grad_(requires_grad[k]) for k, v in received.items()}
        if part:
            for each in self._carried:
                leaves[each.earlier] = sequence.made.pop(each.made).requires_grad_()
        inputs = self._inputs.pop(unit)
        outputs = self.stage({**self._constants, **self._counts[0], **inputs, **leaves}, part)
        for each in self._carried:
            sequence.made[each.made] = outputs[each.made].detach()
        return self._finished(unit, leaves, outputs, program)

    def _run_backward(self, unit: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sequence = self._sequences[unit // len(self._programs)]
        given = super()._run_backward(unit, {**gradients, **sequence.gradients})
        sequence.gradients = {
            each.made: given.pop(each.earlier) for each in self._carried if each.earlier in given
        }
        return given

    def loss(self, microbatch: int) -> Tensor | None:
        """The loss of a micro-batch: its slices' parts add up."""
        count = len(self._programs)
        parts = [super(SlicedExecutor, self).loss(microbatch * count + p) for p in range(count)]
        found = [part for part in parts if part is not None]
        return sum(found[1:], found[0]) if found else None
