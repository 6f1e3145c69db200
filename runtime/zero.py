"""ZeRO 1-3 by ``torch.distributed.fsdp.fully_shard``, a shard group per block, or of small ones.

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

ZeRO 0, and a stage with no data axis, do not go through ``fully_shard``: it would hold a
second copy of every parameter and, on gloo, reduce in the middle of the backward while
nothing else runs.

Source: Rajbhandari et al. 2020, "ZeRO", section 5; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..planner.plan import Precision
from .mesh import DATA_AXIS
from .parameters import COMPUTE_DTYPES, MASTER_DTYPES, StageParameter

if TYPE_CHECKING:
    from .stage import StageModule


GROUP_BYTES = 2_000_000
"""So many bytes of small blocks are gathered and reduced together: each collective costs a
latency, and holding them for longer costs nothing beside a stage's activations."""
GROUP_RATIO = 1.1
"""A block that is small beside its neighbour is gathered with that."""


def apply_zero(stage: StageModule, precision: Precision) -> bool:
    """Shard the stage's parameters over axis ``dp``, in place, block by block.

    Afterwards each sharded parameter's master is its shard, in uninitialized memory on the
    stage's device. Returns whether any parameter is sharded.
    """
    sharded = [parameter for parameter in stage.by_name.values() if parameter.fully_sharded]
    if not sharded:
        return False
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    compute, master = COMPUTE_DTYPES[precision], MASTER_DTYPES[precision]
    if compute != master:
        policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False
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
    for wrapped in _fsdp_modules(stage):
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
    _set_prefetch(stage, [group[0] for group in groups])
    for parameter in sharded:
        _allocate(stage, parameter)
    return True


def _groups(stage: StageModule, sharded: Sequence[StageParameter]) -> list[list[nn.Module]]:
    """The blocks that are gathered together: one each, and small ones with those after them."""
    sizes: dict[int, int] = {}
    for parameter in sharded:
        if parameter.block is not None:
            size = math.prod(parameter.spec.shape) * parameter.master.element_size()
            sizes[parameter.block] = sizes.get(parameter.block, 0) + size
    groups: list[list[int]] = []
    for position in sorted(sizes):
        held = [sizes[other] for other in groups[-1]] if groups else []
        most = max(GROUP_BYTES, GROUP_RATIO * max(*held, sizes[position])) if held else 0
        if sum(held) + sizes[position] > most:
            groups.append([])
        groups[-1].append(position)
    return [[stage.blocks[position] for position in group] for group in groups]


def _set_prefetch(stage: StageModule, blocks: list[nn.Module]) -> None:
    """In the backward each block gathers the one before it.

    ``fully_shard``'s own guess follows the order of past forwards, which with several
    micro-batches in flight names a block of another micro-batch. The first block names
    itself, which does nothing.
    """
    previous = blocks[:1] + blocks[:-1]
    for block, before in zip(blocks, previous, strict=True):
        assert isinstance(block, FSDPModule)
        assert isinstance(before, FSDPModule)
        block.set_modules_to_backward_prefetch([before])
    assert isinstance(stage, FSDPModule)
    if blocks:
        last = blocks[-1]
        assert isinstance(last, FSDPModule)
        stage.set_modules_to_backward_prefetch([last])


def _allocate(stage: StageModule, parameter: StageParameter) -> None:
    """Give a sharded meta parameter memory and make it the master."""
    holder, attribute = stage.owner(parameter.name)
    meta = getattr(holder, attribute)
    assert isinstance(meta, DTensor)
    memory = torch.empty_like(meta, device=stage.device)
    master = nn.Parameter(memory, requires_grad=meta.requires_grad)
    holder.register_parameter(attribute, master)
    parameter.master = master


def _fsdp_modules(stage: nn.Module) -> Iterator[FSDPModule]:
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            yield module


def begin_step(stage: StageModule) -> None:
    """Before a step's first forward: drop gathered parameters that may be out of date."""
    if not stage.is_fully_sharded:
        return
    for module in _fsdp_modules(stage):
        module.reshard()


def begin_backward(stage: StageModule, *, last: bool) -> None:
    """Before the backward of a micro-batch: what is reduced and freed after it."""
    if not stage.is_fully_sharded:
        return
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last or stage.zero == 3)
    stage.set_requires_gradient_sync(last or stage.zero >= 2)


def begin_input_backward(stage: StageModule) -> None:
    """Before a backward that leaves gradients of weights for later: nothing is reduced yet."""
    if not stage.is_fully_sharded:
        return
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(stage.zero == 3)
    stage.set_requires_gradient_sync(False)


def finish_weight_backward(stage: StageModule) -> None:
    """After gradients of weights came outside of a backward of the stage: reduce and free.

    ``fully_shard`` does that when a backward through the module ends, and has no public name
    for it; ``torch.distributed.pipelining`` calls the same.
    """
    if stage.is_fully_sharded:
        fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def abandon_backward(stage: StageModule) -> None:
    """After a backward that an error ended: ``fully_shard`` waits for no end of it any more.

    It would take the next backward for a part of that one, and never hand over its gradients.
    What it has gathered of gradients is forgotten.
    """
    if not stage.is_fully_sharded:
        return
    begin_input_backward(stage)
    assert isinstance(stage, FSDPModule)
    stage.set_is_last_backward(True)
    finish_weight_backward(stage)
    for module in _fsdp_modules(stage):
        group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
