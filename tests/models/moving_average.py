"""A model with batch norm, a moving average of its own, and a counter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class MovingAverage(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.up(inputs))
        y = x - self.average
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count += 1
        return functional.mse_loss(self.head(functional.relu(y)), targets)


def build_model() -> nn.Module:
    return MovingAverage()


def example_batch(global_batch: int) -> dict[str, Tensor]:
    return {
        "inputs": torch.empty(global_batch, 6, device="meta"),
        "targets": torch.empty(global_batch, 3, device="meta"),
    }
