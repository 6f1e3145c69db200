"""Tensors on all ranks of a mesh at once: the meaning of layouts as code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...planner.graph.layout import INVARIANT, PARTIAL, Layout, Mesh

_FACTORS = {torch.float32: 1e4, torch.bfloat16: 6e8, torch.float16: 3e7}


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor with ``layout``: on each mesh axis S (sharded)
    stays S, R (replicated) becomes P (partial sum), P and I (invariant) become I."""
    return tuple(
        placement if placement.is_shard else PARTIAL if placement.kind == "R" else INVARIANT
        for placement in layout
    )


def distribute(tensor: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Return each rank's part of a whole ``tensor`` in ``layout``: shards for S, copies for R and
    I, random summands for P."""
    parts = [tensor]
    for placement, size in zip(layout, mesh.shape, strict=True):
        parts = [piece for part in parts for piece in _spread(part, str(placement), size)]
    return [part.clone() for part in parts]


def _spread(tensor: Tensor, placement: str, size: int) -> Sequence[Tensor]:
    if placement.startswith("S"):
        dim = int(placement[2:-1])
        assert tensor.shape[dim] % size == 0
        return tensor.chunk(size, dim)
    if placement == "P" and tensor.is_floating_point():
        summands = [torch.randn_like(tensor) for _ in range(size - 1)]
        return [*summands, tensor - sum(summands, torch.zeros_like(tensor))]
    return [tensor] * size


def collect(
    parts: Sequence[Tensor], layout: Layout, mesh: Mesh, *, of: str = "", tolerance: float = 1e-10
) -> Tensor:
    """Return the whole tensor from each rank's part in ``layout``; raise AssertionError if copies
    differ by more than ``tolerance``. ``of``: the tensor's name in errors."""
    held = list(parts)
    for axis in reversed(range(len(layout))):
        size = mesh.shape[axis]
        groups = [held[start : start + size] for start in range(0, len(held), size)]
        where = f"copies differ: {of} on axis {axis}"
        held = [_join(group, str(layout[axis]), where, tolerance) for group in groups]
    (whole,) = held
    return whole


def _join(group: Sequence[Tensor], placement: str, where: str, tolerance: float) -> Tensor:
    if placement.startswith("S"):
        return torch.cat(list(group), int(placement[2:-1]))
    if placement == "P":
        return torch.stack(list(group)).sum(0)
    for other in group[1:]:
        assert_close(other, group[0], where, tolerance)
    return group[0]


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Assert that tensors are equal up to ``tolerance`` relative to the largest expected magnitude.
    ``tolerance`` is for float64; it is raised 10,000-fold for float32 and more for 16-bit
    dtypes."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    )
    if not expected.numel():
        return
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{what}: differs"
        return
    tolerance *= _FACTORS.get(expected.dtype, 1.0)
    scale = max(float(expected.detach().abs().nan_to_num(0, 0, 0).max()), 1e-3)
    same = torch.isclose(actual, expected, rtol=0, atol=tolerance * scale, equal_nan=True)
    worst = float((actual - expected).detach().abs().nan_to_num(0).max())
    assert bool(same.all()), f"{what}: differs by {worst:.3g} of {scale:.3g}"
