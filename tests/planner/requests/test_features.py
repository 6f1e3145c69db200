"""What is denied is in no plan, and a plan with less to choose from is never faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from one_stage import plan
from small_graphs import cluster, leaf, mlp, op, weight, with_batch

from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import Graph, Ref
from autoparallel.planner.graph.layout import AxisStrategy, shard
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import allowed, features_of
from autoparallel.planner.requests.request import SCHEDULES, Forced, Request


@cache
def planned(
    *,
    allow: tuple[str, ...] = (),
    deny: tuple[str, ...] = (),
    memory: int | None = None,
    max_tp: int | None = None,
    forced: Forced | None = None,
) -> Plan:
    graph, blocks = mlp(2, rows=4, width=64, inner=256)
    request = Request(
        4,
        features=features_of(allow, deny, SCHEDULES),
        memory_limit_bytes=memory,
        max_tp=max_tp,
        forced=forced or Forced(),
    )
    return plan(graph, blocks, cluster(4, bytes_per_second=1e11), request)


def has(axis: str) -> Callable[[Plan], bool]:
    return lambda found: any(axis in s.mesh.axes and s.mesh.size > 1 for s in found.stages)


def axes(found: Plan) -> int:
    return max(sum(size > 1 for size in stage.mesh.shape) for stage in found.stages)


USES: dict[str, Callable[[Plan], bool]] = {
    "dp": has("dp"),
    "tp": has("tp"),
    "pp": lambda found: len(found.stages) > 1,
    "2d-mesh": lambda found: axes(found) == 2,
    "mixed-stages": lambda found: len({len(stage.devices) for stage in found.stages}) > 1,
    "1f1b": lambda found: len(found.stages) > 1 and found.schedule == "1f1b",
}


COVERED = ("pp", "2d-mesh", "dp", "1f1b")
"""Denied elsewhere too: what a test forces is denied to all others."""


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in USES if name not in COVERED),
        *(pytest.param(name, marks=pytest.mark.slow) for name in COVERED),
    ],
)
def test_what_is_denied_is_not_used_and_nothing_gets_faster(name: str) -> None:
    free, less = planned(), planned(deny=(name,))
    assert not USES[name](less)
    assert less.prediction.step_seconds >= free.prediction.step_seconds * (1 - 1e-9)
    if not USES[name](free):
        assert less.prediction.step_seconds == pytest.approx(free.prediction.step_seconds)


def test_denying_all_but_one_is_forcing_it() -> None:
    for axis, forced in (("dp", Forced(dp=4)), ("pp", Forced(pp=4))):
        only = planned(allow=(axis,))
        assert only.prediction.step_seconds == pytest.approx(
            planned(forced=forced).prediction.step_seconds, rel=1e-6
        ), axis


@pytest.mark.parametrize("zeros", [(1,), (2,), (3,), (1, 3)])
def test_only_the_zero_stages_that_are_allowed_are_used(zeros: tuple[int, ...]) -> None:
    """Memory binds: 0.28 MB of weights take 1.1 MB with AdamW, and 1 MB is there."""
    names = tuple(f"zero{zero}" for zero in zeros)
    forced = Forced(dp=4, recompute="none")
    found = planned(allow=names, memory=1_000_000, forced=forced)
    free = planned(memory=1_000_000, forced=forced)
    assert {stage.zero for stage in found.stages} <= {0, *zeros}
    assert found.prediction.step_seconds >= free.prediction.step_seconds * (1 - 1e-9)
    if free.stages[0].zero in zeros:
        assert found.prediction.step_seconds == pytest.approx(free.prediction.step_seconds)


def test_no_recomputation_is_used_where_it_is_denied() -> None:
    found = planned(deny=("recompute",))
    assert {block.recompute for stage in found.stages for block in stage.blocks} == {"none"}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_is_of_the_allowed_way_only(mode: str) -> None:
    """Where activations do not fit, and one way to recompute is denied, the other is used."""
    forced = Forced(dp=4, zero=0, num_microbatches=1)
    graph, blocks = mlp(6, rows=4096, width=16, inner=64)
    ways = {}
    for deny in ((), (mode,)):
        request = Request(
            4096,
            forced=forced,
            features=features_of((), deny, SCHEDULES),
            memory_limit_bytes=4_000_000,
        )
        ways[deny] = plan(graph, blocks, cluster(4), request)
    less = {block.recompute for stage in ways[mode,].stages for block in stage.blocks}
    assert mode not in less
    assert less != {"none"}
    seconds = {deny: found.prediction.step_seconds for deny, found in ways.items()}
    assert seconds[mode,] >= seconds[()] * (1 - 1e-9)


def test_the_largest_tensor_parallel_degree_is_kept() -> None:
    for most in (1, 2, 4):
        found = planned(max_tp=most, deny=("dp", "pp") if most == 4 else ())
        sizes = [dict(zip(s.mesh.axes, s.mesh.shape, strict=True)) for s in found.stages]
        assert max(each.get("tp", 1) for each in sizes) <= most


@pytest.mark.parametrize(
    ("allow", "deny", "code", "says"),
    [
        ((), ("zero4",), "AP185", "zero"),
        (("tp",), ("tp",), "AP186", "both allowed and denied"),
        ((), SCHEDULES, "AP186", "every schedule"),
    ],
)
def test_features_that_make_no_sense_are_told(
    allow: tuple[str, ...], deny: tuple[str, ...], code: str, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        features_of(allow, deny, SCHEDULES)
    assert caught.value.code == code
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Request(8, forced=Forced(tp=4), max_tp=2),
        lambda: Request(8, forced=Forced(pp=2), features=features_of((), ("pp",), SCHEDULES)),
        lambda: Request(8, forced=Forced(zero=1), features=features_of(("zero3",), (), SCHEDULES)),
    ],
)
def test_what_is_forced_and_denied_is_told(make: Callable[[], Request]) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.code == "AP186"


def tokens() -> Graph:
    """Return a graph of 4 rows of 6 positions, a product with a weight, and a loss by token."""
    nodes = (
        leaf("x", 4, 6, 8),
        weight("w", 8, 8),
        op("product", "linear.default", (Ref("x"), Ref("w")), 4, 6, 8),
        op("loss", "mean.default", (Ref("product"),)),
    )
    return with_batch(Graph(nodes, Ref("loss"), 4))


def experts(path: str = "bmm.default") -> Graph:
    """Return a graph of a product with the weights of 4 experts."""
    nodes = (
        leaf("x", 4, 6, 8),
        weight("w", 4, 8, 8),
        op("product", path, (Ref("x"), Ref("w")), 4, 6, 8),
        op("loss", "mean.default", (Ref("product"),)),
    )
    return Graph(nodes, Ref("loss"), 0)


def left(graph: Graph, *denied: str) -> set[AxisStrategy]:
    """Return the strategies of the product that are left where features are denied."""
    node = graph["product"]
    found = allowed(
        node,
        graph,
        axis_strategies(node, graph, 2),
        lambda: dict.fromkeys((Ref("x"), Ref("product")), frozenset({0, 1})),
        features_of((), denied, SCHEDULES),
    )
    return set(found)


def test_without_data_parallelism_no_strategy_splits_rows() -> None:
    graph = tokens()
    lost = left(graph) - left(graph, "dp")
    assert lost
    assert all(shard(0) in (each.inputs[0], each.outputs[0]) for each in lost)
    assert not any(shard(0) in (each.inputs[0], each.outputs[0]) for each in left(graph, "dp"))
    assert any(each.inputs[1] == shard(0) for each in left(graph, "dp"))  # columns of the product


def test_without_sequence_parallelism_no_strategy_splits_positions() -> None:
    graph = tokens()
    lost = left(graph) - left(graph, "sp")
    assert lost
    assert all(shard(1) in (each.inputs[0], each.outputs[0]) for each in lost)
    assert not any(shard(1) in (each.inputs[0], each.outputs[0]) for each in left(graph, "sp"))


def test_without_expert_parallelism_no_strategy_splits_experts() -> None:
    lost = left(experts()) - left(experts(), "ep")
    assert lost
    assert all(each.inputs[1] == shard(0) for each in lost)
    assert not any(each.inputs[1] == shard(0) for each in left(experts(), "ep"))


def test_the_strategies_of_an_op_are_all_left_where_features_leave_none() -> None:
    graph = tokens()
    node = graph["product"]
    rows = tuple(each for each in axis_strategies(node, graph, 2) if each.inputs[0] == shard(0))
    assert rows
    assert allowed(node, graph, rows, dict, features_of((), ("dp",), SCHEDULES)) == rows
