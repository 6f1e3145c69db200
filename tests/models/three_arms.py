"""Three arms of layers over the same stem, whose results are joined: a wide module, unrolled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 16
CLASSES = 10


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Arms(nn.Module):
    """``num_arms`` stacks of layers, of which the first has one layer more."""

    def __init__(self, num_arms: int, num_layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        depths = [num_layers + (arm == 0) for arm in range(num_arms)]
        self.arms = nn.ModuleList(
            nn.ModuleList(Layer(width) for _ in range(depth)) for depth in depths
        )
        self.head = nn.Linear(num_arms * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        made = []
        for arm in self.arms:
            y = x
            for layer in arm:  # type: ignore[attr-defined]
                y = layer(y)
            made.append(y)
        logits: Tensor = self.head(torch.cat(made, dim=-1))
        return logits


def build_model(num_arms: int = 3, num_layers: int = 2, width: int = WIDTH) -> nn.Module:
    return Arms(num_arms, num_layers, width)


def example_batch(global_batch: int, width: int = WIDTH) -> dict[str, Tensor]:
    return {
        "x": torch.randn(global_batch, width),
        "label": torch.randint(0, CLASSES, (global_batch,)),
    }


def loss_fn(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(logits, batch["label"])
