"""``x[mask]`` in a captured model gives the sums and means of the selected elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from capture_models import check_program, program_of
from torch import Tensor, nn

from autoparallel.planner.errors import CaptureError

ROWS, LENGTH, WIDTH = 6, 5, 4
Use = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.a, self.use = nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.use(self.a(x), target)


def labelled(y: Tensor, target: Tensor) -> Tensor:
    """The mask is written twice."""
    return F.cross_entropy(y[target != -1], target[target != -1], label_smoothing=0.1)


def summed(y: Tensor, target: Tensor) -> Tensor:
    mask = target > 0
    return F.cross_entropy(y[mask], target[mask], reduction="sum") / mask.sum()


def squared(y: Tensor, target: Tensor) -> Tensor:
    mask = target > 1
    return F.mse_loss(y[mask], y.detach().flip(-1)[mask]) + 2 * (y[mask] ** 2).mean()


def undefined(y: Tensor, target: Tensor) -> Tensor:
    """Elements that are left out have no logarithm, and no effect."""
    mask = y[..., 0] > 0
    return torch.log(y[..., 0][mask]).mean() + (1 / y[..., 0][mask].sqrt()).sum()


def weighed(y: Tensor, target: Tensor) -> Tensor:
    mask = target.ge(1)
    weight = torch.arange(ROWS * LENGTH, dtype=y.dtype).view(ROWS, LENGTH)
    each = F.smooth_l1_loss(y[mask], torch.zeros_like(y)[mask], reduction="none").mean(-1)
    return (each * weight[mask]).sum() / weight[mask].sum()


def by_row(y: Tensor, target: Tensor) -> Tensor:
    mask = target > 0
    rows = y[mask].log_softmax(-1)
    return (
        -(rows.exp() * rows).sum(1).mean() + y[mask].numel() * torch.masked_select(y, y > 0.2).sum()
    )


USES = (labelled, summed, squared, undefined, weighed, by_row)


@pytest.mark.parametrize("use", USES)
def test_a_selection_has_the_value_and_the_gradients_of_the_model(use: Use) -> None:
    batch = torch.randn(ROWS, LENGTH, WIDTH), torch.randint(-1, 4, (ROWS, LENGTH))
    check_program(lambda: Model(use), batch)


REFUSED: dict[str, Use] = {
    "different masks": lambda y, t: (y[..., 0][t > 0] * y[..., 1][t > 1]).sum(),
    "len": lambda y, t: y[t > 0].sum() / len(y[t > 0]),
    "sort": lambda y, t: y[..., 0][t > 0].sort().values[:2].sum(),
    "an index": lambda y, t: y[t > 0][0].sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_of_a_selection_are_refused_by_name(name: str) -> None:
    batch = torch.randn(ROWS, LENGTH, WIDTH), torch.randint(-1, 4, (ROWS, LENGTH))
    with pytest.raises(CaptureError) as refused:
        program_of(lambda: Model(REFUSED[name]), batch)
    assert refused.value.code == "AP202"
    assert name in refused.value.what
