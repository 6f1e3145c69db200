"""Alpa's Wide-ResNet as a model file: a bottleneck ResNet whose inner channels are widened.

Sizes as in Alpa (Zheng et al. 2022, OSDI; ``benchmark/alpa/suite_wresnet.py`` and
``alpa/model/wide_resnet.py`` of github.com/alpa-projects/alpa): the 13-billion-parameter one has
101 layers (3, 4, 23 and 3 bottlenecks), 320 base channels, a width factor of 16, images of
224 x 224, float32, and a batch of 1,520.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

IMAGE_SIZE = 224
CLASSES = 1024
BLOCKS = (3, 4, 23, 3)


class Bottleneck(nn.Module):
    """1x1, 3x3 (``width`` times as wide) and 1x1 convolutions around a shortcut."""

    def __init__(self, inputs: int, filters: int, width: int, stride: int) -> None:
        super().__init__()
        inner, outputs = filters * width, filters * 4
        self.conv1 = nn.Conv2d(inputs, filters, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, inner, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.project: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.project = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.project(x))


class WideResNet(nn.Module):
    """(batch, 3, 224, 224) images and their classes to the mean cross entropy."""

    def __init__(self, channels: int, width: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        layers, inputs = [], channels
        for group, count in enumerate(blocks):
            for position in range(count):
                filters = channels * 2**group
                stride = 2 if group and not position else 1
                layers.append(Bottleneck(inputs, filters, width, stride))
                inputs = filters * 4
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), classes)


def build_model(
    channels: int = 320, width: int = 16, blocks: tuple[int, ...] = BLOCKS
) -> WideResNet:
    """The 13-billion-parameter one."""
    return WideResNet(channels, width, blocks)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """Images and classes without values."""
    size = (global_batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    return {
        "images": torch.empty(size, device="meta"),
        "classes": torch.empty(global_batch, dtype=torch.long, device="meta"),
    }
