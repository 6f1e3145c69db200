"""The tables of messages are right collectives, and the formulas are what they count."""

from __future__ import annotations

import pytest
from collective_tables import busiest_bytes, bytes_in_rounds, chain, rounds, wrong_parts
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.cluster.cluster import Link
from autoparallel.cost_model.collectives.algorithms import ALGORITHMS, find_table, two_trees
from autoparallel.cost_model.collectives.collectives import Group, algorithm_seconds
from autoparallel.cost_model.collectives.tables import CollectiveKind, Levels, Message, Table

HOSTS = [(n,) for n in range(2, 17)] + [
    (places,) * hosts for hosts in (2, 3, 4) for places in (1, 2, 3, 4) if places * hosts <= 16
]
UNEVEN = [(2, 1), (1, 2), (3, 2, 2), (4, 1, 1), (5, 3)]
ALL = [(kind, name) for kind, names in ALGORITHMS.items() for name in names]
PIPELINED = ("ring", "tree")
ALPHA1, ALPHA2 = 1e-6, 1e-3
"""Latencies so far apart that sums of a few tell how many of each there were."""


def tables(kind: CollectiveKind, name: str, hosts: tuple[int, ...], pieces: int = 1) -> list[Table]:
    table = find_table(kind, name, hosts, num_pieces=pieces)
    return [] if table is None else [table]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_rank_ends_with_every_part_exactly_once(kind: CollectiveKind, name: str) -> None:
    found = [
        table
        for hosts in HOSTS + UNEVEN
        for pieces in (1, 2, 5)
        for table in tables(kind, name, hosts, pieces)
    ]
    assert len(found) > 10
    for table in found:
        assert wrong_parts(table) == [], (table.hosts, table.num_parts)


def test_a_wrong_table_is_found_wrong() -> None:
    """A ring whose last round is missing, one that adds where it should copy, and one that
    sends what it does not have."""
    table = find_table("all_gather", "ring", [3])
    assert table is not None
    short = Table("all_gather", "ring", (3,), 3, table.rounds[:-1])
    assert len(wrong_parts(short)) == 3
    reduce = find_table("all_reduce", "recursive_doubling", [2])
    assert reduce is not None
    twice = Table("all_reduce", "", (2,), 1, reduce.rounds * 2)
    assert len(wrong_parts(twice)) == 2
    early = Table("broadcast", "", (2,), 1, ((Message(1, 0, (0,)),),))
    assert "round 0: rank 1 lacks part 0" in wrong_parts(early)


def link(alpha_seconds: float, bytes_per_second: float) -> Link:
    return Link("wire", alpha_seconds, bytes_per_second)


def latency(kind: CollectiveKind, name: str, hosts: tuple[int, ...]) -> Levels:
    """How often the formula of an algorithm counts each level's latency."""
    group = Group(sum(hosts), min(hosts), len(hosts), link(ALPHA1, 1e300), link(ALPHA2, 1e300))
    seconds = algorithm_seconds(kind, 1.0, group)[name]
    if (kind, name) == ("all_to_all", "direct"):
        seconds -= (group.num_ranks - 2) * 0.5e-6  # what posting to many costs
    inter = int(seconds / ALPHA2 + 1e-6)
    return Levels(round((seconds - inter * ALPHA2) / ALPHA1), inter)


def transfer(kind: CollectiveKind, name: str, hosts: tuple[int, ...]) -> Levels:
    """How many tensors the formula sends over each level, the other being infinitely fast."""
    infinite = link(0.0, 1e300)
    found = []
    for intra, inter in ((link(0.0, 1.0), infinite), (infinite, link(0.0, 1.0))):
        group = Group(sum(hosts), min(hosts), len(hosts), intra, inter)
        seconds = algorithm_seconds(kind, 1.0, group)[name]
        if (kind, name) == ("all_to_all", "direct"):
            seconds -= (group.num_ranks - 2) * 0.5e-6
        found.append(seconds)
    return Levels(*found)


FLAT_ONLY = (
    "recursive_doubling",
    "halving_doubling",
    "binomial_tree",
    "scatter_all_gather",
    "bruck",
)
"""Formulas that price every message on the slower link where ranks lie on several hosts."""


@pytest.mark.parametrize(("kind", "name"), [a for a in ALL if a[1] != "pipelined_ring"])
def test_a_formula_has_the_latency_and_bytes_of_its_table(kind: CollectiveKind, name: str) -> None:
    checked = 0
    for hosts in HOSTS:
        is_flat = len(hosts) == 1 or hosts[0] == 1
        if name in FLAT_ONLY and not is_flat:
            continue
        pieces = 64 if name == "tree" else 1
        for table in tables(kind, name, hosts, pieces):
            expected = chain(table) if name in PIPELINED else rounds(table)
            sent = busiest_bytes(table) if name in PIPELINED else bytes_in_rounds(table)
            assert latency(kind, name, hosts) == expected, hosts
            assert transfer(kind, name, hosts) == pytest.approx(tuple(sent), abs=1e-9), hosts
            checked += 1
    assert checked >= 4


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_formula_is_offered_only_where_its_algorithm_exists(
    kind: CollectiveKind, name: str
) -> None:
    for hosts in HOSTS:
        group = Group(sum(hosts), min(hosts), len(hosts), link(1e-6, 1e9), link(1e-5, 1e9))
        if name in algorithm_seconds(kind, 1e6, group):
            assert find_table(kind, name, hosts) is not None, hosts


@given(st.integers(2, 16), st.integers(1, 40))
def test_a_pipelined_broadcast_takes_the_rounds_of_the_formula(n: int, pieces: int) -> None:
    """n − 2 + k rounds of S/k: the formula is this at the best k, so never above it."""
    table = find_table("broadcast", "pipelined_ring", (n,), num_pieces=pieces)
    assert table is not None
    assert rounds(table).intra == n - 2 + pieces
    assert bytes_in_rounds(table).intra == pytest.approx((n - 2 + pieces) / pieces)
    alpha, beta, size = 1e-5, 1e9, 1e6
    group = Group(n, n, 1, link(alpha, beta), link(alpha, beta))
    priced = algorithm_seconds("broadcast", size, group)["pipelined_ring"]
    in_turn = rounds(table).intra * alpha + bytes_in_rounds(table).intra * size / beta
    assert priced <= in_turn * (1 + 1e-9)


@pytest.mark.parametrize("hosts", [(5,), (8,), (4, 4), (2, 2, 2)])
def test_a_trees_rounds_near_its_formula_with_more_pieces(hosts: tuple[int, ...]) -> None:
    """Round by round, what a pipeline of k pieces sends exceeds the busiest rank's bytes only
    while it fills and drains: by less each time k is quadrupled, at last by a tenth."""
    excess = []
    for pieces in (4, 16, 64, 256):
        table = find_table("all_reduce", "tree", hosts, num_pieces=pieces)
        assert table is not None
        summed, busiest = bytes_in_rounds(table), busiest_bytes(table)
        excess.append(max(s / b for s, b in zip(summed, busiest, strict=True) if b) - 1)
    assert excess == sorted(excess, reverse=True)
    assert excess[-1] < 0.1


@pytest.mark.parametrize("hosts", UNEVEN)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("all_reduce", "ring"),
        ("all_gather", "ring"),
        ("reduce_scatter", "ring"),
        ("all_reduce", "tree"),
    ],
)
def test_unequal_hosts_are_priced_at_no_less_than_their_table(
    kind: CollectiveKind, name: str, hosts: tuple[int, ...]
) -> None:
    """The group knows the fewest ranks of a host, not where the others lie."""
    (table,) = tables(kind, name, hosts)
    priced, counted = latency(kind, name, hosts), chain(table)
    assert priced.inter >= counted.inter
    assert sum(priced) >= sum(counted)
    sent, moved = transfer(kind, name, hosts), busiest_bytes(table)
    assert all(p >= m - 1e-9 for p, m in zip(sent, moved, strict=True))


@pytest.mark.parametrize("n", range(2, 34))
def test_two_trees_share_the_work(n: int) -> None:
    """Each is a tree over all ranks of ⌈log2 n⌉ levels and at most two children, and no rank
    sends more than twice the tensor in both."""
    both = two_trees(n)
    for parents in both:
        assert sum(parent < 0 for parent in parents) == 1
        assert max(parents.count(rank) for rank in range(n)) <= 2
    table = find_table("all_reduce", "tree", (n,))
    assert table is not None
    assert chain(table).intra == 2 * (n - 1).bit_length()
    assert busiest_bytes(table).intra == min(2, n / 2)


def test_a_mirror_turns_every_message_around() -> None:
    gather = find_table("all_gather", "ring", [3])
    assert gather is not None
    scatter = find_table("reduce_scatter", "ring", [3])
    assert scatter is not None
    assert scatter.kind == "reduce_scatter"
    assert scatter.rounds[0][0] == Message(1, 0, (2,), adds=True)
    assert gather.rounds[1][0] == Message(0, 1, (2,))


def test_a_layout_without_the_algorithm_has_no_table() -> None:
    assert find_table("all_gather", "recursive_doubling", [6]) is None
    assert find_table("all_reduce", "hierarchical", [2, 3]) is None
    assert find_table("all_reduce", "hierarchical", [4]) is None
    assert find_table("all_reduce", "hierarchical_doubling", [2, 2, 2]) is None
