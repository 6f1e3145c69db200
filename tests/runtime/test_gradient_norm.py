"""The norm of a gradient, against sums of squares in float64."""

from __future__ import annotations

import pytest
import torch

from autoparallel.runtime.update.optimizer import (
    NORM_ROW,
    clip_coefficient,
    sum_of_all_squares,
    sum_of_squares,
)


@pytest.mark.parametrize("size", [0, 1, NORM_ROW - 1, NORM_ROW, 3 * NORM_ROW + 5, 1_000_003])
def test_squares_of_float32_are_summed_to_seven_digits_whatever_the_size(size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    expected = float(tensor.double().square().sum())
    assert float(sum_of_squares(tensor)) == pytest.approx(expected, rel=5e-7)


def test_squares_of_float64_are_summed_exactly() -> None:
    tensor = torch.randn(7, 3000, dtype=torch.float64).mT
    assert float(sum_of_squares(tensor)) == pytest.approx(float(tensor.square().sum()), rel=1e-14)


def test_a_gradient_that_is_not_finite_has_a_norm_that_is_not() -> None:
    tensor = torch.ones(2 * NORM_ROW)
    tensor[5] = torch.nan
    assert torch.isnan(sum_of_squares(tensor))


def test_gradients_of_all_sizes_are_summed_together() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator) for size in (3, 70, NORM_ROW + 1)]
    expected = sum(float(each.double().square().sum()) for each in gradients)
    found = sum_of_all_squares(gradients, torch.device("cpu"))
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_gradients_are_clipped_as_torch_does(scale: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5))
    parameter.grad = scale * torch.arange(5.0)
    before = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(parameter.grad, before * clip_coefficient(norm, 1.0))
