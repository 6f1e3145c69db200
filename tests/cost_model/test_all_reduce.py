"""Prices of all-reduces by tables, and which one is chosen."""

from __future__ import annotations

import pytest
from collective_tables import busiest_bytes

from autoparallel.cost_model.cluster.cluster import Link
from autoparallel.cost_model.collectives.all_reduce import (
    LIBRARY,
    ROUND_SECONDS,
    algorithms_of,
    all_reduce_seconds,
    best_all_reduce,
    table_for,
)
from autoparallel.cost_model.collectives.collectives import Group, algorithm_seconds

ALPHA, RATE = 2e-3, 1e8
FAST = Link("switch", ALPHA, RATE)
SLOW = Link("uplink", 2 * ALPHA, RATE / 16)


def group(num_hosts: int, per_host: int, inter: Link = SLOW, library: str = "gloo") -> Group:
    return Group(num_hosts * per_host, per_host, num_hosts, FAST, inter, library=library)  # type: ignore[arg-type]


def test_on_one_switch_tables_cost_what_the_formulas_say_and_the_overhead_of_their_rounds() -> None:
    """Of 8 ranks: 14 rounds of a ring, 6 of halving and doubling, 3 of recursive doubling."""
    own, priced = group(1, 8), group(1, 8, library="any")
    for num_bytes in (1e3, 1e7):
        expected = algorithm_seconds("all_reduce", num_bytes, priced)
        for name, rounds in (("ring", 14), ("halving_doubling", 6), ("recursive_doubling", 3)):
            found = all_reduce_seconds(name, num_bytes, own, (8,))
            assert found == pytest.approx(expected[name] + rounds * ROUND_SECONDS)


def test_over_hosts_a_hierarchy_costs_its_formula_and_its_rounds() -> None:
    """2 x 2 ranks: a round in each host, two between them, one more in each."""
    own, priced = group(2, 2), group(2, 2, library="any")
    expected = algorithm_seconds("all_reduce", 1e6, priced)["hierarchical"]
    found = all_reduce_seconds("hierarchical", 1e6, own, (2, 2))
    assert found == pytest.approx(expected + 4 * ROUND_SECONDS)


def test_a_pipelined_tree_of_many_bytes_costs_little_more_than_its_busiest_port() -> None:
    own = group(1, 8)
    table = table_for("tree", 1e9, own, (8,))
    assert table.num_parts > 2
    least = busiest_bytes(table).intra * 1e9 / RATE
    assert least < all_reduce_seconds("tree", 1e9, own, (8,)) < 1.5 * least
    assert table_for("tree", 8.0, own, (8,)).num_parts == 2


def test_latency_chooses_for_small_buckets_and_the_links_between_hosts_for_large_ones() -> None:
    """Ranks of a host share its uplink: a butterfly sends everything over it twice."""
    assert best_all_reduce(1e3, group(1, 8), (8,)) == "recursive_doubling"
    assert best_all_reduce(1e9, group(1, 8), (8,)) == LIBRARY
    large = best_all_reduce(1e8, group(2, 4), (4, 4))
    seconds = {
        name: all_reduce_seconds(name, 1e8, group(2, 4), (4, 4))
        for name in algorithms_of(group(2, 4), (4, 4))
    }
    assert large == min(seconds, key=seconds.__getitem__) != LIBRARY


def test_what_can_run_depends_on_the_hosts_and_on_the_library() -> None:
    assert "hierarchical" in algorithms_of(group(2, 2), (2, 2))
    assert "hierarchical" not in algorithms_of(group(1, 4), (4,))
    assert "hierarchical_doubling" not in algorithms_of(group(3, 2), (2, 2, 2))
    assert algorithms_of(group(2, 2, library="nccl"), (2, 2)) == (LIBRARY,)


def test_of_nccl_the_name_is_what_it_is_taken_to_choose() -> None:
    own = group(8, 1, library="nccl")
    names = {best_all_reduce(num_bytes, own, (1,) * 8) for num_bytes in (1e3, 1e9)}
    assert names == {"tree", "ring"}
    assert all_reduce_seconds("tree", 1e3, own, (1,) * 8) == pytest.approx(
        min(algorithm_seconds("all_reduce", 1e3, own).values())
    )
