"""A U-Net that learns to take noise out of pictures: a denoising diffusion model.

A model file for autoparallel (see ``gpt.py``). The forward draws a time step for every picture and
the noise that the network has to find; both are the same under every plan. After Ho, Jain and
Abbeel 2020, "Denoising diffusion probabilistic models", without attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

SIZE = 32
NUM_STEPS = 1000


class Residual(nn.Module):
    """Two 3x3 convolutions with group norm and SiLU, told the time step, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        shortcut: Tensor = self.shortcut(x)
        return shortcut + self.conv2(F.silu(self.norm2(h)))


class Diffusion(nn.Module):
    """(batch, 1, size, size) pictures to the mean square error of the predicted noise."""

    def __init__(self, *, depth: int, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.channels = channels
        self.embed = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.SiLU(), nn.Linear(4 * channels, 4 * channels)
        )
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.down = nn.ModuleList(Residual(*pair, 4 * channels) for pair in pairwise(widths))
        self.middle = Residual(widths[-1], widths[-1], 4 * channels)
        self.up = nn.ModuleList(
            Residual(wide + wider, wide, 4 * channels) for wide, wider in pairwise(widths)
        )
        self.head = nn.Conv2d(channels, 1, 3, padding=1)
        betas = torch.linspace(1e-4, 0.02, NUM_STEPS)
        self.register_buffer("signal", torch.cumprod(1 - betas, 0))

    def forward(self, pictures: Tensor) -> Tensor:
        steps = torch.randint(0, NUM_STEPS, (pictures.shape[0],), device=pictures.device)
        noise = torch.randn_like(pictures)
        signal = self.get_buffer("signal")[steps][:, None, None, None]
        noisy = signal.sqrt() * pictures + (1 - signal).sqrt() * noise
        return F.mse_loss(self.denoise(noisy, steps), noise)

    def denoise(self, noisy: Tensor, steps: Tensor) -> Tensor:
        """The noise in (batch, 1, size, size) pictures at the time ``steps`` (batch)."""
        time = self.embed(positions(steps, self.channels).to(noisy.dtype))
        x, levels = self.stem(noisy), list[Tensor]()
        for down in self.down:
            levels.append(x)
            x = F.avg_pool2d(down(x, time), 2)
        x = self.middle(x, time)
        for up in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0)
            x = up(torch.cat([levels.pop(), x], dim=1), time)
        predicted: Tensor = self.head(x)
        return predicted


def positions(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of (batch) time steps: (batch, width)."""
    half = torch.arange(width // 2, device=steps.device)
    angles = steps[:, None] * torch.exp(-math.log(10_000) * half / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def build_model(depth: int = 2, channels: int = 16) -> nn.Module:
    """The model: 0.2 M parameters by default."""
    return Diffusion(depth=depth, channels=channels)


def example_batch(global_batch: int) -> dict[str, Tensor]:
    """What a step takes: global shapes and dtypes, no values."""
    return {"pictures": torch.empty(global_batch, 1, SIZE, SIZE, device="meta")}


def build_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def build_data(
    rank: int, world: int, *, global_batch: int = 32, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Disks of any size anywhere, without end.

    Every rank draws the same pictures and keeps its share of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = slice(rank * global_batch // world, (rank + 1) * global_batch // world)
    axis = torch.linspace(-1, 1, SIZE)
    while True:
        x, y, radius = torch.rand(3, global_batch, 1, 1, generator=generator) - 0.5
        distance = ((axis - x) ** 2 + (axis[:, None] - y) ** 2).sqrt()
        pictures = (distance < radius + 0.6).float() * 2 - 1
        yield {"pictures": pictures.unsqueeze(1)[rows]}
