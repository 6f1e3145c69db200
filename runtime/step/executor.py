"""Running one stage on one rank: the forwards and backwards of a step's micro-batches.

In: the global batch, values received from other stages. Out: values and gradients to send, the
loss, and, after ``finish_step``, every parameter's gradient ready for the optimizer. The schedule
decides the order of the calls; any order in which a micro-batch's forward comes before its backward
works, with any number in flight.

A unit is run at once: a micro-batch, or a slice of its sequences. Unit ``m * num_slices + j`` is
slice ``j`` of micro-batch ``m``. The keys and values that a slice's attention has seen are an input
of the next slice; their gradient comes back from that slice's backward, which therefore runs first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim import Optimizer

from ...cost_model.simulator.actions import BACKWARD, FORWARD
from ...passes.ops.random_ops import step_key
from ...planner.graph.graph import Node
from ...planner.graph.layout import local_region, whole_region
from ..data.rank_batch import ShareBatch, batch_rows, local_part, step_inputs
from ..messages.device_queue import queue_of
from ..parameters.stage import StageModule
from ..parameters.weight_versions import WeightVersions
from ..parameters.zero import (
    begin_backward,
    begin_input_backward,
    begin_step,
    finish_sums,
    finish_weight_backward,
    reduce_finished,
)
from ..update.deferred_update import DeferredUpdate
from ..update.gradients import GradientReducer, PlannedSums

if TYPE_CHECKING:
    from ...passes.local.stage_program import StageProgram
    from ...planner.variants.sequence_slices import Carried


Constants = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""Whole values by name: of a program's constants, and of the values by which it counts a loss's
rows. Both have the same names but differ in batch size if a rank has rows of its own."""

ReadConstants = Callable[["StageVariant", "StageProgram"], Constants]
"""Function that returns the constants of a stage's program in a variant of the step."""


def no_constants(variant: StageVariant, program: StageProgram) -> Constants:
    """Return empty constants, for a model that has none."""
    return {}, {}


@dataclass(frozen=True, slots=True)
class StageVariant:
    """The programs of a stage in one variant of the step, for one shape of batches.

    ``parts`` are the numbers of the stage's programs that run a micro-batch, one per slice of the
    sequences; ``carried`` are the values that a slice passes to the next slice. ``rows`` is the
    number of rows of the global batch, ``capture`` the number of the model's trace: variants equal
    in both, and in the layouts of constants, have equal constants. Asynchronous schedules make
    ``num_updates`` updates in a step.
    """

    num_microbatches: int
    parts: tuple[int, ...] = (0,)
    carried: tuple[Carried, ...] = ()
    rows: int = 0
    capture: int = 0
    num_updates: int = 1

    @property
    def per_update(self) -> int:
        """The number of micro-batches whose gradients make one update."""
        return self.num_microbatches // self.num_updates


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Values of a micro-batch (or slice) that are kept between its forward and its backward. Of
    outputs only the nodes in autograd's graph are kept, so that the memory of sent values is
    freed."""

    received: Mapping[str, Tensor]
    outputs: Mapping[str, GradientEdge]
    loss: Tensor | None


@dataclass(slots=True)
class _Sequence:
    """Values that one slice of a micro-batch hands to the next, by key, and their gradients, which
    the later slice hands back."""

    made: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class StageExecutor:
    """Executor of the part of a stage that one rank holds.

    A step is ``begin_step``, then ``forward`` and ``backward`` for each micro-batch (the
    last backward with ``last=True``), then ``finish_step``, then the optimizer's ``step``. A
    backward may come in two halves, ``backward_inputs`` and ``backward_weights``.
    """

    def __init__(
        self,
        stage: StageModule,
        planned: StageVariant,
        read_constants: ReadConstants = no_constants,
        *,
        seed: int = 0,
        versions: WeightVersions | None = None,
        sums: PlannedSums = PlannedSums(),  # noqa: B008 - frozen
    ) -> None:
        """Make an executor whose steps run ``planned`` until ``use`` chooses another variant.

        ``seed`` and the attribute ``steps_begun`` (steps so far, also of an earlier run that is
        continued) decide the forward's random numbers. Asynchronous schedules update the weights in
        the middle of a step and compute with ``versions`` of them. Callers may set attributes: with
        ``defers``, a step ends without waiting for gradient sums (see ``deferred_update``);
        gradients are of the loss times ``loss_scale``; with ``keeps_gradients``, a step adds to
        existing gradients, not yet summed over ranks; with ``publishes_later``, the caller makes
        the gradient copies that the optimizer gets (see ``PartedUpdate``).
        """
        self.stage = stage
        self.versions = versions
        self.seed = seed
        self.steps_begun = 0
        self.loss_scale: Tensor | float = 1.0
        self.keeps_gradients = False
        self.defers = False
        self.publishes_later = False
        self.parameters = stage.by_name
        self._read_constants = read_constants
        self._constants_of: dict[tuple[Any, ...], Constants] = {}
        self._planned = planned
        self.use(planned)
        self._counts: list[Mapping[str, Tensor | None]] = []
        self._is_updated = False
        self._reducer = GradientReducer(self.parameters.values(), stage.device_mesh, sums)
        self._reducer.attach(self.parameters.values())
        self._batch: Mapping[str, Tensor] = {}
        self._queue = queue_of(stage.device)
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: dict[int, Tensor] = {}
        self._sequences: dict[int, _Sequence] = defaultdict(_Sequence)

    def use(self, variant: StageVariant) -> None:
        """Make the next steps run ``variant``, whose programs have been added to the stage."""
        self.variant = variant
        self.program = self.stage.programs[variant.parts[0]]
        layouts = tuple((name, held.layout) for name, held in self.program.constants.items())
        key = variant.rows, variant.capture, layouts
        if key not in self._constants_of:
            whole, counted = self._read_constants(variant, self.program)
            counting = self.program.counting
            leaves = counting.leaves if counting is not None else ()  # only these are kept whole
            counted = {name: counted[name] for name in leaves}
            self._constants_of[key] = self._local_constants(whole), counted
        self._constants, self._whole = self._constants_of[key]

    @property
    def num_microbatches(self) -> int:
        return self.variant.num_microbatches

    def refresh_constants(self) -> None:
        """Compute the constants again, as buffers that they depend on may have changed, and return
        to the planned variant."""
        self._constants_of.clear()
        self.use(self._planned)

    def forget_constants(self, rows: int, capture: int) -> None:
        """Drop the constants that belong to batches of ``rows`` rows and to trace number
        ``capture`` of the model; their next use computes them again."""
        for key in [each for each in self._constants_of if each[:2] == (rows, capture)]:
            del self._constants_of[key]

    def _local_constants(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mesh, coordinates = self.program.mesh, self.program.coordinates
        return {
            name: local_part(
                whole[name],
                local_region(held.spec.shape, held.layout, mesh, coordinates),
                held.spec.dtype,
                self.stage.device,
            )
            for name, held in self.program.constants.items()
        }

    def begin_step(self, batch: Mapping[str, Tensor], *, forgets_gradients: bool = True) -> None:
        """Start a step on the global ``batch``. The previous step's gradients are dropped, unless
        ``keeps_gradients`` is set or ``forgets_gradients`` is false."""
        self._batch = batch
        self._inputs.clear()  # before new inputs are allocated
        programs = [self.stage.programs[part] for part in self.variant.parts]
        self._inputs = step_inputs(batch, programs, self.num_microbatches, self._queue)
        self.program.draws.key = step_key(self.seed, self.steps_begun)
        self.steps_begun += torch.is_grad_enabled()
        self._in_flight.clear()
        self._losses.clear()
        self._sequences.clear()
        if self.stage.weight_gradients is not None:
            self.stage.weight_gradients.clear()
        self.stage.keep_buffers()
        self._counts = list(self._counted())
        if forgets_gradients and not self.keeps_gradients:
            self.zero_grad()
        if not self.keeps_gradients:
            begin_step(self.stage)
            for parameter in self.parameters.values():
                if parameter.is_stale or not (self.publishes_later and parameter.formats.offloads):
                    parameter.refresh()
        if self.versions is not None:
            self.versions.begin()

    def _counted(self) -> Iterator[Mapping[str, Tensor | None]]:
        """Yield, for each update in the step, the counts (such as the number of targets) that
        divide the losses of its micro-batches, by key. A count that needs rows of other ranks is
        None: the loss then sums it over ranks."""
        counting, batch = self.program.counting, self._batch
        if counting is not None and isinstance(batch, ShareBatch):
            read = {node.name for node in counting.inputs if node.name in batch.dims}
            if not batch.held.is_whole and read - batch.whole.keys():
                yield dict.fromkeys(loss.key for loss in counting.losses)
                return
        values = {} if counting is None else self._counted_inputs(counting.inputs)

        def value_of(node: Node, microbatch: int) -> Tensor:
            if node.kind != "input":
                return self._whole[node.name].to(self.stage.device)
            return values[node.name, microbatch]

        for first in range(0, self.num_microbatches, self.variant.per_update):
            yield {} if counting is None else counting.evaluate(value_of, first)

    def _counted_inputs(self, nodes: Iterable[Node]) -> dict[tuple[str, int], Tensor]:
        """Return the inputs that the counts of a loss depend on, whole, by name and micro-batch."""
        count = self.num_microbatches
        units = [(node, m) for node in nodes if node.kind == "input" for m in range(count)]
        parts = []
        for node, microbatch in units:
            rows = batch_rows(self._batch, node.name, node.spec, microbatch, count)
            whole = whole_region(node.spec.shape)
            parts.append(local_part(rows, whole, node.spec.dtype))
        copies = self._queue.to_device(parts)
        return {(node.name, m): copy for (node, m), copy in zip(units, copies, strict=True)}

    def forward(self, unit: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the forward of a micro-batch or slice, number ``unit``; return the values for other
        stages, by key. ``received`` has this rank's part of each value from other stages, by
        key."""
        microbatch, at = divmod(unit, len(self.variant.parts))
        program, sequence = self.stage.programs[self.variant.parts[at]], self._sequences[microbatch]
        leaves = {
            boundary.key: received[boundary.key]
            .detach()
            .requires_grad_(boundary.spec.requires_grad)
            for boundary in program.receives
        }
        if at:
            for each in self.variant.carried:
                leaves[each.earlier] = sequence.made.pop(each.made).requires_grad_()
        outputs = self.run(unit, leaves)
        for each in self.variant.carried:
            sequence.made[each.made] = outputs[each.made].detach()
        if torch.is_grad_enabled():
            self._in_flight[unit] = self._kept(leaves, outputs)
        if program.loss is not None:
            self._losses[unit] = self.loss_part(outputs[program.loss].detach())
        return {boundary.key: outputs[boundary.key].detach() for boundary in program.sends}

    def run(self, unit: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the forward of a micro-batch or slice; return the stage's values by key, with their
        autograd graph."""
        microbatch, at = divmod(unit, len(self.variant.parts))
        self.program.draws.microbatch = microbatch
        if self.versions is not None:
            self.versions.use(FORWARD, microbatch)
        counts = self._counts[microbatch // self.variant.per_update]
        values = {**self._constants, **counts, **self._inputs.pop(unit), **received}
        outputs: dict[str, Tensor] = self.stage(values, self.variant.parts[at])
        return outputs

    def _kept(self, leaves: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> _InFlight:
        edges = {key: get_gradient_edge(o) for key, o in outputs.items() if o.requires_grad}
        return _InFlight(
            leaves, edges, None if self.program.loss is None else outputs[self.program.loss]
        )

    def backward(
        self, unit: int, gradients: Mapping[str, Tensor], *, last: bool
    ) -> dict[str, Tensor]:
        """Run the backward of a micro-batch or slice, number ``unit``; return the gradients of the
        values received, by key.

        ``gradients`` has, by key, the gradient of each value sent, summed over the stages that
        received it. ``last`` says that no other backward of this step follows.
        """
        if self.stage.weight_gradients is not None:
            received = self.backward_inputs(unit, gradients)
            self.backward_weights(unit, last=last)
            return received
        if self.versions is not None:
            self.versions.use(BACKWARD, unit)
        if self._is_updated:
            self.zero_grad()
        begin_backward(self.stage, last=last)
        self._reducer.begin_backward(last=last)
        return self._run_backward(unit, gradients)

    def backward_inputs(self, unit: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the part of ``backward`` that makes the gradients of received values, for which other
        stages wait. Weight gradients are left to ``backward_weights``. The stage must have been
        made with ``splits_backward``."""
        assert self.stage.weight_gradients is not None
        begin_input_backward(self.stage)
        self._reducer.begin_backward(last=False)
        with self.stage.weight_gradients.collecting(unit):
            return self._run_backward(unit, gradients)

    def backward_weights(self, unit: int, *, last: bool) -> None:
        """Compute a micro-batch's (or slice's) weight gradients, left by ``backward_inputs``."""
        assert self.stage.weight_gradients is not None
        begin_backward(self.stage, last=last)
        self._reducer.begin_backward(last=last, among=self.stage.deferred)
        self.stage.weight_gradients.run(unit, partial(reduce_finished, self.stage))
        finish_weight_backward(self.stage)

    def _run_backward(self, unit: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flight, variant = self._in_flight.pop(unit), self.variant
        sequence = self._sequences[unit // len(variant.parts)]
        gradients = {**gradients, **sequence.gradients}
        edges, grads = [], []
        for key, edge in flight.outputs.items():
            gradient = gradients.get(key)
            if key == self.program.loss:
                assert flight.loss is not None
                share = torch.full_like(flight.loss, 1.0 / variant.per_update) * self.loss_scale
                gradient = share if gradient is None else gradient + share
            if gradient is not None:
                edges.append(edge)
                grads.append(gradient)
        torch.autograd.backward(edges, grads)
        received = {
            key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for key, leaf in flight.received.items()
            if leaf.requires_grad
        }
        sequence.gradients = {
            each.made: received.pop(each.earlier)
            for each in variant.carried
            if each.earlier in received
        }
        return received

    def loss(self, microbatch: int) -> Tensor | None:
        """Return this rank's part of a micro-batch's loss, or None where another stage computes it.
        The loss is the sum of the parts of all ranks of the stage."""
        count = len(self.variant.parts)
        units = range(microbatch * count, (microbatch + 1) * count)
        parts = [self._losses[unit] for unit in units if unit in self._losses]
        return sum(parts[1:], parts[0]) if parts else None

    def loss_part(self, loss: Tensor) -> Tensor:
        """Return this rank's term of a loss: the loss, or zeros if another rank with the same loss
        counts it."""
        assert self.program.loss is not None
        layout = self.program.layouts[self.program.loss]
        counts = all(
            placement.kind == "P" or position == 0
            for placement, position in zip(layout, self.program.coordinates, strict=True)
        )
        return loss if counts else torch.zeros_like(loss)

    def mean_loss(self) -> Tensor | None:
        """Return this rank's part of the step's loss (mean over micro-batches), None without a
        loss."""
        losses = map(self.loss, range(self.num_microbatches))
        found = [loss for loss in losses if loss is not None]
        return torch.stack(found).mean() if found else None

    def begin_reduction(self) -> None:
        """Prepare the gradient sums for a step with one backward, which the script itself calls."""
        self._reducer.begin_backward(last=True)

    def finish_step(self) -> None:
        """Sum the gradients over ranks after the last backward, and set the masters' ``grad`` for
        the optimizer. Collective over the stage; if it ``defers`` its update, the sums are only
        started. Gradients of tied parameters are summed over stages later (``tied_parameters``)."""
        finish_sums(self.stage)
        if self.defers:
            self._reducer.launch_all()
        else:
            self._reducer.finish()
        if self.stage.sums is not None:
            self.stage.sums.finish()
        if not self._in_flight:
            self.stage.keep_buffers()
        if not self.defers:
            for parameter in self.parameters.values():
                if not (self.publishes_later and parameter.casts_gradient):
                    parameter.publish()

    def deferred_update(
        self, optimizer: Optimizer, tell: Callable[[], None]
    ) -> DeferredUpdate | None:
        """Return the deferred update of the stage's parameters, made block by block in the next
        step's forward; None if the plan sums gradients in the order of the backward."""
        self.stage.before_block = lambda block: None
        if not self._reducer.can_defer:
            return None
        deferred = DeferredUpdate(self._reducer, optimizer, tell=tell)
        self.stage.before_block = deferred.before_block
        return deferred

    def update(self, step: Callable[[], None]) -> None:
        """Run the optimizer's ``step`` before the end of a training step, after ``finish_step``.
        The gradients are kept until the next backward."""
        assert self.versions is not None
        self.versions.update(step)
        self._is_updated = True

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._is_updated = False
        self.stage.with_gradient.clear()
        for parameter in self.parameters.values():
            parameter.zero_grad()
