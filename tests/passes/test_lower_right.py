"""Causal attention of parts of the positions, against that of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from autoparallel.passes.collectives import Rank
from autoparallel.passes.local_functions import split_causal_attention
from autoparallel.passes.saved_tensors import FakeRanks
from autoparallel.planner.layout import Mesh

SEQ, HEADS = 12, 4


def values(key_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, HEADS, SEQ, 6), (2, key_heads, SEQ, 6), (2, key_heads, SEQ, 5))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_attention_of_one_device(parts: int, key_heads: int) -> None:
    """Outputs side by side; gradients of keys and values summed over the ranks."""
    options = {"scale": 0.3, "enable_gqa": key_heads < HEADS}
    inputs = values(key_heads)
    whole = functional.scaled_dot_product_attention(*inputs, is_causal=True, **options)
    seed = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, inputs, seed)
    query, key, value = inputs
    mesh, made = Mesh(("cp",), (parts,)), []
    for place, own in enumerate(query.chunk(parts, 2)):
        rank = Rank(mesh, (place,), FakeRanks(mesh, (place,)))
        made.append(
            split_causal_attention(rank, own, key, value, axes=(0,), dropout_p=0.0, **options)
        )
    found = torch.cat(made, 2)
    torch.testing.assert_close(found, whole, rtol=1e-13, atol=1e-13)
    for gradient, one in zip(torch.autograd.grad(found, inputs, seed), expected, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-12, atol=1e-12)


def test_the_mask_of_a_gpu_is_the_one_written_on_a_cpu() -> None:
    query, key, value = values(HEADS)
    last = query[:, :, 8:]
    found = torch.ops.autoparallel.lower_right_attention(last, key, value)
    bias = causal_lower_right(4, SEQ)
    torch.testing.assert_close(
        found, functional.scaled_dot_product_attention(last, key, value, bias)
    )
