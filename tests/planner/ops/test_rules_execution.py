"""Strategies of ops that need no local differences, run by ranks that just call the op.

Values and gradients of the parts, put together as the placements say, equal the whole's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from op_cases import OpCase, f, graph_of, positive
from sharding import assert_close, collect, distribute, gradient_layout
from torch import Tensor

from autoparallel.planner.graph.layout import AxisStrategy, Mesh
from autoparallel.planner.ops import axis_strategies

NUM_RANKS = 2
MESH = Mesh(("tp",), (NUM_RANKS,))

UNARY = (
    "celu cosh erfc exp2 expm1 floor frac ceil hardsigmoid hardtanh lgamma log10 log2 log_sigmoid "
    "isfinite isinf isnan logical_not nan_to_num positive relu6 round selu sgn sign sinh tan trunc "
    "asinh lift_fresh asin acos atan square"
)
COMPARISONS = (
    "eq ne ge gt le lt greater less greater_equal less_equal not_equal atan2 fmax fmin fmod "
    "remainder logical_and logical_or logical_xor xlogy"
)
BITS = "__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor"


def overload(name: str) -> str:
    """The overload on tensors only."""
    found = getattr(torch.ops.aten, name).overloads()
    return f"aten.{name}.{'Tensor' if 'Tensor' in found else 'default'}"


def fraction(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def bits(*shape: int) -> Tensor:
    return torch.randint(0, 8, shape)


def cases() -> list[OpCase]:
    torch.manual_seed(0)
    rest: list[tuple[str, tuple[Any, ...]]] = [
        ("aten.acosh.default", (fraction(4, 2).detach().add(2).requires_grad_(),)),
        ("aten.atanh.default", (fraction(4, 2),)),
        ("aten.clamp_max.default", (f(4, 6), 0.5)),
        ("aten.floor_divide.default", (positive(4, 6).detach(), positive(6).detach())),
        ("aten.clip.default", (f(4, 6), -0.5, 0.5)),
        ("aten.threshold.default", (f(4, 6), 0.1, 0.0)),
        ("aten.subtract.Tensor", (f(4, 6), f(6))),
        ("aten.multiply.Tensor", (f(4, 6), f(4, 1))),
        ("aten.divide.Tensor", (f(4, 6), positive(6))),
        ("aten.rsub.Scalar", (f(4, 6), 1.0)),
        ("aten.rsub.Tensor", (f(4, 6), f(4, 6))),
        ("aten.argmin.default", (f(4, 6, 2), 1)),
        ("aten.argsort.default", (f(4, 6), 0)),
        ("aten.cummax.default", (f(4, 6), 1)),
        ("aten.cumprod.default", (positive(4, 6), 1)),
        ("aten.diff.default", (f(4, 6), 1, -1, f(4, 1))),
        ("aten.median.dim", (f(4, 6, 2), 1)),
        ("aten.min.dim", (f(4, 6, 2), 1, True)),
        ("aten.std_mean.correction", (f(4, 6, 2), [1])),
        ("aten._log_softmax.default", (f(4, 6), 1, False)),
        ("aten.adaptive_avg_pool1d.default", (f(2, 4, 6), [3])),
        ("aten.adaptive_max_pool2d.default", (f(2, 4, 6, 6), [3, 3])),
        ("aten.avg_pool1d.default", (f(2, 4, 6), [2])),
        ("aten.max_pool1d.default", (f(2, 4, 6), [2])),
        ("aten.max_pool2d_with_indices.default", (f(2, 4, 6, 6), [2, 2])),
        ("aten.pixel_unshuffle.default", (f(2, 4, 6, 6), 2)),
        ("aten.upsample_nearest1d.default", (f(2, 4, 6), [12])),
        ("aten.copy.default", (f(4, 6).detach(), f(6).detach())),
        ("aten.fill.Tensor", (f(4, 6), f())),
        ("aten.to.other", (f(4, 6), f(6))),
        ("aten.type_as.default", (f(4, 6), f(6))),
        ("aten.expand_as.default", (f(1, 6), f(4, 6))),
        ("aten.view_as.default", (f(4, 6), f(4, 2, 3))),
        ("aten.slice_scatter.default", (f(4, 6), f(4, 2), 1, 2, 4)),
        ("aten.select_scatter.default", (f(4, 6), f(6), 0, 1)),
        ("aten.tile.default", (f(4, 1), [1, 3])),
        ("aten.swapaxes.default", (f(2, 4, 6), 0, 2)),
        ("aten.movedim.intlist", (f(2, 4, 6, 8), [0, 3], [2, 0])),
        ("aten.tensor_split.sections", (f(4, 6), 3, 1)),
        ("aten.concat.default", ([f(4, 6), f(4, 2)], 1)),
        ("aten.feature_dropout.default", (f(4, 6), 0.0, True)),
        ("aten.einsum.default", ("bij,bjk->bki", [f(2, 4, 6), f(2, 6, 8)])),
        ("aten.addcdiv.default", (f(4, 6), f(6), positive(4, 6))),
    ]
    return [
        *(OpCase(overload(name), (fraction(4, 6),)) for name in UNARY.split()),
        *(OpCase(overload(name), (positive(4, 6), positive(6))) for name in COMPARISONS.split()),
        *(OpCase(overload(name), (bits(4, 6), bits(4, 1))) for name in BITS.split()),
        *(OpCase(op, args) for op, args in rest),
        OpCase("aten.div.Tensor_mode", (f(4, 6), positive(6)), {"rounding_mode": "floor"}),
    ]


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor | None]:
    made = [index for index, output in enumerate(outputs) if output.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not made or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [outputs[i] for i in made],
            wanted,
            [cotangents[i] for i in made],
            materialize_grads=True,
        )
    )
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def check(case: OpCase, strategy: AxisStrategy) -> None:
    whole = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors)
    outputs = case.call(whole)
    cotangents = [torch.randn_like(o) if o.is_floating_point() else o for o in outputs]
    wanted = gradients(outputs, whole, cotangents)
    parts = [
        distribute(t.detach(), (held,), MESH)
        for t, held in zip(whole, strategy.inputs, strict=True)
    ]
    given = [
        distribute(c, gradient_layout((held,)), MESH)
        for c, held in zip(cotangents, strategy.outputs, strict=True)
    ]
    results, grads = [], []
    for rank in range(NUM_RANKS):
        own = tuple(
            part[rank].requires_grad_(t.requires_grad) for part, t in zip(parts, whole, strict=True)
        )
        results.append(case.call(own))
        grads.append(gradients(results[-1], own, [each[rank] for each in given]))
    for index, held in enumerate(strategy.outputs):
        found = collect([r[index].detach() for r in results], (held,), MESH, of=f"output {index}")
        assert_close(found, outputs[index].detach(), f"output {index}")
    for index, held in enumerate(strategy.inputs):
        if (grad := wanted[index]) is not None:
            of = f"gradient {index}"
            made = [g[index] for g in grads]
            assert_close(collect(made, gradient_layout((held,)), MESH, of=of), grad, of)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_parts_put_together_equal_the_whole(case: OpCase) -> None:
    graph = graph_of(case)
    strategies = axis_strategies(graph["op"], graph, NUM_RANKS)
    for strategy in strategies:
        assert not strategy.collectives
        check(case, strategy)
    assert any(held.is_shard for s in strategies for held in s.outputs), "nothing can be split"
