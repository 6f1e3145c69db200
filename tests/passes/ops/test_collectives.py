"""Every conversion keeps the tensor, and its backward is what the gradient's placement says."""

from __future__ import annotations

import itertools

import pytest
import torch
from communicator import ThreadCommunicator, run_ranks
from marks import slow
from sharding import assert_close, collect, distribute, gradient_layout

from autoparallel.passes.ops.collectives import (
    MOVES,
    Alone,
    convert,
    format_steps,
    local_tensor,
    parse_steps,
)
from autoparallel.planner.graph.layout import (
    CONVERSIONS,
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Mesh,
    conversion_steps,
    format_layout,
    shard,
)

PLACEMENTS = (shard(0), shard(1), REPLICATE, INVARIANT, PARTIAL)
PAIRS = [
    (a, b)
    for a, b in itertools.product(PLACEMENTS, PLACEMENTS)
    if a != b and (a.kind, b.kind) in CONVERSIONS
]


def check(mesh: Mesh, source: Layout, target: Layout) -> list[list[tuple[object, ...]]]:
    """Convert a random tensor and gradient; returns each rank's collectives."""
    torch.manual_seed(0)
    tensor, gradient = torch.randn(12, 24).double(), torch.randn(12, 24).double()
    parts = distribute(tensor, source, mesh)
    gradients = distribute(gradient, gradient_layout(target), mesh)
    steps = conversion_steps(source, target)

    def work(communicator: ThreadCommunicator) -> tuple[torch.Tensor, ...]:
        rank = mesh.index(communicator.coordinates)
        part = parts[rank].requires_grad_()
        result = convert(part, steps, communicator)
        forward = list(communicator.calls)
        result.backward(gradients[rank])
        assert part.grad is not None
        calls.append([*forward, ("|",), *communicator.calls[len(forward) :]])
        return result.detach(), part.grad

    calls: list[list[tuple[object, ...]]] = []
    results = run_ranks(mesh, work)
    name = f"{format_layout(source)} -> {format_layout(target)}"
    assert_close(collect([r[0] for r in results], target, mesh, of=name), tensor, name, 1e-13)
    grads = [r[1] for r in results]
    assert_close(
        collect(grads, gradient_layout(source), mesh, of=name), gradient, f"grad {name}", 1e-13
    )
    return calls


def test_the_thirteen_conversions_have_moves() -> None:
    assert set(MOVES) | {("S", "S")} == set(CONVERSIONS)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_a_conversion_on_one_axis_is_exact_both_ways_and_uses_the_collectives_it_says(
    source: object, target: object, size: int
) -> None:
    mesh = Mesh(("tp",), (size,))
    calls = check(mesh, (source,), (target,))  # type: ignore[arg-type]
    expected = CONVERSIONS[source.kind, target.kind]  # type: ignore[attr-defined]
    for of_rank in calls:
        split = of_rank.index(("|",))
        found = [[c[0] for c in of_rank[:split]], [c[0] for c in of_rank[split + 1 :]]]
        assert found == [[name] if name else [] for name in expected]


@pytest.mark.parametrize("shape", [(2, 2), slow((2, 3))])
def test_every_conversion_on_two_axes_is_exact_both_ways(shape: tuple[int, int]) -> None:
    """All pairs of layouts over (S(0), S(1), R, I, P), nested splits included."""
    mesh = Mesh(("dp", "tp"), shape)
    layouts = list(itertools.product(PLACEMENTS, PLACEMENTS))
    checked = 0
    for source, target in itertools.product(layouts, layouts):
        kinds = {(s.source.kind, s.target.kind) for s in conversion_steps(source, target)}
        if kinds <= set(CONVERSIONS):
            check(mesh, source, target)
            checked += 1
    assert checked > 400


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_does_not_keep_the_whole_in_memory(dim: int) -> None:
    """Of rows, which lie together, as of columns."""
    whole = torch.arange(16.0).reshape(4, 4)

    def work(communicator: ThreadCommunicator) -> int:
        part = convert(whole, conversion_steps((INVARIANT,), (shard(dim),)), communicator)
        return part.untyped_storage().nbytes()

    assert run_ranks(Mesh(("tp",), (2,)), work) == [32, 32]


def test_integers_and_booleans_convert_forward_only() -> None:
    mesh = Mesh(("tp",), (2,))
    numbers = torch.arange(8)

    def work(communicator: ThreadCommunicator) -> bool:
        part = convert(numbers, conversion_steps((INVARIANT,), (shard(0),)), communicator)
        mask = convert(part > 3, conversion_steps((shard(0),), (INVARIANT,)), communicator)
        assert mask.dtype == torch.bool
        return torch.equal(mask, numbers > 3)

    assert run_ranks(mesh, work) == [True, True]


def test_the_text_of_a_conversion_reads_back() -> None:
    axes = ("dp", "tp")
    for source, target in itertools.product(PLACEMENTS, PLACEMENTS):
        steps = conversion_steps((source, target), (target, source))
        if steps:
            assert parse_steps(format_steps(steps, axes), axes) == steps


def test_a_failing_rank_fails_the_test_and_hangs_nobody() -> None:
    def work(communicator: ThreadCommunicator) -> None:
        if communicator.coordinates == (1,):
            raise ValueError("rank 1 is broken")
        communicator.all_reduce(torch.ones(1), 0)

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(Mesh(("tp",), (3,)), work)


def test_a_plain_parameter_is_its_own_local_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert local_tensor(parameter) is parameter


def test_a_rank_alone_has_every_result_as_a_new_tensor() -> None:
    alone = Alone()
    x = torch.arange(6.0).view(2, 3)
    results = [
        alone.all_reduce(x, 0),
        alone.all_reduce(x, 0, "max"),
        alone.all_gather(x, 0, 1),
        alone.reduce_scatter(x, 0, 0),
        alone.all_to_all(x, 0, 0, 1),
        alone.swap(x, 0),
    ]
    assert (alone.size(0), alone.coordinate(0)) == (1, 0)
    for result in results:
        assert torch.equal(result, x)
        assert result.data_ptr() != x.data_ptr()
