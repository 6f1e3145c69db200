"""Every strategy that a rule offers, run by ranks on parts, equals the op on the whole.

Values and every input's gradient, in float64, to 1e-10 of the largest magnitude; of ops that
models spend their time in also some in float32 and bfloat16, to what their digits allow.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from marks import slow
from op_cases import OpCase, cases, f, graph_of
from random_suites import sample_size
from torch import Tensor

from autoparallel.passes.local.prove import describe, node_layouts, prove
from autoparallel.planner.graph.layout import Mesh, shard

CASES = cases()
MESHES = {
    Mesh(("tp",), (2,)): sys.maxsize,
    Mesh(("tp",), (3,)): sample_size(1, sys.maxsize),
    Mesh(("dp", "tp"), (2, 2)): sample_size(2, 10),
}
"""The number of layouts of an op that are proven on each mesh."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_offered_layout_of_an_op_equals_one_device(
    case: OpCase, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    graph, proven = graph_of(case), 0
    chooser = random.Random(str(case))
    for mesh, number in MESHES.items():
        layouts = node_layouts(graph, mesh)
        if len(layouts) > number:
            layouts = chooser.sample(layouts, number)
        for layout in layouts:
            try:
                prove(graph, case.call, case.tensors, mesh=mesh, layout=layout)
            except Exception as error:
                error.add_note(f"{case} on {mesh.shape} as {describe(layout)}")
                raise
            proven += 1
    assert proven >= len(MESHES)
    record_property("proven", proven)
    print(f"{case}: {proven} layouts proven")


@pytest.mark.parametrize("shape", [(4,), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranks_that_share_a_head_of_keys_read_it(shape: tuple[int, ...], is_causal: bool) -> None:
    """16 heads of queries and two of keys: an axis of four ranks splits those of queries only."""
    torch.manual_seed(0)
    op = "aten.scaled_dot_product_attention.default"
    key, value = f(1, 2, 8, 4), f(1, 2, 8, 4)
    case = OpCase(op, (f(1, 16, 8, 4), key, value, None, 0.0, is_causal), {"enable_gqa": True})
    graph, mesh = graph_of(case), Mesh(("dp", "tp")[: len(shape)], shape)
    layouts = node_layouts(graph, mesh)
    heads = [
        each for each in layouts if shard(1) in each.inputs[0] and shard(1) not in each.inputs[1]
    ]
    assert heads
    for layout in layouts:
        prove(graph, case.call, case.tensors, mesh=mesh, layout=layout)


_NAMES = (
    "linear matmul addmm bmm einsum scaled_dot_product_attention embedding layer_norm rms_norm "
    "softmax log_softmax cross_entropy_loss gelu silu mul add cat split split_with_sizes view "
    "transpose expand sum mean conv2d batch_norm group_norm"
)
TRAINED_WITH = frozenset(_NAMES.split())
SAMPLES = [case for case in CASES if case.op.split(".")[1] in TRAINED_WITH]
LAYOUTS_PER_SAMPLE = sample_size(1, 5)
FIRST = {case.op: case for case in reversed(SAMPLES)}
"""The first case of each op, which is proven in these formats by default."""


def in_dtype(case: OpCase, dtype: torch.dtype) -> OpCase:
    """The case with its float64 tensors in another format."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            return value.detach().to(dtype).requires_grad_(value.requires_grad)
        if isinstance(value, tuple | list):
            return type(value)(cast(item) for item in value)
        return value

    return replace(case, args=cast(case.args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [case if case is FIRST[case.op] else slow(case) for case in SAMPLES], ids=str
)
def test_sampled_layouts_hold_in_the_formats_that_are_trained_in(
    case: OpCase, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    torch.manual_seed(0)
    case = in_dtype(case, dtype)
    graph, mesh = graph_of(case), Mesh(("tp",), (2,))
    layouts = node_layouts(graph, mesh)
    chosen = random.Random(str(case)).sample(layouts, min(LAYOUTS_PER_SAMPLE, len(layouts)))
    for layout in chosen:
        try:
            prove(graph, case.call, case.tensors, mesh=mesh, layout=layout)
        except Exception as error:
            error.add_note(f"{case} in {dtype} as {describe(layout)}")
            raise
    assert chosen
    record_property(f"proven-{str(dtype).removeprefix('torch.')}", len(chosen))
