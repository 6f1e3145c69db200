"""The norm of a gradient, against sums of squares in float64."""

from __future__ import annotations

import pytest
import torch

from autoparallel.runtime.optimizer import NORM_ROW, sum_of_squares


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
