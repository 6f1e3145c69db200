"""Reduce-scatters of ``fully_shard`` that run in the background on a CPU.

In: the input and output of a reduce-scatter of a group of parameters, and their gradients from
earlier micro-batches. Out: gradients that have the sum of both, once the reduction is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...passes.ops.collectives import local_tensor
from ..messages.communicator import reduce_scatter
from .parameters import StageParameter


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A running reduce-scatter: its handle (None if it has ended), and its output and input. Its
    result is to be added to ``gradients``, from earlier micro-batches. Gradients of the parameters
    ``apart`` are summed in another dtype, or in host memory."""

    work: Any
    tensors: tuple[Tensor, Tensor]
    gradients: tuple[tuple[StageParameter, Tensor], ...]
    apart: tuple[StageParameter, ...]

    def take(self, parameter: StageParameter) -> None:
        """Add a parameter's gradient to its sum ``accumulated``, in the dtype of the
        reduce-scatter. ``fully_shard`` had cast the output too early, before its values had
        come."""
        gradient = parameter.held.grad
        if gradient is None:
            return
        view = local_tensor(gradient)
        values = torch.as_strided(self.tensors[0], view.shape, view.stride(), view.storage_offset())
        parameter.add_gradient(values)
        parameter.held.grad = None


class PendingReductions:
    """Holder of a stage's reduce-scatter that runs in the background on a CPU; at most one at a
    time."""

    def __init__(self) -> None:
        self._reduction: _Reduction | None = None

    def start(self, reduction: _Reduction) -> None:
        """Remember a started reduce-scatter; ``finish`` must have ended the previous reduction."""
        assert self._reduction is None
        self._reduction = reduction

    def finish(self) -> None:
        """Wait for the reduce-scatter, and add its result to the gradients from before it."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        if reduction.work is not None:
            reduction.work.wait()
        with torch.no_grad():
            for parameter in reduction.apart:
                reduction.take(parameter)
            for parameter, gradient in reduction.gradients:
                if parameter.gradient is not None:
                    local_tensor(gradient).add_(parameter.gradient)
                parameter.held.grad = gradient

    def forget(self) -> None:
        """Forget a reduce-scatter whose result is not needed, as after an error."""
        self._reduction = None


@dataclass(frozen=True, slots=True)
class AsyncReduceScatter:
    """A reduce-scatter for ``fully_shard`` that runs in the background on a CPU. The reduce-scatter
    built into ``fully_shard`` would make the host wait.

    ``fully_shard`` makes the gradients views of ``output_tensor``, or adds it to existing
    gradients. So ``__call__`` removes existing gradients until the values have come. If a gradient
    has hooks, which read it at once, the reduce-scatter is waited for.
    """

    pending: PendingReductions
    parameters: tuple[StageParameter, ...] = ()
    is_async: bool = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an input or output of a reduce-scatter, after the previous one's memory is
        released."""
        self.pending.finish()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Start the reduce-scatter (a sum) of ``input_tensor`` into ``output_tensor``."""
        held = [parameter.held for parameter in self.parameters]
        has_hooks = any(getattr(m, "_post_accumulate_grad_hooks", None) for m in held)
        apart = tuple(parameter for parameter in self.parameters if parameter.sums_apart)
        work = reduce_scatter(output_tensor, input_tensor, group=group, async_op=True)
        if has_hooks or not self.is_async:
            work.wait()
            if not apart:
                return
            work = None  # a second wait would undo the sum over groups of ranks
        gradients = tuple(
            (parameter, parameter.held.grad)
            for parameter in self.parameters
            if parameter.held.grad is not None
        )
        for parameter, _ in gradients:
            parameter.held.grad = None
        tensors = output_tensor, input_tensor
        self.pending.start(_Reduction(work, tensors, gradients, apart))
