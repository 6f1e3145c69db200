"""Attention with a window equals attention under the mask that it stands for."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from autoparallel.passes.ops.windowed import windowed_attention


def inputs(rows: int, length: int, heads: int, held: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = [(2, heads, rows, 8), (2, held, length, 8), (2, held, length, 4)]
    return tuple(torch.randn(each, dtype=torch.float64, requires_grad=True) for each in shapes)


@pytest.mark.parametrize(
    ("rows", "length", "window", "held"),
    [
        (16, 16, 4, 4),
        (700, 700, 4, 1),
        (700, 700, 150, 2),
        (300, 1000, 130, 2),
        (1024, 1024, 128, 1),
        (513, 600, 33, 4),
        (256, 300, 200, 1),
        (1, 300, 20, 1),
    ],
)
def test_it_equals_attention_under_a_mask(rows: int, length: int, window: int, held: int) -> None:
    given = inputs(rows, length, 4, held)
    seen = torch.ones(rows, length, dtype=torch.bool)
    seen = seen.tril(length - rows).triu(length - rows - window + 1)
    wanted = functional.scaled_dot_product_attention(*given, seen, enable_gqa=True, scale=0.3)
    found = torch.ops.autoparallel.scaled_dot_product_attention(
        *given, is_causal=True, enable_gqa=True, window=window, scale=0.3
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for own, other in zip(
        torch.autograd.grad(found.square().sum(), given),
        torch.autograd.grad(wanted.square().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_its_products_grow_with_the_window_and_not_with_the_keys() -> None:
    """Each query is multiplied with two chunks of keys, the first ones with one."""
    given = [each.detach() for each in inputs(4096, 4096, 2, 2)]
    with FlopCounterMode(display=False) as counted:
        windowed_attention(*given, window=256)
    pairs = prod(given[0].shape[:3]) * 2 * 256
    assert 0.9 * pairs < counted.get_total_flops() / 2 / (8 + 4) <= pairs


def test_it_takes_no_mask_and_no_dropout() -> None:
    given = inputs(8, 8, 1, 1)
    with pytest.raises(ValueError, match="without a mask"):
        torch.ops.autoparallel.scaled_dot_product_attention(*given, None, 0.1, True, window=2)
