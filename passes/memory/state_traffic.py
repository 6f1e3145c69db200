"""Allocations of ZeRO and of gradient sums while a stage runs, in the runtime's order.

In: a stage's parameters by block, the ZeRO stage, and the events of a micro-batch (a block's
forward or backward begins or ends). Out: the bytes of gathered parameters, of buffers and of
gradients, recorded in a ``LiveBytes``. The counterpart of ``runtime.parameters.zero`` and
``runtime.update.gradients``; for ZeRO 1 to 3 the order is that of FSDP2's parameter groups
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py): a block is gathered into a flat buffer
and copied out of it, the buffer lives until the next copy; in the backward the block before is
gathered meanwhile, gradients are copied into a flat buffer, which lives until the next block's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ...cost_model.ops.memory import PrecisionPolicy
from ...planner.graph.layout import Mesh, Placement
from ..local.stage_program import StageProgram, shard_dim
from .storages import LiveBytes

Library = Literal["gloo", "nccl"]

GATHERED, COMMUNICATION, GRADIENTS = "gathered", "communication", "gradients"
MAIN = "main_grad"
BUCKET_BYTES, FULL_BYTES = 32_000_000, 8_000_000
"""Sizes of gradient buckets in float32, as in ``planner.variants.gradient_buckets``: the most bytes
of a bucket, and the bytes from which on no further block is added to it."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Bytes of the parameters of a block that ZeRO shards, padded: ``whole`` in the compute dtype,
    ``reduced`` in the dtype in which gradients are summed, ``part`` for one rank's shard of
    ``reduced``."""

    whole: int
    reduced: int
    part: int


@dataclass
class Owner:
    """Parameters of one block, or parameters that several blocks share: ``sharded`` by ZeRO, and
    ``reduced``, whose gradients are all-reduced."""

    sharded: list[nn.Parameter]
    reduced: list[nn.Parameter]
    shards: Shards


def is_reduced(layout: Sequence[Placement], mesh: Mesh) -> bool:
    """Return whether gradients of parameters in this layout are summed over some mesh axis."""
    return any(
        size > 1 and not placement.is_shard
        for size, placement in zip(mesh.shape, layout, strict=True)
    )


class StateTraffic:
    """Simulation of the allocations that gathering a stage's parameters and reducing its gradients
    make during one micro-batch; they are recorded in ``live``. ``reduces``: the micro-batch is the
    step's last, so gradients are reduced. With ``library`` "gloo" a reduce-scatter receives as many
    bytes as it sends."""

    def __init__(
        self,
        program: StageProgram,
        live: LiveBytes,
        *,
        zero: int,
        policy: PrecisionPolicy,
        reduces: bool,
        library: Library = "gloo",
    ) -> None:
        self.program, self.live, self.zero, self.policy = program, live, zero, policy
        self.reduces, self.library = reduces, library
        self.owners: list[Owner] = []
        self.shared = Owner([], [], Shards(0, 0, 0))
        self.at = len(program.blocks)
        self.is_gathering = False
        self.bucket: list[nn.Parameter] = []

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the stage's parameters, by name, before the micro-batch; they are unsharded and in
        the compute dtype."""
        self.owners = [self._owner(block.parameters, parameters) for block in self.program.blocks]
        declared = self.program.parameters
        self.shared = self._owner([n for n in declared if declared[n].shared], parameters)

    def _owner(self, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> Owner:
        program, mesh, declared = self.program, self.program.mesh, self.program.parameters
        names = [name for name in names if name in parameters]
        axes = {name: program.shard_axes(name, self.zero) for name in names}
        own = {name: program.sharding(axes[name]).num_shards for name in names}
        own = {name: shards for name, shards in own.items() if shards > 1}
        padded = {name: padded_numel(parameters[name].shape, own[name]) for name in own}
        trained = [name for name in own if parameters[name].requires_grad]
        others = [
            name
            for name in names
            if name not in own
            and parameters[name].requires_grad
            and is_reduced(declared[name].layout, mesh)
        ]
        size = self.policy.gradient_bytes
        shards = Shards(
            sum(padded.values()) * self.policy.gathered_bytes,
            sum(padded[name] for name in trained) * size,
            sum(padded[name] // own[name] for name in trained) * size,
        )
        return Owner([parameters[n] for n in own], [parameters[n] for n in others], shards)

    def begin(self, *, is_first: bool) -> None:
        """Begin a micro-batch. If it is not the step's first, add the bytes of gathered parameters
        and gradients that exist already."""
        self.is_gathering = self.zero == 3 or (self.zero > 0 and is_first)
        everybody = [*self.owners, self.shared]
        for index, owner in enumerate(everybody):
            if self.zero in (1, 2) and not is_first:
                self.live.hold(f"whole {index}", owner.shards.whole, GATHERED)
            if self.zero >= 2 and not is_first:
                self.live.hold("new part", owner.shards.part, COMMUNICATION)
                received = owner.shards.reduced if self.library == "gloo" else 0
                self.live.hold("received", received, COMMUNICATION)
                self.live.hold("received", 0, COMMUNICATION)
                self.live.hold("new part", 0, COMMUNICATION)
                self.live.hold(f"part {index}", owner.shards.part, GRADIENTS)
        if self.is_gathering:
            self.live.hold(f"whole {len(self.owners)}", self.shared.shards.whole, GATHERED)

    def forward_begins(self, index: int) -> None:
        whole = self.owners[index].shards.whole
        if self.is_gathering and whole:
            self.live.hold("next flat", whole, COMMUNICATION)
            self.live.hold(f"whole {index}", whole, GATHERED)
            self.live.hold("next flat", 0, COMMUNICATION)
            self.live.hold("flat", whole, COMMUNICATION)

    def forward_ends(self, index: int) -> None:
        if self.zero == 3:
            self.live.hold(f"whole {index}", 0, GATHERED)

    def stage_forward_ends(self) -> None:
        self.live.hold("flat", 0, COMMUNICATION)
        if self.zero == 3:
            self.live.hold(f"whole {len(self.owners)}", 0, GATHERED)

    def stage_backward_begins(self) -> None:
        if self.zero == 3:
            self.live.hold(f"whole {len(self.owners)}", self.shared.shards.whole, GATHERED)

    def backward_begins(self, index: int) -> None:
        """Simulate the begin of the backward of block ``index``: reduce the gradients of the blocks
        after it, and gather the parameters of this block and the block before."""
        if index >= self.at:
            return
        for later in range(self.at - 1, index, -1):
            self._sum(self.owners[later], later)
        if self.at < len(self.owners):
            self._sum(self.owners[self.at], self.at)
        self.at = index
        if self.zero == 3:
            before = self.owners[index - 1].shards.whole if index else 0
            self.live.hold(f"whole {index}", self.owners[index].shards.whole, GATHERED)
            self.live.hold("flat", before, COMMUNICATION)

    def stage_backward_ends(self) -> None:
        for index in range(min(self.at, len(self.owners) - 1), -1, -1):
            self._sum(self.owners[index], index)
        self._end_bucket()
        self._sum(self.shared, len(self.owners))
        self._end_bucket()
        self.live.hold("reduce", 0, COMMUNICATION)
        self.live.hold("received", 0, COMMUNICATION)

    def _sum(self, owner: Owner, index: int) -> None:
        if owner.sharded:
            if self.zero == 3 or self.reduces:
                self.live.hold(f"whole {index}", 0, GATHERED)
            if self.zero >= 2 or self.reduces:
                self.live.hold("reduce", 0, COMMUNICATION)
                self.live.hold("received", 0, COMMUNICATION)
                self.live.hold("reduce", owner.shards.reduced, COMMUNICATION)
                for parameter in owner.sharded:
                    forget_gradient(parameter)
                self.live.hold("new part", owner.shards.part, COMMUNICATION)
                received = owner.shards.reduced if self.library == "gloo" else 0
                self.live.hold("received", received, COMMUNICATION)
                self.live.hold("new part", 0, COMMUNICATION)
                self.live.hold(f"part {index}", owner.shards.part, GRADIENTS)
        if self.reduces and owner.reduced:
            self._bucket(owner.reduced)

    def _bucket(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add gradients to the flat buckets that are all-reduced. A bucket that is not full also
        takes gradients of the next block."""
        for parameter in parameters:
            self.bucket.append(parameter)
            if self._bucket_bytes() > BUCKET_BYTES:
                self._end_bucket()
        if self._bucket_bytes() > FULL_BYTES:
            self._end_bucket()

    def _bucket_bytes(self) -> int:
        return sum(each.numel() for each in self.bucket) * self.policy.gradient_bytes

    def _end_bucket(self) -> None:
        self._flatten(self.bucket)
        self.bucket = []

    def _flatten(self, parameters: Sequence[nn.Parameter]) -> None:
        members = [each for each in parameters if gradient_of(each) is not None]
        if not members:
            return
        with torch.no_grad():
            gradients = [gradient_of(each) for each in members]
            flat = torch.cat([each.reshape(-1) for each in gradients if each is not None])
            self.live.mark((flat,), GRADIENTS)
            offset = 0
            for parameter in members:
                view = flat[offset : offset + parameter.numel()].view(parameter.shape)
                offset += parameter.numel()
                set_gradient(parameter, view)


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient; if it is summed in another dtype than the parameter's, it is
    kept outside of ``parameter.grad``. None if there is none."""
    found: Tensor | None = getattr(parameter, MAIN, None)
    return parameter.grad if found is None else found


def set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Set a parameter's gradient; the inverse of ``gradient_of``."""
    if gradient.dtype != parameter.dtype:
        setattr(parameter, MAIN, gradient)
    else:
        parameter.grad = gradient


def forget_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None
    if hasattr(parameter, MAIN):
        delattr(parameter, MAIN)


def padded_numel(shape: Sequence[int], shards: int) -> int:
    """Return the number of elements of a parameter whose sharded dimension is padded to a multiple
    of ``shards``.

    >>> padded_numel((3, 5), 2), padded_numel((), 1), padded_numel((1, 4), 2)
    (20, 1, 4)
    """
    if not shape:
        return 1
    rows = shape[shard_dim(shape, shards)]
    return prod(shape) // rows * -(-rows // shards) * shards
