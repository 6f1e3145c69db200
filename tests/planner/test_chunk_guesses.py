"""The guesses of what cut pipelines take: those that are left out could not be among the best."""

from __future__ import annotations

from functools import cache

import pytest
from one_stage import ranked
from small_graphs import cluster, mlp

from autoparallel.planner import rules
from autoparallel.planner.arranged.chunk_guesses import (
    Guess,
    Way,
    about,
    fastest,
    least_seconds,
    ways,
)
from autoparallel.planner.arranged.chunk_search import thrifty_first
from autoparallel.planner.errors import UsageError
from autoparallel.planner.proposers.balanced import block_flops
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES, Forced, Request
from autoparallel.planner.schedules.rank_held import rank_held
from autoparallel.planner.search.candidates import Candidate

BLOCKS = 8
SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)
"""Compute and wires so slow that weights are better not copied: pipelines win."""


@cache
def bases() -> tuple[Candidate, ...]:
    """Pipelines of two and four ranks, of few and many micro-batches."""
    found: dict[object, Candidate] = {}
    features = features_of((), (), (*SCHEDULES, *CHUNKED_SCHEDULES))
    for ranks in (2, 4):
        for number in (4, 8, 32):
            forced = Forced(pp=ranks, num_microbatches=number)
            asked = Request(32, forced=forced, features=features)
            _, candidates = ranked(*mlp(BLOCKS, rows=32), SLOW, asked)
            for each in candidates[:2]:
                found.setdefault((each.rows, each.stages), each)
    return tuple(found.values())


@cache
def flops() -> tuple[float, ...]:
    return tuple(block_flops(*mlp(BLOCKS, rows=32), rules))


@cache
def every() -> tuple[Guess, ...]:
    guesses = []
    for number, way in enumerate(ways(bases(), CHUNKED_SCHEDULES, flops())):
        try:
            guesses.append(Guess(about(way), number, way))
        except UsageError:
            continue
    return tuple(sorted(guesses))


def once() -> list[Guess]:
    found: dict[object, Guess] = {}
    for each in every():
        way = each.way
        found.setdefault((way.base, way.schedule, way.chunks), each)
    return list(found.values())


def test_no_guess_is_below_its_bound() -> None:
    ratios = [least_seconds(each.way) / each.seconds for each in every()]
    assert len(ratios) > 20
    assert max(ratios) <= 1.0
    assert sorted(ratios)[len(ratios) // 2] > 0.8, "a bound that is far away leaves nothing out"


@pytest.mark.parametrize("most", [1, 3, 10])
@pytest.mark.parametrize("place", [0, 2, 7, -1])
def test_the_fastest_are_those_of_all(most: int, place: int) -> None:
    """With a bar at one of the guesses, which itself is not below it; of two cuts into as many
    stages the faster."""
    bar = every()[place].seconds
    wanted = [each for each in once() if each.seconds < bar][:most]
    assert fastest(bases(), CHUNKED_SCHEDULES, flops(), most=most, bar=bar) == wanted
    free = fastest(bases(), CHUNKED_SCHEDULES, flops(), most=most, bar=float("inf"))
    assert free == once()[:most]


def test_chunks_take_what_their_blocks_do() -> None:
    """However they are cut, all together take what the stages of the candidate do."""
    for way in ways(bases(), CHUNKED_SCHEDULES, flops()):
        costs = [answer.cost for _, answer in way.base.candidate.answers]
        assert len(way.costs) == way.chunks * way.num_ranks
        assert sum(own.forward for own in way.costs) == pytest.approx(
            sum(cost.forward_seconds for cost in costs)
        )
        assert sum(own.step for own in way.costs) == pytest.approx(
            sum(cost.step_seconds for cost in costs)
        )


def test_of_two_that_are_as_fast_the_one_that_holds_less_is_first() -> None:
    """The order else is that of their seconds."""
    found = thrifty_first(once())
    assert sorted(found) == once()
    assert found != once(), "breadth-first holds more, and is as fast"
    for place, own in enumerate(found):
        for other in found[place + 1 :]:
            assert own.seconds <= other.seconds * 1.01
            if other.way.base is own.way.base and other.way.chunks == own.way.chunks:
                is_thrifty = held(own.way) <= held(other.way)
                assert is_thrifty or other.seconds > own.seconds * 1.01


def held(way: Way) -> int:
    own = rank_held(way.schedule, way.num_ranks, way.chunks, way.num_microbatches)
    assert own is not None
    return sum(own)
