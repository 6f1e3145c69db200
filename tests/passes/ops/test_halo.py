"""Attention with a window on split positions: results and gradients of all ranks, and messages."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autoparallel.passes.backward.recomputing import Recomputing
from autoparallel.passes.local.simulated import ThreadCommunicator, run_ranks
from autoparallel.passes.ops.collectives import Rank
from autoparallel.passes.ops.halo import halo_attention
from autoparallel.passes.ops.windowed import windowed_attention
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.ops.attention import halo_parts

HEADS, SCALE = 4, 0.3


def tensors(seq: int, *, key_heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, HEADS, seq, 6), (2, key_heads, seq, 6), (2, key_heads, seq, 5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def check(inputs: list[Tensor], num_ranks: int, window: int) -> list[list[tuple[object, ...]]]:
    """Compare the parts of all ranks with the attention of one device under a written mask; return
    the calls of each rank."""
    query, key, value = inputs
    seq, count = query.shape[2], HEADS // key.shape[1]
    seen = torch.ones(seq, seq, dtype=torch.bool).tril().triu(1 - window)
    whole = torch.nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(count, 1),
        value.repeat_interleave(count, 1),
        seen,
        scale=SCALE,
    )
    seed = torch.randn_like(whole)
    gradients = torch.autograd.grad(whole, inputs, seed)
    mesh = Mesh(("cp",), (num_ranks,))

    def work(communicator: ThreadCommunicator) -> tuple[Tensor, tuple[Tensor, ...], list[object]]:
        (place,) = communicator.coordinates
        own = [each.detach().chunk(num_ranks, 2)[place].clone().requires_grad_() for each in inputs]
        rank = Rank(mesh, (place,), communicator)
        out = halo_attention(rank, *own, ring=(0,), window=window, scale=SCALE)
        found = torch.autograd.grad(out, own, seed.chunk(num_ranks, 2)[place])
        return out.detach(), found, communicator.calls

    results = run_ranks(mesh, work)
    made = torch.cat([out for out, _, _ in results], 2)
    torch.testing.assert_close(made, whole, rtol=0, atol=1e-12)
    for position, one in enumerate(gradients):
        parts = torch.cat([found[position] for _, found, _ in results], 2)
        torch.testing.assert_close(parts, one, rtol=0, atol=1e-12)
    return [calls for _, _, calls in results]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 30])
@pytest.mark.parametrize(("num_ranks", "length"), [*product((2, 4), (1, 3, 20)), (3, 8)])
def test_the_parts_of_all_ranks_are_the_attention_of_one_device(
    num_ranks: int, length: int, window: int, key_heads: int
) -> None:
    """Windows of a part of a rank's positions, of several ranks' and of all."""
    calls = check(tensors(num_ranks * length, key_heads=key_heads), num_ranks, window)
    assert [len(each) for each in calls] == [2 * (window > 1)] * num_ranks, "once there and back"


@pytest.mark.parametrize(
    ("window", "parts"), [(1, ()), (2, (1,)), (5, (4,)), (6, (4, 1)), (9, (4, 4)), (99, (4, 4, 4))]
)
def test_the_last_of_four_ranks_receives_no_more_than_the_window(
    window: int, parts: tuple[int, ...]
) -> None:
    assert halo_parts(window, 4, 4) == parts


@pytest.mark.parametrize("keeps_costly", [True, False])
def test_a_recomputed_block_has_the_same_gradients(keeps_costly: bool) -> None:
    inputs, mesh = tensors(48, key_heads=2), Mesh(("cp",), (3,))
    whole = windowed_attention(*inputs, window=5, scale=SCALE, enable_gqa=True)
    seed = torch.randn_like(whole)
    gradients = torch.autograd.grad(whole, inputs, seed)

    def work(communicator: ThreadCommunicator) -> tuple[Tensor, ...]:
        (place,) = communicator.coordinates
        own = [each.detach().chunk(3, 2)[place].clone().requires_grad_() for each in inputs]
        rank = Rank(mesh, (place,), communicator)

        def call(*parts: Tensor) -> Tensor:
            return halo_attention(rank, *parts, ring=(0,), window=5, scale=SCALE) * 1

        contexts = Recomputing(keeps_costly=keeps_costly).contexts
        made = checkpoint(call, *own, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(made, own, seed.chunk(3, 2)[place])

    results = run_ranks(mesh, work)
    for position, one in enumerate(gradients):
        parts = torch.cat([found[position] for found in results], 2)
        torch.testing.assert_close(parts, one, rtol=0, atol=1e-12)


def test_the_op_that_is_measured_has_the_shapes_of_a_rank() -> None:
    query, key, value = tensors(16, key_heads=2)
    op = torch.ops.autoparallel.halo_attention
    made = op(query, key, value, 4, enable_gqa=True, window=5)
    made.sum().backward()
    assert key.grad is not None
    with FakeTensorMode():
        fake = [torch.empty(each.shape, requires_grad=True) for each in (query, key, value)]
        assert op(*fake, 4, enable_gqa=True, window=5).shape == made.shape
