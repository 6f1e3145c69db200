"""Ring attention: results and gradients of all ranks, messages, and pairs in each step."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoparallel.passes.backward.recomputing import Recomputing
from autoparallel.passes.local.simulated import ThreadCommunicator, run_ranks
from autoparallel.passes.ops.attention_parts import attend, attend_backward
from autoparallel.passes.ops.collectives import Rank
from autoparallel.passes.ops.ring import ring_attention
from autoparallel.planner.graph.layout import Mesh

HEADS, SCALE = 4, 0.3
CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def tensors(
    seq: int, *, key_heads: int = HEADS, value_size: int = 6, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, HEADS, seq, 6), (2, key_heads, seq, 6), (2, key_heads, seq, value_size)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def whole(inputs: list[Tensor], *, is_causal: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Results of one device, a gradient of these, and the gradients of the inputs."""
    enable_gqa = inputs[0].shape[1] != inputs[1].shape[1]
    out = functional.scaled_dot_product_attention(
        *inputs, is_causal=is_causal, scale=SCALE, enable_gqa=enable_gqa
    )
    seed = torch.randn_like(out)
    return out, seed, torch.autograd.grad(out, inputs, seed)


def by_ring(
    inputs: list[Tensor], seed: Tensor, num_ranks: int, *, is_causal: bool
) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
    """Results and gradients of each rank's parts."""
    mesh = Mesh(("cp",), (num_ranks,))

    def work(communicator: ThreadCommunicator) -> tuple[Tensor, tuple[Tensor, ...]]:
        (place,) = communicator.coordinates
        own = [each.detach().chunk(num_ranks, 2)[place].clone() for each in inputs]
        for each in own:
            each.requires_grad_()
        rank = Rank(mesh, (place,), communicator)
        out = ring_attention(rank, *own, ring=(0,), is_causal=is_causal, scale=SCALE)
        return out.detach(), torch.autograd.grad(out, own, seed.chunk(num_ranks, 2)[place])

    return run_ranks(mesh, work)


def check(inputs: list[Tensor], num_ranks: int, *, is_causal: bool, tolerance: float) -> None:
    out, seed, gradients = whole(inputs, is_causal=is_causal)
    found = by_ring(inputs, seed, num_ranks, is_causal=is_causal)
    made = torch.cat([own for own, _ in found], 2)
    torch.testing.assert_close(made, out, rtol=0, atol=tolerance)
    for position, one in enumerate(gradients):
        parts = torch.cat([own[position] for _, own in found], 2)
        torch.testing.assert_close(parts, one, rtol=0, atol=tolerance)


@pytest.mark.parametrize("value_size", [6, 5])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_parts_of_all_ranks_are_the_attention_of_one_device(
    is_causal: bool, num_ranks: int, length: int, key_heads: int, value_size: int
) -> None:
    """``length`` positions on a rank: of an odd number the chunks are not equal."""
    inputs = tensors(num_ranks * length, key_heads=key_heads, value_size=value_size)
    check(inputs, num_ranks, is_causal=is_causal, tolerance=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_rank_may_have_a_single_position(is_causal: bool, num_ranks: int) -> None:
    """As in a step of shorter sequences than the plan's: some chunks are empty."""
    check(tensors(num_ranks), num_ranks, is_causal=is_causal, tolerance=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_are_merged_in_float32_where_tensors_have_16_bits(is_causal: bool) -> None:
    """Results differ by the rounding of each part's and of the merged result, 2**-9 of at most 2.5
    each; sums of gradients travel in 16 bits."""
    check(tensors(64, dtype=torch.bfloat16), 4, is_causal=is_causal, tolerance=0.03)


def calls_of(length: int, num_ranks: int, *, is_causal: bool) -> list[tuple[Any, ...]]:
    """Messages of rank 0 in a forward and a backward."""
    mesh, inputs = Mesh(("cp",), (num_ranks,)), tensors(length * num_ranks)

    def work(communicator: ThreadCommunicator) -> list[tuple[Any, ...]]:
        (place,) = communicator.coordinates
        own = [each.detach().chunk(num_ranks, 2)[place].clone().requires_grad_() for each in inputs]
        rank = Rank(mesh, (place,), communicator)
        ring_attention(rank, *own, ring=(0,), is_causal=is_causal).sum().backward()
        return communicator.calls

    found = run_ranks(mesh, work)
    assert all(own == other for own, other in pairwise(found)), "ranks differ in their messages"
    return found[0]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_sends_each_part_once_forward_and_twice_backward(num_ranks: int) -> None:
    """n - 1 messages of keys and values, in the backward as many, and n - 1 of their gradients;
    with causality three swaps in each direction."""
    messages = 3 * (num_ranks - 1)
    kinds = Counter(call[0] for call in calls_of(4, num_ranks, is_causal=False))
    assert kinds == {"exchange": messages}
    kinds = Counter(call[0] for call in calls_of(4, num_ranks, is_causal=True))
    assert kinds == {"exchange": messages, "swap": 6}


class Pairs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Pairs of a query and a key that each kernel computes, and the most keys that one reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []
        self.most_keys = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CPU_KERNEL:
            rows, columns = args[0].shape[-2], args[1].shape[-2]
            is_causal = len(args) > 4 and args[4]
            self.found.append(rows * (rows + 1) // 2 if is_causal else rows * columns)
            self.most_keys = max(self.most_keys, columns)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_all_ranks_have_equal_work_in_every_step_and_keys_of_one_rank(num_ranks: int) -> None:
    """8 positions on a rank: 8 · 9 / 2 pairs of its own, then 8 · 4 of each other rank."""
    inputs, mesh = tensors(8 * num_ranks), Mesh(("cp",), (num_ranks,))

    def work(communicator: ThreadCommunicator) -> Pairs:
        (place,) = communicator.coordinates
        own = [each.detach().chunk(num_ranks, 2)[place] for each in inputs]
        rank = Rank(mesh, (place,), communicator)
        with Pairs() as pairs:
            ring_attention(rank, *own, ring=(0,), is_causal=True)
        return pairs

    for pairs in run_ranks(mesh, work):
        assert pairs.found == [36, *[32] * (num_ranks - 1)]
        assert pairs.most_keys == 8


@pytest.mark.parametrize(("keeps_costly", "repeated"), [(True, 0), (False, 3)])
def test_selective_recomputation_keeps_results_and_repeats_no_message_of_the_ring(
    keeps_costly: bool, repeated: int
) -> None:
    """Of four ranks: three messages forward and six backward; full recomputation repeats three."""
    num_ranks, mesh = 4, Mesh(("cp",), (4,))
    inputs = tensors(4 * num_ranks)
    _, seed, gradients = whole(inputs, is_causal=True)

    def work(communicator: ThreadCommunicator) -> tuple[int, tuple[Tensor, ...]]:
        (place,) = communicator.coordinates
        own = [each.detach().chunk(num_ranks, 2)[place].clone().requires_grad_() for each in inputs]
        rank = Rank(mesh, (place,), communicator)

        def call(*parts: Tensor) -> Tensor:
            return ring_attention(rank, *parts, ring=(0,), is_causal=True, scale=SCALE) * 1

        contexts = Recomputing(keeps_costly=keeps_costly).contexts
        made = checkpoint(call, *own, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(made, own, seed.chunk(num_ranks, 2)[place])
        return sum(name == "exchange" for name, *_ in communicator.calls), found

    results = run_ranks(mesh, work)
    assert [number for number, _ in results] == [9 + repeated] * num_ranks
    for position, one in enumerate(gradients):
        parts = torch.cat([own[position] for _, own in results], 2)
        torch.testing.assert_close(parts, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_written_scores_equal_the_kernel(dtype: torch.dtype) -> None:
    """Values of size 5 have no kernel on a CPU; their first 5 of 6 entries are the same."""
    query, key, value = (each.detach() for each in tensors(8, key_heads=2, dtype=dtype))
    options: dict[str, Any] = {"is_causal": True, "scale": SCALE}
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    kernel = attend(query, key, value, **options)
    written = attend(query, key, value[..., :5], **options)
    torch.testing.assert_close(written.out, kernel.out[..., :5], rtol=0, atol=tolerance)
    torch.testing.assert_close(written.statistic, kernel.statistic, rtol=0, atol=tolerance)
    seed = torch.randn_like(kernel.out)
    seed[..., 5:] = 0.0
    found = attend_backward(seed, (query, key, value), kernel, **options)
    cut = (query, key, value[..., :5])
    other = attend_backward(seed[..., :5], cut, written, **options)
    for own, one in zip(other, found, strict=True):
        wanted = one[..., : own.shape[-1]]
        torch.testing.assert_close(own, wanted, rtol=0, atol=2 * tolerance)


@pytest.mark.parametrize("name", ["ring_attention", "balanced_ring_attention"])
def test_the_op_that_is_measured_runs_as_many_kernels_as_a_rank(name: str) -> None:
    query, key, value = tensors(8, key_heads=2)
    op = getattr(torch.ops.autoparallel, name)
    with Pairs() as pairs:
        made = op(query, key, value, 4, enable_gqa=True)
    later = 32 if name.startswith("balanced") else 64
    assert pairs.found == [36 if later == 32 else 64, *[later] * 3]
    made.sum().backward()
    assert key.grad is not None
    with FakeTensorMode():
        fake = [torch.empty(each.shape, requires_grad=True) for each in (query, key, value)]
        made = op(*fake, 4)
        made.sum().backward()
        assert made.shape == query.shape
