"""Causal attention of parts of the positions, against that of all of them."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.passes.local.local_functions import (
    balanced_causal_attention,
    split_causal_attention,
)
from autoparallel.passes.local.simulated import ThreadCommunicator, run_ranks
from autoparallel.passes.memory.saved_tensors import FakeRanks
from autoparallel.passes.ops.collectives import Rank
from autoparallel.planner.graph.layout import Mesh

SEQ, HEADS = 12, 4


def values(key_heads: int, seq: int = SEQ) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, HEADS, seq, 6), (2, key_heads, seq, 6), (2, key_heads, seq, 5))
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


MESHES = [
    ((2,), (0,)),
    ((3,), (0,)),
    ((4,), (0,)),
    ((2, 2), (0, 1)),
    ((2, 3), (0,)),
    ((3, 2), (1,)),
]
"""Ranks by axis, and the axes that balance."""


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize(("shape", "balanced"), MESHES, ids=str)
def test_balanced_parts_are_the_attention_of_one_device(
    shape: tuple[int, ...], balanced: tuple[int, ...], length: int, key_heads: int
) -> None:
    """``length`` positions on a rank: of an odd one the sequence is not cut in equal halves."""
    parts, axes = prod(shape), tuple(range(len(shape)))
    options: dict[str, Any] = {"scale": 0.3, "enable_gqa": key_heads < HEADS}
    inputs = values(key_heads, parts * length)
    whole = functional.scaled_dot_product_attention(*inputs, is_causal=True, **options)
    seed = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, inputs, seed)
    mesh = Mesh(("dp", "cp")[-len(shape) :], shape)

    def work(communicator: ThreadCommunicator) -> tuple[Tensor, tuple[Tensor, ...]]:
        place = mesh.index(communicator.coordinates)
        whole_keys = [each.detach().clone().requires_grad_() for each in inputs[1:]]
        own = [inputs[0].detach().chunk(parts, 2)[place].clone().requires_grad_(), *whole_keys]
        rank = Rank(mesh, communicator.coordinates, communicator)
        made = balanced_causal_attention(rank, *own, axes=axes, balanced=balanced, **options)
        return made.detach(), torch.autograd.grad(made, own, seed.chunk(parts, 2)[place])

    made, gradients = zip(*run_ranks(mesh, work), strict=True)
    torch.testing.assert_close(torch.cat(made, 2), whole, rtol=0, atol=1e-12)
    queries, keys, values_ = zip(*gradients, strict=True)
    found = (torch.cat(queries, 2), sum(keys), sum(values_))
    for gradient, one in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, one, rtol=0, atol=1e-12)


class Pairs(TorchDispatchMode):
    """Counts the pairs of a query and a key that attention computes and does not hide."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, mask = args[0], (kwargs or {}).get("attn_mask")
            rows = query.shape[-2]
            heads = prod(query.shape[:2])
            seen = rows * (rows + 1) // 2 if mask is None else int(torch.isfinite(mask).sum())
            self.count += seen * (heads if mask is None or mask.dim() == 2 else 1)
        return func(*args, **(kwargs or {}))


def pairs_of_ranks(parts: int, seq: int, function: Any, **options: Any) -> list[int]:
    """Of one head of one row, by rank."""
    query, key, value = (each[:1, :1, :, :5].detach() for each in values(1, seq))
    mesh, found = Mesh(("cp",), (parts,)), []
    for place, own in enumerate(query.chunk(parts, 2)):
        rank = Rank(mesh, (place,), FakeRanks(mesh, (place,)))
        with Pairs() as counted:
            function(rank, own, key, value, axes=(0,), **options)
        found.append(counted.count)
    return found


def test_every_rank_computes_as_many_pairs_where_the_halves_are_equal() -> None:
    """Of 16 positions 1 + … + 16 = 136 pairs are seen, a quarter of them by each of four ranks.

    In contiguous parts the last rank sees 13 + 14 + 15 + 16 = 58 of them.
    """
    assert pairs_of_ranks(4, 16, split_causal_attention) == [10, 26, 42, 58]
    assert pairs_of_ranks(4, 16, balanced_causal_attention, balanced=(0,)) == [34, 34, 34, 34]


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_ranks_differ_by_less_than_a_row_of_each_where_the_halves_are_not_equal(
    parts: int,
) -> None:
    """Of 5 positions a rank keeps 3 and takes 2: the third one is its own."""
    found = pairs_of_ranks(parts, 5 * parts, balanced_causal_attention, balanced=(0,))
    assert sum(found) == 5 * parts * (5 * parts + 1) // 2
    assert max(found) - min(found) == 5 * (parts - 1)
    plain = pairs_of_ranks(parts, 5 * parts, split_causal_attention)
    assert max(found) < max(plain)


def test_the_op_that_is_measured_computes_what_the_first_rank_does() -> None:
    """Of three ranks with 4 of 12 positions: the first keeps 0 and 1 and takes 10 and 11."""
    query, key, value = values(2)
    whole = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    own = query[:, :, [0, 1, 10, 11]]
    found = torch.ops.autoparallel.balanced_attention(own, key, value, [2, 12], enable_gqa=True)
    torch.testing.assert_close(found, whole[:, :, [0, 1, 10, 11]], rtol=0, atol=1e-13)


def test_attention_of_fake_tensors_writes_no_mask() -> None:
    """Memory is counted on them for GPUs too: 4 queries and 10,000 keys would need 40 kB."""
    with FakeTensorMode(), LargestBoolean() as seen:
        query, key = (torch.empty(1, 1, length, 8) for length in (4, 10_000))
        found = torch.ops.autoparallel.lower_right_attention(query, key, key)
    assert found.shape == query.shape
    assert seen.numel == 0


class LargestBoolean(TorchDispatchMode):
    """The elements of the largest boolean tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.bool:
            self.numel = max(self.numel, made.numel())
        return made
