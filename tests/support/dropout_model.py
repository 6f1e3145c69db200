"""A small model with dropout and data of its own, whose losses tell if a run goes on exactly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES, WIDTH = 16, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), y)


def build_model(num_blocks: int = 4) -> nn.Module:
    return Net(num_blocks)


def batch(rows: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "y": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
    return batch(global_batch, 0)


def build_data(
    rank: int, world: int, *, global_batch: int, seed: int, start: int
) -> Iterator[dict[str, Tensor]]:
    share = global_batch // world
    for number in count(start):
        whole = batch(global_batch, 1000 * seed + number)
        yield {name: each[rank * share :][:share] for name, each in whole.items()}


def build_optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)  # type: ignore[arg-type]


def build_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
