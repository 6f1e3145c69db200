"""A residual network whose first value is read again at the end, and a gate of it halfway.

So values jump over stages, as in U-ViT (Bao et al. 2023, arXiv:2209.12152).
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LongSkip(nn.Module):
    def __init__(self, n_layer: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(n_layer))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        start, middle = x, len(self.layers) // 2
        for index, layer in enumerate(self.layers):
            x = layer(x * torch.sigmoid(start) if index == middle else x)
        return F.mse_loss(self.last(x + start), y)


def build_model(n_layer: int = 8, width: int = 32) -> LongSkip:
    return LongSkip(n_layer, width)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(global_batch, 16), "y": torch.zeros(global_batch, 1)}
