"""Hosts without a switch: rings of their wires, and what groups and messages have of them."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError, Host, Link
from autoparallel.cost_model.cluster.gpu_links import (
    WIRES,
    Wires,
    are_wires,
    num_links_used,
    wires_among,
)
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.collectives import (
    collective_seconds,
    group_of,
    p2p_seconds,
)
from autoparallel.cost_model.profile.transfers import level_of

CUBE = WIRES["hybrid-cube-mesh"]


@st.composite
def random_wires(draw: st.DrawFn) -> Wires:
    size = draw(st.integers(2, 5))
    counts = {pair: draw(st.integers(0, 2)) for pair in combinations(range(size), 2)}
    return tuple(
        tuple(counts[min(i, j), max(i, j)] if i != j else 0 for j in range(size))
        for i in range(size)
    )


def most_rings(wires: Wires) -> int:
    """By trying every set of rings: cycles through all devices, as sets of neighbours."""
    size = len(wires)
    rings = {
        frozenset(frozenset(pair) for pair in zip(order, (*order[1:], 0), strict=True))
        for rest in permutations(range(1, size))
        for order in [(0, *rest)]
    }

    def most(left: dict[frozenset[int], int]) -> int:
        found = 0
        for ring in rings:
            if all(left[pair] for pair in ring):
                found = max(found, 1 + most({p: n - (p in ring) for p, n in left.items()}))
        return found

    return most(
        {frozenset(pair): wires[min(pair)][max(pair)] for pair in combinations(range(size), 2)}
    )


@given(random_wires())
def test_as_many_rings_as_any_choice_of_them_has(wires: Wires) -> None:
    rings = wires[0][1] if len(wires) == 2 else 2 * most_rings(wires)
    assert num_links_used(wires) == rings
    assert rings <= min(sum(row) for row in wires)


@given(random_wires(), st.randoms())
def test_the_order_of_devices_does_not_matter(wires: Wires, rng: object) -> None:
    order = list(range(len(wires)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    assert num_links_used(wires_among(wires, order)) == num_links_used(wires)


def test_the_cube_of_v100s_has_six_links_each_and_three_rings() -> None:
    assert are_wires(CUBE)
    assert {sum(row) for row in CUBE} == {6}
    assert num_links_used(CUBE) == 6
    quads = [num_links_used(wires_among(CUBE, quad)) for quad in ((0, 1, 2, 3), (4, 5, 6, 7))]
    assert quads == [4, 4]


def test_a_group_has_the_rate_of_its_rings_and_two_hosts_the_network() -> None:
    cluster = parse_cluster("2x8xV100-16GB")
    whole = cluster.hosts[0].link
    rates = [
        group_of(cluster, ranks).intra.bytes_per_second / whole.bytes_per_second
        for ranks in (range(8), range(4), (0, 1), (2, 3), (8, 11), (0, 2, 4, 6))
    ]
    assert rates == pytest.approx([1, 4 / 6, 1 / 6, 2 / 6, 2 / 6, 2 / 6])
    assert group_of(cluster, (3, 4)).intra.name == "pcie3"
    assert group_of(cluster, range(16)).intra == whole
    assert group_of(cluster, (0, 8)).inter == cluster.inter_link


def test_with_a_switch_every_group_has_the_whole_rate() -> None:
    cluster = parse_cluster("16xV100-32GB")
    assert group_of(cluster, (3, 4)).intra == cluster.hosts[0].link


def test_messages_take_the_wires_between_two_devices() -> None:
    cluster = parse_cluster("2x8xV100-16GB")
    links = [cluster.link(first, second) for first, second in ((0, 1), (0, 3), (3, 4), (7, 8))]
    assert [link.num_links for link in links[:2]] == [1, 2]
    assert [link.name for link in links] == ["nvlink2", "nvlink2", "pcie3", "infiniband-edr-shared"]
    assert cluster.send_link(range(4), range(4, 8)).num_links == 1
    assert cluster.send_link(range(2), range(2, 4)).num_links == 1
    assert cluster.send_link(range(2, 4), range(4, 6)).name == "pcie3"
    assert cluster.send_link(range(4, 8), range(8, 12)) == cluster.inter_link


def test_fewer_devices_of_a_host_keep_their_wires() -> None:
    assert parse_cluster("8xV100-16GB").hosts[0].part(4) == parse_cluster("4xV100-16GB").hosts[0]


def test_groups_of_other_rates_are_measured_apart() -> None:
    cluster = parse_cluster("8xV100-16GB")
    levels = [level_of(group_of(cluster, ranks)) for ranks in (range(4), (0, 1), (0, 3), (3, 4))]
    assert levels == ["intra:nvlink2x4", "intra:nvlink2x1", "intra:nvlink2x2", "intra:pcie3"]


def test_a_group_with_fewer_wires_is_never_faster() -> None:
    host = parse_cluster("8xV100-16GB").hosts[0]
    less = tuple(tuple(max(n - 1, 0) for n in row) for row in CUBE)
    fewer = Host(host.device, 8, host.link, wires=less, detour=host.detour)
    clusters = [Cluster("v100", (each,), host.link) for each in (host, fewer)]
    for size in range(2, 9):
        for ranks in combinations(range(8), size):
            seconds = [
                collective_seconds("all_reduce", 1 << 26, group_of(each, ranks))
                for each in clusters
            ]
            assert seconds[0] <= seconds[1] * (1 + 1e-12)


def test_messages_over_fewer_links_are_never_faster_and_over_nvlink_never_slower_than_around() -> (
    None
):
    cluster = parse_cluster("8xV100-16GB")
    links = [cluster.link(*pair) for pair in ((3, 4), (0, 1), (0, 3))]
    for power in range(21, 33):
        seconds = [p2p_seconds(1 << power, link) for link in links]
        assert seconds == sorted(seconds, reverse=True)


def test_rings_of_any_wires_are_found_in_a_moment() -> None:
    """Two quads of many links with few between, and eight devices with many links each."""
    quads = tuple(
        tuple(0 if i == j else 4 if i // 4 == j // 4 else int(i % 4 == j % 4) for j in range(8))
        for i in range(8)
    )
    assert num_links_used(quads) == 4
    many = tuple(tuple(0 if i == j else 3 + (i * j) % 4 for j in range(8)) for i in range(8))
    assert num_links_used(many) >= 2 * min(sum(row) for row in many) // 3


PAIR: Wires = ((0, 1), (1, 0))
LINK = Link("bridge", 1e-6, 1e9, num_links=1)


@pytest.mark.parametrize(
    ("wires", "link", "detour", "message"),
    [
        (((0, 1), (2, 0)), LINK, LINK, "symmetric 2 × 2 table"),
        (((0, 1, 1), (1, 0, 1), (1, 1, 0)), LINK, LINK, "2 × 2 table of link counts"),
        (PAIR, Link("bridge", 1e-6, 1e9), LINK, "'bridge' does not say how many links"),
        (PAIR, LINK, None, "no link for devices that no wires join"),
        ((), LINK, LINK, "detour is set, but wires is not"),
    ],
)
def test_wires_that_do_not_fit(wires: Wires, link: Link, detour: Link | None, message: str) -> None:
    device = parse_cluster("1xH100").hosts[0].device
    with pytest.raises(ClusterError, match=message):
        Host(device, 2, link, wires=wires, detour=detour)
