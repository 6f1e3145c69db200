"""ZeRO 1-3 by ``torch.distributed.fsdp.fully_shard``, a shard group per block or per small blocks.

===== ================================== =============================================
 zero  parameters                         gradients
===== ================================== =============================================
 0     whole, unless their layout splits  all-reduced once per step (see ``gradients``)
 1     gathered once per step             summed locally, reduce-scattered once per step
 2     gathered once per step             reduce-scattered every micro-batch
 3     gathered for each forward and      reduce-scattered every micro-batch
       backward, then freed
===== ================================== =============================================

Optimizer states are sharded from ZeRO 1 on. Gradients are sums over ranks: the captured loss is
already the mean over the whole micro-batch.

A parameter is sharded over all ranks of the joint axes on which it is whole (``StageProgram.
shard_axes``): weights of experts over fewer ranks than the rest of their block. ``fully_shard`` has
one group of ranks per module, so a wrapper of the block gathers and reduces these. It is cut along
its first dimension, or a later one where that is shorter than the ranks are many (``shard_dim``).
With ``StagePlan.shard_degree`` it is sharded within groups: ``fully_shard`` has a mesh of two axes,
and sums the shards of all micro-batches over the groups in a step's last backward.

While a group of blocks computes, the next group's parameters are gathered, and the gradients
of the group before are reduce-scattered.

ZeRO 0, and a stage without joint axes, do not go through ``fully_shard``: it would hold a
second copy of every parameter and, on gloo, reduce in the middle of the backward while
nothing else runs.

Source: Rajbhandari et al. 2020, "ZeRO", section 5; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard

from ...passes.local.stage_program import shard_dim
from ...passes.ops.collectives import local_tensor
from ..messages.groups import mesh_along
from .parameters import HOST, Formats, StageParameter, on_host
from .reductions import AsyncReduceScatter, PendingReductions

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


SUMS_ALL = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether ``fully_shard`` can reduce zeros for missing gradients. It can add the shards of several
micro-batches only if all have the same parameters, and split backwards leave some gradients to the
next micro-batch. Older versions of torch sum over groups in every micro-batch instead."""


class GatheredBlock(nn.Module):
    """Wrapper of a block: ``fully_shard`` gathers with it the parameters that are sharded over
    other ranks than the parameters that it gathers with the block itself."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.block_name = block.block_name

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.block(*inputs)
        return outputs


@dataclass(frozen=True, slots=True)
class _Owner:
    """Parameters that are gathered and reduced together over the mesh axes ``axes``, in groups of
    ``shards`` ranks (0: all), and the ``modules`` whose forward needs them: blocks, wrappers of
    blocks, or the stage."""

    modules: list[nn.Module]
    axes: tuple[int, ...]
    shards: int
    parameters: list[StageParameter]


def apply_zero(stage: StageModule, formats: Formats) -> PendingReductions | None:
    """Shard the stage's parameters over their ``shard_axes`` by ``fully_shard``, in place, block by
    block. Afterwards each sharded parameter's master is its shard, in uninitialized memory on the
    stage's device. Returns None if no parameter is sharded."""
    sharded = [parameter for parameter in stage.by_name.values() if parameter.shard_axes]
    if not sharded:
        return None
    pending = PendingReductions()
    shard = partial(_shard, stage, formats, pending)
    units = []
    for unit in _units(sharded):
        among = [parameter for own in unit.values() for parameter in own]
        units.append([shard(owner, among) for owner in _owners(stage, among)])
    shared = [parameter for parameter in sharded if parameter.block is None]
    like = (shared or sharded)[0]
    shard(_Owner([stage], like.shard_axes, like.group_shards, shared), sharded)
    if ASYNC_ON_CPU if stage.device.type == "cpu" else not formats.moves_shards:
        _gather_ahead(stage)
    _set_prefetch(stage, units)
    held = {id(own.sharded_param): own for own in _sharded_parameters(stage)}
    for parameter in sharded:
        holder, attribute = stage.owner(parameter.name)
        _allocate(stage, parameter, held[id(getattr(holder, attribute))])
    return pending


def _shard(
    stage: StageModule,
    formats: Formats,
    pending: PendingReductions,
    owner: _Owner,
    among: Sequence[StageParameter],
) -> FSDPModule:
    """Apply ``fully_shard`` to an owner's modules, which hold other parameters ``among`` its own;
    return the first module, which stands for all of them."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if formats.compute != formats.master:
        policy = MixedPrecisionPolicy(
            param_dtype=formats.compute, reduce_dtype=formats.gradient, cast_forward_inputs=False
        )
    ignored = {each.leaf for each in stage.by_name.values() if each.leaf is not None}
    own = {parameter.name for parameter in owner.parameters}
    ignored |= {getattr(*stage.owner(each.name)) for each in among if each.name not in own}
    mesh = mesh_along(stage.device_mesh, owner.axes, owner.shards)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(local_tensor(parameter).shape, mesh.size(mesh.ndim - 1)))

    fully_shard(
        owner.modules,
        mesh=mesh,
        reshard_after_forward=stage.zero == 3,
        shard_placement_fn=placement,
        mp_policy=policy,
        ignored_params=ignored,
    )
    for block in owner.modules[:-1]:
        block.register_forward_hook(_gather_in_backward)
    wrapped = owner.modules[0]
    assert isinstance(wrapped, FSDPModule)
    wrapped.set_gradient_divide_factor(1.0)
    wrapped.set_force_sum_reduction_for_comms(True)
    if owner.shards and stage.weight_gradients is not None and SUMS_ALL:
        wrapped.set_reduce_scatter_unused_params(True)
    if stage.device.type == "cpu":
        # fully_shard sums the result over groups at once, so it must be complete
        is_async = ASYNC_ON_CPU and not owner.shards
        reduces = AsyncReduceScatter(pending, tuple(owner.parameters), is_async=is_async)
        wrapped.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]  # no public base
    return wrapped


def _owners(stage: StageModule, unit: Sequence[StageParameter]) -> list[_Owner]:
    """Return the owners of the parameters of a unit of blocks: one per set of axes, the first with
    the outermost modules. All but the last wrap the blocks."""
    found: list[_Owner] = []
    sets = {parameter.shard_axes for parameter in unit}
    for axes in sorted(sets, key=lambda each: (-len(each), each)):
        own = [parameter for parameter in unit if parameter.shard_axes == axes]
        positions = dict.fromkeys(each.block for each in own if each.block is not None)
        for position in positions if found else ():
            stage.calls[position] = GatheredBlock(stage.calls[position])
        modules = [stage.calls[position] for position in positions]
        found.append(_Owner(modules, axes, own[0].group_shards, own))
    return found[::-1]


def _gather_in_backward(block: nn.Module, args: Any, outputs: Any) -> None:
    """Hook after a block's forward: all-gather its group when a gradient of its outputs arrives.
    ``fully_shard`` does so only for a group's last block, which may get no gradient: it may be
    frozen, run under ``no_grad``, or not be used."""
    fully_shard.state(block)._register_pre_backward_hook(outputs)  # type: ignore[attr-defined]


def _gather_ahead(stage: StageModule) -> None:
    """Make the stage's all-gathers overlap with compute on a CPU; on a GPU, make them use less
    memory.

    Their buffers are then freed when parameters have been copied out of them; but parameters that
    come from host memory would be copied in the stream of the compute, not beside it. The method
    ``_set_unshard_async_op`` is private; without it a CPU waits for each all-gather where it
    begins.
    """
    set_async = getattr(stage, "_set_unshard_async_op", None)
    if set_async is not None:
        set_async(True)


def _units(sharded: Iterable[StageParameter]) -> list[dict[int, list[StageParameter]]]:
    """Group a stage's blocks into units, which are gathered together: each block alone, but
    consecutive small blocks (``GROUP_BYTES``, ``TINY_BYTES``) together. Return for each unit the
    parameters that ZeRO shards, by position of their block."""
    own: dict[int, list[StageParameter]] = {}
    for parameter in sharded:
        if parameter.block is not None:
            own.setdefault(parameter.block, []).append(parameter)
    units: list[dict[int, list[StageParameter]]] = []
    held = 0
    for position in sorted(own):
        size = sum(math.prod(p.spec.shape) * p.master.element_size() for p in own[position])
        if not units or (held + size > GROUP_BYTES and min(held, size) > TINY_BYTES):
            units.append({})
            held = 0
        units[-1][position] = own[position]
        held += size
    return units


def _set_prefetch(stage: StageModule, units: list[list[FSDPModule]]) -> None:
    """Make each unit of blocks prefetch (all-gather early) the next unit in the forward, the
    previous unit in the backward.

    ``units`` has the first module of each owner, the outermost first. By itself ``fully_shard``
    gathers a unit in the forward only when the host gets to it. Its guess for the backward follows
    the order of past forwards, which is wrong with several micro-batches in flight. A module that
    prefetches nothing names itself, which has no effect. The innermost module is the last of its
    unit in a forward, the outermost in a backward.
    """
    assert isinstance(stage, FSDPModule)
    for module in chain(*units):
        module.set_modules_to_backward_prefetch([module])
    in_order: list[list[FSDPModule]] = [*units[:1], *units, [stage]]
    for before, unit in pairwise(in_order):
        unit[0].set_modules_to_backward_prefetch(unit[:1] if before is unit else before[::-1])
    for unit, after in pairwise(units):
        unit[-1].set_modules_to_forward_prefetch(after)


class _HostShard(FSDPParam):
    """Parameter of ``fully_shard`` whose shard is gathered from host memory: ``padded``, in the
    stream in which a gathering begins. Its ``sharded_param`` on the device has no memory, and gets
    gradients only. FSDP2's CPUOffloadPolicy instead moves gradients too, where the host waits
    for each if it sums them over micro-batches."""

    padded: Tensor

    @staticmethod
    def part_of(own: FSDPParam) -> Tensor:
        """Make ``own`` gather its shard from host memory; return this rank's part of it."""
        own.__class__ = _HostShard
        assert isinstance(own, _HostShard)
        size, dim = own.padded_sharded_param_size, own.fsdp_placement.dim
        whole = torch.zeros(size, dtype=own.sharded_param.dtype, device=HOST)
        own.padded = whole.pin_memory() if own.device.type == "cuda" else whole
        return own.padded.narrow(dim, 0, own.sharded_size[dim] if own.sharded_size.numel() else 0)

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        return [self.padded.view(-1).to(self.device, non_blocking=True)]

    def reset_sharded_param(self) -> None:
        """Take the parameter that the module holds, as the method does for shards on the device."""
        held: Any = getattr(self._module_info.module, self._module_info.param_name)
        self.sharded_param, self._sharding_spec = held, held._spec


def _allocate(stage: StageModule, parameter: StageParameter, own: FSDPParam) -> None:
    """Give a sharded parameter, so far on meta, uninitialized memory for its shard on the device.
    It becomes the master or, if masters are in host memory, the device's copy of the master, which
    has no memory if it is gathered from host memory too. ``own``: ``fully_shard``'s object of it.
    """
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
        if parameter.formats.moves_shards and stage.zero == 3:
            parameter.host_shard = _HostShard.part_of(own)
            local_tensor(master.detach()).untyped_storage().resize_(0)
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


def _sharded_parameters(stage: nn.Module) -> Iterator[FSDPParam]:
    """Yield ``fully_shard``'s objects of a stage's parameters."""
    for group in _parameter_groups(stage):
        yield from group.fsdp_params


def partial_sums(stage: StageModule) -> Iterator[Tensor]:
    """Yield the sums of gradients over micro-batches that are still to be summed over groups."""
    for group in _parameter_groups(stage) if stage.is_fully_sharded else ():
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output


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
    sums_each = stage.weight_gradients is not None and not SUMS_ALL
    stage.set_requires_all_reduce(last or sums_each or stage.sums is not None)


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
    positions: dict[Any, int] = {
        block.block_name: position for position, block in enumerate(stage.blocks)
    }
    for group in reversed(list(_parameter_groups(stage))):
        is_block_group = stage not in group.modules
        names = (getattr(module, "block_name", "") for module in group.modules)
        is_finished = all(positions.get(name) not in remaining for name in names)
        if is_block_group and is_finished and group._training_state.name != "POST_BACKWARD":
            stage.with_gradient.update(_with_gradient(group))
            group.post_backward()


def finish_weight_backward(stage: StageModule) -> None:
    """Reduce gradients and free parameters after weight gradients computed outside of a backward.
    ``fully_shard`` does so itself at the end of a backward, by a private function;
    ``torch.distributed.pipelining`` calls it too."""
    if stage.is_fully_sharded:
        for group in _parameter_groups(stage):
            stage.with_gradient.update(_with_gradient(group))
        fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _with_gradient(group: Any) -> Iterator[int]:
    """Yield the ids of a group's sharded parameters whose gradients are still to be reduced."""
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        summed = getattr(parameter, "unsharded_accumulated_grad", None)
        if summed is not None or (whole is not None and whole.grad is not None):
            yield id(parameter.sharded_param)


def finish_sums(stage: StageModule) -> None:
    """Wait for the running reduction after a step's last backward. Drop zeros that are the sum for
    a parameter without gradients (``SUMS_ALL``)."""
    if stage.reductions is None:
        return
    stage.reductions.finish()
    assert not [*partial_sums(stage)], "all sums over groups are complete"
    for parameter in stage.by_name.values() if stage.weight_gradients is not None else ():
        if parameter.group_shards and id(parameter.held) not in stage.with_gradient:
            parameter.zero_grad()


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
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.15 has it in ``grad``
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
