"""A stage's parameters: the views of a parameter for optimizer, checkpoint and blocks, and its box.

Three views of a parameter of one rank:

- ``master``: an ``nn.Parameter`` in the master dtype: a DTensor, or a plain tensor in a stage
  that splits nothing. Optimizer, clipping and checkpoint work on it.
- the tensor the block computes with. Where ``fully_shard`` owns the parameter it makes that
  by all-gather (ZeRO 1-3). Elsewhere it is ``leaf``, a plain local tensor: the master's own
  memory, or, in mixed precision, a copy in the compute dtype.
- ``gradient``: the local gradient, summed over micro-batches in the master dtype, or in the
  compute dtype where the plan says so.

With the optimizer's states in host memory the master is there too, and ``fully_shard`` owns
``shard``, a copy of it in the compute dtype. Gradients may be there too (``sums``), and with the
parameters in host memory ``shard`` has no memory of its own: it is gathered from ``host_shard``. A
frozen parameter's master is the tensor that blocks compute with, on the device, in the compute
dtype or quantized (the bytes of ``passes.ops.nf4``).

A parameter is held split or whole on each mesh axis (its layout). If it is whole on joint axes
("dp", "ep", "cp") and the stage's ZeRO stage is at least 1, or 3 for a frozen parameter,
``fully_shard`` cuts the rank's part once more over all ranks of these axes, along dimension 0, as
``torch.chunk`` does: chunks of ``ceil(rows / ranks)`` rows,
the last ones shorter or empty. A rank's part is always one box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement

from ...cost_model.ops.memory import DEFAULT, StateOptions
from ...passes.local.stage_program import shard_dim
from ...passes.ops.collectives import local_tensor
from ...passes.ops.nf4 import pack_nf4, unpack_nf4
from ...planner.graph.graph import TensorSpec
from ...planner.graph.layout import Layout, Mesh, Region, local_region, local_shape, region_shape
from ...planner.plan import Precision
from ..messages.device_queue import queue_of
from ..messages.groups import mesh_beside
from .offloading import HostSums

if TYPE_CHECKING:
    from ...passes.local.stage_program import ParameterProgram, StageProgram


def shard_region(
    shape: Sequence[int],
    layout: Layout,
    mesh: Mesh,
    coordinates: Sequence[int],
    axes: Sequence[int],
    shards: int = 0,
) -> Region:
    """Return the index ranges (start, stop) of a parameter that the rank at ``coordinates`` of the
    mesh holds, if ZeRO shards it over ``axes`` (``passes.local.stage_program.shard_axes``), in
    groups of ``shards`` ranks (0: all of them).

    >>> from autoparallel.planner.graph.layout import REPLICATE, shard
    >>> mesh = Mesh(("dp", "tp"), (2, 2))
    >>> shard_region((10, 3), (REPLICATE, shard(0)), mesh, (1, 1), (0,))
    ((8, 10), (0, 3))
    """
    box = local_region(shape, layout, mesh, coordinates)
    if not axes:
        return box
    shards = shards or mesh.num_ranks(axes)
    dim = shard_dim(region_shape(box), shards)
    start, stop = box[dim]
    rows = -(-(stop - start) // shards)
    place = 0
    for axis in axes:
        place = place * mesh.shape[axis] + coordinates[axis]
    first = min(start + place % shards * rows, stop)
    return (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :])


def dtensor_placements(layout: Layout) -> tuple[DTensorPlacement, ...]:
    """Convert a parameter's layout to DTensor placements, one for each mesh axis."""
    return tuple(
        Shard(placement.dim) if placement.is_shard else Replicate() for placement in layout
    )


COMPUTE_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "fp8": torch.bfloat16,
}
MASTER_DTYPES = COMPUTE_DTYPES | dict.fromkeys(("bf16", "fp16", "fp8"), torch.float32)


HOST = torch.device("cpu")


def precision_of(dtype: torch.dtype) -> Precision | None:
    """Return the precision of plans that compute in ``dtype``, or None if there is no such
    precision.

    >>> precision_of(torch.bfloat16), precision_of(torch.int64)
    ('bf16', None)
    """
    return next((name for name, each in COMPUTE_DTYPES.items() if each == dtype), None)


@dataclass(frozen=True, slots=True)
class Formats:
    """Dtypes of a stage's parameters and gradients; ``offloads``: masters (the optimizer's
    parameters) are in host memory; ``moves_shards``: the shards of ``fully_shard`` are, too."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    offloads: bool = False
    moves_shards: bool = False

    @staticmethod
    def of(precision: Precision, states: StateOptions = DEFAULT) -> Formats:
        """Return the dtypes of trained parameters and their gradients, by a plan's options."""
        compute, master = COMPUTE_DTYPES[precision], MASTER_DTYPES[precision]
        gradient = compute if states.gradient_dtype == "compute" else master
        offloads = states.offload != "none"
        return Formats(compute, master, gradient, offloads, states.moves_parameters)

    def of_parameter(self, spec: TensorSpec) -> Formats:
        """Return the dtypes of one parameter: a frozen one has only the compute dtype."""
        if spec.is_complex:
            dtype = getattr(torch, spec.dtype)
            return Formats(dtype, dtype, dtype, self.offloads and spec.requires_grad)
        return self if spec.requires_grad else Formats(self.compute, self.compute, self.compute)


@dataclass(eq=False, slots=True)
class StageParameter:
    """One parameter of a stage on one rank.

    ``block`` is the position of the block that uses it, None if several do. ``region`` are the
    index ranges of the whole parameter that this rank holds. ZeRO shards it over the mesh axes
    ``shard_axes``, in groups of ``group_shards`` ranks (0: all are one group). ``reduce_axes`` are
    the axes over which gradients are still to be summed after the last backward. ``num_replicas``
    ranks hold the same part. ``master`` is the
    parameter that the optimizer updates. Blocks compute with ``leaf`` or, under ZeRO, with the
    all-gathered master or ``shard``, its copy on the device. ``accumulated`` is the sum of
    gradients in another dtype than blocks use, or in host memory: then ``sums`` makes it.
    ``host_shard`` is this rank's part of the shard if it is in host memory.
    """

    name: str
    spec: TensorSpec
    layout: Layout
    block: int | None
    region: Region
    shard_axes: tuple[int, ...]
    reduce_axes: tuple[int, ...]
    num_replicas: int
    master: nn.Parameter
    formats: Formats
    leaf: nn.Parameter | None = None
    shard: nn.Parameter | None = None
    group_shards: int = 0
    accumulated: Tensor | None = None
    sums: HostSums | None = None
    host_shard: Tensor | None = None
    has_copy: bool = field(init=False)
    """True if blocks compute with a copy of the master, in another dtype or on another device."""
    is_stale: bool = field(init=False)
    """True while the device's copy of a master in host memory is outdated."""
    local_bytes: int = field(init=False)
    """Bytes of this rank's part of the gradient."""

    def __post_init__(self) -> None:
        formats = self.formats
        is_other = formats.offloads or formats.compute != formats.master
        self.has_copy = self.leaf is not None and is_other
        self.is_stale = formats.offloads
        self.local_bytes = math.prod(region_shape(self.region)) * formats.gradient.itemsize

    @property
    def local(self) -> Tensor:
        """This rank's part of the master, as an ordinary tensor in the same memory."""
        with torch.no_grad():
            return local_tensor(self.master).detach()

    @property
    def value(self) -> Tensor:
        """This rank's part of the parameter as numbers: the master, or a quantized weight as linear
        layers read it."""
        if not self.spec.stored:
            return self.local
        return unpack_nf4(self.local, self.spec.shape, self.formats.compute)

    def fill(self, part: Tensor) -> None:
        """Copy ``part``, this rank's part, into the master and the tensor that blocks compute with,
        cast to their dtypes or quantized."""
        if self.spec.stored:
            part = pack_nf4(part.to(self.local.device, self.formats.compute))
        self.local.copy_(part)
        self.refresh()

    @property
    def held(self) -> nn.Parameter:
        """The tensor on the stage's device in whose ``grad`` a backward leaves the gradient:
        ``leaf``, or, under ZeRO, the shard of the parameter."""
        if self.leaf is not None:
            return self.leaf
        return self.master if self.shard is None else self.shard

    @property
    def sums_apart(self) -> bool:
        """Tell whether the gradients of micro-batches are summed in ``accumulated``, in another
        dtype than a backward leaves them in, or in host memory."""
        return self.sums is not None or self.held.dtype != self.formats.gradient

    @property
    def casts_gradient(self) -> bool:
        """Tell whether the optimizer gets the gradient as a copy, in another dtype or on the
        host."""
        return self.formats.offloads or self.formats.gradient != self.formats.master

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient, or None if there is no gradient yet."""
        if self.sums_apart:
            return self.accumulated
        gradient = self.held.grad
        return None if gradient is None else local_tensor(gradient)

    @gradient.setter
    def gradient(self, value: Tensor | None) -> None:
        held = self.held
        if self.sums_apart:
            self.accumulated = value
        elif self.leaf is None and value is not None:
            held.grad = like_tensor(held, value)
        else:
            held.grad = value

    def add_gradient(self, gradient: Tensor) -> None:
        """Add this rank's part of a gradient to ``accumulated``, the sum in the gradient dtype."""
        if self.sums is not None:
            gradient, total = gradient.to(self.formats.gradient), self.accumulated
            self.accumulated = self.sums.add(self.name, self.block, gradient, total)
        elif self.accumulated is None:
            self.accumulated = gradient.to(self.formats.gradient)
        else:
            self.accumulated += gradient

    def no_gradient(self) -> Tensor:
        """Return zeros in the shape, dtype and on the device of this rank's part of the
        gradient."""
        held = local_tensor(self.held.detach())
        return torch.zeros_like(held, dtype=self.formats.gradient)

    def like_master(self, local: Tensor) -> Tensor:
        """Wrap ``local``, a tensor of the shape of this rank's part, as a DTensor if the master is
        one."""
        return like_tensor(self.master, local)

    def publish(self, given: Tensor | None = None) -> None:
        """Set the master's ``grad`` to the gradient, in the master's dtype and on its device.

        Its strides are made the master's, since torch's fused optimizers on the CPU ignore strides
        and would pair wrong elements (of a convolution, channels last). ``given`` is a copy of the
        gradient, if the caller has made one.
        """
        if self.leaf is None and not self.casts_gradient:
            return
        gradient = self.gradient if given is None else given
        if gradient is not None and self.casts_gradient:
            local = self.local
            cast = torch.empty_like(local, requires_grad=False)
            gradient = cast.copy_(gradient)
        elif gradient is not None and gradient.stride() != self.local.stride():
            gradient = torch.empty_like(self.local, dtype=gradient.dtype).copy_(gradient)
        self.master.grad = None if gradient is None else self.like_master(gradient)

    def zero_grad(self) -> None:
        """Drop the gradient: of the master, of the tensor that blocks compute with, and the sum."""
        self.master.grad = None
        self.accumulated = None
        self.held.grad = None

    def refresh(self) -> None:
        """Copy the master into the tensor that blocks compute with, after an optimizer step."""
        self.is_stale = False
        if self.host_shard is not None:
            queue_of(local_tensor(self.held).device).mark().synchronize()  # it may be read
            self.host_shard.copy_(self.local)
        elif self.has_copy or self.shard is not None:
            with torch.no_grad():
                local_tensor(self.held).copy_(self.local)


def make_parameter(
    name: str,
    declared: ParameterProgram,
    program: StageProgram,
    device_mesh: DeviceMesh,
    *,
    zero: int,
    formats: Formats,
    device: torch.device,
    is_plain: bool,
) -> StageParameter:
    """Make the parameter ``name`` of a stage with memory on ``device``, or on meta if ZeRO will
    shard it. ``is_plain``: no parameter of the stage is split, so they are ordinary tensors, not
    DTensors."""
    spec, layout, mesh = declared.spec, declared.layout, program.mesh
    formats = formats.of_parameter(spec)
    axes = program.shard_axes(name, zero)
    sharding = program.sharding(axes)
    shards = sharding.num_shards if sharding.num_replicas > 1 else 0
    shape = local_shape(spec.shape, layout, mesh.shape)
    leaf = None
    if axes:
        dtype = formats.compute if formats.offloads else formats.master
        master: Tensor = torch.empty(shape, dtype=dtype, device="meta")
        others = [axis for axis in range(len(mesh.axes)) if axis not in axes]
        if others:
            beside = mesh_beside(device_mesh, axes, others, shards)
            master = _dtensor(master, beside, tuple(layout[axis] for axis in others))
    else:
        dtype = formats.master
        if spec.stored:
            shape, dtype = (spec.stored_bytes,), torch.uint8
        master = torch.empty(shape, dtype=dtype, device=device)
        copy = master if spec.stored else master.to(formats.compute)
        leaf = nn.Parameter(copy, requires_grad=spec.requires_grad)
        master = master if is_plain else _dtensor(master, device_mesh, layout)
        if formats.offloads:
            master = on_host(master, formats.master)
    reduce_axes = tuple(
        axis
        for axis, size in enumerate(mesh.shape)
        if size > 1 and not layout[axis].is_shard and axis not in axes
    )
    return StageParameter(
        name=name,
        spec=spec,
        layout=layout,
        block=None,
        region=shard_region(spec.shape, layout, mesh, program.coordinates, axes, shards),
        shard_axes=axes,
        reduce_axes=reduce_axes,
        num_replicas=mesh.num_ranks(reduce_axes) * sharding.num_replicas,
        master=nn.Parameter(master, requires_grad=spec.requires_grad),
        formats=formats,
        leaf=leaf,
        group_shards=shards,
    )


def on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized host tensor with the strides and placements of ``like``, pinned if
    a GPU will copy it."""
    local = local_tensor(like.detach())
    is_pinned = local.device.type == "cuda"
    memory = torch.empty_like(local, dtype=dtype, device=HOST, pin_memory=is_pinned)
    return like_tensor(like, memory) if isinstance(like, DTensor) else memory


def like_tensor(whole: Tensor, local: Tensor) -> Tensor:
    """Wrap ``local`` as a DTensor with the placements of ``whole``; if ``whole`` is no DTensor,
    return ``local``."""
    if not isinstance(whole, DTensor):
        return local
    if not local.requires_grad:
        # As fully_shard makes its gradients: ``from_local`` is an autograd function and takes
        # ten times as long, for every parameter in every step.
        spec = whole._spec
        if local.dtype != whole.dtype and spec.tensor_meta is not None:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        made: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made
    return DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _dtensor(local: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    return DTensor.from_local(local, mesh, dtensor_placements(layout), run_check=False)


def attach_gradient_hook(
    parameter: StageParameter, ready: Callable[[StageParameter], None]
) -> None:
    """Register a hook that calls ``ready`` after each backward in which ``parameter`` got a
    gradient. If gradients are summed in another dtype than autograd's, the hook first adds the
    gradient to ``accumulated`` and removes it from ``grad``."""
    leaf = parameter.leaf
    if leaf is None or not leaf.requires_grad:
        return

    def hook(tensor: Tensor) -> None:
        if parameter.sums_apart and tensor.grad is not None:
            gradient, tensor.grad = tensor.grad, None
            parameter.add_gradient(gradient.to(parameter.formats.gradient))
        ready(parameter)

    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def get_by_path(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the submodule that directly holds the attribute at dotted ``path``, and the
    attribute's name."""
    prefix, _, name = path.rpartition(".")
    return module.get_submodule(prefix), name
