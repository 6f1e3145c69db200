"""Ops that a graph has in another form than the trace: their values, gradients, and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_models import check_program, program_of
from torch import Tensor, nn

from autoparallel.passes.capture.lower import LITERAL_ELEMENTS
from autoparallel.planner.errors import CaptureError

X = torch.linspace(-1, 2, 12).view(4, 3)


class Model(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(3, 4), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x))


def expanded_copy(y: Tensor) -> Tensor:
    copy = torch.zeros_like(y)
    copy.copy_(y[:, :1])
    return (copy * y).mean()


def cast_copy(y: Tensor) -> Tensor:
    copy = torch.zeros_like(y, dtype=torch.float64)
    copy.copy_((y > 0)[:, :1])
    return (copy * y).mean()


MANY = [0.25 * (number % 7) for number in range(LITERAL_ELEMENTS + 1)]


def large_literal(y: Tensor) -> Tensor:
    numbers = torch.tensor(MANY, dtype=y.dtype)
    return (y[:, :1] * numbers).square().mean()


@pytest.mark.parametrize("use", [expanded_copy, cast_copy])
def test_an_op_in_another_form_has_the_same_value_and_gradient(
    use: Callable[[Tensor], Tensor],
) -> None:
    check_program(lambda: Model(use), (X,))


def test_a_large_tensor_of_numbers_is_held_beside_the_graph() -> None:
    program = program_of(lambda: Model(large_literal), (X,))
    (held,) = program.literals.values()
    assert held.tolist() == MANY


def autocast(y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (y @ y.t()).mean()


def by_values(y: Tensor) -> Tensor:
    return y.flatten()[(y.flatten() > 0).nonzero()].mean()


@pytest.mark.parametrize(
    ("use", "code", "what"),
    [(autocast, "AP205", "autocast"), (by_values, "AP202", "aten.nonzero.default")],
)
def test_an_op_that_no_plan_can_hold_is_refused_by_name(
    use: Callable[[Tensor], Tensor], code: str, what: str
) -> None:
    with pytest.raises(CaptureError) as refused:
        program_of(lambda: Model(use), (X,))
    assert refused.value.code == code
    assert what in refused.value.what
    assert refused.value.where.startswith(f"{__file__}:")
