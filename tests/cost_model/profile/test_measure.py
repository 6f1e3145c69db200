"""Measuring real ops on this CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_interpreters import ForkedInterpreter
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
from autoparallel.cost_model.profile.case import OpCase, ProfileError, canonical
from autoparallel.cost_model.profile.clocks import backward_of, flat
from autoparallel.cost_model.profile.database import (
    Database,
    Environment,
    Measurement,
    environment_of,
)
from autoparallel.cost_model.profile.measure import (
    Budget,
    Progress,
    combined,
    measure,
    measure_all,
    median_interval,
)

QUICK = Budget(total_seconds=20.0, case_seconds=0.05, max_repeats=20)
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


def test_of_two_visits_that_disagree_the_faster_counts() -> None:
    first, second = Measurement(1.0, 4.0, 10, 0.01), Measurement(1.05, 2.0, 30, 0.02)
    assert combined(first, second) == Measurement((10 + 31.5) / 40, 2.0, 40, 0.02)


def test_each_distinct_case_is_measured_and_a_second_run_measures_nothing() -> None:
    environment = environment_of("cpu")
    seen: list[Progress] = []
    with Database(":memory:") as database:
        cases = [gelu(4), gelu(8), gelu(4)]
        outcomes = list(
            measure_all(cases, database, environment, budget=QUICK, observe=seen.append)
        )
        assert [outcome.case for outcome in outcomes] == [gelu(4), gelu(8)] * 2
        assert dict(database.all(environment)).keys() == {gelu(4), gelu(8)}
        last = {outcome.case: outcome.measurement for outcome in outcomes}
        assert database.all(environment) == last
        assert [each.done for each in seen] == [0, 1, 2, 3, 4]
        assert {each.of for each in seen} == {4}
        assert [each.case for each in seen] == [gelu(4), gelu(8), gelu(4), gelu(8), None]
        assert seen[-1].seconds_left == 0.0
        assert all(each.seconds_left <= QUICK.total_seconds for each in seen)
        assert list(measure_all(cases, database, environment, budget=QUICK)) == []


def test_the_weightiest_case_is_measured_first_and_the_budget_ends_it() -> None:
    cases = [gelu(4), gelu(8), gelu(16)]
    weights = {gelu(8): 0.7, gelu(16): 0.2}
    environment = environment_of("cpu")
    with Database(":memory:") as database:
        run = measure_all(cases, database, environment, budget=QUICK, weights=weights)
        order = [outcome.case for outcome in run]
        assert order[:3] == [gelu(8), gelu(16), gelu(4)]
    with Database(":memory:") as database:
        spent = replace(QUICK, total_seconds=0.0)
        assert list(measure_all(cases, database, environment, budget=spent)) == []


def test_a_case_that_fails_is_reported_once_and_the_others_are_measured() -> None:
    broken = call("aten.mm.default", [tensor(2, 3), tensor(2, 3)])
    environment = environment_of("cpu")
    with Database(":memory:") as database:
        run = measure_all([broken, gelu(4)], database, environment, budget=QUICK)
        failed = [outcome for outcome in run if outcome.error is not None]
        assert [outcome.case for outcome in failed] == [broken]
        assert set(database.all(environment)) == {gelu(4)}


def test_features_of_a_measured_case_are_renewed() -> None:
    environment = environment_of("cpu")
    better = replace(gelu(4), flops=(77.0, 88.0))
    with Database(":memory:") as database:
        database.put(environment, gelu(4), Measurement(1.0, 1.0, 9, 0.0))
        assert list(measure_all([better], database, environment, budget=QUICK)) == []
        (kept,) = database.all(environment)
        assert kept.flops == (77.0, 88.0)


def test_times_are_not_recorded_for_another_environment() -> None:
    elsewhere = Environment("another CPU", "", "2.13.0", 64)
    with Database(":memory:") as database, pytest.raises(ProfileError, match="another CPU"):
        list(measure_all([gelu(4)], database, elsewhere, budget=QUICK))


SUPPORT = Path(__file__).parents[2] / "support"
INTERRUPTED = """
import sys
sys.path.insert(0, sys.argv[2])
from autoparallel.cost_model.profile.database import Database, environment_of
from autoparallel.cost_model.profile.measure import Budget, measure_all
from profile_cases import gelu
cases = [gelu(size) for size in range(1, 100_000)]
with Database(sys.argv[1]) as database:
    budget = Budget(total_seconds=100, case_seconds=0.02)
    for outcome in measure_all(cases, database, environment_of("cpu"), budget=budget):
        print(outcome.case.tensors[0].shape[0], flush=True)
"""


def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.sqlite"
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    run = ForkedInterpreter(
        [sys.executable, str(script), str(path), str(SUPPORT)], env=os.environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.stdout is not None
    with run.stdout:
        told = [int(run.stdout.readline()) for _ in range(5)]
        os.kill(run.pid, signal.SIGINT)
        rest = run.stdout.read().decode().splitlines()
    assert run.wait(timeout=60) != 0
    assert "KeyboardInterrupt" in rest[-1]
    told += [int(line) for line in rest if line.isdigit()]
    with Database(path) as database:
        (environment,) = database.environments()
        kept = {case.tensors[0].shape[0] for case in database.all(environment)}
    assert set(told) <= kept
    assert len(kept) <= len(told) + 1


def test_a_case_ends_with_its_seconds() -> None:
    slow = linear(512, 512, 512)
    assert measure(slow, "cpu", budget=Budget(case_seconds=0.0)).repeats == 1
