"""Interleaved candidates: priced as ``evaluate`` prices them, chosen where they are faster."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from recut import recomputed, recut
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.evaluate.evaluate import Evaluation, evaluate
from autoparallel.planner.find_plan import ONE_STAGE_PER_RANK, plan, run_proposers
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.proposers.interleaved import Interleaving, _options, alike_pipelines
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES, Forced, Request
from autoparallel.planner.search.bound import work_bound
from autoparallel.planner.search.candidates import Candidate, complete_simulation, is_whole
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.pool import CandidatePool
from autoparallel.planner.search.report_plan import make_plan

SAME = 1e-9
ALL = (*SCHEDULES, *CHUNKED_SCHEDULES)
SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
"""Compute and wires so slow that weights are better not copied: pipelines win."""

PIPELINE = Request(8, forced=Forced(pp=4, num_microbatches=8))


def deep() -> tuple[Graph, Blocks]:
    return mlp(8, rows=8)


@cache
def found(*allow: str, limit: int | None = None) -> Plan:
    request = replace(PIPELINE, features=features_of(allow, (), ALL), memory_limit_bytes=limit)
    return plan(*deep(), SLOW, request)


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


@pytest.mark.slow
def test_more_schedules_are_never_slower() -> None:
    steps = [found(*ALL[:number]).prediction.step_seconds for number in (1, 3, 5, 6, len(ALL))]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


@pytest.mark.slow
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
    """With 1,024 micro-batches two shorter steps are simulated and continued.

    Where messages take as long as stages, an order may come back to itself only after many
    micro-batches.
    """
    job, _, options = options_of(4, 1024)
    errors = []
    for option in options:
        candidate = option.candidate()
        if candidate is not None:
            assert not is_whole(candidate)
            whole = complete_simulation(job, candidate)
            errors.append(abs(candidate.step_seconds / whole.step_seconds - 1))
    assert sorted(errors)[len(errors) // 2] < 0.001
    assert max(errors) < 0.05


@pytest.mark.slow
def test_what_does_not_fit_is_not_cut() -> None:
    """Chunks hold more activations: with less memory than they take, one stage per rank wins."""
    free, plain = found("1f1b", "interleaved"), found("1f1b")
    assert plain.prediction.peak_memory_bytes < free.prediction.peak_memory_bytes
    limit = plain.prediction.peak_memory_bytes
    tight = found("1f1b", "interleaved", limit=limit)
    assert tight.prediction.peak_memory_bytes <= limit


@pytest.mark.parametrize(
    "count", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 4))]
)
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
    job = SearchContext.of(*deep(), SLOW, asked, rules=rules, basis=DEFAULT)
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


def searched(
    request: Request, graph: Graph, blocks: Blocks, on: Cluster = SLOW
) -> tuple[SearchContext, CandidatePool]:
    """The pool with the pipelines of one stage per rank."""
    job = SearchContext.of(graph, blocks, on, request, rules=rules, basis=DEFAULT)
    return job, run_proposers(job, ONE_STAGE_PER_RANK)


def options_of(
    ranks: int, count: int, *, rows: int = 1, limit: int | None = None
) -> tuple[SearchContext, CandidatePool, list[Interleaving]]:
    """Every interleaving of the pipelines of so many ranks, with micro-batches of ``rows``."""
    forced = Forced(pp=ranks, num_microbatches=count)
    request = Request(
        rows * count, forced=forced, features=features_of((), (), ALL), memory_limit_bytes=limit
    )
    job, pool = searched(request, *mlp(8, rows=rows * count))
    return job, pool, list(_options(job, alike_pipelines(job, pool)))


def test_what_a_rank_spends_is_no_more_than_the_step_and_all_of_its_chunks() -> None:
    """Chunks are unlike: the first and last are short. A rank's compute is theirs together, so the
    busiest rank's, with what it communicates and the optimizer, is at most the step."""
    _, _, options = options_of(2, 8)
    for option in options:
        candidate = option.candidate()
        if candidate is None:
            continue
        spent = candidate.spent_seconds
        busy = sum(seconds for name, seconds in spent.items() if name != "bubble")
        assert busy <= candidate.step_seconds * (1 + SAME), option
        num_ranks = len(candidate.costs) // candidate.num_chunks
        mean = sum(sum(cost.compute_seconds) for cost in candidate.costs) / num_ranks
        assert spent["compute"] >= candidate.num_microbatches * mean * (1 - SAME)


def oracle(job: SearchContext, option: Interleaving, candidate: Candidate) -> Evaluation:
    """What the evaluator says of the base's plan cut again, recomputed as the candidate is."""
    graph, blocks = job.structure.graph, job.structure.blocks
    base = make_plan(job.structure, job.cluster, job.request, option.base, (), job.budget.spent())
    starts = tuple(stage.start for stage in option.stages)
    plain = recut(base, graph, blocks, option.schedule, option.chunks, starts=starts)
    made = make_plan(job.structure, job.cluster, job.request, candidate, (), job.budget.spent())
    zeros = [stage.zero for stage in made.stages]
    plain = replace(
        plain,
        stages=tuple(
            replace(stage, zero=zero) for stage, zero in zip(plain.stages, zeros, strict=True)
        ),
    )
    for mode in ("none", "selective", "full"):
        names = {
            block.name for stage in made.stages for block in stage.blocks if block.recompute == mode
        }
        plain = recomputed(plain, names, mode)
    return evaluate(graph, blocks, plain, job.cluster)


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("ranks", [2, 4])
def test_candidates_cost_what_their_pipelines_do_when_cut_again(ranks: int, count: int) -> None:
    """The search prices stages from tables; the oracle cuts the plan and prices every node."""
    job, _, options = options_of(ranks, count)
    schedules = set()
    for option in options:
        candidate = option.candidate()
        if candidate is None:
            continue
        schedules.add(candidate.schedule)
        priced = oracle(job, option, candidate)
        assert candidate.step_seconds == pytest.approx(priced.step_seconds, rel=SAME)
        assert candidate.peak_bytes == pytest.approx(priced.peak_memory_bytes, rel=SAME)
        assert candidate.fits
    assert schedules >= {"interleaved", "bfs", "zbv"}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_candidates_that_must_recompute_cost_what_their_plans_do(ranks: int) -> None:
    """With less memory than the candidates take some blocks are recomputed."""
    _, _, options = options_of(ranks, 8, rows=64)
    most = max(made.peak_bytes for each in options if (made := each.candidate()) is not None)
    limit = int(0.7 * most)
    job, _, options = options_of(ranks, 8, rows=64, limit=limit)
    num_recomputed = 0
    for option in options:
        candidate = option.candidate()
        if candidate is None:
            continue
        policies = [answer.setting.policy for _, answer in candidate.answers]
        num_recomputed += any(policy.num_blocks for policy in policies)
        priced = oracle(job, option, candidate)
        assert candidate.step_seconds == pytest.approx(priced.step_seconds, rel=SAME)
        assert candidate.peak_bytes == pytest.approx(priced.peak_memory_bytes, rel=SAME)
        assert candidate.fits == (candidate.peak_bytes <= limit)
    assert num_recomputed


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_candidate_takes_less_than_its_bound(ranks: int) -> None:
    ratios = []
    for count in (4, 8, 32):
        _, _, options = options_of(ranks, count)
        made = [(option.least_seconds(), option.candidate()) for option in options]
        ratios += [least / each.step_seconds for least, each in made if each is not None]
    assert len(ratios) > 10
    assert max(ratios) <= 1.0
    assert sorted(ratios)[len(ratios) // 2] > 0.8, "a bound that is far away leaves nothing out"


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("count", [2, 8])
def test_a_rank_idles_so_many_times_less_as_it_has_stages(count: int, chunks: int) -> None:
    """With messages that take no time, R ranks of C equal stages and N micro-batches that a rank
    works t on each take (N + (R - 1) / C) t; here R = 2."""
    free = cluster(2, bytes_per_second=1e15, flops=1e6)
    graph, blocks = even_layers(8, 64 * count)
    forced = Forced(pp=2, num_microbatches=count)
    features = features_of(("1f1b", "interleaved"), (), ALL)
    request = Request(64 * count, forced=forced, features=features)
    job, pool = searched(request, graph, blocks, free)
    (base, *_) = alike_pipelines(job, pool)
    work = sum(cost.forward_seconds + cost.backward_seconds for cost in base.costs) / 2
    options = {option.chunks: option for option in _options(job, [base])}
    candidate = options[chunks].candidate()
    assert candidate is not None
    assert candidate.step_seconds == pytest.approx((count + 1 / chunks) * work, rel=0.02)


def even_layers(number: int, rows: int) -> tuple[Graph, Blocks]:
    """Equal layers: the input and the loss are parts of the first and of the last."""
    graph, blocks = mlp(number, rows=rows)
    first, *layers, last = blocks.blocks
    one, *others, end = layers
    return graph, Blocks(
        (
            replace(
                one,
                kind="first",
                nodes=(*first.nodes, *one.nodes),
                parameters=(*first.parameters, *one.parameters),
            ),
            *others,
            replace(end, kind="last", nodes=(*end.nodes, *last.nodes)),
        )
    )
