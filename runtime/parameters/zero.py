"""ZeRO 1-3 by ``torch.distributed.fsdp.fully_shard``, a shard group per block or per small blocks.

===== ================================== =============================================
 zero  parameters                         gradients
===== ================================== =============================================
 0     whole on every rank of ``dp``      all-reduced once per step (see ``gradients``)
 1     gathered once per step             summed locally, reduce-scattered once per step
 2     gathered once per step             reduce-scattered every micro-batch
 3     gathered for each forward and      reduce-scattered every micro-batch
       backward, then freed
===== ================================== =============================================

Optimizer states are sharded from ZeRO 1 on. Gradients are sums over ``dp``: the captured
loss is already the mean over the whole micro-batch.

While a group of blocks computes, the next group's parameters are gathered, and the gradients
of the group before are reduce-scattered.

ZeRO 0, and a stage with no data axis, do not go through ``fully_shard``: it would hold a
second copy of every parameter and, on gloo, reduce in the middle of the backward while
nothing else runs.

Source: Rajbhandari et al. 2020, "ZeRO", section 5; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...passes.ops.collectives import local_tensor
from ..messages.communicator import reduce_scatter
from ..messages.groups import DATA_AXIS
from .parameters import Formats, StageParameter, on_host

if TYPE_CHECKING:
    from .stage import StageModule


GROUP_BYTES = 2_000_000
"""Size up to which small blocks are gathered and reduced together: each collective has a latency,
and keeping small blocks gathered for longer costs little memory beside activations."""
TINY_BYTES = 50_000
"""Size up to which a block (little more than norms) is gathered together with its neighbour, of any
size. A larger block is not: its compute would wait for the neighbour's all-gather."""
ASYNC_ON_CPU = True
"""Whether all-gathers and reduce-scatters overlap with compute on a CPU; on a GPU they always
do."""


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A running reduce-scatter: its handle, and its output and input. Its result is to be added to
    ``gradients``, from earlier micro-batches. Gradients of the parameters ``apart`` are summed in
    another dtype."""

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
        gradients = tuple(
            (parameter, parameter.held.grad)
            for parameter in self.parameters
            if parameter.held.grad is not None
        )
        for parameter, _ in gradients:
            parameter.held.grad = None
        tensors = output_tensor, input_tensor
        self.pending.start(_Reduction(work, tensors, gradients, apart))


def apply_zero(stage: StageModule, formats: Formats) -> PendingReductions | None:
    """Shard the stage's parameters over mesh axis ``dp`` by ``fully_shard``, in place, block by
    block. Afterwards each sharded parameter's master is its shard, in uninitialized memory on the
    stage's device. Returns None if no parameter is sharded."""
    sharded = [parameter for parameter in stage.by_name.values() if parameter.fully_sharded]
    if not sharded:
        return None
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if formats.compute != formats.master:
        policy = MixedPrecisionPolicy(
            param_dtype=formats.compute, reduce_dtype=formats.gradient, cast_forward_inputs=False
        )
    ignored = {parameter.leaf for parameter in stage.by_name.values() if parameter.leaf is not None}
    groups = _groups(stage, sharded)
    everything: list[list[nn.Module]] = [*groups, [stage]]
    for modules in everything:
        fully_shard(
            modules,
            mesh=stage.device_mesh[DATA_AXIS],
            reshard_after_forward=stage.zero == 3,
            mp_policy=policy,
            ignored_params=ignored,
        )
    for modules in groups:
        for block in modules[:-1]:
            block.register_forward_hook(_gather_in_backward)
    pending = PendingReductions()
    for modules in everything:
        wrapped = modules[0]
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
        if stage.device.type == "cpu":
            owned = tuple(p for p in sharded if _owner(stage, p) in modules)
            reduces = AsyncReduceScatter(pending, owned, is_async=ASYNC_ON_CPU)
            wrapped.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]  # no public base
    if stage.device.type != "cpu" or ASYNC_ON_CPU:
        _gather_ahead(stage)
    _set_prefetch(stage, [group[0] for group in groups])
    for parameter in sharded:
        _allocate(stage, parameter)
    return pending


def _owner(stage: StageModule, parameter: StageParameter) -> nn.Module:
    """Return the module with which ``fully_shard`` gathers a parameter: the block that uses it, or,
    if several blocks use it, the stage."""
    return stage if parameter.block is None else stage.blocks[parameter.block]


def _gather_in_backward(block: nn.Module, args: Any, outputs: Any) -> None:
    """Hook after a block's forward: all-gather its group when a gradient of its outputs arrives.
    ``fully_shard`` does so only for a group's last block, which may get no gradient: it may be
    frozen, run under ``no_grad``, or not be used."""
    fully_shard.state(block)._register_pre_backward_hook(outputs)  # type: ignore[attr-defined]


def _gather_ahead(stage: StageModule) -> None:
    """Make the stage's all-gathers overlap with compute on a CPU; on a GPU, make them use less
    memory.

    Their buffers are then freed when parameters have been copied out of them. The method
    ``_set_unshard_async_op`` is private; without it a CPU waits for each all-gather where it
    begins.
    """
    set_async = getattr(stage, "_set_unshard_async_op", None)
    if set_async is not None:
        set_async(True)


def _groups(stage: StageModule, sharded: Sequence[StageParameter]) -> list[list[nn.Module]]:
    """Group the stage's blocks into units of ``fully_shard``, which are all-gathered together: each
    block alone, but consecutive small blocks (``GROUP_BYTES``, ``TINY_BYTES``) together.
    ``sharded`` are the parameters that ZeRO shards."""
    sizes: dict[int, int] = {}
    for parameter in sharded:
        if parameter.block is not None:
            size = math.prod(parameter.spec.shape) * parameter.master.element_size()
            sizes[parameter.block] = sizes.get(parameter.block, 0) + size
    groups: list[list[int]] = []
    for position in sorted(sizes):
        held = sum(sizes[other] for other in groups[-1]) if groups else 0
        is_tiny = min(held, sizes[position]) <= TINY_BYTES
        if not groups or (held + sizes[position] > GROUP_BYTES and not is_tiny):
            groups.append([])
        groups[-1].append(position)
    return [[stage.blocks[position] for position in group] for group in groups]


def _set_prefetch(stage: StageModule, blocks: list[nn.Module]) -> None:
    """Make each group of blocks prefetch (all-gather early) the next group in the forward, the
    previous group in the backward.

    ``blocks`` has the first block of each group. By itself ``fully_shard`` gathers a group in the
    forward only when the host gets to it. Its guess for the backward follows the order of past
    forwards, which is wrong with several micro-batches in flight. The first block has no previous
    group and names itself, which has no effect.
    """
    for before, block in pairwise([*blocks[:1], *blocks, stage]):
        assert isinstance(before, FSDPModule)
        assert isinstance(block, FSDPModule)
        block.set_modules_to_backward_prefetch([before])
    for block, after in pairwise(blocks):
        assert isinstance(block, FSDPModule)
        assert isinstance(after, FSDPModule)
        block.set_modules_to_forward_prefetch([after])


def _allocate(stage: StageModule, parameter: StageParameter) -> None:
    """Give a sharded parameter, so far on meta, uninitialized memory for its shard on the device.
    It becomes the master or, if masters are in host memory, the device's copy of the master."""
    holder, attribute = stage.owner(parameter.name)
    meta = getattr(holder, attribute)
    assert isinstance(meta, DTensor)
    memory = torch.empty_like(meta, device=stage.device)
    master = nn.Parameter(memory, requires_grad=meta.requires_grad)
    holder.register_parameter(attribute, master)
    if parameter.formats.offloads:
        parameter.shard = master
        held = on_host(master, parameter.formats.master)
        parameter.master = nn.Parameter(held, requires_grad=meta.requires_grad)
    else:
        parameter.master = master
    if parameter.sums_apart and meta.requires_grad and stage.device.type != "cpu":
        master.register_post_accumulate_grad_hook(partial(_take, parameter))  # type: ignore[no-untyped-call]


def _take(parameter: StageParameter, held: Tensor) -> None:
    """Move a gradient that ``fully_shard`` has reduced from ``held.grad`` to the parameter's sum
    ``accumulated``, which has another dtype. It is a hook after the gradient's accumulation."""
    if held.grad is not None:
        parameter.add_gradient(local_tensor(held.grad))
        held.grad = None


def _parameter_groups(stage: nn.Module) -> Iterator[Any]:
    """Yield ``fully_shard``'s parameter groups of a stage; the group of the stage module itself is
    first."""
    states = dict.fromkeys(
        fully_shard.state(module)  # type: ignore[attr-defined]
        for module in stage.modules()
        if isinstance(module, FSDPModule)
    )
    for state in states:
        if state._fsdp_param_group is not None:
            yield state._fsdp_param_group


def gathered_copies(stage: StageModule) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield for each sharded parameter its gathered tensor (without memory while not gathered), and
    its whole gradient if that is summed but not yet reduced, else None."""
    for group in _parameter_groups(stage) if stage.is_fully_sharded else ():
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                summed = parameter.unsharded_accumulated_grad
                whole = parameter._unsharded_param
                yield whole, whole.grad if summed is None else summed


def begin_step(stage: StageModule) -> None:
    """Free gathered parameters, which may be outdated, before a step's first forward. Gathers that
    an interrupted forward has begun are waited for first."""
    if not stage.is_fully_sharded:
        return
    for group in _parameter_groups(stage):
        group.wait_for_unshard()
        group.reshard()


def begin_backward(stage: StageModule, *, last: bool) -> None:
    """Tell ``fully_shard`` before a micro-batch's backward whether it reduces gradients and frees
    gathered parameters, as the ZeRO stage requires. ``last``: it is the step's last backward."""
    if not stage.is_fully_sharded:
        return
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last or stage.zero == 3)
    stage.set_requires_gradient_sync(last or stage.zero >= 2)


def begin_input_backward(stage: StageModule) -> None:
    """Tell ``fully_shard`` to reduce no gradients in the next backward: it computes gradients of
    activations alone, and weight gradients are computed later."""
    if not stage.is_fully_sharded:
        return
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(stage.zero == 3)
    stage.set_requires_gradient_sync(False)


def reduce_finished(stage: StageModule, remaining: Container[int]) -> None:
    """Reduce the gradients of the groups whose blocks' weight gradients are all computed.
    ``remaining`` are the positions of the blocks whose weight gradients are still to be
    computed."""
    if not stage.is_fully_sharded:
        return
    positions = {block: position for position, block in enumerate(stage.blocks)}
    for group in reversed(list(_parameter_groups(stage))):
        is_block_group = stage not in group.modules
        is_finished = all(positions.get(m) not in remaining for m in group.modules)
        if is_block_group and is_finished and group._training_state.name != "POST_BACKWARD":
            group.post_backward()


def finish_weight_backward(stage: StageModule) -> None:
    """Reduce gradients and free parameters after weight gradients computed outside of a backward.
    ``fully_shard`` does so itself at the end of a backward, by a private function;
    ``torch.distributed.pipelining`` calls it too."""
    if stage.is_fully_sharded:
        fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def abandon_backward(stage: StageModule) -> None:
    """Make ``fully_shard`` forget a backward that an error ended. Otherwise it would treat the next
    backward as a part of the failed one and never deliver gradients. Gradients accumulated so far
    are dropped."""
    if not stage.is_fully_sharded:
        return
    begin_input_backward(stage)
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(True)
    finish_weight_backward(stage)
    assert stage.reductions is not None
    stage.reductions.forget()
    for group in _parameter_groups(stage):
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.15 has it in ``grad``
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
