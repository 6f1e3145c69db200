"""Schedules of several stages per rank that are forced: the search's own, on ranks alike."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from recut import recut
from small_graphs import cluster, mlp

from autoparallel.planner.errors import InfeasibleError, TimeLimitError, UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.find_plan import plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.pins import parse_pin
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES, Forced, Request

SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
FEW = cluster(2, bytes_per_second=1e6, flops=1e6)
ALL = (*SCHEDULES, *CHUNKED_SCHEDULES)


@cache
def forced_plan(schedule: str, pp: int | None) -> Plan:
    """The plan of eight layers under a schedule, on ``pp`` ranks or the best number of them."""
    forced = Forced(pp=pp, schedule=schedule, num_microbatches=8)
    return plan(*mlp(8, rows=8), SLOW, Request(8, forced=forced))


@pytest.mark.parametrize("pp", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", CHUNKED_SCHEDULES)
def test_what_is_forced_is_what_is_found_where_only_that_is_allowed(schedule: str, pp: int) -> None:
    graph, blocks = mlp(8, rows=8)
    forced = forced_plan(schedule, pp)
    only = features_of([schedule], (), ALL)
    request = Request(8, forced=Forced(pp=pp, num_microbatches=8), features=only)
    allowed = plan(graph, blocks, SLOW, request)
    assert forced.schedule == allowed.schedule == schedule
    assert forced.prediction == allowed.prediction
    assert len(forced.stages) == pp * forced.num_chunks
    assert 0 < forced.solver.bound_seconds <= forced.prediction.step_seconds


def test_the_number_of_stages_per_rank_is_the_best_or_the_one_that_is_forced() -> None:
    graph, blocks = mlp(10, rows=8)

    def step(chunks: int | None) -> tuple[int, float]:
        forced = Forced(pp=2, schedule="interleaved", chunks=chunks, num_microbatches=8)
        own = plan(graph, blocks, FEW, Request(8, forced=forced))
        return own.num_chunks, own.prediction.step_seconds

    every = {count: step(count) for count in (2, 3, 4)}
    assert {count: own for count, (own, _) in every.items()} == {2: 2, 3: 3, 4: 4}
    _, free = step(None)
    assert free <= min(seconds for _, seconds in every.values())


@pytest.mark.parametrize(
    "schedule",
    [
        "interleaved",
        "zbv",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in CHUNKED_SCHEDULES
            if name not in ("interleaved", "zbv")
        ),
    ],
)
def test_the_number_of_ranks_is_the_best_where_none_is_forced(schedule: str) -> None:
    def step(pp: int | None) -> float:
        own = forced_plan(schedule, pp)
        assert own.schedule == schedule
        assert own.num_chunks >= 2
        return own.prediction.step_seconds

    assert step(None) <= min(step(2), step(4)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("forced", "said"),
    [
        (Forced(schedule="zbv", dp=4), "devices and blocks for 1"),
        (Forced(schedule="interleaved", chunks=6), "each with 6 blocks or more: .* for 1"),
        (Forced(schedule="zbv", pp=1), "needs a pipeline"),
        (Forced(schedule="bfs", pp=4, chunks=3), "the model has 10 blocks"),
        (Forced(schedule="zbv", chunks=3), "chunks=3 with schedule=zbv"),
        (Forced(schedule="1f1b", pp=2, chunks=2), "chunks=2 with schedule=1f1b"),
    ],
)
def test_what_cannot_be_of_several_stages_is_said(forced: Forced, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        plan(*mlp(8, rows=8), SLOW, Request(8, forced=forced))
    assert caught.value.code == "AP546"


def test_a_name_means_what_its_alias_does() -> None:
    one, other = (
        plan(*mlp(6, rows=4), FEW, Request(4, forced=Forced(pp=2, schedule=name)))
        for name in ("interleaved", "interleaved-1f1b")
    )
    assert one.schedule == other.schedule == "interleaved"
    assert one.prediction == other.prediction


@pytest.mark.parametrize("pp", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_schedule_that_can_have_one_stage_per_rank_has_as_many_as_are_forced(
    pp: int | None,
) -> None:
    forced = Forced(pp=pp, schedule="zb-h1", chunks=2)
    found = plan(*mlp(4, rows=4), FEW, Request(4, forced=forced))
    assert found.schedule == "zb-h1"
    assert found.num_chunks == 2
    single = plan(*mlp(4, rows=4), FEW, Request(4, forced=Forced(pp=2, schedule="zb-h1")))
    assert single.num_chunks == 1


def test_a_forced_number_of_one_stage_per_rank_is_searched_and_bounded_as_such() -> None:
    forced = Forced(pp=2, schedule="interleaved", chunks=1)
    found = plan(*mlp(8, rows=4), FEW, Request(4, forced=forced))
    assert (found.schedule, found.num_chunks, len(found.stages)) == ("interleaved", 1, 2)


def test_a_schedule_of_several_stages_is_refused_where_pipelines_are_denied() -> None:
    without = features_of((), ["pp"], ALL)
    with pytest.raises(UsageError, match="pp is denied") as caught:
        plan(*mlp(8, rows=8), SLOW, Request(8, forced=Forced(schedule="zbv"), features=without))
    assert caught.value.code == "AP186"


def test_where_no_chunks_fit_it_is_said_that_memory_is_what_lacks() -> None:
    """A pipeline of one stage per rank fits in these bytes, breadth-first loops do not."""
    whole = features_of((), ["selective", "full"], ALL)
    plain = Request(4, forced=Forced(pp=2, schedule="1f1b"), features=whole)
    limit = plan(*mlp(4, rows=4), FEW, plain).prediction.peak_memory_bytes
    asked = replace(plain, memory_limit_bytes=limit)
    for pp in (2, None):
        with pytest.raises(InfeasibleError, match="chunks of a rank do not fit") as caught:
            plan(*mlp(4, rows=4), FEW, replace(asked, forced=Forced(pp=pp, schedule="bfs")))
        assert caught.value.code == "AP301"


def test_what_no_pipeline_can_run_is_named() -> None:
    forced = Forced(schedule="dualpipev", num_microbatches=2)
    with pytest.raises(UsageError, match="schedule=dualpipev,microbatches=2") as caught:
        plan(*mlp(8, rows=8), SLOW, Request(8, forced=forced))
    assert caught.value.code == "AP546"


@pytest.mark.parametrize("limit", [0.001, 0.05, pytest.param(0.5, marks=pytest.mark.slow)])
def test_what_is_found_in_little_time_runs_as_it_was_forced_to(limit: float) -> None:
    forced = Forced(pp=2, schedule="interleaved")
    with suppress(TimeLimitError):  # where nothing was found in time that is said
        own = plan(*mlp(8, rows=8), FEW, Request(8, forced=forced, time_limit_seconds=limit))
        assert own.schedule == "interleaved"
        assert own.num_chunks > 1


def test_ranks_of_a_v_have_as_much_each_as_can_be() -> None:
    """Six layers between a light embedding and a light loss, both on the first of two ranks."""
    graph, blocks = mlp(6, rows=8)
    on = cluster(2, num_hosts=2, bytes_per_second=1e6, flops=1e6)
    own = plan(graph, blocks, on, Request(8, forced=Forced(pp=2, schedule="zbv")))
    layers = [sum(b.name.startswith("layers") for b in stage.blocks) for stage in own.stages]
    assert layers[0] + layers[3] == layers[1] + layers[2] == 3
    plain = Forced(pp=2, schedule="1f1b", num_microbatches=own.num_microbatches)
    base = plan(graph, blocks, on, Request(8, forced=plain))
    even = evaluate(graph, blocks, recut(base, graph, blocks, "zbv", 2), on)
    assert own.prediction.step_seconds < even.step_seconds * 0.9
    assert own.prediction.peak_memory_bytes < even.peak_memory_bytes


@pytest.mark.parametrize("layer", [0, 3])
def test_blocks_that_pins_tell_apart_keep_all_their_layouts(layer: int) -> None:
    """What is cut runs each layer as the pipeline that was found does, not as its template."""
    pins = (parse_pin(f"layers.{layer}.up.weight=S(1)@tp"),)

    def found(schedule: str) -> Plan:
        forced = Forced(pp=2, tp=2, schedule=schedule, num_microbatches=8)
        return plan(*mlp(8, rows=8), SLOW, Request(8, forced=forced, pins=pins))

    def named(own: Plan) -> set[str]:
        return {name for stage in own.stages for name in stage.layouts if name.endswith(".up")}

    plain, cut = found("1f1b"), found("interleaved")
    assert cut.num_chunks > 1
    assert named(cut) == named(plain) > {"layers.0.up"}
    assert cut.prediction.step_seconds < plain.prediction.step_seconds


@pytest.mark.parametrize("layer", ["layers.1", "layers.2", "layers.3"])
def test_where_a_stage_is_to_begin_one_does(layer: str) -> None:
    """With as many stages per rank as that takes."""
    forced = Forced(pp=2, schedule="interleaved")
    found = plan(*mlp(8, rows=4), FEW, Request(4, forced=forced, stage_at=(layer,)))
    assert layer in {stage.blocks[0].name for stage in found.stages}


def test_where_no_stage_of_so_many_per_rank_begins_as_asked_that_is_refused() -> None:
    """Ten blocks in four stages: one begins with the third layer, and none with the second."""
    forced = Forced(pp=2, schedule="interleaved", chunks=2)
    request = Request(8, forced=forced, stage_at=("layers.2",))
    found = plan(*mlp(8, rows=8), SLOW, request)
    assert "layers.2" in {stage.blocks[0].name for stage in found.stages}
    with pytest.raises(UsageError, match=r"--stage-at layers\.1: no stage starts there") as caught:
        plan(*mlp(8, rows=8), SLOW, replace(request, stage_at=("layers.1",)))
    assert caught.value.code == "AP183"


def test_where_hosts_cannot_have_stages_of_one_size_that_is_said() -> None:
    few = replace(SLOW, hosts=tuple(replace(SLOW.hosts[0], num_devices=size) for size in (1, 2)))
    forced = Forced(pp=2, schedule="interleaved")
    with pytest.raises(UsageError, match="different meshes") as caught:
        plan(*mlp(4, rows=8), few, Request(8, forced=forced))
    assert caught.value.code == "AP546"
