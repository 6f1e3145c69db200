"""Attention with a window equals attention under the mask that it stands for."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from autoparallel.passes.local.local_functions import split_causal_attention
from autoparallel.passes.memory.saved_tensors import FakeRanks
from autoparallel.passes.ops.collectives import Rank
from autoparallel.passes.ops.windowed import windowed_attention
from autoparallel.planner.graph.layout import Mesh


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


@pytest.mark.slow
def test_a_million_positions_on_eight_ranks_equal_one_device_and_a_direct_softmax() -> None:
    """One head of size 16 with a window of 1,024. Sampled results and gradients of queries and
    values are compared with sums over the window, written out."""
    length, window, parts = 2**20, 1024, 8
    torch.manual_seed(0)
    query, key, value, seed = torch.randn(4, 1, 1, length, 16, dtype=torch.float64).unbind()
    given = [each.requires_grad_() for each in (query, key, value)]
    mesh, made = Mesh(("cp",), (parts,)), []
    for place, own in enumerate(query.chunk(parts, 2)):
        rank = Rank(mesh, (place,), FakeRanks(mesh, (place,)))
        made.append(split_causal_attention(rank, own, key, value, axes=(0,), window=window))
    found = torch.cat(made, 2)
    by_query, by_key, by_value = torch.autograd.grad(found, given, seed)
    whole = windowed_attention(*given, window=window)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(whole, given, seed)
    for one, other in zip((by_query, by_key, by_value), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    for place in (0, 1, 1023, 1024, length // 8 - 1, length // 8, length // 8 + 1023, length - 1):
        seen = slice(max(0, place - window + 1), place + 1)
        own, keys, values = query[0, 0, place], key[0, 0, seen], value[0, 0, seen]
        direct = torch.softmax(keys @ own / 4, 0) @ values
        torch.testing.assert_close(found[0, 0, place], direct, rtol=1e-10, atol=1e-10)
        (one,) = torch.autograd.grad(direct @ seed[0, 0, place], query, retain_graph=True)
        torch.testing.assert_close(by_query[0, 0, place], one[0, 0, place], rtol=1e-9, atol=1e-9)
