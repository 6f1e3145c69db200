"""A model with an op that no family of records has: tests add its record."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.logaddexp(self.left(x), self.right(x))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build_model(width: int = 16) -> nn.Module:
    return Model(width)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    return {"x": torch.empty((global_batch, 16), device="meta")}
