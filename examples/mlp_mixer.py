"""An MLP-Mixer that learns to tell shapes apart: layers that mix patches, then channels.

A model file for autoparallel (see ``gpt.py``). The images are drawn as they are needed.
After Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SIZE = 32
PATCH = 8
CLASSES = 4


class MLP(nn.Module):
    """A hidden layer of ``hidden`` units over the last dimension."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """(batch, patches, channels) to the same: an MLP over patches, one over channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.mix_patches = MLP(patches, 2 * channels)
        self.norm2 = nn.LayerNorm(channels)
        self.mix_channels = MLP(channels, 4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mix_channels(self.norm2(x))


class Mixer(nn.Module):
    """(batch, 3, size, size) images and their classes to the mean cross entropy."""

    def __init__(self, *, n_layer: int, channels: int, classes: int, smoothing: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, PATCH, stride=PATCH)
        patches = (SIZE // PATCH) ** 2
        self.layers = nn.ModuleList(Layer(patches, channels) for _ in range(n_layer))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, classes)
        self.smoothing = smoothing

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x).mean(dim=1))
        return F.cross_entropy(logits, classes, label_smoothing=self.smoothing)


def build_model(
    n_layer: int = 4, channels: int = 64, classes: int = CLASSES, smoothing: float = 0.1
) -> nn.Module:
    """The model: 0.2 M parameters by default."""
    return Mixer(n_layer=n_layer, channels=channels, classes=classes, smoothing=smoothing)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    return {
        "images": torch.empty(global_batch, 3, SIZE, SIZE, device="meta"),
        "classes": torch.empty(global_batch, dtype=torch.long, device="meta"),
    }


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def build_data(
    rank: int, world: int, *, global_batch: int = 32, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Stripes of four directions in noise, without end.

    Every rank draws the same images and keeps its share of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
    axis = torch.arange(SIZE) * 0.8
    while True:
        classes = torch.randint(CLASSES, (global_batch,), generator=generator)
        phase = 6.3 * torch.rand(global_batch, 1, 1, generator=generator)
        angle = (classes * torch.pi / CLASSES).view(-1, 1, 1)
        waves = torch.sin(axis * angle.cos() + axis[:, None] * angle.sin() + phase)
        noise = torch.randn(global_batch, 3, SIZE, SIZE, generator=generator)
        images = waves.unsqueeze(1) + 0.5 * noise
        yield {"images": images[rows], "classes": classes[rows]}
