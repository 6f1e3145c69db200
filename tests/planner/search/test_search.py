"""The whole search: forced degrees, memory that binds, and what cannot be done."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
from one_stage import plan, ranked
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import Cluster, Host
from autoparallel.planner.errors import InfeasibleError, TimeLimitError, UsageError
from autoparallel.planner.graph.layout import format_layout
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search import candidates
from autoparallel.planner.search.candidates import complete_simulation


def degrees(found: Plan) -> list[dict[str, int]]:
    return [dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True)) for stage in found.stages]


@pytest.mark.parametrize(
    ("num_devices", "forced", "expected"),
    [
        (2, Forced(dp=2), [{"dp": 2}]),
        (2, Forced(tp=2), [{"tp": 2}]),
        pytest.param(2, Forced(pp=2), [{"dp": 1}] * 2, marks=pytest.mark.slow),
        pytest.param(4, Forced(dp=2, tp=2), [{"dp": 2, "tp": 2}], marks=pytest.mark.slow),
        pytest.param(4, Forced(dp=2, pp=2), [{"dp": 2}] * 2, marks=pytest.mark.slow),
        pytest.param(4, Forced(tp=2, pp=2), [{"tp": 2}] * 2, marks=pytest.mark.slow),
        (8, Forced(dp=2, tp=2, pp=2), [{"dp": 2, "tp": 2}] * 2),
        (4, Forced(pp=4, num_microbatches=8), [{"dp": 1}] * 4),
        (6, Forced(tp=3), None),
    ],
)
def test_forced_degrees_are_kept(
    num_devices: int, forced: Forced, expected: list[dict[str, int]] | None
) -> None:
    graph, blocks = mlp(4, rows=8, width=24, inner=48)
    found = plan(graph, blocks, cluster(num_devices), Request(8, forced=forced))
    devices = [rank for stage in found.stages for rank in stage.devices]
    assert devices == list(range(num_devices))
    assert [block.name for stage in found.stages for block in stage.blocks] == [
        block.name for block in blocks.blocks
    ]
    if expected is not None:
        assert degrees(found) == expected
    if forced.num_microbatches is not None:
        assert found.num_microbatches == forced.num_microbatches
    assert all(each.get("tp", 1) == (forced.tp or each.get("tp", 1)) for each in degrees(found))


@pytest.mark.parametrize(
    ("size", "forced"), [(1, Forced(pp=1)), (2, Forced(pp=2)), (4, Forced(dp=2)), (8, Forced())]
)
def test_a_micro_batch_has_the_size_on_each_rank(size: int, forced: Forced) -> None:
    graph, blocks = mlp(4, rows=8)
    found = plan(graph, blocks, cluster(4), Request(8, microbatch_size=size, forced=forced))
    assert {found.microbatch_size // each.get("dp", 1) for each in degrees(found)} == {size}


def test_forced_axes_split_what_they_say() -> None:
    graph, blocks = mlp(2, rows=8)
    found = plan(graph, blocks, cluster(4), Request(8, forced=Forced(dp=2, tp=2)))
    layouts = found.stages[0].layouts
    for name, layout in layouts.items():
        if name.endswith("weight"):
            on_dp, on_tp = layout.outputs[0]
            assert str(on_dp) == "R"
            assert on_tp.is_shard, name
    assert format_layout(layouts["x"].outputs[0]) == "S(0) I"


def test_forced_choices_of_memory_are_kept() -> None:
    graph, blocks = mlp(2, rows=8)
    for zero in range(4):
        forced = Forced(dp=2, zero=zero)
        assert plan(graph, blocks, cluster(2), Request(8, forced=forced)).stages[0].zero == zero
    full = plan(graph, blocks, cluster(2), Request(8, forced=Forced(recompute="full")))
    assert {block.recompute for stage in full.stages for block in stage.blocks} == {"full"}
    gpipe = Forced(pp=2, schedule="gpipe", num_microbatches=4)
    assert plan(graph, blocks, cluster(2), Request(8, forced=gpipe)).schedule == "gpipe"


@pytest.mark.parametrize(
    ("forced", "global_batch", "code"),
    [
        (Forced(dp=2, tp=2, pp=2), 8, "AP127"),
        (Forced(dp=3), 9, "AP127"),
        (Forced(pp=8), 8, "AP127"),
        (Forced(num_microbatches=3), 8, "AP124"),
        (Forced(dp=4), 6, "AP124"),
    ],
)
def test_what_cannot_be_met_is_a_usage_error(forced: Forced, global_batch: int, code: str) -> None:
    graph, blocks = mlp(2, rows=8)
    with pytest.raises(UsageError) as caught:
        plan(graph, blocks, cluster(4), Request(global_batch, forced=forced))
    assert caught.value.code == code


def test_a_pipeline_longer_than_the_model_is_a_usage_error() -> None:
    graph, blocks = mlp(1, rows=8)
    with pytest.raises(UsageError, match="needs at least as many blocks"):
        plan(graph, blocks, cluster(4), Request(8, forced=Forced(pp=4)))


def test_a_graph_without_a_batch_is_planned_only_as_it_is() -> None:
    graph, blocks = mlp(2, rows=8)
    fixed = replace(graph, batch_dims={})
    assert plan(fixed, blocks, cluster(2), Request(8)).num_microbatches == 1
    with pytest.raises(UsageError) as caught:
        plan(fixed, blocks, cluster(2), Request(16))
    assert caught.value.code == "AP125"


def test_micro_batches_that_do_not_divide_are_refused_when_asked_for() -> None:
    with pytest.raises(UsageError) as caught:
        Request(8, microbatch_size=3)
    assert caught.value.code == "AP124"


def test_memory_that_binds_chooses_zero() -> None:
    """Weights outweigh everything: 16 bytes a parameter whole; sharded over 4 a good deal less."""
    graph, blocks = mlp(4, rows=4, width=256, inner=1024)
    forced = Forced(dp=4, recompute="none")
    whole = replace(forced, zero=0)
    need = plan(graph, blocks, cluster(4), Request(4, forced=whole)).prediction.peak_memory_bytes
    tight = plan(
        graph, blocks, cluster(4), Request(4, forced=forced, memory_limit_bytes=int(0.55 * need))
    )
    assert tight.stages[0].zero >= 2
    assert tight.prediction.peak_memory_bytes <= 0.55 * need


def test_memory_that_binds_chooses_how_many_blocks_are_recomputed() -> None:
    """Activations outweigh everything, and the micro-batch cannot shrink."""
    graph, blocks = mlp(8, rows=4096, width=16, inner=64)
    forced = Forced(num_microbatches=1, dp=2)
    counts = []
    need = 0
    for share in (1.0, 0.8, 0.5):
        limit = int(share * need) if need else None
        found = plan(
            graph, blocks, cluster(2), Request(4096, forced=forced, memory_limit_bytes=limit)
        )
        need = need or found.prediction.peak_memory_bytes
        counts.append(sum(block.recompute != "none" for block in found.stages[0].blocks))
        assert found.prediction.peak_memory_bytes <= share * need
    assert counts[0] == 0
    assert 0 < counts[1] < counts[2]


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    graph, blocks = mlp(4, rows=4, width=256, inner=1024)
    request = Request(4, forced=Forced(recompute="none", zero=0), memory_limit_bytes=10**6)
    with pytest.raises(InfeasibleError) as caught:
        plan(graph, blocks, cluster(2), request)
    assert caught.value.code == "AP301"
    assert "GiB over" in caught.value.what
    assert "recompute=full" in caught.value.fix
    assert "zero=3" in caught.value.fix
    assert "devices" in caught.value.fix


def test_no_time_is_a_time_limit_error() -> None:
    graph, blocks = mlp(2, rows=8)
    with pytest.raises(TimeLimitError):
        plan(graph, blocks, cluster(2), Request(8, time_limit_seconds=0.0))


def test_the_alternatives_lost_for_a_reason() -> None:
    graph, blocks = mlp(4, rows=12)
    whole = Features(frozenset({"zb-h1", "zb-h2"}))
    found = plan(graph, blocks, cluster(3), Request(12, features=whole), is_bounded=True)
    assert found.alternatives
    for other in found.alternatives:
        assert other.step_seconds >= found.prediction.step_seconds
        named = r"(compute|communication|gradient synchronization|bubble) \+|overheads|small diff"
        assert re.search(named, other.reason)
    assert found.solver.num_problems > 0
    assert 0 < found.solver.bound_seconds <= found.prediction.step_seconds
    assert set(found.solver.seconds) >= {"costs", "ilp", "dp", "simulator", "total"}


@pytest.mark.slow
def test_the_plan_is_the_fastest_of_all_forced_ones() -> None:
    """The search equals the best of every degree, ZeRO stage, schedule and micro-batch forced."""
    graph, blocks = mlp(2, rows=8, width=64, inner=128)
    on = cluster(2, bytes_per_second=1e8, flops=1e10)
    found = plan(graph, blocks, on, Request(8))
    best = min(
        plan(graph, blocks, on, Request(8, forced=forced)).prediction.step_seconds
        for forced in _every_choice()
    )
    assert found.prediction.step_seconds <= best * (1 + 2e-3)


def _every_choice() -> list[Forced]:
    found = []
    for count, schedule in product((1, 2, 4, 8), ("1f1b", "gpipe")):
        found.append(Forced(pp=2, num_microbatches=count, schedule=schedule))
    for count, zero in product((1, 2, 4), range(4)):
        found.append(Forced(dp=2, num_microbatches=count, zero=zero))
    for count in (1, 2, 4, 8):
        found.append(Forced(tp=2, num_microbatches=count))
    return found


@pytest.mark.slow
def test_stages_on_hosts_of_different_sizes_use_every_device() -> None:
    graph, blocks = mlp(4, rows=4)
    one = cluster(2).hosts[0]
    mixed = Cluster("mixed", (one, Host(one.device, 4, one.link)), cluster(2).inter_link)
    found = plan(graph, blocks, mixed, Request(4))
    assert [rank for stage in found.stages for rank in stage.devices] == list(range(6))


def test_the_observer_hears_of_progress() -> None:
    graph, blocks = mlp(2, rows=8)
    heard: list[tuple[str, float, float]] = []
    plan(
        graph,
        blocks,
        cluster(2),
        Request(8),
        observe=lambda what, done, total: heard.append((what, done, total)),
    )
    assert heard[-1][1] == heard[-1][2]


@pytest.mark.slow
def test_planning_is_repeatable() -> None:
    def found() -> Plan:
        graph, blocks = mlp(2, rows=4)
        result = plan(graph, blocks, cluster(4), Request(4), is_bounded=True)
        return replace(result, solver=replace(result.solver, seconds={}))

    assert found() == found()


def test_the_winner_is_the_fastest_by_whole_steps_where_they_were_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that are continued from too few micro-batches are wrong; the winner's is not."""
    graph, blocks = mlp(6, rows=8, width=256, inner=1024)
    on, request = cluster(2, num_hosts=4, bytes_per_second=2e9), Request(128, top=8)
    monkeypatch.setattr(candidates, "MOST_STEPS", 16)
    monkeypatch.setattr(candidates, "_simulated_numbers", lambda stages: (1, 2))
    job, found = ranked(graph, blocks, on, request)
    winner, *others = found
    assert any(each.step_seconds != complete_simulation(job, each).step_seconds for each in others)
    assert winner.step_seconds == complete_simulation(job, winner).step_seconds
    assert all(each.step_seconds >= winner.step_seconds for each in others)
