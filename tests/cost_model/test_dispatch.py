"""Tokens that are sent to experts: how many places want one, and what sending takes."""

from __future__ import annotations

from itertools import combinations
from statistics import mean

import pytest

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.collectives import collective_seconds, group_of
from autoparallel.cost_model.collectives.dispatch import (
    BETWEEN_SHARE,
    WITHIN_SHARE,
    dispatch_seconds,
    distinct_places,
)


@pytest.mark.parametrize(
    ("places", "copies", "num_experts"), [(2, 1, 4), (2, 2, 4), (4, 2, 8), (4, 3, 8), (8, 4, 8)]
)
def test_distinct_places_are_the_mean_over_every_choice(
    places: int, copies: int, num_experts: int
) -> None:
    held = num_experts // places
    every = [
        len({expert // held for expert in chosen})
        for chosen in combinations(range(num_experts), copies)
    ]
    assert distinct_places(places, copies, num_experts) == pytest.approx(mean(every))


def test_all_to_all_sends_a_copy_for_each_expert() -> None:
    group = group_of(parse_cluster("1x8xH100"), range(8))
    found = dispatch_seconds(1e8, 4, 32, group, "alltoall")
    assert found == collective_seconds("all_to_all", 4e8, group)


def test_a_token_crosses_to_another_host_once() -> None:
    group = group_of(parse_cluster("2x8xH100"), range(16))
    hosts = distinct_places(2, 8, 64)
    crossing = 1e9 * hosts / 2 / (BETWEEN_SHARE * group.inter.bytes_per_second)
    found = dispatch_seconds(1e9, 8, 64, group, "hybridep")
    assert found == pytest.approx(crossing, rel=0.01)
    assert found < dispatch_seconds(1e9, 8, 64, group, "alltoall") / 3


def test_within_a_host_the_links_of_the_host_count() -> None:
    group = group_of(parse_cluster("1x8xB200"), range(8))
    sent = distinct_places(8, 8, 64) * 7 / 8
    expected = 1e9 * sent / (WITHIN_SHARE * group.intra.bytes_per_second)
    found = dispatch_seconds(1e9, 8, 64, group, "deepep")
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
def test_nothing_is_sent_within_one_rank(dispatcher: str) -> None:
    group = group_of(parse_cluster("1x8xB200"), range(1))
    assert dispatch_seconds(1e9, 8, 64, group, dispatcher) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("places", "copies", "num_experts", "limit"),
    [(2, 2, 8, (4, 2)), (4, 2, 8, (4, 2)), (8, 3, 8, (4, 2)), (2, 3, 12, (4, 3))],
)
def test_places_where_a_router_first_chooses_groups_are_the_mean_over_every_choice(
    places: int, copies: int, num_experts: int, limit: tuple[int, int]
) -> None:
    groups, chosen = limit
    of_group, of_place = num_experts // groups, num_experts // places
    every = []
    for own in combinations(range(groups), chosen):
        pool = [expert for expert in range(num_experts) if expert // of_group in own]
        every += [len({each // of_place for each in ids}) for ids in combinations(pool, copies)]
    assert distinct_places(places, copies, num_experts, limit) == pytest.approx(mean(every))
