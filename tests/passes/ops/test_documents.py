"""Attention within packed documents equals attention under the mask that it stands for."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoparallel.passes.backward.recomputing import Recomputing
from autoparallel.passes.ops import documents
from autoparallel.passes.ops.documents import (
    Bounds,
    bounds_of,
    document_attention,
    shared_chunks,
)
from autoparallel.passes.ops.lower_right import attend_upto
from autoparallel.planner.plan import Recompute

SORTED = [[0] * 5 + [1] * 1 + [2] * 14, [7] * 20]
SINGLE = [list(range(20)), [3] * 19 + [4]]
EQUAL = [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 8, [n // 5 for n in range(20)]]
AGAIN = [[0] * 5 + [1] * 3 + [0] * 12, [2] * 20]
IDS = {"sorted": SORTED, "single": SINGLE, "equal": EQUAL, "again": AGAIN, "shared": SORTED[:1]}


def inputs(rows: int, length: int, held: int, size: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = [(2, 4, rows, 8), (2, held, length, 8), (2, held, length, size)]
    return tuple(torch.randn(each, dtype=torch.float64, requires_grad=True) for each in shapes)


def mask_of(ids: Tensor, first: int, end: int, window: int) -> Tensor:
    back = torch.arange(first, end)[:, None] - torch.arange(ids.shape[-1])
    seen = (back >= 0) & (back < window if window else back >= 0)
    return (ids[:, None, first:end, None] == ids[:, None, None]) & seen


def check(found: Tensor, wanted: Tensor, given: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for weight in (torch.ones_like(wanted), torch.randn_like(wanted)):
        for own, other in zip(
            torch.autograd.grad((found * weight).sum(), given, retain_graph=True),
            torch.autograd.grad((wanted * weight).sum(), given, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize(("first", "end"), [(0, 20), (10, 15), (3, 4)])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(("held", "size"), [(4, 8), (2, 8), (2, 4)])
def test_it_equals_attention_under_a_mask(
    kind: str, first: int, end: int, window: int, held: int, size: int
) -> None:
    given, ids = inputs(end - first, 20, held, size), torch.tensor(IDS[kind])
    seen = mask_of(ids, first, end, window)
    wanted = functional.scaled_dot_product_attention(*given, seen, enable_gqa=True, scale=0.3)
    found = attend_upto(end, *given, documents=ids[:, None, None], window=window, scale=0.3)
    check(found, wanted, given)


def test_masks_of_chunks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK", 3)
    given, ids = inputs(11, 20, 2), torch.tensor(AGAIN)
    for window in (0, 6):
        wanted = functional.scaled_dot_product_attention(
            *given, mask_of(ids, 9, 20, window), enable_gqa=True
        )
        check(document_attention(*given, ids, end=20, window=window), wanted, given)


def test_the_op_takes_no_mask_and_no_dropout() -> None:
    given, ids = inputs(20, 20, 4), torch.tensor(SORTED)[:, None, None]
    op = torch.ops.autoparallel.scaled_dot_product_attention
    wanted = functional.scaled_dot_product_attention(*given, mask_of(ids[:, 0, 0], 0, 20, 0))
    check(op(*given, is_causal=True, documents=ids), wanted, given)
    with pytest.raises(ValueError, match="without a mask"):
        op(*given, None, 0.1, True, documents=ids)


@pytest.mark.parametrize("mode", ["attention", "full"])
def test_a_recomputed_block_that_keeps_attention_runs_it_once(
    mode: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, ids = inputs(20, 20, 4), torch.tensor(SORTED)
    wanted = document_attention(*given, ids, end=20)
    expected = torch.autograd.grad(wanted.square().sum(), given)
    runs = []
    attend = documents.attend
    monkeypatch.setattr(documents, "attend", lambda *a, **k: runs.append(1) or attend(*a, **k))
    found = checkpoint(
        lambda *own: document_attention(*own, ids, end=20),
        *given,
        use_reentrant=False,
        context_fn=Recomputing.of(mode).contexts,
    )
    once = len(runs)
    for own, other in zip(torch.autograd.grad(found.square().sum(), given), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    assert len(runs) == (once if mode == "attention" else 2 * once)


def test_kernels_compute_pairs_within_documents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of documents of 64 and 192 positions, on one rank, and on the second half of the
    positions, where the second document has 64 keys before its queries."""
    given = [each.detach() for each in inputs(256, 256, 4)]
    ids = torch.tensor([[0] * 64 + [1] * 192])
    pairs = []
    attend = documents.attend

    def counted(query: Tensor, key: Tensor, *rest: Tensor, **options: Any) -> documents.Attended:
        pairs.append(len(query) * query.shape[-2] * key.shape[-2])
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(documents, "attend", counted)
    document_attention(*given, ids, end=256)
    assert sum(pairs) == 2 * (64**2 + 192**2)
    pairs.clear()
    document_attention(given[0][..., 128:, :], *given[1:], ids, end=256)
    assert sum(pairs) == 2 * (128 * 64 + 128 * 128)


def test_bounds_are_read_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor(SORTED)
    reads = []
    read = documents._read
    monkeypatch.setattr(documents, "_read", lambda rows: reads.append(1) or read(rows))
    assert bounds_of(ids) == bounds_of(ids) == documents.Bounds(((0, 5, 6, 20), (0, 20)), False)
    ids[1, 0] = 6
    assert bounds_of(ids).rows == ((0, 5, 6, 20), (0, 1, 20))
    assert len(reads) == 2


def unevenness(bounds: Bounds, ranks: int, chunks: int, window: int) -> float:
    """Pairs of the busiest rank relative to the mean, counted position by position."""
    taken = shared_chunks(bounds, ranks, chunks, window)
    assert sorted(each for own in taken for each in own) == [*range(ranks * chunks)]
    assert {len(own) for own in taken} == {chunks}
    seen = torch.zeros(bounds.rows[0][-1], dtype=torch.int64)
    for start, stop in (each for row in bounds.rows for each in pairwise(row)):
        pairs = torch.arange(1, stop - start + 1)
        seen[start:stop] += pairs.clamp(max=window) if window else pairs
    work = seen.view(ranks * chunks, -1).sum(1)
    return float(max(work[list(own)].sum() for own in taken) * ranks / work.sum())


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("mean", [256, 2048, 2**16])
def test_ranks_share_documents_evenly_by_their_pairs(mean: int, window: int) -> None:
    """16,384 positions on 8 ranks; whole sequences without a window are the hardest case."""
    for seed in range(5):
        lengths = torch.empty(300).exponential_(1 / mean, generator=torch.manual_seed(seed))
        stops = (lengths.ceil().long().cumsum(0)).tolist()
        inner = [stop for stop in stops if stop < 2**14]
        bounds = Bounds(((0, *inner, 2**14),), is_repeated=False)
        assert unevenness(bounds, 8, 8, window) < 1.1


def test_queries_stay_where_ranks_are_even_anyway() -> None:
    equal = Bounds((tuple(range(0, 65, 4)),) * 2, is_repeated=False)
    assert shared_chunks(equal, 4, 4) == tuple(tuple(range(r * 4, r * 4 + 4)) for r in range(4))


@pytest.mark.slow
def test_a_million_positions_in_documents_equal_direct_softmaxes() -> None:
    """One head of size 16 and documents of 1 to 2,047 positions, on one device. The whole first and
    last documents and one in the middle are compared with a softmax, and its gradients, written
    out; eight ranks with their parts of the queries compute the same results."""
    length, parts = 2**20, 8
    torch.manual_seed(0)
    steps = torch.randint(1, 2048, (length // 512,)).cumsum(0)
    ids = torch.bucketize(torch.arange(length), steps, right=True)[None]
    query, key, value, seed = torch.randn(4, 1, 1, length, 16, dtype=torch.float64).unbind()
    given = [each.requires_grad_() for each in (query, key, value)]
    found = document_attention(*given, ids, end=length)
    gradients = torch.autograd.grad(found, given, seed)
    (bounds,) = bounds_of(ids).rows
    for place in (0, len(bounds) // 2, len(bounds) - 2):
        own = slice(bounds[place], bounds[place + 1])
        q, k, v = (each[0, 0, own].detach().requires_grad_() for each in given)
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        direct = torch.softmax((q @ k.T / 4).masked_fill(hidden, float("-inf")), -1) @ v
        torch.testing.assert_close(found[0, 0, own], direct, rtol=1e-10, atol=1e-10)
        expected = torch.autograd.grad(direct, (q, k, v), seed[0, 0, own])
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one[0, 0, own], other, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        made = [
            document_attention(own, key, value, ids, end=(rank + 1) * length // parts)
            for rank, own in enumerate(query.chunk(parts, 2))
        ]
    torch.testing.assert_close(torch.cat(made, 2), found, rtol=1e-12, atol=1e-12)


def by_lengths(
    query: Tensor, key: Tensor, value: Tensor, sums: Tensor, of_keys: Tensor, scale: float
) -> Tensor:
    """What FlashAttention computes by cumulative lengths: (positions, heads, size) of documents, of
    each the last query aligned to the last key."""
    count = query.shape[1] // key.shape[1]
    parts = []
    for rows, columns in zip(pairwise(sums.tolist()), pairwise(of_keys.tolist()), strict=True):
        q = query[slice(*rows)].transpose(0, 1)
        k, v = (
            each[slice(*columns)].transpose(0, 1).repeat_interleave(count, 0)
            for each in (key, value)
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen.tril(k.shape[1] - q.shape[1])
        out = functional.scaled_dot_product_attention(q, k, v, seen, scale=scale)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def flash(*args: Any, scale: float) -> tuple[Tensor, ...]:
    query, key, value, sums, of_keys, longest, longest_keys, *rest = args
    assert rest == [0.0, True, False]
    assert (longest, longest_keys) == (int(sums.diff().max()), int(of_keys.diff().max()))
    out = by_lengths(query, key, value, sums, of_keys, scale)
    return out, out.new_zeros(query.shape[1], len(query)), out, out, out


def flash_backward(gradient: Tensor, *args: Any, scale: float) -> tuple[Tensor, ...]:
    query, key, value, _, statistic, sums, of_keys, *_ = args
    assert statistic.shape == (query.shape[1], len(query))
    with torch.enable_grad():
        given = [each.detach().requires_grad_() for each in (query, key, value)]
        return torch.autograd.grad(by_lengths(*given, sums, of_keys, scale), given, gradient)


@pytest.mark.parametrize(("first", "end"), [(0, 20), (10, 15), (3, 18)])
def test_on_a_gpu_in_16_bits_all_documents_are_one_call(
    first: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FlashAttention written out in the place of its kernels, which there are not here."""
    kernels = {"_flash_attention_forward": flash, "_flash_attention_backward": flash_backward}
    aten = SimpleNamespace(**{n: SimpleNamespace(default=each) for n, each in kernels.items()})
    monkeypatch.setattr(documents, "aten", aten)
    monkeypatch.setattr(documents, "kernel_of", lambda *tensors: "flash")
    given, ids = inputs(end - first, 20, 2), torch.tensor(SORTED)
    wanted = functional.scaled_dot_product_attention(
        *given, mask_of(ids, first, end, 0), enable_gqa=True, scale=0.3
    )
    check(document_attention(*given, ids, end=end, scale=0.3), wanted, given)


def test_the_call_of_flash_attention_is_one_that_torch_has() -> None:
    packed = documents.Packed(bounds_of(torch.tensor(SORTED)), 15, 0.3)
    shapes = (2, 4, 5, 8), (2, 2, 20, 8), (2, 2, 20, 8)
    given = [torch.empty(each, device="meta", dtype=torch.bfloat16) for each in shapes]
    query, key, value = given
    found = packed._attend_at_once(query, key, value)
    gradients = packed._backward_at_once(found.out, (query, key, value), found)
    assert found.out.shape == query.shape
    assert [each.shape for each in gradients] == [torch.Size(shape) for shape in shapes]
