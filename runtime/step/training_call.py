"""Training by a plan in a script's own loop: forwards whose backward autograd starts.

In: the executor of a plan with one stage, and global batches in the plan's shapes. Out: the loss,
or the model's outputs, with a graph. A backward through them adds this step's gradients, summed
over ranks and micro-batches, to the masters' ``grad``, as autograd does on one device: any number
of forwards and backwards may come between two steps of the optimizer.

A plan with one micro-batch keeps its graph until the backward comes. With several, each
micro-batch's backward follows its forward at once, so that no more is held than the plan says: the
loss then carries finished gradients, which its backward scales by the gradient it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...passes.ops.collectives import convert, local_tensor
from ...planner.errors import UsageError
from ...planner.graph.layout import INVARIANT, ROW_AXES, conversion_steps
from ..data.rank_batch import ShareBatch
from ..messages.communicator import ProcessCommunicator
from ..messages.pending_results import shared_sum
from ..messages.shared_objects import group_for
from ..messages.watchdog import BETWEEN_STEPS
from ..parameters.parameters import StageParameter
from ..parameters.zero import abandon_backward, begin_backward
from ..update.chosen_gradients import second_gradient

if TYPE_CHECKING:
    from .executor import StageExecutor


SAME_GRADIENT = 1e-3
"""Largest difference between ranks' gradients that rounding explains, relative to their norm."""


class TrainingCall:
    """Forwards of a model by a script's training loop, under a plan with one stage per rank;
    ``tell`` informs a watchdog."""

    def __init__(
        self, executor: StageExecutor, tell: Callable[..., None] = lambda *what: None
    ) -> None:
        self._executor = executor
        self._parameters: Sequence[StageParameter] = list(executor.parameters.values())
        self._tell = tell
        self._num_backwards = 0
        self._backward_id = -1
        self._is_running = False
        self._gradients = _GradientCheck()
        self._before: dict[str, tuple[Tensor | None, Any]] = {}

    @property
    def step_key(self) -> int:
        """The key from which the last forward's random numbers were drawn."""
        return self._executor.program.draws.key

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the forward; return the loss of the global batch, whose sum over ranks runs in the
        background."""
        if self._executor.num_microbatches > 1 and torch.is_grad_enabled():
            return self._loss_with_gradients(batch)
        values = [each[self._loss_key] for each in self._forwards(batch)]
        loss = torch.stack(values).mean() if len(values) > 1 else values[0]
        return self._summed(self._differentiable((loss,))[0])

    def _summed(self, loss: Tensor) -> Tensor:
        """Sum each rank's part of the loss; return it on every rank, with its autograd graph."""
        if self._executor.program.mesh.size == 1:
            return loss
        part = loss.clone()
        memory = part.detach()
        memory.copy_(self._executor.loss_part(memory))
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        return shared_sum(part, others=others, progress=self._tell)

    def outputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the forward; return the outputs of the model, under a plan with one micro-batch.

        They have the rows of ``batch``. If it is this rank's share of a global batch, gradients are
        averaged over ranks, as in ``DistributedDataParallel``: each rank's loss is of its own rows.

        Raises UsageError AP940 where the rows cannot be divided evenly.
        """
        (values,) = self._forwards(batch)
        program = self._executor.program
        if program.share is not None:
            raise UsageError(
                "AP940",
                "a batch cannot be divided evenly, and the model returns no loss",
                why="outputs with different numbers of samples are not gathered",
                fix="set drop_last=True, or pass loss_fn to parallelize and train with Step",
            )
        made = self._differentiable(tuple(values[key] for key in program.kept))
        is_share = isinstance(batch, ShareBatch)
        given = (
            self._as_given(key, value, is_share=is_share)
            for key, value in zip(program.kept, made, strict=True)
        )
        if not is_share and dist.get_world_size() > 1:
            given = (_with_backward(value, self._gradients.see) for value in given)
        # Scripts write to outputs in place; autograd refuses that for a custom Function's views.
        return tuple(value.clone() if value._is_view() else value for value in given)

    @property
    def _loss_key(self) -> str:
        loss = self._executor.program.loss
        assert loss is not None
        return loss

    def _as_given(self, key: str, value: Tensor, *, is_share: bool) -> Tensor:
        """Convert an output to the rows that the caller gave: all, or this rank's share."""
        program = self._executor.program
        layout = program.layouts[key]
        own = ROW_AXES if is_share else ()
        named = zip(program.mesh.axes, layout, strict=True)
        target = tuple(p if axis in own else INVARIANT for axis, p in named)
        steps = conversion_steps(layout, target)
        whole = convert(value, steps, ProcessCommunicator(self._executor.stage.device_mesh))
        num_shares = program.mesh.row_parts
        if not is_share or num_shares == 1:
            return whole
        return _with_backward(whole, lambda gradient: gradient / num_shares)

    def _forwards(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Run the forwards of all micro-batches; return the values that leave the stage, by key,
        for each. Under ``no_grad``, buffers get their new values at once."""
        self._forget_open_backwards()
        executor = self._executor
        executor.begin_step(self._joined(batch), forgets_gradients=False)
        values = []
        for microbatch in range(executor.num_microbatches):
            self._tell(f"computing the forward of micro-batch {microbatch}")
            values.append(executor.run(microbatch, {}))
        if not torch.is_grad_enabled():
            executor.stage.keep_buffers()
        self._tell(BETWEEN_STEPS)
        return values

    def _joined(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch; where an input requires a gradient, a backward sums it over the ranks
        that compute parts of it."""
        wanted = [name for name, value in batch.items() if value.requires_grad]
        if not wanted or not torch.is_grad_enabled():
            return batch
        communicator = ProcessCommunicator(self._executor.stage.device_mesh)
        held = self._executor.program.inputs
        joined = {}
        for name in wanted:
            layout = held[name].layout if name in held else ()
            axes = tuple(at for at, placement in enumerate(layout) if placement != INVARIANT)
            joined[name] = _with_backward(batch[name], partial(_sum_over, communicator, axes))
        return {**batch, **joined}

    def _differentiable(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``values``; a backward through any of them runs the whole step's backward."""
        if not any(value.requires_grad for value in values):
            return values
        return _around_backward(values, self._begin, self._end)

    def _begin(self) -> None:
        """Prepare the stage for a backward. It is called for each output that a backward goes
        through; only the first call of a backward has an effect."""
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._backward_id:
            self._forget_open_backwards()
        self._backward_id = backward_id
        self._num_backwards += 1
        if self._num_backwards > 1:
            return
        self._tell("computing the backward of all micro-batches")
        self._set_aside()
        begin_backward(self._executor.stage, last=True)
        self._executor.begin_reduction()

    def _end(self) -> None:
        self._num_backwards -= 1
        if self._num_backwards:
            return
        beside = {
            parameter.name: parameter.master.grad
            for parameter in self._parameters
            if parameter.leaf is not None and parameter.master.grad is not None
        }
        self._executor.finish_step()
        self._deliver(self._taken())
        self._add(beside)
        self._tell(BETWEEN_STEPS)

    def _add(self, beside: Mapping[str, Tensor]) -> None:
        """Add the gradients ``beside``, which autograd itself left on the masters during the
        backward (as of a weight penalty), to the masters' ``grad``."""
        with torch.no_grad():
            for parameter in self._parameters:
                gradient, master = beside.get(parameter.name), parameter.master
                if gradient is None:
                    continue
                whole = gradient
                if isinstance(master, DTensor):
                    whole = gradient.redistribute(placements=master.placements)  # type: ignore[attr-defined]
                master.grad = whole if master.grad is None else master.grad + whole

    def _forget_open_backwards(self) -> None:
        """Restore the gradients from before a backward that ended with an error."""
        if self._num_backwards:
            self._num_backwards = 0
            abandon_backward(self._executor.stage)
            self._restore()

    def _loss_with_gradients(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run forward and backward of every micro-batch; return the loss, whose backward delivers
        the gradients."""
        if self._is_running:
            raise UsageError(
                "AP935",
                "the model is called recursively",
                why="torch.utils.checkpoint around the whole model repeats its forward in the "
                "backwards of micro-batches, which run inside of the call",
                fix="remove the checkpointing; the plan recomputes what memory requires",
            )
        executor = self._executor
        self._forget_open_backwards()
        executor.begin_step(batch, forgets_gradients=False)
        self._set_aside()
        self._is_running = True
        try:
            for microbatch in range(executor.num_microbatches):
                self._tell(f"computing the forward of micro-batch {microbatch}")
                executor.forward(microbatch, {})
                self._tell(f"computing the backward of micro-batch {microbatch}")
                last = microbatch == executor.num_microbatches - 1
                with torch.autocast(executor.stage.device.type, enabled=False):
                    executor.backward(microbatch, {}, last=last)
            executor.finish_step()
        except BaseException:
            abandon_backward(executor.stage)
            self._restore()
            raise
        finally:
            self._is_running = False
        gradients = self._taken()
        self._tell(BETWEEN_STEPS)
        loss = executor.mean_loss()
        assert loss is not None
        if gradients:
            anchor = torch.zeros((), device=loss.device, requires_grad=True)
            loss = _Delivered.apply(anchor, loss, gradients, self._deliver)  # type: ignore[no-untyped-call]
        return self._summed(loss)

    def _set_aside(self) -> None:
        """Take the gradients off the masters, so that the next backward makes and sums only its
        own. Hooks on gradients are taken off too: ``fully_shard`` would call them before the sums
        are complete."""
        for parameter in self._parameters:
            master = parameter.master
            hooks = getattr(master, "_post_accumulate_grad_hooks", None)
            self._before[parameter.name] = master.grad, hooks
            if hooks:
                master._post_accumulate_grad_hooks = None  # type: ignore[assignment]
            parameter.zero_grad()

    def _restore(self) -> None:
        for parameter in self._parameters:
            parameter.zero_grad()
            gradient, hooks = self._before.get(parameter.name, (None, None))
            parameter.master.grad = gradient
            if hooks:
                parameter.master._post_accumulate_grad_hooks = hooks
        self._before.clear()

    def _taken(self) -> dict[str, Tensor]:
        """Return this step's gradients by name; restore the masters' earlier gradients."""
        taken = {
            parameter.name: parameter.master.grad
            for parameter in self._parameters
            if parameter.master.grad is not None
        }
        self._restore()
        return taken

    def _deliver(self, gradients: Mapping[str, Tensor]) -> None:
        """Add gradients to the masters' ``grad``, and call the hooks of the script on the
        masters."""
        summed: list[tuple[Tensor, Tensor]] = []
        delivered = []
        for parameter in self._parameters:
            master, gradient = parameter.master, gradients.get(parameter.name)
            if gradient is None or not master.requires_grad:
                continue
            for hook in (master._backward_hooks or {}).values():
                replaced = hook(gradient)
                gradient = gradient if replaced is None else replaced
            if master.grad is None:
                master.grad = gradient
            else:
                summed.append((local_tensor(master.grad), local_tensor(gradient)))
            delivered.append(master)
        if summed:
            with torch.no_grad():
                torch._foreach_add_([one for one, _ in summed], [other for _, other in summed])
        for master in delivered:
            for hook in (getattr(master, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(master)


class _GradientCheck:
    """Check that all ranks pass equal gradients for outputs, in backwards 1, 2, 4, 8 and so on."""

    def __init__(self) -> None:
        self._num_seen = 0

    def see(self, gradient: Tensor) -> Tensor:
        """Return an output's gradient unchanged; raise UsageError AP945 on every rank if ranks
        differ in it. Collective."""
        self._num_seen += 1
        if self._num_seen & (self._num_seen - 1):
            return gradient
        flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        values = flat.detach().double().flatten()
        places = torch.arange(values.numel(), dtype=values.dtype, device=values.device)
        own = torch.stack([values.norm(), (values * torch.cos(places)).sum()])
        every = own.new_empty((dist.get_world_size(), 2))
        dist.all_gather(list(every.unbind(0)), own, group=group_for(own))
        spread = (every - every[0]).abs().amax(0)
        if bool((spread > SAME_GRADIENT * every[:, 0].abs().amax()).any()):
            raise UsageError(
                "AP945",
                "the loss of the model's outputs differs between ranks",
                why="every rank has the outputs of the global batch, and computes the same loss "
                "from them; their gradients were compared",
                fix="use the same labels and random numbers on every rank, such as those of the "
                "global batch",
            )
        return gradient


class _WithBackward(torch.autograd.Function):
    """Identity whose backward applies a function to the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def _with_backward(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``tensor``; its backward replaces the gradient by ``change(gradient)``."""
    found: Tensor = _WithBackward.apply(tensor, change)  # type: ignore[no-untyped-call]
    return found


def _sum_over(communicator: ProcessCommunicator, axes: Sequence[int], gradient: Tensor) -> Tensor:
    """Sum a gradient over axes of the mesh."""
    if torch.is_grad_enabled():
        raise second_gradient()
    for axis in axes:
        gradient = communicator.all_reduce(gradient.contiguous(), axis)
    return gradient


class _Delivered(torch.autograd.Function):
    """Loss whose parameter gradients are already computed; its backward scales and adds them."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        loss: Tensor,
        gradients: dict[str, Tensor],
        deliver: Callable[[Mapping[str, Tensor]], None],
    ) -> Tensor:
        ctx.gradients, ctx.deliver = gradients, deliver
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UsageError(
                "AP934",
                "backward was called twice through one loss",
                why="the first backward has already used the gradients of its micro-batches",
                fix='add the losses up before one backward, or plan with parallel="microbatches=1"',
            )
        with torch.no_grad():
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for gradient in gradients.values():
                by_dtype.setdefault(gradient.dtype, []).append(local_tensor(gradient))
            for dtype, locals_ in by_dtype.items():
                torch._foreach_mul_(locals_, scales[0].to(dtype))
        ctx.deliver(gradients)
        return None, None, None, None


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, begin: Callable[[], None], end: Callable[[], None], tensor: Tensor
    ) -> Tensor:
        ctx.begin, ctx.end = begin, end
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        ctx.begin()
        end = ctx.end
        # Queued twice: fully_shard queues its own last work when the backward is under way.
        _at_end(lambda: _at_end(end))
        return None, None, gradients[0]


def _around_backward(
    tensors: tuple[Tensor, ...], begin: Callable[[], None], end: Callable[[], None]
) -> tuple[Tensor, ...]:
    """Return ``tensors`` so that a backward calls ``begin`` before it goes through any of them, and
    ``end`` when it is done, once per tensor that it goes through. Tensors not reached get no
    gradient."""
    return tuple(_Boundary.apply(begin, end, each) for each in tensors)  # type: ignore[no-untyped-call]


def _at_end(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running, by autograd's ``queue_callback``;
    it has no public name, but ``fully_shard`` and DDP use it too."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
