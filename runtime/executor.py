"""Running one stage on one rank: the forwards and backwards of a step's micro-batches.

In: the global batch, values received from other stages. Out: values and gradients to send,
the loss, and, after ``finish_step``, every parameter's gradient ready for the optimizer.
The order of the calls is the schedule's business; any order in which a micro-batch's
forward comes before its backward works, with any number in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..cost_model.actions import BACKWARD, FORWARD
from ..passes.random_ops import step_key
from ..planner.graph import Node
from ..planner.layout import local_region
from .data import batch_rows, local_part, step_inputs
from .device_queue import queue_of
from .gradients import GradientReducer
from .share_batch import ShareBatch
from .stage import StageModule
from .versions import WeightVersions
from .zero import begin_backward, begin_input_backward, begin_step, finish_weight_backward

if TYPE_CHECKING:
    from ..passes.stage_program import StageProgram


ReadConstants = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What a micro-batch keeps from its forward to its backward.

    Of what it made only the place in autograd's graph, so that what was sent is freed.
    """

    received: Mapping[str, Tensor]
    outputs: Mapping[str, GradientEdge]
    loss: Tensor | None


class StageExecutor:
    """One rank's part of a stage.

    A step is ``begin_step``, then ``forward`` and ``backward`` for each micro-batch (the
    last backward with ``last=True``), then ``finish_step``, then the optimizer's ``step``. A
    backward may come in two halves, ``backward_inputs`` and ``backward_weights``.
    """

    def __init__(
        self,
        stage: StageModule,
        *,
        num_microbatches: int,
        constants: Mapping[str, Tensor] | None = None,
        counted: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        per_update: int | None = None,
        versions: WeightVersions | None = None,
    ) -> None:
        """``constants`` are the whole values, by name, of the stage's constants and of the
        leaves of its counting; ``counted`` the latter's, where the stage has rows of its own.

        ``seed`` and ``steps_begun`` decide the forward's random numbers; a run that continues
        another one sets ``steps_begun`` to that one's. Asynchronous schedules update the
        weights after every ``per_update`` micro-batches, which ``stage`` is built for, and
        compute with ``versions`` of them. Gradients are those of the loss times ``loss_scale``;
        while ``keeps_gradients`` a step adds its own to those that are there, which no
        ``finish_step`` may have completed.
        """
        self.stage = stage
        self.program = stage.program
        self._part = 0
        self._planned_count = num_microbatches
        self.num_microbatches = num_microbatches
        self.per_update = self._planned_per_update = per_update or num_microbatches
        self.versions = versions
        self.seed = seed
        self.steps_begun = 0
        self.loss_scale: Tensor | float = 1.0
        self.keeps_gradients = False
        self.parameters = stage.by_name
        self._smaller: dict[int, tuple[int, ReadConstants]] = {}
        self.use_constants(constants or {}, counted)
        self._counts: list[Mapping[str, Tensor | None]] = []
        self._is_updated = False
        self._requires_grad = {
            boundary.key: boundary.spec.requires_grad for boundary in self.program.receives
        }
        self._reducer = GradientReducer(self.parameters.values(), stage.device_mesh)
        self._reducer.attach(self.parameters.values())
        self._batch: Mapping[str, Tensor] = {}
        self._queue = queue_of(stage.device)
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._losses: dict[int, Tensor] = {}

    def use_constants(
        self, constants: Mapping[str, Tensor], counted: Mapping[str, Tensor] | None = None
    ) -> None:
        """Compute with these values of the stage's constants from the next step on."""
        program = self.stage.programs[0]
        held = self._local_constants(constants, program)
        self._planned = (self._planned_count, held, _read_by(program, counted or constants))
        self._of_smaller: dict[int, tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]]] = {}
        self.use(self._part)

    def _local_constants(
        self, constants: Mapping[str, Tensor], program: StageProgram
    ) -> dict[str, Tensor]:
        mesh, coordinates = program.mesh, program.coordinates
        return {
            name: local_part(
                constants[name],
                local_region(held.spec.shape, held.layout, mesh, coordinates),
                held.spec.dtype,
                self.stage.device,
            )
            for name, held in program.constants.items()
        }

    def use(self, part: int) -> None:
        """Have the next step run program ``part`` of the stage, which it has for some lengths."""
        self._part, self.program = part, self.stage.programs[part]
        if part in self._smaller and part not in self._of_smaller:
            count, read = self._smaller[part]
            whole, counted = read()
            held = self._local_constants(whole, self.program)
            self._of_smaller[part] = count, held, _read_by(self.program, counted)
        count, constants, counted = self._of_smaller.get(part, self._planned)
        self.num_microbatches = count
        self.per_update = count if part in self._smaller else self._planned_per_update
        self._constants, self._whole = constants, counted

    def add_program(self, num_microbatches: int, read: ReadConstants) -> None:
        """The stage's last program runs a batch of ``num_microbatches``; ``use`` chooses it.

        ``read`` gives the values of its constants, as ``use_constants`` takes them.
        """
        self._smaller[len(self.stage.programs) - 1] = num_microbatches, read

    def begin_step(self, batch: Mapping[str, Tensor], *, forgets_gradients: bool = True) -> None:
        """Start a step on the global ``batch``; forget the gradients of the one before, unless
        they are kept."""
        self._batch = batch
        self._inputs.clear()  # before its memory is taken anew
        self._inputs = step_inputs(batch, self._unit_programs(), self.num_microbatches, self._queue)
        self.program.draws.key = step_key(self.seed, self.steps_begun)
        self.steps_begun += torch.is_grad_enabled()
        self._in_flight.clear()
        self._losses.clear()
        if self.stage.weight_gradients is not None:
            self.stage.weight_gradients.clear()
        self.stage.keep_buffers()
        self._counts = list(self._counted())
        if forgets_gradients and not self.keeps_gradients:
            self.zero_grad()
        if not self.keeps_gradients:
            begin_step(self.stage)
            for parameter in self.parameters.values():
                parameter.refresh()
        if self.versions is not None:
            self.versions.begin()

    def _unit_programs(self) -> Sequence[StageProgram]:
        """What runs a micro-batch: the programs of its slices, in order."""
        return (self.program,)

    def _counted(self) -> Iterator[Mapping[str, Tensor | None]]:
        """For each update, what its micro-batches must know of each other.

        None for a count that takes rows of other ranks: the loss sums it over them.
        """
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

        for first in range(0, self.num_microbatches, self.per_update):
            yield {} if counting is None else counting.evaluate(value_of, first)

    def _counted_inputs(self, nodes: Iterable[Node]) -> dict[tuple[str, int], Tensor]:
        """Every micro-batch's whole value of the inputs that the stage's counting reads."""
        count = self.num_microbatches
        units = [(node, m) for node in nodes if node.kind == "input" for m in range(count)]
        parts = []
        for node, microbatch in units:
            rows = batch_rows(self._batch, node.name, node.spec, microbatch, count)
            whole = tuple((0, size) for size in node.spec.shape)
            parts.append(local_part(rows, whole, node.spec.dtype))
        copies = self._queue.to_device(parts)
        return {(node.name, m): copy for (node, m), copy in zip(units, copies, strict=True)}

    def forward(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a micro-batch forward; returns the values that other stages get, by key.

        ``received`` has this rank's part of every value from other stages, by key.
        """
        leaves = self._leaves(received)
        return self._finished(microbatch, leaves, self.run(microbatch, leaves), self.program)

    def _leaves(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            key: value.detach().requires_grad_(self._requires_grad[key])
            for key, value in received.items()
        }

    def run(self, microbatch: int, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that leaves the stage in a micro-batch's forward, by key, with its graph."""
        self.program.draws.microbatch = microbatch
        if self.versions is not None:
            self.versions.use(FORWARD, microbatch)
        counts = self._counts[microbatch // self.per_update]
        values = {**self._constants, **counts, **self._inputs.pop(microbatch), **received}
        outputs: dict[str, Tensor] = self.stage(values, self._part)
        return outputs

    def _finished(
        self,
        microbatch: int,
        leaves: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        program: StageProgram,
    ) -> dict[str, Tensor]:
        """Keeps what the backward needs; returns what is sent."""
        if torch.is_grad_enabled():
            self._in_flight[microbatch] = self._kept(leaves, outputs)
        loss = program.loss
        if loss is not None:
            self._losses[microbatch] = self.loss_part(outputs[loss].detach())
        return {boundary.key: outputs[boundary.key].detach() for boundary in program.sends}

    def _kept(self, leaves: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> _InFlight:
        edges = {key: get_gradient_edge(o) for key, o in outputs.items() if o.requires_grad}
        return _InFlight(leaves, edges, None if self.program.loss is None
                         else outputs[self.program.loss])  # fmt: skip

    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], *, last: bool
    ) -> dict[str, Tensor]:
        """Run a micro-batch backward; returns the gradients of the received values, by key.

        ``gradients`` has, by key, the gradient of each value sent, summed over the stages
        that got it. ``last`` says that no other backward of this step follows.
        """
        if self.stage.weight_gradients is not None:
            received = self.backward_inputs(microbatch, gradients)
            self.backward_weights(microbatch, last=last)
            return received
        if self.versions is not None:
            self.versions.use(BACKWARD, microbatch)
        if self._is_updated:
            self.zero_grad()
        begin_backward(self.stage, last=last)
        self._reducer.begin_backward(last=last)
        return self._run_backward(microbatch, gradients)

    def backward_inputs(
        self, microbatch: int, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The half of ``backward`` that others wait for; ``backward_weights`` is the other.

        The stage must have been made with ``splits_backward``.
        """
        assert self.stage.weight_gradients is not None
        begin_input_backward(self.stage)
        self._reducer.begin_backward(last=False)
        with self.stage.weight_gradients.collecting(microbatch):
            return self._run_backward(microbatch, gradients)

    def backward_weights(self, microbatch: int, *, last: bool) -> None:
        """Compute the gradients of weights that ``backward_inputs`` has put off."""
        assert self.stage.weight_gradients is not None
        begin_backward(self.stage, last=last)
        self._reducer.begin_backward(last=last, among=self.stage.deferred)
        self.stage.weight_gradients.run(microbatch)
        finish_weight_backward(self.stage)

    def _run_backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flight = self._in_flight.pop(microbatch)
        edges, grads = [], []
        for key, edge in flight.outputs.items():
            gradient = gradients.get(key)
            if key == self.program.loss:
                assert flight.loss is not None
                share = torch.full_like(flight.loss, 1.0 / self.per_update) * self.loss_scale
                gradient = share if gradient is None else gradient + share
            if gradient is not None:
                edges.append(edge)
                grads.append(gradient)
        torch.autograd.backward(edges, grads)
        return {
            key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for key, leaf in flight.received.items()
            if leaf.requires_grad
        }

    def loss(self, microbatch: int) -> Tensor | None:
        """This rank's part of a micro-batch's loss, or None where another stage computes it.

        The parts of a stage's ranks add up to the loss.
        """
        return self._losses.get(microbatch)

    def loss_part(self, loss: Tensor) -> Tensor:
        """This rank's part of a loss that it holds: 0 where another rank counts for it."""
        assert self.program.loss is not None
        layout = self.program.layouts[self.program.loss]
        counts = all(
            placement.kind == "P" or position == 0
            for placement, position in zip(layout, self.program.coordinates, strict=True)
        )
        return loss if counts else torch.zeros_like(loss)

    def mean_loss(self) -> Tensor | None:
        """This rank's part of the step's loss: the mean over the micro-batches run so far."""
        if not self._losses:
            return None
        return torch.stack(list(self._losses.values())).mean()

    def begin_reduction(self) -> None:
        """Before a step's only backward, where autograd starts it: sums begin as it goes."""
        self._reducer.begin_backward(last=True)

    def finish_step(self) -> None:
        """After the last backward: complete the gradient sums and hand them to the optimizer.

        Collective over the stage. What several stages hold is yet to be summed over these
        (``runtime.tied``).
        """
        self._reducer.finish()
        if not self._in_flight:
            self.stage.keep_buffers()
        for parameter in self.parameters.values():
            parameter.publish()

    def update(self, step: Callable[[], None]) -> None:
        """Run the optimizer's ``step`` in the middle of a step, after ``finish_step``.

        The gradients stay until the next backward.
        """
        assert self.versions is not None
        self.versions.update(step)
        self._is_updated = True

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._is_updated = False
        for parameter in self.parameters.values():
            parameter.zero_grad()


def _read_by(program: StageProgram, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the counting of a stage reads of constants' whole values: no other stays whole."""
    leaves = program.counting.leaves if program.counting is not None else ()
    return {name: whole[name] for name in leaves}
