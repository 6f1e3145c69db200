"""Measuring real ops on this CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from profile_cases import (
    attention,
    call,
    cross_entropy,
    elementwise,
    embedding,
    gelu,
    layer_norm,
    linear,
    ref,
    softmax,
    tensor,
)

from autoparallel.cost_model.profile.arguments import MeasureError, build_call
from autoparallel.cost_model.profile.case import OpCase, canonical
from autoparallel.cost_model.profile.clocks import backward_of, flat
from autoparallel.cost_model.profile.measure import (
    Budget,
    measure,
    median_interval,
)

QUICK = Budget(case_seconds=0.05, max_repeats=20)
TRANSFORMER = (
    linear(32, 64, 16),
    attention(2, 16, 8, is_causal=True),
    layer_norm(32, 16),
    gelu(32, 64),
    embedding(10, 16, 2, 16),
    cross_entropy(32, 10),
    softmax(32, 10),
    elementwise("aten.add.Tensor", 2, 32, 16),
)


@pytest.mark.parametrize("case", TRANSFORMER, ids=lambda case: case.op)
def test_the_ops_of_a_transformer_are_measured_in_both_directions(case: OpCase) -> None:
    found = measure(case, "cpu", budget=replace(QUICK, case_seconds=10.0))
    assert found.forward_seconds > 0
    assert found.backward_seconds > 0
    assert QUICK.min_repeats <= found.repeats <= QUICK.max_repeats
    assert found.spread >= 0


@pytest.mark.parametrize("case", TRANSFORMER, ids=lambda case: case.op)
def test_a_rebuilt_op_has_the_tensors_of_its_case_and_all_their_gradients(case: OpCase) -> None:
    made = build_call(case, "cpu")
    given = flat([*made.args, *made.kwargs.values()])
    assert [tuple(each.shape) for each in given] == [each.shape for each in case.tensors]
    assert [each.requires_grad for each in given] == [each.requires_grad for each in case.tensors]
    backward = backward_of(made)
    assert backward is not None
    gradients = backward.run(flat(made.op(*made.args, **made.kwargs)), made.leaves)
    assert [each.shape for each in gradients] == [each.shape for each in made.leaves]


def test_sixty_four_times_the_work_of_a_matmul_is_not_measured_faster() -> None:
    small, large = linear(64, 64, 64), linear(256, 256, 256)
    for _ in range(3):  # a pause of the machine in one of them does not repeat itself
        less = measure(small, "cpu", budget=QUICK)
        more = measure(large, "cpu", budget=QUICK)
        if more.forward_seconds > less.forward_seconds:
            break
    assert more.forward_seconds > less.forward_seconds
    assert more.backward_seconds > less.backward_seconds


def test_an_op_without_gradients_has_no_backward() -> None:
    assert measure(linear(8, 8, 8, grad=False), "cpu", budget=QUICK).backward_seconds == 0.0
    is_best = call("aten.argmax.default", [tensor(8, 8)], -1)
    assert measure(is_best, "cpu", budget=QUICK).backward_seconds == 0.0


@pytest.mark.parametrize(
    "case",
    [
        OpCase(
            "aten.gather.default",
            (tensor(4, 3), tensor(4, 9, dtype="int64")),
            canonical((ref(0), 1, ref(1)), {}),
        ),
        OpCase(
            "aten.index_select.default",
            (tensor(3, 4), tensor(8, dtype="int64")),
            canonical((ref(0), 0, ref(1)), {}),
        ),
        OpCase(
            "aten.index.Tensor",
            (tensor(5, 3), tensor(7, dtype="int64")),
            canonical((ref(0), [None, ref(1)]), {}),
        ),
        OpCase(
            "aten.scatter_add.default",
            (tensor(3, 5), tensor(3, 5, dtype="int64"), tensor(3, 5)),
            canonical((ref(0), 0, ref(1), ref(2)), {}),
        ),
        call("aten.one_hot.default", [tensor(6, dtype="int64")], 4),
        OpCase(
            "aten.cat.default",
            (tensor(3, 5), tensor(2, 5)),
            canonical(([ref(0), ref(1)],), {"dim": 0}),
        ),
        call("aten.where.self", [tensor(3, 4, dtype="bool"), tensor(3, 4), tensor(3, 4)]),
        call("aten.add_.Tensor", [tensor(3, 4), tensor(3, 4)]),
        call("aten.floor_divide.default", [tensor(9, dtype="int64"), tensor(9, dtype="int64")]),
        call("aten.to.dtype", [tensor(3, 4)], torch.bfloat16),
        call("aten.split.Tensor", [tensor(6, 4)], 2),
        OpCase(
            "aten.full.default",
            (),
            canonical(([2, 3], 1.0), {"dtype": torch.float32, "device": torch.device("meta")}),
        ),
    ],
    ids=lambda case: case.op,
)
def test_indices_lists_masks_and_writes_are_rebuilt_in_range(case: OpCase) -> None:
    assert measure(case, "cpu", budget=QUICK).forward_seconds > 0


def test_every_class_and_row_that_is_indexed_exists() -> None:
    loss = build_call(cross_entropy(500, 3), "cpu")
    assert set(loss.args[1].tolist()) == {0, 1, 2}
    rows = build_call(embedding(4, 2, 10, 50), "cpu")
    assert set(rows.args[1].flatten().tolist()) == {0, 1, 2, 3}


def test_another_call_has_tensors_of_its_own() -> None:
    """And repeats and lists are copied as such: each gradient arrives at its own leaf."""
    tensors = (tensor(3, 5), tensor(2, 5))
    case = OpCase("aten.cat.default", tensors, canonical(([ref(0), ref(1)],), {"dim": 0}))
    first = build_call(case, "cpu")
    second = first.another()
    assert {each.data_ptr() for each in first.leaves}.isdisjoint(
        each.data_ptr() for each in second.leaves
    )
    assert [each.tolist() for each in first.leaves] == [each.tolist() for each in second.leaves]
    made = second.op(*second.args, **second.kwargs)
    gradients = torch.autograd.grad(made.sum(), second.leaves)
    assert [each.shape for each in gradients] == [(3, 5), (2, 5)]


def test_what_is_written_to_is_new_in_every_run() -> None:
    made = build_call(call("aten.add_.Tensor", [tensor(3, 4), tensor(3, 4)]), "cpu")
    before = made.args[0].detach().clone()
    args, kwargs = made.prepare()
    made.op(*args, **kwargs)
    assert torch.equal(made.args[0], before)
    assert not torch.equal(args[0], before)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (call("aten.no_such_op.default", [tensor(2)]), "torch has no such op"),
        (call("gelu", [tensor(2)]), "not the path of an op"),
        (call("aten.mm.default", [tensor(2, 3), tensor(2, 3)]), "cannot be multiplied"),
        (replace(gelu(2), arguments="{}"), "arguments"),
        (gelu(10**7, 10**7), "GB are free"),
        (replace(gelu(2), tensors=(tensor(2, dtype="float31"),)), "no dtype 'float31'"),
    ],
)
def test_an_op_that_cannot_run_alone_is_named_with_its_shapes(case: OpCase, message: str) -> None:
    with pytest.raises(MeasureError, match=message) as caught:
        measure(case, "cpu", budget=QUICK)
    assert case.op in str(caught.value)
    assert all(str(each) in str(caught.value) for each in case.tensors)


def test_the_median_and_its_interval_are_those_of_the_order_statistics() -> None:
    """Of 1..100, 1.96·√100/2 = 9.8 ranks on either side of the middle: 40 to 61."""
    median, half_width = median_interval([float(each) for each in range(100, 0, -1)])
    assert median == 50.5
    assert half_width == pytest.approx((61 - 40) / 2 / 50.5)


def test_a_case_ends_with_its_seconds() -> None:
    slow = linear(512, 512, 512)
    assert measure(slow, "cpu", budget=Budget(case_seconds=0.0)).repeats == 1
