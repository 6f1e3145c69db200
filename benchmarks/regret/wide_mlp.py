"""A chain of wide linear layers: many weights, little compute, small activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH = 768


class WideMLP(nn.Module):
    """Rows of ``WIDTH`` features to the loss of their regression."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            features = F.relu(layer(features))
        return F.mse_loss(features, targets)


def build_model(num_layers: int = 8) -> nn.Module:
    """The model: 4.7 M parameters by default."""
    return WideMLP(num_layers)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    names = ("features", "targets")
    return {name: torch.empty((global_batch, WIDTH), device="meta") for name in names}
