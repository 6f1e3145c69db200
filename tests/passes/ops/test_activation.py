"""Functions between the two products of an expert: as a text, and computed from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoparallel.passes.ops.activation import activate, describe

ROWS = torch.tensor([[0.5, -1.0, 2.0, -0.25], [1.0, 0.0, -2.0, 3.0]])


def gated(rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2], rows[..., 1::2]
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@pytest.mark.parametrize(
    "function",
    [
        gated,
        torch.relu,
        nn.functional.silu,
        lambda rows: rows.to(torch.float64) * 2,
        lambda rows: rows.clamp(min=None, max=1.5),
        lambda rows: rows.permute(*[1, 0]),
        lambda rows: rows.transpose(0, 1)[1:, ...].sum(dim=(0, 1)),
        lambda rows: torch.chunk(rows, 2, dim=-1)[0],
    ],
)
def test_a_function_computes_the_same_from_its_text(function: Callable[[Tensor], Tensor]) -> None:
    text = describe(nn.Module(), function)
    assert text is not None
    assert torch.equal(activate(text, ROWS), function(ROWS))


class Scaled(nn.Module):
    """Has a weight between the products."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.act = nn.ReLU()


def by_sign(rows: Tensor) -> Tensor:
    return rows * 2 if rows.sum() > 0 else rows


@pytest.mark.parametrize(
    "function",
    [
        by_sign,
        lambda rows: (rows, rows),
        lambda rows: ROWS,
        lambda rows: rows.to(memory_format=torch.contiguous_format),
        lambda rows: torch.linalg.norm(rows),
        lambda rows: rows * rows.shape[0],
    ],
)
def test_a_function_that_no_text_can_hold_has_none(function: Callable[[Tensor], object]) -> None:
    text = describe(nn.Module(), function)
    assert text is None or torch.equal(activate(text, ROWS), function(ROWS))


def test_a_function_that_reads_a_weight_has_no_text() -> None:
    owner = Scaled()
    assert describe(owner, lambda rows: rows * owner.scale) is None
