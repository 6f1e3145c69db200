"""Changes of layout in an exported script: values and gradients by their formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from script_ranks import group_of_one, on_ranks
from torch import Tensor

from autoparallel.passes.ops.local_loss import part_of
from autoparallel.runtime.script_parts import mesh as changes
from autoparallel.runtime.script_parts.mesh import Mesh

RANKS = 2
Values = list[Tensor]
Formula = Callable[[Values, int], Tensor]
"""Of all ranks' tensors, and a rank: its result."""


def own(values: Values, rank: int) -> Tensor:
    return values[rank]


def half(values: Values, rank: int) -> Tensor:
    return values[rank] / RANKS


def total(values: Values, rank: int) -> Tensor:
    return sum(values, torch.zeros(()))


def joined(values: Values, rank: int) -> Tensor:
    return torch.cat(values, 1)


def part(values: Values, rank: int) -> Tensor:
    return values[rank].chunk(RANKS, 1)[rank]


def part_of_total(values: Values, rank: int) -> Tensor:
    return total(values, rank).chunk(RANKS, 1)[rank]


def padded(values: Values, rank: int) -> Tensor:
    zeros = torch.zeros_like(values[rank])
    return torch.cat([values[rank] if each == rank else zeros for each in range(RANKS)], 1)


def exchanged(split: int, concat: int, values: Values, rank: int) -> Tensor:
    return torch.cat([each.chunk(RANKS, split)[rank] for each in values], concat)


def other_end(values: Values, rank: int) -> Tensor:
    return values[RANKS - 1 - rank]


CHANGES: dict[str, tuple[Callable[..., Tensor], Formula, Formula]] = {
    "all_gather": (partial(changes.all_gather, dim=1), joined, part_of_total),
    "all_gather_same": (partial(changes.all_gather_same, dim=1), joined, part),
    "pad": (partial(changes.pad, dim=1), padded, part),
    "take_part": (partial(changes.take_part, dim=1), part, padded),
    "take_part_same": (partial(changes.take_part_same, dim=1), part, joined),
    "as_term": (changes.as_term, half, half),
    "as_term_same": (changes.as_term_same, half, own),
    "divide_gradient": (changes.divide_gradient, own, half),
    "sum_gradient": (changes.sum_gradient, own, total),
    "all_reduce": (changes.all_reduce, total, own),
    "all_reduce_both": (changes.all_reduce_both, total, total),
    "reduce_scatter": (partial(changes.reduce_scatter, dim=1), part_of_total, joined),
    "all_to_all": (
        partial(changes.all_to_all, split_dim=0, concat_dim=1),
        partial(exchanged, 0, 1),
        partial(exchanged, 1, 0),
    ),
    "swap": (lambda x, mesh, axis: changes.swap(x, (axis,), mesh), other_end, other_end),
}


def of_ranks(seed: int, shape: torch.Size = torch.Size((2, 4))) -> Values:  # noqa: B008
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(RANKS)]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_has_the_value_and_the_gradient_of_its_formula(name: str) -> None:
    change, value, gradient = CHANGES[name]
    given = of_ranks(0)
    upstream = of_ranks(1, value(given, 0).shape)

    def run(mesh: Mesh) -> tuple[Tensor, Tensor]:
        rank = mesh.coordinate("tp")
        x = given[rank].clone().requires_grad_()
        made = change(x, mesh, "tp")
        made.backward(upstream[rank])
        assert x.grad is not None
        return made.detach(), x.grad

    for rank, (made, grad) in enumerate(on_ranks({"tp": RANKS}, run)):
        torch.testing.assert_close(made, value(given, rank))
        torch.testing.assert_close(grad, gradient(upstream, rank))


@pytest.mark.parametrize("name", ["all_gather", "take_part", "all_to_all"])
def test_integers_are_moved_without_a_gradient(name: str) -> None:
    change, value, _ = CHANGES[name]
    given = [torch.arange(8).view(2, 4) + 10 * rank for rank in range(RANKS)]
    made = on_ranks({"tp": RANKS}, lambda mesh: change(given[mesh.coordinate("tp")], mesh, "tp"))
    for rank, each in enumerate(made):
        assert torch.equal(each, value(given, rank))


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "swap"])
def test_on_an_axis_of_one_rank_nothing_changes(name: str) -> None:
    x = torch.ones(2, 4)
    (made,) = on_ranks({"tp": 1}, lambda mesh: CHANGES[name][0](x, mesh, "tp"))
    assert torch.equal(made, x)


def test_a_part_starts_behind_the_parts_of_the_ranks_before() -> None:
    """Of 2 by 3 ranks with 4 entries each: the outer axis counts 12, the inner one 4."""
    shape = {"dp": 2, "tp": 3}
    found = on_ranks(shape, lambda mesh: part_of(mesh, 4, ("dp", "tp")))
    assert found == [(0, 24), (4, 24), (8, 24), (12, 24), (16, 24), (20, 24)]
    found = on_ranks(shape, lambda mesh: part_of(mesh, 4, ("tp",)))
    assert found == [(0, 12), (4, 12), (8, 12)] * 2
    found = on_ranks(shape, lambda mesh: part_of(mesh, 4, ("dp", "tp"), mirrored=("tp",)))
    assert found == [(8, 24), (4, 24), (0, 24), (20, 24), (16, 24), (12, 24)]


def test_the_collectives_of_a_process_group_give_new_tensors() -> None:
    """On one rank every result is the tensor itself, whole and contiguous."""
    x = torch.arange(6.0).view(2, 3).t()
    with group_of_one():
        mesh = Mesh((0,), {"dp": 1, "tp": 1}, "cpu")
        assert (mesh.size("tp"), mesh.coordinate("dp")) == (1, 0)
        results = [
            mesh.all_reduce(x, "tp"),
            mesh.all_reduce(x, "tp", "max"),
            mesh.all_gather(x, "dp", 1),
            mesh.reduce_scatter(x, "dp", 0),
            mesh.all_to_all(x, "tp", 0, 1),
            mesh.swap(x, "dp"),
        ]
    for result in results:
        assert torch.equal(result, x)
        assert result.is_contiguous()
        assert result.data_ptr() != x.data_ptr()
