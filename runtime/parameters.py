"""A stage's parameters: what the optimizer, the checkpoint and the blocks each see of one.

Three views of a parameter of one rank:

- ``master``: an ``nn.Parameter`` in the master dtype: a DTensor, or a plain tensor in a stage
  that splits nothing. Optimizer, clipping and checkpoint work on it.
- the tensor the block computes with. Where ``fully_shard`` owns the parameter it makes that
  by all-gather (ZeRO 1-3). Elsewhere it is ``leaf``, a plain local tensor: the master's own
  memory, or, in mixed precision, a copy in the compute dtype.
- ``gradient``: the local gradient, summed over micro-batches in the master dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..passes.ops.collectives import local_tensor
from ..planner.graph import TensorSpec
from ..planner.layout import Layout, Region, local_shape
from ..planner.plan import Precision
from .mesh import DATA_AXIS
from .shards import is_fully_sharded, placements, shard_region

if TYPE_CHECKING:
    from ..passes.local.stage_program import ParameterProgram, StageProgram

COMPUTE_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
    "fp8": torch.bfloat16,
}  # fmt: skip
MASTER_DTYPES = COMPUTE_DTYPES | dict.fromkeys(("bf16", "fp16", "fp8"), torch.float32)


@dataclass(eq=False, slots=True)
class StageParameter:
    """One parameter on one rank.

    ``block`` is the position of the owning block, None for a shared one. ``region`` is the
    box of the whole parameter that this rank holds. ``reduce_axes`` are the mesh axes over
    which gradients are still to be summed after the last backward; the ``num_replicas`` ranks
    along them hold the same box.
    """

    name: str
    spec: TensorSpec
    layout: Layout
    block: int | None
    region: Region
    reduce_axes: tuple[int, ...]
    num_replicas: int
    fully_sharded: bool
    master: nn.Parameter
    leaf: nn.Parameter | None = None
    accumulated: Tensor | None = None
    has_copy: bool = field(init=False)
    """Whether blocks compute with a copy in another dtype than the master's."""
    local_bytes: int = field(init=False)
    """Of this rank's part of the master, and of its gradient."""

    def __post_init__(self) -> None:
        self.has_copy = self.leaf is not None and self.leaf.dtype != self.master.dtype
        sizes = (stop - start for start, stop in self.region)
        self.local_bytes = math.prod(sizes) * self.master.element_size()

    @property
    def local(self) -> Tensor:
        """This rank's part of the master, sharing its memory."""
        with torch.no_grad():
            return local_tensor(self.master).detach()

    @property
    def gradient(self) -> Tensor | None:
        """This rank's gradient, or None where no gradient has come."""
        if self.leaf is None:
            gradient = self.master.grad
            return None if gradient is None else local_tensor(gradient)
        return self.accumulated if self.has_copy else self.leaf.grad

    @gradient.setter
    def gradient(self, value: Tensor | None) -> None:
        if self.leaf is None:
            self.master.grad = None if value is None else self.like_master(value)
        elif self.has_copy:
            self.accumulated = value
        else:
            self.leaf.grad = value

    def like_master(self, local: Tensor) -> Tensor:
        """``local``, a tensor over this rank's region, as a DTensor if the master is one."""
        master = self.master
        if not isinstance(master, DTensor):
            return local
        if local.dtype == master.dtype and not local.requires_grad:
            # As fully_shard makes its gradients: ``from_local`` is an autograd function and takes
            # ten times as long, for every parameter in every step.
            made: DTensor = DTensor(local, master._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            return made
        return DTensor.from_local(
            local,
            master.device_mesh,
            master.placements,
            run_check=False,
            shape=master.shape,
            stride=master.stride(),
        )

    def publish(self) -> None:
        """Hand the gradient to the optimizer: as the master's ``grad``.

        It is laid out in memory like the master: torch's fused optimizers on the CPU take a
        gradient of other strides (a convolution's, channels last) element for element.
        """
        if self.leaf is not None:
            gradient = self.gradient
            if gradient is not None and gradient.stride() != self.leaf.stride():
                gradient = torch.empty_like(self.local, dtype=gradient.dtype).copy_(gradient)
            self.master.grad = None if gradient is None else self.like_master(gradient)

    def zero_grad(self) -> None:
        """Forget the gradient, in all views."""
        self.master.grad = None
        self.accumulated = None
        if self.leaf is not None:
            self.leaf.grad = None

    def refresh(self) -> None:
        """Bring the compute copy up to date after an optimizer step."""
        if self.has_copy:
            assert self.leaf is not None
            with torch.no_grad():
                self.leaf.copy_(self.local)


def make_parameter(
    name: str,
    declared: ParameterProgram,
    program: StageProgram,
    device_mesh: DeviceMesh,
    *,
    zero: int,
    precision: Precision,
    device: torch.device,
    is_plain: bool,
) -> StageParameter:
    """The parameter ``name``: empty memory on ``device``, or meta where ZeRO will shard it.

    ``is_plain``: the stage splits nothing, its parameters are ordinary tensors.
    """
    spec, layout, mesh = declared.spec, declared.layout, program.mesh
    sharded = is_fully_sharded(spec.shape, layout, mesh, zero)
    shape = local_shape(spec.shape, layout, mesh.shape)
    master: Tensor = torch.empty(
        shape, dtype=MASTER_DTYPES[precision], device="meta" if sharded else device
    )
    leaf = None
    if sharded:
        others = tuple(axis for axis in mesh.axes if axis != DATA_AXIS)
        if others:
            master = _dtensor(master, device_mesh[others], layout[1:])
    else:
        leaf = nn.Parameter(master.to(COMPUTE_DTYPES[precision]), requires_grad=spec.requires_grad)
        master = master if is_plain else _dtensor(master, device_mesh, layout)
    reduce_axes = tuple(
        axis
        for axis, size in enumerate(mesh.shape)
        if size > 1 and not layout[axis].is_shard and not (sharded and axis == 0)
    )
    return StageParameter(
        name=name,
        spec=spec,
        layout=layout,
        block=None,
        region=shard_region(spec.shape, layout, mesh, program.coordinates, zero),
        reduce_axes=reduce_axes,
        num_replicas=math.prod(mesh.shape[axis] for axis in reduce_axes),
        fully_sharded=sharded,
        master=nn.Parameter(master, requires_grad=spec.requires_grad),
        leaf=leaf,
    )


def _dtensor(local: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    return DTensor.from_local(local, mesh, placements(layout), run_check=False)


def attach_gradient_hook(
    parameter: StageParameter, ready: Callable[[StageParameter], None]
) -> None:
    """Call ``ready`` after each backward that gave ``parameter``'s leaf a gradient.

    In mixed precision the gradient is moved from the leaf into the master dtype first.
    """
    leaf = parameter.leaf
    if leaf is None or not leaf.requires_grad:
        return

    def hook(tensor: Tensor) -> None:
        if parameter.has_copy and tensor.grad is not None:
            gradient = tensor.grad.to(parameter.master.dtype)
            tensor.grad = None
            if parameter.accumulated is None:
                parameter.accumulated = gradient
            else:
                parameter.accumulated += gradient
        ready(parameter)

    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def get_by_path(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that holds the attribute at the dotted ``path``, and its last name."""
    prefix, _, name = path.rpartition(".")
    return module.get_submodule(prefix), name
