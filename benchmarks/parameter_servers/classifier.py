"""A classifier of generated points, whose labels a fixed random network gives.

In: a seed and how many points. Out: points and labels that a small network can learn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

FEATURES, HIDDEN, CLASSES = 32, 64, 10
TEACHER_SEED = 7


class Classifier(nn.Module):
    """Rows of ``FEATURES`` numbers, and their classes, to the cross-entropy in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, points: Tensor, classes: Tensor) -> Tensor:
        for layer in self.layers:
            points = F.relu(layer(points))
        return F.cross_entropy(self.head(points), classes)


def build_model() -> nn.Module:
    """The model: 6.9 thousand parameters."""
    return Classifier()


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    return {
        "points": torch.empty((global_batch, FEATURES), device="meta"),
        "classes": torch.empty(global_batch, dtype=torch.long, device="meta"),
    }


def points_of(seed: int, count: int) -> dict[str, Tensor]:
    """Normal points, and for each the class for which the teacher's output is the largest."""
    teacher = torch.Generator().manual_seed(TEACHER_SEED)
    first = torch.randn(FEATURES, 16, generator=teacher) / FEATURES**0.5
    second = torch.randn(16, CLASSES, generator=teacher)
    points = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return {"points": points, "classes": (torch.tanh(2 * points @ first) @ second).argmax(1)}
