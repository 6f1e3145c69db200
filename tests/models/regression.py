"""A regression: a mean square over rows and outputs, and a small mean of another size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Regression(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        error = functional.mse_loss(self.head(h), y)
        return error + 0.1 * h.abs().mean()


def build_model(width: int = 16) -> nn.Module:
    return Regression(width)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    return {
        "x": torch.empty((global_batch, 6), device="meta"),
        "y": torch.empty((global_batch, 2), device="meta"),
    }
