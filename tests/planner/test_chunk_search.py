"""Pipelines cut again into several stages per rank: priced as evaluate has it, where faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster import Cluster
from autoparallel.cost_model.simulator import simulate
from autoparallel.cost_model.stage_costs import StageCosts
from autoparallel.planner.arranged.chunk_guesses import extrapolated
from autoparallel.planner.arranged.chunk_memory import fitting, recomputed
from autoparallel.planner.arranged.chunks import chunked, plan
from autoparallel.planner.arranged.priced import Wanted, priced
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.evaluate import Evaluator, evaluate
from autoparallel.planner.graph import Blocks, Graph
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES, Forced, Request
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.planner.search.search import ranked
from autoparallel.planner.search.work_bound import work_bound

SAME = 1e-9
ALL = (*SCHEDULES, *CHUNKED_SCHEDULES)
SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
"""Compute and wires so slow that weights are better not copied: pipelines win."""

PIPELINE = Request(8, forced=Forced(pp=4))


def deep() -> tuple[Graph, Blocks]:
    return mlp(8, rows=8)


PLANS: dict[str, Plan] = {}
"""Several tests ask for the same plan."""


def found(*allow: str, on: Cluster = SLOW, request: Request = PIPELINE) -> Plan:
    key = repr((allow, on, request))
    if key not in PLANS:
        PLANS[key] = plan(*deep(), on, replace(request, features=features_of(allow, (), ALL)))
    return PLANS[key]


@pytest.mark.parametrize("schedule", CHUNKED_SCHEDULES)
def test_a_pipeline_of_equal_ranks_is_faster_cut_again(schedule: str) -> None:
    """Eight micro-batches on four ranks: 1F1B idles 3 of 11 parts of its step, chunks less."""
    own, plain = found(schedule, "1f1b"), found("1f1b")
    assert (own.schedule, plain.schedule) == (schedule, "1f1b")
    assert own.num_chunks >= 2
    assert own.prediction.step_seconds < plain.prediction.step_seconds
    assert any("1F1B" in other.summary for other in own.alternatives)


@pytest.mark.parametrize("schedule", ALL)
def test_what_is_chosen_costs_what_evaluate_says_and_keeps_its_bound(schedule: str) -> None:
    own = found(schedule)
    assert own.schedule == schedule
    priced = evaluate(*deep(), own, SLOW)
    assert priced.step_seconds == pytest.approx(own.prediction.step_seconds, rel=SAME)
    assert priced.peak_memory_bytes == own.prediction.peak_memory_bytes
    assert 0 < own.solver.bound_seconds <= own.prediction.step_seconds * (1 + SAME)


def test_more_schedules_are_never_slower() -> None:
    steps = [found(*ALL[:number]).prediction.step_seconds for number in (1, 3, 5, 6, len(ALL))]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


def test_no_schedule_of_several_stages_is_below_the_bound_of_any() -> None:
    """The bound of one search holds for the forced plans of all schedules and chunks."""
    bound = found(*CHUNKED_SCHEDULES).solver.bound_seconds
    for schedule in CHUNKED_SCHEDULES:
        for chunks in (2,) if schedule in ("zbv", "dualpipev") else (2, 3):
            if 4 * chunks > len(deep()[1].blocks):
                continue
            forced = Forced(pp=4, schedule=schedule, chunks=chunks, num_microbatches=8)
            own = plan(*deep(), SLOW, Request(8, forced=forced))
            assert own.prediction.step_seconds >= bound * (1 - SAME)


def test_steps_of_many_micro_batches_follow_from_those_of_few() -> None:
    """Random stages and messages: most are within 0.5 % of the step.

    Where messages take as long as chunks, ZB-V's order may come back to itself only after many
    micro-batches.
    """
    errors = []
    for schedule in CHUNKED_SCHEDULES:
        for seed in range(4):
            step = random_step(schedule, Random(seed))
            errors.append(abs(extrapolated(step, 4, 2, 96) / step(96) - 1))
    assert sorted(errors)[len(errors) * 3 // 4] < 0.005
    assert max(errors) < 0.05


def random_step(schedule: str, choose: Random) -> Callable[[int], float]:
    """The step of eight random stages on four ranks, by the number of micro-batches."""
    draw = [[choose.uniform(low, 2.0) for _ in range(8)] for low in (1.0, 1.5, 0.0, 0.0)]

    def step(num_microbatches: int) -> float:
        table = build_schedule(schedule, 8, num_microbatches, num_chunks=2)
        costs = StageCosts(
            draw[0], draw[1], send_seconds=draw[2][1:], send_backward_seconds=draw[3][1:]
        )
        return float(simulate(table, costs).step_seconds)

    return step


@pytest.mark.slow
def test_what_does_not_fit_is_not_cut() -> None:
    """Chunks hold more activations: with less memory than they take, one stage per rank wins."""
    free, plain = found("1f1b", "interleaved"), found("1f1b")
    assert plain.prediction.peak_memory_bytes < free.prediction.peak_memory_bytes
    limit = plain.prediction.peak_memory_bytes
    tight = found("1f1b", "interleaved", request=replace(PIPELINE, memory_limit_bytes=limit))
    assert tight.prediction.peak_memory_bytes <= limit


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("schedule", CHUNKED_SCHEDULES)
def test_no_plan_is_below_the_bound_of_its_micro_batches(schedule: str, count: int) -> None:
    forced = Forced(pp=4, schedule=schedule, chunks=2, num_microbatches=count)
    try:
        own = plan(*deep(), SLOW, Request(8, forced=forced))
    except UsageError:
        assert schedule in ("interleaved", "dualpipev"), "whole rounds of the ranks"
        assert count < 8
        return
    asked = Request(8, forced=Forced(pp=4, num_microbatches=count))
    job, _ = ranked(*deep(), SLOW, asked)
    least = own.solver.bound_seconds
    assert work_bound(job, (8 // count,)) <= least <= own.prediction.step_seconds * (1 + SAME)


def test_a_plan_that_holds_too_much_is_recomputed_until_it_fits() -> None:
    """Between what chunks hold and what they hold with all blocks recomputed, some are."""
    forced = Forced(pp=4, schedule="interleaved", chunks=2, num_microbatches=8)
    request = Request(8, forced=forced)
    free = plan(*deep(), SLOW, request)
    whole = plan(*deep(), SLOW, replace(request, forced=replace(forced, recompute="full")))
    most, least = (each.prediction.peak_memory_bytes for each in (free, whole))
    assert least < most
    limit = least + 2 * (most - least) // 3
    tight = plan(*deep(), SLOW, replace(request, memory_limit_bytes=limit))
    assert least <= tight.prediction.peak_memory_bytes <= limit
    modes = [block.recompute for stage in tight.stages for block in stage.blocks]
    assert 0 < modes.count("none") < len(modes)
    assert free.prediction.step_seconds < tight.prediction.step_seconds
    assert tight.prediction.step_seconds < whole.prediction.step_seconds
    priced = evaluate(*deep(), tight, SLOW)
    assert priced.step_seconds == pytest.approx(tight.prediction.step_seconds, rel=SAME)
    with pytest.raises(InfeasibleError, match="chunks of a rank"):
        plan(*deep(), SLOW, replace(request, memory_limit_bytes=least - 1))


def test_what_fits_is_recomputed_no_more_than_it_must_be() -> None:
    """From a base with everything recomputed, as many blocks are not as memory has room for."""
    forced = Forced(pp=4, num_microbatches=8, recompute="full", schedule="1f1b")
    base = plan(*deep(), SLOW, Request(8, forced=forced))
    names = {block.name for stage in base.stages for block in stage.blocks}
    free = cut(recomputed(base, names, "none"))
    whole = cut(base)
    most, least = (each.prediction.peak_memory_bytes for each in (free, whole))
    modes: tuple[Recompute, ...] = ("none", "full")
    assert fitting(cut, base, most, modes) == free
    limit = (3 * most + least) / 4
    some = fitting(cut, base, limit, modes)
    assert some.prediction.peak_memory_bytes <= limit
    assert free.prediction.step_seconds < some.prediction.step_seconds
    assert some.prediction.step_seconds < whole.prediction.step_seconds
    assert fitting(cut, base, most, ("full",)) == whole


def cut(base: Plan) -> Plan:
    looped = chunked(base, *deep(), "interleaved", 2)
    return priced(looped, Evaluator(*deep()))


def test_what_is_not_simulated_takes_at_least_what_is_said() -> None:
    """A plan that does not fit, or cannot be faster, is left at what its busiest rank does."""
    forced = Forced(pp=4, num_microbatches=8, schedule="1f1b")
    base = plan(*deep(), SLOW, Request(8, forced=forced))
    for schedule in CHUNKED_SCHEDULES:
        looped, evaluator = chunked(base, *deep(), schedule, 2), Evaluator(*deep())
        whole = priced(looped, evaluator).prediction
        step, peak = whole.step_seconds, whole.peak_memory_bytes
        assert priced(looped, evaluator, Wanted(peak, step)).prediction == whole
        for wanted in (Wanted(peak - 1, step), Wanted(peak, step / 2)):
            brief = priced(looped, evaluator, wanted).prediction
            assert brief.peak_memory_bytes == peak
            assert step / 2 < brief.step_seconds < step
