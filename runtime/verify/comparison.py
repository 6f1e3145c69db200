"""The comparison behind ``verify``: one device's tensors against the plan's, by name.

The measure is the largest absolute difference over the reference tensor's largest
magnitude. Tensors that are zero but for rounding (a key bias under softmax has a gradient
of exactly zero) would be noise over noise, so magnitudes below ``NOISE`` times the largest
of all compared tensors count as that much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...planner.layout import Region

NOISE = 1e-6
"""Tensors below this share of the largest magnitude are measured against that share."""

GRADIENT_NOISE = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Gradients below this share of the largest are rounding: a key bias under softmax, say."""

Quantity = Literal["loss", "gradient", "weight", "buffer"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One compared tensor. ``relative`` is the largest difference over its magnitude."""

    quantity: Quantity
    name: str
    block: str
    relative: float


@dataclass(frozen=True, slots=True)
class Verification:
    """What ``verify`` found. ``differences`` has every compared tensor in the model's order."""

    dtype: str
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def failures(self) -> tuple[Difference, ...]:
        """What differs by more than the tolerance (NaN included), first block first."""
        return tuple(d for d in self.differences if not d.relative <= self.tolerance)

    @property
    def passed(self) -> bool:
        return not self.failures

    def worst(self, quantity: Quantity) -> float:
        """The largest relative difference of one quantity (NaN if any is NaN)."""
        found = [d.relative for d in self.differences if d.quantity == quantity]
        return next((value for value in found if value != value), max(found, default=0.0))


Piece = tuple[Region, torch.Tensor]
"""A rank's part of a tensor, and the box of the whole tensor that it is."""


def compare(
    quantity: Quantity,
    reference: Mapping[str, torch.Tensor],
    actual: Mapping[str, Sequence[Piece]],
    blocks: Mapping[str, str],
    *,
    gradients: Mapping[str, torch.Tensor] | None = None,
) -> list[Difference]:
    """The difference of every reference tensor from the ranks' pieces of it.

    Every piece is compared, so copies that drifted apart are seen. A tensor with a part that
    no rank holds differs by infinity. Magnitudes are taken over all of ``reference`` for the
    noise floor; ``blocks`` tells the block of each name. ``gradients`` are those that moved
    the reference: where one is rounding noise (``GRADIENT_NOISE``) an adaptive optimizer's
    step is too, and is measured against the largest magnitude of all.
    """
    largest = max((_magnitude(tensor) for tensor in reference.values()), default=0.0)
    moving = max((_magnitude(tensor) for tensor in (gradients or {}).values()), default=0.0)
    differences = []
    for name, expected in reference.items():
        scale = torch.full_like(expected, max(_magnitude(expected), NOISE * largest))
        if gradients is not None and name in gradients and expected.dtype in GRADIENT_NOISE:
            noise = gradients[name].abs() <= GRADIENT_NOISE[expected.dtype] * moving
            scale[noise] = largest
        relative = _largest_error(expected, actual.get(name, ()), scale)
        differences.append(Difference(quantity, name, blocks.get(name, ""), relative))
    return differences


def _largest_error(expected: torch.Tensor, pieces: Sequence[Piece], scale: torch.Tensor) -> float:
    """The largest error over its scale; an error where the scale is zero counts as it is."""
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    covered = torch.zeros(expected.shape, dtype=torch.bool)
    errors = []
    for region, values in pieces:
        box = tuple(slice(start, stop) for start, stop in region)
        if values.shape != expected[box].shape:
            return float("inf")
        covered[box] = True
        errors.append(_magnitude((values.to(expected.dtype) - expected[box]) / scale[box]))
    if not bool(covered.all()):
        return float("inf")
    return next((error for error in errors if error != error), max(errors, default=0.0))


def _magnitude(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
