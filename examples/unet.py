"""A U-Net that learns to find shapes in noise: segmentation with skips and transposed
convolutions.

A model file for autoparallel (see ``gpt.py``). The images are drawn as they are needed; the
pixels at a shape's edge are labelled ``IGNORED``. After Ronneberger et al. 2015, "U-Net", with
group norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SIZE = 32
CLASSES = 3
IGNORED = -100


class Convolutions(nn.Module):
    """Two 3x3 convolutions with group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """(batch, 1, size, size) images and the class of each pixel to the mean cross entropy."""

    def __init__(self, *, depth: int, channels: int, classes: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.stem = Convolutions(1, channels)
        self.down = nn.ModuleList(Convolutions(wide, wider) for wide, wider in pairwise(widths))
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(wider, wide, 2, stride=2) for wide, wider in pairwise(widths)
        )
        self.up = nn.ModuleList(Convolutions(2 * wide, wide) for wide in widths[:-1])
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        levels = [self.stem(images)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for widen, up in zip(reversed(self.widen), reversed(self.up), strict=True):
            x = up(torch.cat([levels.pop(), widen(x)], dim=1))
        return F.cross_entropy(self.head(x), classes, ignore_index=IGNORED)


def build_model(depth: int = 2, channels: int = 16, classes: int = CLASSES) -> nn.Module:
    """The model: 0.1 M parameters by default; ``depth=4, channels=64`` is the paper's."""
    return UNet(depth=depth, channels=channels, classes=classes)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    shape = (global_batch, SIZE, SIZE)
    return {
        "images": torch.empty(global_batch, 1, SIZE, SIZE, device="meta"),
        "classes": torch.empty(shape, dtype=torch.long, device="meta"),
    }


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def build_data(
    rank: int, world: int, *, global_batch: int = 32, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """A disk and a square in noise, without end.

    Every rank draws the same images and keeps its share of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
    axis = torch.linspace(-1, 1, SIZE)
    while True:
        place = torch.rand(4, global_batch, 1, 1, generator=generator) - 0.5
        disk = ((axis - place[0]) ** 2 + (axis[:, None] - place[1]) ** 2).sqrt() - 0.4
        square = torch.maximum((axis - place[2]).abs(), (axis[:, None] - place[3]).abs()) - 0.3
        classes = torch.where(square < 0, 2, torch.where(disk < 0, 1, 0))
        noise = torch.randn(global_batch, SIZE, SIZE, generator=generator)
        images = (classes + 0.5 * noise).unsqueeze(1)
        edge = torch.minimum(disk.abs(), square.abs()) < 1 / SIZE
        classes = classes.masked_fill(edge, IGNORED)
        yield {"images": images[rows], "classes": classes[rows]}
