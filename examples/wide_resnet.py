"""A Wide ResNet that learns to tell shapes apart: image classification with batch norm.

A model file for autoparallel (see ``gpt.py``). The images are drawn as they are needed, so
nothing is downloaded. After Zagoruyko and Komodakis 2016, "Wide Residual Networks": WRN-d-k
has d = 6 n + 4 convolutions and k times the usual channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SIZE = 32
CLASSES = 4


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU: (batch, channels, h, w)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        return self.shortcut(x) + y


class WideResNet(nn.Module):
    """(batch, 3, size, size) images and their classes to the mean cross entropy."""

    def __init__(self, *, blocks: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        channels, layers = 16, []
        for group in range(3):
            for position in range(blocks):
                stride = 2 if group and not position else 1
                layers.append(ResidualBlock(channels, 16 * width * 2**group, stride))
                channels = 16 * width * 2**group
        self.layers = nn.ModuleList(layers)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        x = F.adaptive_avg_pool2d(F.relu(self.norm(x)), 1).flatten(1)
        return F.cross_entropy(self.head(x), classes)


def build_model(blocks: int = 1, width: int = 2, classes: int = CLASSES) -> nn.Module:
    """WRN-10-2 by default, 0.3 M parameters; ``blocks=4, width=10`` is WRN-28-10."""
    return WideResNet(blocks=blocks, width=width, classes=classes)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    return {
        "images": torch.empty(global_batch, 3, SIZE, SIZE, device="meta"),
        "classes": torch.empty(global_batch, dtype=torch.long, device="meta"),
    }


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD as the paper trains with it."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)


def build_data(
    rank: int, world: int, *, global_batch: int = 32, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Noisy images of disks, squares, rings and crosses, without end.

    Every rank draws the same images and keeps its share of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
    while True:
        classes = torch.randint(CLASSES, (global_batch,), generator=generator)
        images = draw(classes, generator)
        yield {"images": images[rows], "classes": classes[rows]}


def draw(classes: Tensor, generator: torch.Generator) -> Tensor:
    """One image of each class, (rows, 3, size, size): the shape's place, size and color vary."""
    rows = len(classes)
    center, radius, color = (
        torch.rand(rows, count, 1, 1, generator=generator) for count in (2, 1, 3)
    )
    axis = torch.linspace(-1, 1, SIZE)
    x = (axis[None, None, :] - (center[:, 0] - 0.5)).expand(rows, SIZE, SIZE)
    y = (axis[None, :, None] - (center[:, 1] - 0.5)).expand(rows, SIZE, SIZE)
    r = 0.3 + 0.4 * radius[:, 0]
    distance, reach = (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs())
    arm = torch.minimum(x.abs(), y.abs())
    ring, cross = (distance < r) & (distance > 0.6 * r), (reach < r) & (arm < 0.3 * r)
    shapes = torch.stack([distance < r, reach < r, ring, cross])
    chosen = shapes[classes, torch.arange(rows)].unsqueeze(1)
    noise = 0.2 * torch.randn(rows, 3, SIZE, SIZE, generator=generator)
    return chosen * (0.5 + color) + noise
