"""The memory traffic of experts besides their products, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.dispatch import DISPATCHERS, ROW_COPIES
from autoparallel.cost_model.ops.compute import rate
from autoparallel.passes.ops.activation import describe
from autoparallel.passes.ops.collectives import Alone, Parts, Rank, parts_of
from autoparallel.passes.ops.experts import Sending, run_experts, sent_experts
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import CostAssumptions
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Mesh, NodeLayout
from autoparallel.planner.ops.experts import ExpertKernels, expert_traffic, num_kernels

TOKENS, CHOSEN, EXPERTS, HIDDEN, WIDTH = 32, 2, 4, 16, 24
PAIRS, BYTES = TOKENS * CHOSEN, 2


def swiglu(made: torch.Tensor) -> torch.Tensor:
    gate, up = made.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def clamped(made: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: two clamps, a product with a number, a sigmoid, two products and a sum."""
    gate, up = made[..., ::2], made[..., 1::2]
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def layer(
    function: Callable[[Any], Any], *, has_biases: bool = False
) -> tuple[Node, tuple[TensorSpec, ...]]:
    """A layer of experts with gated activations, and the specs of its inputs."""
    shapes: list[tuple[int, ...]] = [
        *((TOKENS, HIDDEN), (TOKENS, CHOSEN), (TOKENS, CHOSEN)),
        *((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    ]
    if has_biases:
        shapes += [(EXPERTS, 2 * WIDTH), (EXPERTS, HIDDEN)]
    specs = tuple(
        TensorSpec(shape, "int64" if at == 1 else "bfloat16", requires_grad=at != 1)
        for at, shape in enumerate(shapes)
    )
    options: dict[str, Any] = {
        "activation": describe(nn.Module(), function),
        "num_experts": EXPERTS,
    }
    made = TensorSpec((TOKENS, HIDDEN), "bfloat16", requires_grad=True)
    arguments = tuple(Ref(f"i{at}") for at in range(len(specs)))
    node = Node("e", "op", "autoparallel.experts.default", arguments, options, outputs=(made,))
    return node, specs


@pytest.mark.parametrize(
    ("kernels", "forward", "backward"),
    [
        ("one", 0, 0),
        # the product's result is read and the activation's written; backward the same and the
        # gradient of the result
        ("activation", 3 * WIDTH, 5 * WIDTH),
        # silu: 2 and 3; times: 3 and 5; the score: each row read and written, backward twice
        ("separate", 5 * WIDTH + 2 * HIDDEN, 8 * WIDTH + 4 * HIDDEN),
    ],
)
@pytest.mark.parametrize("moves", [0, 2, 4])
def test_rows_that_are_copied_and_the_activation(
    kernels: ExpertKernels, forward: int, backward: int, moves: int
) -> None:
    copied = 2 * moves * HIDDEN
    expected = (PAIRS * BYTES * (copied + forward), PAIRS * BYTES * (copied + backward))
    assert expert_traffic(*layer(swiglu), kernels, moves) == expected


def test_biases_and_each_op_of_an_activation_count_apart() -> None:
    """Of clamps, a product with a number, a sigmoid and a sum with a number 2 forward and 3
    backward, of two products 3 and 5. A bias is gathered and added: 4 and 2 of its width."""
    biases = 2 * WIDTH + HIDDEN
    forward = (5 * 2 + 2 * 3) * WIDTH + 4 * biases + 2 * HIDDEN
    backward = (5 * 3 + 2 * 5) * WIDTH + 2 * biases + 4 * HIDDEN
    found = expert_traffic(*layer(clamped, has_biases=True), "separate", 0)
    assert found == (PAIRS * BYTES * forward, PAIRS * BYTES * backward)


@pytest.mark.parametrize("kernels", get_args(ExpertKernels))
def test_a_price_has_the_traffic_besides_the_products(kernels: ExpertKernels) -> None:
    node, specs = layer(swiglu)
    cluster, whole = parse_cluster("1xH100"), (INVARIANT,)
    host = cluster.hosts[0]
    device = replace(host.device, launch_seconds=0.0)
    cluster = replace(cluster, hosts=(replace(host, device=device),))
    layout = NodeLayout((whole,) * len(specs), (whole,))

    def seconds(own: ExpertKernels, imbalance: float = 1.0) -> float:
        assumptions = CostAssumptions(expert_kernels=own, imbalance=imbalance)
        mesh = Mesh(("dp",), (1,))
        prices = Prices(mesh, cluster, (0,), "bf16", "adamw", rules, assumptions=assumptions)
        return sum(prices.compute(node, specs, layout))

    per_byte = rate(device, "copy", "bfloat16").seconds_per_byte
    more = sum(expert_traffic(node, specs, kernels, 2)) - sum(expert_traffic(node, specs, "one", 2))
    assert seconds(kernels) - seconds("one") == pytest.approx(more * per_byte, abs=1e-15)
    assert seconds(kernels, 1.5) == pytest.approx(1.5 * seconds(kernels))


def test_each_dispatcher_says_how_often_it_copies_rows() -> None:
    assert set(ROW_COPIES) == set(DISPATCHERS)


class Kernels(TorchDispatchMode):
    """Counter of ops that compute, as a GPU's host issues them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Pair(Alone):
    """Communicator of one of two ranks, of which each gets its own rows back."""

    def size(self, axis: int) -> int:
        return 2

    def parts(
        self, counts: torch.Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], torch.Tensor]:
        sums = torch.cat((counts, counts)).sum(-1).t()
        return parts_of(sums.tolist, len(sums), len(counts), 0), counts


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("num_parts", [0, 1, 2])
@pytest.mark.parametrize("function", [swiglu, clamped])
def test_kernels_are_those_that_the_runtime_issues(
    function: Callable[[Any], Any], num_parts: int, has_biases: bool
) -> None:
    node, specs = layer(function, has_biases=has_biases)
    held = EXPERTS // 2 if num_parts else EXPERTS
    x, _, scores = (torch.rand(spec.shape, requires_grad=True) for spec in specs[:3])
    ids = torch.randint(EXPERTS, specs[1].shape)
    weights = [torch.rand(held, *spec.shape[1:], requires_grad=True) for spec in specs[3:]]
    options: dict[str, Any] = {"activation": node.kwargs["activation"], "transposed": False}
    rank = Rank(Mesh(("ep",), (2,)), (0,), Pair())
    with Kernels() as forward:
        if num_parts:
            sending = Sending((0,), (0,), num_parts=num_parts)
            options |= {"axes": (0,), "sending": sending}
            made = sent_experts(rank, x, ids, scores, *weights, **options)
        else:
            made = run_experts(x, ids, scores, *weights, **options)
    with Kernels() as backward:
        torch.autograd.grad(made, [x, scores, *weights], torch.ones_like(made))
    told = num_kernels(node, "separate", num_parts)
    assert told is not None
    every = tuple(max(1, num_parts) * each for each in told)
    assert every == pytest.approx((forward.count, backward.count), rel=0.25)
