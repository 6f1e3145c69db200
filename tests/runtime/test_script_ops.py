"""Functions of an exported script on a rank's part, against the op on the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from script_ranks import on_ranks
from torch import Tensor

from autoparallel.passes.ops.lower_right import split_in_half
from autoparallel.runtime.script_parts import ops
from autoparallel.runtime.script_parts.mesh import Mesh
from autoparallel.runtime.script_parts.stages import Draw
from autoparallel.runtime.script_parts.weights import Weight

DRAW = Draw(seed=7, first=3)


def part(x: Tensor, mesh: Mesh, split: dict[str, int]) -> Tensor:
    for axis, dim in split.items():
        x = x.chunk(mesh.size(axis), dim)[mesh.coordinate(axis)]
    return x


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_split_classes_have_the_loss_and_gradient_of_all_classes(smoothing: float) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 8, dtype=torch.float64), torch.tensor([0, 7, -100, 3, 4])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, label_smoothing=smoothing)
    expected.backward()

    def run(mesh: Mesh) -> tuple[Tensor, Tensor]:
        own = part(logits, mesh, {"tp": 1}).clone().requires_grad_()
        count = (target != -100).sum()
        loss = ops.split_cross_entropy(
            mesh, own, target, count, axes=("tp",), label_smoothing=smoothing
        )
        loss.backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    found = on_ranks({"tp": 2}, run)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), whole.grad)


@pytest.mark.parametrize("length", [6, 7])
def test_two_halves_of_the_queries_attend_as_all_of_them(length: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, length, 8).unbind()
    first, second = split_in_half(query)
    assert first.shape[-2] == (length + 1) // 2
    found = [
        ops.attend_upto(first.shape[-2], first, key, value),
        ops.attend_upto(length, second, key, value),
    ]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(torch.cat(found, -2), expected)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [({"tp": 2}, (0,)), ({"dp": 2, "tp": 2}, (0, 0)), ({"dp": 2, "tp": 2}, (None, 0))],
)
def test_parts_of_a_matrix_are_split_along_their_own_dimension(
    shape: dict[str, int], wanted: tuple[int | None, ...]
) -> None:
    """The matrix is split along columns before, and each of its two parts along rows after."""
    matrix, sizes = torch.arange(96.0).view(12, 8), [8, 4]
    axes = {axis: 1 for axis, at in zip(shape, wanted, strict=True) if at is not None}

    def run(mesh: Mesh) -> tuple[list[Tensor], list[Tensor]]:
        own = part(matrix, mesh, axes).contiguous()
        found = ops.exchanged_split(mesh, own, sizes=sizes, dim=0, wanted=wanted)
        rows = dict.fromkeys(axes, 0)
        return found, [part(each, mesh, rows) for each in matrix.split(sizes)]

    for found, expected in on_ranks(shape, run):
        assert all(map(torch.equal, found, expected))


def test_an_activation_is_the_function_itself() -> None:
    assert torch.equal(
        ops.activate(torch.relu, torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0])
    )


SPLIT = {"dp": 0, "tp": 1}


def test_dropout_of_a_part_is_the_part_of_the_dropout() -> None:
    """So is its gradient; a quarter of the elements is dropped, and the mean stays."""
    x = torch.ones(64, 32)

    def run(mesh: Mesh) -> tuple[Tensor, Tensor]:
        own = part(x, mesh, SPLIT).clone().requires_grad_()
        made = ops.dropout(own, 0.25, mesh, DRAW, number=2, split=SPLIT)
        made.sum().backward()
        assert own.grad is not None
        return made.detach(), own.grad

    ((whole, grad),) = on_ranks({"dp": 1, "tp": 1}, run)
    assert torch.equal(whole, grad)
    assert whole.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(whole.mean()) == pytest.approx(1, abs=0.05)
    parts = on_ranks({"dp": 2, "tp": 2}, run)
    for at in (0, 1):
        rows = [torch.cat([parts[row][at], parts[row + 1][at]], 1) for row in (0, 2)]
        assert torch.equal(torch.cat(rows), whole)
    (all_dropped,) = on_ranks(
        {"tp": 1}, lambda mesh: ops.dropout(x, 1.0, mesh, DRAW, number=0, split={})
    )
    assert not all_dropped.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_of_a_part_are_the_part_of_all(dtype: torch.dtype) -> None:
    like = torch.empty(64, 32, dtype=dtype)

    def run(mesh: Mesh) -> Tensor:
        return ops.uniform(part(like, mesh, SPLIT), mesh, DRAW, number=1, split=SPLIT)

    (whole,) = on_ranks({"dp": 1, "tp": 1}, run)
    assert whole.dtype == dtype
    assert 0 <= float(whole.min()) < 0.05 < 0.95 < float(whole.max()) < 1
    assert float(whole.double().mean()) == pytest.approx(0.5, abs=0.03)
    parts = on_ranks({"dp": 2, "tp": 2}, run)
    assert torch.equal(torch.cat([torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)]), whole)


def test_a_part_of_a_micro_batch_starts_at_its_rows_in_the_whole_batch() -> None:
    """Micro-batches have 8 rows, of which each of two ranks has 4; tp splits 6 columns twice."""
    x, draw = torch.empty(4, 3), Draw(microbatch=2)
    starts = on_ranks(
        {"dp": 2, "tp": 2}, lambda mesh: ops.start_of(x, mesh, draw, split=SPLIT, rows=(0, 8))
    )
    assert starts == [(16, 0), (16, 3), (20, 0), (20, 3)]
    twice = on_ranks(
        {"dp": 2, "tp": 2},
        lambda mesh: ops.start_of(x, mesh, draw.of(5), split={"dp": 0, "tp": 0}, rows=None),
    )
    assert twice == [(0, 0), (4, 0), (8, 0), (12, 0)]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("shape", "share"), [((1, 4, 6), 6), ((2, 3, 8), 12), ((5, 3), 6)])
def test_ranks_share_a_weight_of_few_rows_along_another_dimension(
    shape: tuple[int, ...], share: int, zero: int
) -> None:
    """Five rows are padded to eight, of which each of four ranks has two."""
    matrix = torch.arange(float(torch.Size(shape).numel())).view(shape)

    def run(mesh: Mesh) -> tuple[int, Tensor, Tensor]:
        weight = Weight(matrix, {}, mesh, trained=True, zero=zero)
        weight.add(torch.full(shape, 1.0 + mesh.coordinate("dp")))
        weight.complete()
        assert weight.gradient is not None
        own = weight.master.detach()
        return own.numel(), weight.whole(own), weight.whole(weight.gradient)

    for numel, whole, gradient in on_ranks({"dp": 4}, run):
        assert numel == share
        assert torch.equal(whole, matrix)
        assert torch.equal(gradient, torch.full(shape, 10.0))
