"""How plans sum gradients: buckets, algorithms, order, and prices that agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.variants.gradient_buckets import (
    BUCKET_SIZE,
    HeldGradient,
    held_gradients,
    make_buckets,
)

LAYERS, ROWS = 3, 8


def linked(
    number: int, alpha_seconds: float = 1e-4, rate: float = 1e6, kind: str = "cpu"
) -> Cluster:
    """Devices that talk over gloo, or NCCL, by slow links."""
    found = cluster(number)
    hosts = tuple(
        replace(
            host,
            device=replace(host.device, kind=kind),
            link=replace(host.link, alpha_seconds=alpha_seconds, bytes_per_second=rate),
        )
        for host in found.hosts
    )
    return replace(found, hosts=hosts)


def planned(on: Cluster, forced: Forced) -> Plan:
    graph, blocks = mlp(LAYERS, rows=ROWS)
    return plan(graph, blocks, on, Request(ROWS, forced=forced))


def test_buckets_are_filled_as_the_backward_goes_and_shared_gradients_come_last() -> None:
    small = [HeldGradient(f"{block}", block, (0,), False, 1000) for block in range(4)]
    shared = HeldGradient("shared", None, (0,), False, 10)
    large = HeldGradient("large", 4, (0,), False, BUCKET_SIZE + 1)
    other = HeldGradient("other", 2, (0, 1), False, 1)
    found = make_buckets([shared, *small, large, other])
    assert [bucket.names for bucket in found] == [
        ("other",),
        ("large",),
        ("3", "2", "1", "0"),
        ("shared",),
    ]
    assert [bucket.block for bucket in found] == [2, 4, 0, -1]
    by_block = make_buckets([shared, *small, large], by_block=True)
    assert [bucket.names for bucket in by_block] == [
        ("large",),
        ("3",),
        ("2",),
        ("1",),
        ("0",),
        ("shared",),
    ]


def test_no_gradient_is_left_out_and_none_is_summed_twice() -> None:
    graph, blocks = mlp(LAYERS, rows=ROWS)
    for forced in (Forced(dp=4, zero=0), Forced(dp=2, pp=2, zero=0)):
        found = plan(graph, blocks, linked(4), Request(ROWS, forced=forced))
        names = [
            name
            for index in range(len(found.stages))
            for bucket in make_buckets(held_gradients(graph, blocks, found, index))
            for name in bucket.names
        ]
        trained = [node.name for node in graph.parameters if node.spec.requires_grad]
        assert sorted(names) == sorted(trained)
        sums = [own for stage in found.stages for own in stage.gradient_sums]
        size = sum(node.spec.numel for node in graph.parameters)
        assert sum(own.num_bytes for own in sums) == 4 * size


@pytest.mark.parametrize(
    "forced",
    [
        Forced(dp=4, gradients="backward"),
        Forced(dp=4, gradients="priority"),
        Forced(dp=4, allreduce="tree"),
        Forced(dp=4, allreduce="ring", gradients="priority"),
        Forced(dp=2, pp=2, allreduce="recursive_doubling"),
        Forced(dp=2, tp=2, allreduce="halving_doubling"),
    ],
)
def test_every_plan_is_evaluated_to_what_it_predicts_and_survives_its_file(forced: Forced) -> None:
    graph, blocks = mlp(LAYERS, rows=ROWS)
    found = plan(graph, blocks, linked(4), Request(ROWS, forced=forced))
    again = evaluate(graph, blocks, found, found.cluster)
    assert again.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-6)
    for each, stage in zip(again.stages, found.stages, strict=True):
        assert each.seconds == pytest.approx(stage.prediction.seconds, rel=1e-9)
    assert loads(dumps(found)) == found
    assert found.gradient_order == (forced.gradients or found.gradient_order)
    if forced.allreduce is not None:
        names = {own.algorithm for stage in found.stages for own in stage.gradient_sums}
        assert names == {forced.allreduce}


def test_sums_by_priority_are_never_slower_where_links_are_slow() -> None:
    """What hides a sum is also the next forward."""
    on = linked(4)
    backward = planned(on, Forced(dp=4, zero=0, gradients="backward", allreduce="library"))
    priority = planned(on, Forced(dp=4, gradients="priority", allreduce="library"))
    assert priority.prediction.step_seconds < backward.prediction.step_seconds
    chosen = planned(on, Forced(dp=4, zero=0, allreduce="library"))
    gain = 1 - priority.prediction.step_seconds / backward.prediction.step_seconds
    assert chosen.gradient_order == ("priority" if gain >= 0.02 else "backward")


def test_the_parts_of_a_bucket_are_all_there_in_turn() -> None:
    found = planned(linked(4, rate=1e5), Forced(dp=4, gradients="priority"))
    parts: dict[int, list[tuple[int, int]]] = {}
    for own in found.stages[0].gradient_sums:
        parts.setdefault(own.bucket, []).append((own.part, own.num_parts))
    for own in parts.values():
        assert [part for part, _ in own] == list(range(own[0][1]))


def test_on_links_of_great_latency_a_tree_of_few_messages_is_named_and_priced() -> None:
    on = linked(4, alpha_seconds=1e-2, rate=1e9)
    library = planned(on, Forced(dp=4, zero=0, allreduce="library", gradients="backward"))
    chosen = planned(on, Forced(dp=4, zero=0, gradients="backward"))
    assert {own.algorithm for own in chosen.stages[0].gradient_sums} == {"recursive_doubling"}
    assert chosen.prediction.step_seconds < library.prediction.step_seconds


def test_without_gloo_the_library_chooses_and_the_price_stays() -> None:
    found = planned(linked(4, kind="cuda"), Forced(dp=4, zero=0))
    assert {own.algorithm for own in found.stages[0].gradient_sums} <= {"ring", "tree"}
    assert found.gradient_order == "backward"


@pytest.mark.parametrize(
    ("on", "forced", "code"),
    [
        (linked(4, kind="cuda"), {"dp": 4, "allreduce": "tree"}, "AP196"),
        (linked(4), {"dp": 4, "allreduce": "hierarchical"}, "AP196"),
        (linked(4, kind="cuda"), {"dp": 4, "gradients": "priority"}, "AP197"),
        (linked(4), {"pp": 4, "gradients": "priority"}, "AP197"),
        (linked(4), {"dp": 2, "tp": 2, "gradients": "priority"}, "AP197"),
        (linked(4), {"dp": 4, "zero": 1, "gradients": "priority"}, "AP195"),
        (linked(4), {"dp": 4, "zero": 3, "allreduce": "ring"}, "AP195"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_its_reason(
    on: Cluster, forced: dict[str, object], code: str
) -> None:
    with pytest.raises(UsageError) as error:
        planned(on, Forced(**forced))  # type: ignore[arg-type]
    assert error.value.code == code
    assert error.value.why
    assert error.value.fix
