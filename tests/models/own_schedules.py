"""A chain of layers, and pipeline schedules of its own that no built-in schedule has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoparallel


@autoparallel.register_schedule("warm-1f1b")
def warm(num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    """1F1B with one more forward in the warm-up of every rank."""
    for rank in range(num_ranks):
        forwards = [f"{rank}F{m}" for m in range(num_microbatches)]
        backwards = [f"{rank}B{m}" for m in range(num_microbatches)]
        warmup = min(num_ranks - rank, num_microbatches)
        row = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            row += [forward, backward]
        yield row + backwards[num_microbatches - warmup :]


@autoparallel.register_schedule("v-rounds", chunks=2, shape="v", split_backward=True)
def v_rounds(num_ranks: int, num_microbatches: int) -> Iterator[str]:
    """Rounds of micro-batches there and back, with the weight gradients of a round at its end."""
    if num_microbatches % 2:
        raise ValueError("a round has two micro-batches")
    for rank in range(num_ranks):
        there, back = rank, 2 * num_ranks - 1 - rank
        row = []
        for m in range(0, num_microbatches, 2):
            for kind in (f"{there}F", f"{back}F", f"{back}I", f"{there}I", f"{back}W", f"{there}W"):
                row += [f"{kind}{m}", f"{kind}{m + 1}"]
        yield " ".join(row)


@autoparallel.register_schedule("half-split", split_backward=True)
def half_split(num_ranks: int, num_microbatches: int) -> Iterator[list[str]]:
    """All forwards, then all backwards, of which even ranks split the last one only."""
    numbers = range(num_microbatches)
    for rank in range(num_ranks):
        row = [f"{rank}F{m}" for m in numbers]
        if rank % 2:
            yield row + [f"{rank}{kind}{m}" for kind in "IW" for m in numbers]
        else:
            last = num_microbatches - 1
            yield row + [f"{rank}B{m}" for m in numbers[:-1]] + [f"{rank}I{last}", f"{rank}W{last}"]


@autoparallel.register_schedule("looped", chunks=(1, 4))
def looped(num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[list[str]]:
    """All forwards, chunk by chunk, then all backwards, for any number of chunks."""
    for rank in range(num_ranks):
        stages = [rank + num_ranks * chunk for chunk in range(num_chunks)]
        numbers = range(num_microbatches)
        forwards = [f"{stage}F{m}" for stage in stages for m in numbers]
        yield forwards + [f"{stage}B{m}" for stage in reversed(stages) for m in numbers]


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class Net(nn.Module):
    """Layers and a head, with the loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.layers(x)), y)


def build_model(width: int = 32, depth: int = 8) -> nn.Module:
    """Build the net."""
    return Net(width, depth)


def example_batch(global_batch: int, seq: int | None = None) -> dict[str, Tensor]:
    """Make a batch of classes."""
    return {"x": torch.randn(global_batch, 32), "y": torch.arange(global_batch) % 4}
