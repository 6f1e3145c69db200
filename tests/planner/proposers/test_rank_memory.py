"""What the stages of a rank recompute to fit together, against all that they could."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from small_graphs import cluster, mlp

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.find_plan import ONE_STAGE_PER_RANK, run_proposers
from autoparallel.planner.plan import Recompute
from autoparallel.planner.proposers.interleaved import _options, alike_pipelines
from autoparallel.planner.proposers.rank_memory import RankStage, recomputed_to_fit
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES, Forced, Request
from autoparallel.planner.schedules.held import splits, stage_half_pairs
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.stage.recompute_policy import POLICY_MODES, RecomputePolicy
from autoparallel.planner.stage.stage_cost import TRANSIENT, combine_bytes

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
COUNT = 8
WORST = 0.05
"""How much longer than with the best recomputation the stages of a rank may take: where each has
two or three blocks, one block more is a large part of them."""


@cache
def ranks_of(schedule: str, chunks: int = 2) -> list[list[RankStage]]:
    """The stages of both ranks of a pipeline of eight layers."""
    slow = cluster(2, bytes_per_second=1e6, flops=1e6)
    forced = Forced(pp=2, num_microbatches=COUNT)
    request = Request(
        COUNT, forced=forced, features=features_of((), (), (*SCHEDULES, *CHUNKED_SCHEDULES))
    )
    job = SearchContext.of(*mlp(8, rows=COUNT), slow, request, rules=rules, basis=DEFAULT)
    pool = run_proposers(job, ONE_STAGE_PER_RANK)
    option = next(
        each
        for each in _options(job, alike_pipelines(job, pool))
        if each.schedule == schedule and each.chunks == chunks
    )
    held = stage_half_pairs(schedule, len(option.stages), COUNT, chunks)
    stages = [
        replace(stage, held=halves, splits=splits(schedule))
        for stage, halves in zip(option.priced, held, strict=True)
    ]
    return [[stages[member] for member in members] for members in option.parts]


def priced(stages: list[RankStage], policies: tuple[RecomputePolicy, ...]) -> tuple[float, float]:
    """Seconds of the rank's stages, and their bytes together."""
    costs = [stage.cost(policy) for stage, policy in zip(stages, policies, strict=True)]
    size = sum(combine_bytes([cost.memory_bytes for cost in costs], once=TRANSIENT).values())
    return sum(cost.objective(COUNT) for cost in costs), size


@cache
def every(schedule: str, rank: int) -> list[tuple[float, float]]:
    """Seconds and bytes of every recomputation of the stages of a rank."""
    stages = ranks_of(schedule)[rank]
    choices = [policies_of(stage) for stage in stages]
    return [priced(stages, policies) for policies in product(*choices)]


def policies_of(stage: RankStage) -> list[RecomputePolicy]:
    """Every recomputation of a stage."""
    policies = stage.policies().policies
    return [policies[number] for number in range(len(policies))]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("schedule", CHUNKED_SCHEDULES)
def test_it_fits_wherever_anything_does_and_is_near_the_best(schedule: str, rank: int) -> None:
    stages, known = ranks_of(schedule)[rank], every(schedule, rank)
    sizes = [size for _, size in known]
    least, most = min(sizes), max(sizes)
    for share in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0):
        limit = least + share * (most - least)
        seconds, size = priced(stages, recomputed_to_fit(stages, limit, MODES))
        assert size <= limit * (1 + 1e-9)
        best = min(own for own, held in known if held <= limit)
        assert best * (1 - 1e-9) <= seconds <= best * (1 + WORST)


def test_nothing_is_recomputed_where_all_fits_and_the_thriftiest_where_nothing_does() -> None:
    for schedule, rank in product(CHUNKED_SCHEDULES, (0, 1)):
        stages, known = ranks_of(schedule)[rank], every(schedule, rank)
        assert not any(policy.num_blocks for policy in recomputed_to_fit(stages, 1e18, MODES))
        _, size = priced(stages, recomputed_to_fit(stages, 1.0, MODES))
        assert size <= min(own for _, own in known) * (1 + WORST)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_single_mode_is_that_of_every_block(mode: Recompute) -> None:
    stages = ranks_of("interleaved")[0]
    policies = recomputed_to_fit(stages, 1e18, (mode,))
    for stage, policy in zip(stages, policies, strict=True):
        assert policy.num_blocks == stage.run.stop - stage.run.start


@pytest.mark.parametrize(
    "modes", [("none", "selective"), ("none", "full"), ("none", "none-offloaded")]
)
def test_only_modes_that_are_allowed_are_used(modes: tuple[Recompute, ...]) -> None:
    stages = ranks_of("bfs")[0]
    most = max(size for _, size in every("bfs", 0))
    for share in (0.3, 0.6, 0.9):
        for policy in recomputed_to_fit(stages, share * most, modes):
            used = dict(zip(POLICY_MODES, map(sum, policy), strict=True))
            assert all(not used[mode] for mode in used if mode not in modes)
