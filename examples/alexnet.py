"""AlexNet in one column: convolutions that are all compute, and layers that are all weights.

The model of "One weird trick for parallelizing convolutional neural networks" (Krizhevsky,
2014, https://arxiv.org/abs/1404.5997). Its five convolutions hold 4 % of the weights and do 92 % of
the work; its three fully connected layers hold 96 % of the weights. So a plan may well split
the batch in the convolutions and the weights in what follows, on the same devices.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

CONVOLUTIONS = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (384, 3, 1, 1), (256, 3, 1, 1))
"""Channels, kernel, stride and padding of each."""

POOLED = (0, 1, 4)
"""The convolutions that a max pooling follows."""


class AlexNet(nn.Module):
    """(batch, 3, size, size) images and their classes to the mean cross entropy.

    ``width`` multiplies the channels, ``hidden`` is the width of the fully connected layers.
    """

    def __init__(self, *, size: int, width: float, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for index, (out, kernel, stride, padding) in enumerate(CONVOLUTIONS):
            out = max(8, int(out * width))
            layers += [nn.Conv2d(channels, out, kernel, stride, padding), nn.ReLU()]
            if index in POOLED:
                layers.append(nn.MaxPool2d(3, 2))
            channels = out
        self.features = nn.Sequential(*layers)
        side = self.features(torch.empty(1, 3, size, size, device="meta")).shape[-1]
        self.fc6 = nn.Linear(channels * side * side, hidden)
        self.fc7 = nn.Linear(hidden, hidden)
        self.fc8 = nn.Linear(hidden, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.features(images).flatten(1)  # (batch, channels · side · side)
        x = F.relu(self.fc6(x))
        x = F.relu(self.fc7(x))
        return F.cross_entropy(self.fc8(x), classes)


def build_model(
    size: int = 224, width: float = 1.0, hidden: int = 4096, classes: int = 1000
) -> nn.Module:
    """The model: 61.1 M parameters by default."""
    return AlexNet(size=size, width=width, hidden=hidden, classes=classes)


def example_batch(global_batch: int, size: int = 224) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    return {
        "images": torch.empty((global_batch, 3, size, size), device="meta"),
        "classes": torch.empty((global_batch,), dtype=torch.long, device="meta"),
    }


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum as the paper trains with it."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4)
