"""Numbers that a model makes of the number of rows: those of the batch that runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_models import program_of
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run

ROWS, WIDTH = 12, 6

Loss = Callable[[Tensor, Tensor], Tensor]


def rooted(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y) / z.shape[0] ** 0.5).square().sum()


def one_less(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() / (len(z) - 1)


def by_branch(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() * (1.0 if z.shape[0] > 8 else 100.0)


def by_longer_branch(z: Tensor, y: Tensor) -> Tensor:
    if z.shape[0] > 8:
        z = z.tanh()
    return (z - y).square().mean()


def linspaced(z: Tensor, y: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, len(z), dtype=z.dtype)
    return ((z - y).square().mean(1) * weights).mean()


def mean_of_linspace(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean() * torch.linspace(1.0, 4.0, len(z), dtype=z.dtype).square().mean()


def numbered_tensor(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() / torch.tensor(float(len(z)), dtype=z.dtype)


def limited_index(z: Tensor, y: Tensor) -> Tensor:
    return (z - y)[:, : min(len(z), 4)].square().mean()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return (z - y.roll(len(y) // 4, 1)).square().mean()


def whole_slice(z: Tensor, y: Tensor) -> Tensor:
    return (z[: len(y)] - y).square().sum() / len(y)


def masked(z: Tensor, y: Tensor) -> Tensor:
    is_first = (torch.arange(len(z)) < 4).to(z.dtype)
    return ((z - y).square().mean(1) * is_first).sum() / is_first.sum()


def masked_by_many(z: Tensor, y: Tensor) -> Tensor:
    is_counted = (torch.arange(len(z)) < 10)[:, None].expand(-1, WIDTH)
    return (z - y).masked_fill(~is_counted, 0.0).square().mean()


def expanded(z: Tensor, y: Tensor) -> Tensor:
    scale = torch.full((z.shape[0], 1), 1.0 / z.shape[0], dtype=z.dtype)
    return ((z - y).square() * scale).sum()


LOSSES: dict[str, Loss] = {
    "sum / shape[0]": lambda z, y: (z - y).square().sum() / z.shape[0],
    "sum / len": lambda z, y: functional.l1_loss(z, y, reduction="sum") / len(y),
    "sum / numel": lambda z, y: (z - y).square().sum() / y.numel(),
    "sum * (1 / size(0))": lambda z, y: (z - y).square().sum() * (1 / z.size(0)),
    "max(1, n)": lambda z, y: functional.huber_loss(z, y, reduction="sum") / max(1, z.shape[0]),
    "batchmean": lambda z, y: functional.kl_div(
        z.log_softmax(1), y.softmax(1), reduction="batchmean"
    ),
    "log": lambda z, y: (z - y).square().mean() * math.log(z.shape[0]),
    "clamp": lambda z, y: (z - y).clamp(max=len(z) / 10).square().mean(),
    "power": lambda z, y: (z - y).square().mean() ** (1 + 1 / len(z)),
    "rows of a view": lambda z, y: (z - y).reshape(-1).square().sum() / (z.shape[0] * 3),
}
LOSSES |= {
    each.__name__: each
    for each in (
        rooted, one_less, by_branch, by_longer_branch, linspaced, mean_of_linspace,
        numbered_tensor, limited_index, shifted, whole_slice, masked, masked_by_many, expanded,
    )
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def captured(build: Callable[[], nn.Module], rows: int = ROWS) -> tuple[nn.Module, Any, Any]:
    """A model with its weights, its batch, and the program of that batch, in float64."""
    torch.manual_seed(0)
    model = build().double()
    batch = torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double()
    return model, batch, program_of(build, batch)


def loss_of(program: Any, model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> Tensor:
    """The loss of the program in ``count`` micro-batches, as executors add them up."""
    found = program.with_batch_size(len(batch[0]) // count)
    held = dict(model.named_parameters())
    constants = [node.name for node in found.graph if node.kind == "constant"]
    values = {**held, **evaluate(found, constants)}
    losses = []
    for parts in zip(*(part.chunk(count) for part in batch), strict=True):
        inputs = dict(zip(program.inputs, parts, strict=False))
        losses.append(run(found.graph, {**values, **inputs}))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", LOSSES)
def test_a_program_has_the_numbers_of_the_batch_that_runs(name: str) -> None:
    model, batch, program = captured(lambda: Model(LOSSES[name]))
    expected = model(*batch)
    assert torch.allclose(loss_of(program, model, batch, 1), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["sum / shape[0]", "batchmean", "clamp", "whole_slice"])
def test_micro_batches_divide_by_the_rows_of_the_whole_batch(name: str) -> None:
    model, batch, program = captured(lambda: Model(LOSSES[name]))
    assert program.graph.batch_dims
    sums = program.graph.accumulation.sums
    scale = 3 if sums else 1  # executors multiply sums by the number of micro-batches
    found = scale * loss_of(program, model, batch, 3)
    assert torch.allclose(found, model(*batch), rtol=1e-12)
