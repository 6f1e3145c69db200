"""Measuring what ZeRO does with a block's states: gathering parameters, scattering gradients.

In: a mesh of the ranks that shard them, bytes. Out: what to time. It is ``fully_shard``
itself, with the copies into and out of its buffers that a bare all-gather or reduce-scatter
does not have. A gather is ``unshard`` then ``reshard``. A scatter is a backward of a small
product that keeps its parameters gathered, less the same backward of a plain module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..parameters.zero import AsyncReduceScatter, PendingReductions

NUM_TENSORS = 4
COLUMNS = 64
ITEM_BYTES = 4

Timed = tuple[Callable[[], object], Callable[[], object] | None, int]
"""What to time, what to take off (or None), and the bytes it really has."""


class _Block(nn.Module):
    """As many parameters as one block may have, used once each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(rows, COLUMNS, device=device)) for _ in range(NUM_TENSORS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x @ weight.t()).sum() for weight in self.weights]).sum()


def state_calls(kind: str, num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Timed:
    """For "zero_gather" or "zero_scatter" of about ``num_bytes``: what to time.

    ``mesh`` has one axis, whose ranks are the group.
    """
    row_bytes = NUM_TENSORS * COLUMNS * ITEM_BYTES * mesh.size()
    rows = max(1, num_bytes // row_bytes) * mesh.size()
    sharded = _sharded(_Block(rows, device), mesh, keeps=kind == "zero_scatter")
    whole_bytes = rows * COLUMNS * NUM_TENSORS * ITEM_BYTES
    if kind == "zero_gather":
        return _gather(sharded), None, whole_bytes
    return _step(sharded, device), _step(_Block(rows, device), device), whole_bytes


def _sharded(block: nn.Module, mesh: DeviceMesh, *, keeps: bool) -> FSDPModule:
    made = fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    made.set_reshard_after_backward(not keeps)
    if mesh.device_type == "cpu":
        reduces = AsyncReduceScatter(PendingReductions(), is_async=False)
        made.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]  # no public base
    return made


def _gather(block: FSDPModule) -> Callable[[], object]:
    def gather() -> None:
        block.unshard()
        block.reshard()

    return gather


def _step(block: nn.Module | FSDPModule, device: torch.device) -> Callable[[], object]:
    assert isinstance(block, nn.Module)
    x = torch.ones(1, COLUMNS, device=device)

    def step() -> None:
        block(x).backward()
        block.zero_grad()

    return step
