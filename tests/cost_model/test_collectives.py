"""Collective times against values derived by hand from the formulas' papers."""

import pytest
from collective_tables import wrong_parts
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.cluster.cluster import Cluster, Host, Link
from autoparallel.cost_model.cluster.presets import Protocols, find_link
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.algorithms import find_table
from autoparallel.cost_model.collectives.collectives import (
    POST_SECONDS,
    CollectiveKind,
    Group,
    Library,
    algorithm_seconds,
    collective_seconds,
    group_of,
    p2p_seconds,
)

KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)
FAST = Link("fast", alpha_seconds=1e-6, bytes_per_second=100e9)
SLOW = Link("slow", alpha_seconds=10e-6, bytes_per_second=1e9)
ALPHA, BETA = SLOW.alpha_seconds, SLOW.bytes_per_second


def one_host(n: int, link: Link = SLOW, library: Library = "any") -> Group:
    return Group(n, n, 1, link, link, library=library)


def test_ring_all_reduce_sends_twice_all_but_one_part() -> None:
    """4 ranks, 4 GB: each rank sends 2·3 parts of 1 GB at 1 GB/s, in 6 steps of 10 µs."""
    seconds = algorithm_seconds("all_reduce", 4e9, one_host(4))
    assert seconds["ring"] == pytest.approx(6.0 + 6 * 10e-6, rel=1e-12)


def test_halving_doubling_moves_as_much_in_fewer_steps() -> None:
    """8 ranks: 2·log2 8 = 6 steps instead of 14, the same 2·7/8 of the bytes."""
    seconds = algorithm_seconds("all_reduce", 8e9, one_host(8))
    assert seconds["halving_doubling"] == pytest.approx(14.0 + 6 * 10e-6, rel=1e-12)
    assert seconds["ring"] - seconds["halving_doubling"] == pytest.approx(8 * 10e-6, rel=1e-3)


def test_recursive_doubling_is_cheapest_for_a_few_bytes() -> None:
    """8 ranks, 8 bytes: log2 8 = 3 messages; every other algorithm sends 6 or more in turn."""
    seconds = algorithm_seconds("all_reduce", 8, one_host(8))
    assert min(seconds, key=lambda name: seconds[name]) == "recursive_doubling"
    assert seconds["recursive_doubling"] == pytest.approx(3 * (10e-6 + 8e-9))


def test_two_trees_over_two_ranks_send_the_tensor_once() -> None:
    assert algorithm_seconds("all_reduce", 1e9, one_host(2))["tree"] == pytest.approx(
        1.0 + 2 * 10e-6
    )


def test_two_trees_have_logarithmic_latency() -> None:
    """16 ranks: 2·4 messages in turn, against 30 around the ring."""
    seconds = algorithm_seconds("all_reduce", 1, one_host(16))
    assert seconds["tree"] == pytest.approx(8 * 10e-6, rel=1e-3)
    assert seconds["ring"] == pytest.approx(30 * 10e-6, rel=1e-3)


def test_butterflies_fold_the_ranks_over_a_power_of_two() -> None:
    """6 ranks, 4 GB: two hand theirs to others, which 4 ranks sum in 2 exchanges of 4 GB, or
    in 2·2 of 2·3/4·4 GB in all, before the two are told: 2 messages of 4 GB more."""
    seconds = algorithm_seconds("all_reduce", 4e9, one_host(6))
    assert seconds["recursive_doubling"] == pytest.approx(4 * (4.0 + 10e-6))
    assert seconds["halving_doubling"] == pytest.approx(6.0 + 4 * 10e-6 + 2 * (4.0 + 10e-6))


def test_doubling_an_all_gather_needs_a_power_of_two() -> None:
    assert "recursive_doubling" not in algorithm_seconds("all_gather", 1e6, one_host(6))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_all_gather_and_reduce_scatter_are_half_a_ring_all_reduce(kind: CollectiveKind) -> None:
    seconds = algorithm_seconds(kind, 4e9, one_host(4))
    assert seconds["ring"] == pytest.approx(3.0 + 3 * 10e-6, rel=1e-12)
    assert seconds["recursive_doubling"] == pytest.approx(3.0 + 2 * 10e-6, rel=1e-12)


def test_all_to_all_sends_all_but_its_own_part() -> None:
    """4 ranks, 4 GB each: 3 messages of 1 GB. Bruck: 2 messages of half the tensor, 2 GB."""
    seconds = algorithm_seconds("all_to_all", 4e9, one_host(4))
    assert seconds["pairwise"] == pytest.approx(3.0 + 3 * 10e-6, rel=1e-12)
    assert seconds["bruck"] == pytest.approx(4.0 + 2 * 10e-6, rel=1e-12)


def test_all_to_all_over_hosts_waits_for_the_slow_share() -> None:
    """2 hosts of 2: half of 4 GB leaves the host at 1 GB/s while 1 GB stays in it. One peer
    after the other, the parts add up; all at once, the slow one hides the fast."""
    seconds = algorithm_seconds("all_to_all", 4e9, Group(4, 2, 2, FAST, SLOW))
    assert seconds["pairwise"] == pytest.approx(2.0 + 0.01 + 1e-6 + 2 * 10e-6, rel=1e-9)
    assert seconds["direct"] == pytest.approx(2.0 + 10e-6 + 2 * POST_SECONDS, rel=1e-9)


def test_broadcast_formulas() -> None:
    """8 ranks, 8 GB: a binomial tree sends it 3 times in turn; scatter + all-gather 2·7/8."""
    seconds = algorithm_seconds("broadcast", 8e9, one_host(8))
    assert seconds["binomial_tree"] == pytest.approx(3 * (8.0 + 10e-6))
    assert seconds["scatter_all_gather"] == pytest.approx(14.0 + 10 * 10e-6)


def test_pipelined_broadcast_equals_its_best_number_of_chunks() -> None:
    """(n − 2 + k)·(α + S/(kβ)) at the best real k is the closed form, below every integer's."""
    n, size = 8, 1e7
    closed = algorithm_seconds("broadcast", size, one_host(n))["pipelined_ring"]
    two = algorithm_seconds("broadcast", size, one_host(2))["pipelined_ring"]
    assert two == pytest.approx(ALPHA + size / BETA)
    chunked = [(n - 2 + k) * (ALPHA + size / (k * BETA)) for k in range(1, 1000)]
    assert closed <= min(chunked)
    assert closed == pytest.approx(min(chunked), rel=1e-4)


def test_rings_over_hosts_use_the_network_of_every_rank() -> None:
    """2 hosts of 4 at 1 GB/s per device: four rings, each leaving a host at another device, so
    a quarter of the 14 GB that a rank sends crosses hosts. Twice 7 hops, 2 of them between
    hosts."""
    group = Group(8, 4, 2, FAST, SLOW)
    seconds = algorithm_seconds("all_reduce", 8e9, group)["ring"]
    assert seconds == pytest.approx(14 / 4 + 2 * (5 * 1e-6 + 2 * 10e-6), rel=1e-9)


def test_hierarchical_all_reduce_by_hand() -> None:
    """2 hosts of 4, 8 GB. In the host twice 3 parts of 2 GB at 100 GB/s; between hosts each
    rank all-reduces its 2 GB with one other: 2·1/2·2 GB at 1 GB/s."""
    group = Group(8, 4, 2, FAST, SLOW)
    seconds = algorithm_seconds("all_reduce", 8e9, group)["hierarchical"]
    expected = 2 * (3 * 1e-6 + 6 / 100) + 2.0 + 2 * 10e-6
    assert seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("num_bytes", [1e3, 1e6, 1e9])
def test_hierarchical_beats_a_flat_ring_across_slow_links(
    kind: CollectiveKind, num_bytes: float
) -> None:
    seconds = algorithm_seconds(kind, num_bytes, Group(32, 8, 4, FAST, SLOW))
    assert seconds["hierarchical"] < seconds["ring"]


def test_an_uneven_group_has_no_hierarchy() -> None:
    assert "hierarchical" not in algorithm_seconds("all_reduce", 1e6, Group(5, 2, 2, FAST, SLOW))


def test_the_start_of_a_collective_is_paid_once() -> None:
    started = Link("s", ALPHA, BETA, base_seconds=1.0)
    for kind in KINDS:
        plain, slow = (collective_seconds(kind, 1e6, one_host(8, x)) for x in (SLOW, started))
        assert slow == pytest.approx(plain + 1.0), kind
    assert p2p_seconds(1e9, started) == pytest.approx(1.0 + ALPHA + 1.0)


def test_a_library_offers_only_what_it_has() -> None:
    across = Group(32, 8, 4, FAST, SLOW, library="nccl")
    assert set(algorithm_seconds("all_reduce", 1e6, across)) == {"ring", "tree"}
    assert set(algorithm_seconds("all_gather", 1e6, across)) == {"ring"}
    assert set(algorithm_seconds("all_to_all", 1e6, across)) == {"direct"}
    one_per_host = Group(4, 1, 4, FAST, SLOW, library="nccl")
    assert set(algorithm_seconds("all_gather", 1e6, one_per_host)) == {
        "ring",
        "recursive_doubling",
    }
    assert set(algorithm_seconds("all_reduce", 1e6, one_host(4, library="gloo"))) == {"ring"}


def test_on_gloo_a_reduce_scatter_is_half_an_all_reduce() -> None:
    group = one_host(4, library="gloo")
    assert 2 * collective_seconds("reduce_scatter", 1e6, group) == pytest.approx(
        collective_seconds("all_reduce", 1e6, group)
    )


def test_one_rank_or_no_bytes_cost_nothing() -> None:
    for kind in KINDS:
        assert collective_seconds(kind, 1e9, one_host(1)) == 0.0
        assert collective_seconds(kind, 0, one_host(8)) == 0.0
    assert p2p_seconds(0, SLOW) == 0.0


links = st.builds(
    Link,
    name=st.just("link"),
    alpha_seconds=st.floats(0, 1e-3),
    bytes_per_second=st.floats(1e6, 1e12),
    base_seconds=st.floats(0, 1e-3),
    reduction_bytes_per_second=st.sampled_from([0.0, 1e9, 1e12]),
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    per_host, hosts = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    extra = draw(st.integers(0, 3)) if hosts > 1 else 0
    return Group(
        per_host * hosts + extra,
        per_host,
        hosts,
        draw(links),
        draw(links),
        library=draw(st.sampled_from(["nccl", "gloo", "any"])),
    )


@given(st.sampled_from(KINDS), groups(), st.integers(0, 10**12), st.integers(0, 10**12))
def test_more_bytes_are_never_faster(
    kind: CollectiveKind, group: Group, first: int, second: int
) -> None:
    fewer, more = sorted((first, second))
    assert collective_seconds(kind, fewer, group) <= collective_seconds(kind, more, group) + 1e-15


@given(groups(), st.integers(1, 10**12))
def test_an_all_reduce_never_beats_the_bytes_it_must_move(group: Group, num_bytes: int) -> None:
    """Without a summing switch, every rank sends at least 2(n − 1)/n ≥ 1 times the tensor
    (Thakur, section 4.5), over both its links at best."""
    if group.num_ranks < 2 or group.intra.reduction_bytes_per_second:
        return
    rate = group.intra.bytes_per_second if group.ranks_per_host > 1 or not group.is_even else 0
    rate += group.inter.bytes_per_second if group.num_hosts > 1 else 0
    assert collective_seconds("all_reduce", num_bytes, group) >= num_bytes / rate


@given(st.sampled_from(KINDS), groups(), st.integers(1, 10**12))
def test_the_cheapest_is_an_algorithm_that_exists_for_the_group(
    kind: CollectiveKind, group: Group, num_bytes: int
) -> None:
    if group.num_ranks < 2 or not group.is_even or group.num_ranks > 64:
        return
    seconds = algorithm_seconds(kind, num_bytes, group)
    name = min(seconds, key=lambda one: seconds[one])
    if name == "in_switch":
        assert group.intra.reduction_bytes_per_second > 0
        return
    if kind == "reduce_scatter" and group.library == "gloo":
        kind = "all_to_all"
    table = find_table(kind, name, (group.ranks_per_host,) * group.num_hosts)
    assert table is not None
    assert wrong_parts(table) == []


def test_the_switch_sums_only_where_nccl_has_it_do_so() -> None:
    nvlink = find_link("nvlink4")
    four, five = (Group(n, n, 1, nvlink, SLOW, library="nccl") for n in (4, 5))
    assert "in_switch" not in algorithm_seconds("all_reduce", 1e9, four)
    assert "in_switch" in algorithm_seconds("all_reduce", 1e9, five)


def test_a_tensor_below_a_chunk_passes_the_switch_twice() -> None:
    """1 GB/s of sums and a first chunk of 1 s: 0.5 GB goes in and out in turn, 1 s; of 4 GB
    only the first chunk is not overlapped, 5 s. Two messages of 10 µs."""
    link = Link("switched", ALPHA, 1e6, reduction_bytes_per_second=1e9)
    protocols = {"switched": Protocols(switch_fill_seconds=1.0)}
    group = one_host(8, link, "nccl")
    for num_bytes, expected in ((5e8, 1.0), (4e9, 5.0)):
        seconds = algorithm_seconds("all_reduce", num_bytes, group, protocols=protocols)
        assert seconds["in_switch"] == pytest.approx(expected + 2 * ALPHA)


def test_nccl_takes_the_cheaper_protocol() -> None:
    """4 ranks: 6 steps of 10 µs at a quarter of 1 GB/s, or of 110 µs at all of it. They cost
    the same where 1.5·S/β·3 = 600 µs."""
    link = Link("wire", ALPHA, BETA)
    protocols = {"wire": Protocols(short_share=0.25, long_alpha_seconds=100e-6)}
    group = one_host(4, link, "nccl")
    equal = 600e-6 / 4.5 * BETA
    for num_bytes in (equal / 10, equal, equal * 10):
        short = 6 * 10e-6 + 1.5 * num_bytes / BETA / 0.25
        long = 6 * 110e-6 + 1.5 * num_bytes / BETA
        assert collective_seconds(
            "all_reduce", num_bytes, group, protocols=protocols
        ) == pytest.approx(min(short, long))
    assert short > long
    gloo = one_host(4, link, "gloo")
    plain = collective_seconds("all_reduce", 1e9, gloo, protocols=protocols)
    assert plain == pytest.approx(6 * 10e-6 + 1.5)


def test_a_pair_of_ranks_gets_few_channels_up_to_a_size() -> None:
    """Half the rate up to 1 GB; then no faster than that, then the whole rate."""
    protocols = {"slow": Protocols(p2p_few_share=0.5, p2p_few_bytes=1e9)}
    for gigabytes, expected in ((0.5, 1.0), (1.0, 2.0), (1.5, 2.0), (3.0, 3.0)):
        seconds = p2p_seconds(gigabytes * 1e9, SLOW, protocols=protocols)
        assert seconds == pytest.approx(expected + ALPHA), gigabytes


def test_groups_know_where_their_ranks_lie() -> None:
    cluster = parse_cluster("4x8xH100")
    within = group_of(cluster, range(8, 16))
    assert (within.num_ranks, within.ranks_per_host, within.num_hosts) == (8, 8, 1)
    assert within.library == "nccl"
    across = group_of(cluster, range(3, 32, 8))
    assert (across.num_ranks, across.ranks_per_host, across.num_hosts) == (4, 1, 4)
    both = group_of(cluster, [0, 1, 8, 9])
    assert (both.num_ranks, both.ranks_per_host, both.num_hosts) == (4, 2, 2)
    assert group_of(cluster, [0, 1, 8]).is_even is False
    assert group_of(parse_cluster("cpu:4"), range(4)).library == "gloo"


def test_a_group_over_unequal_hosts_runs_at_the_slowest() -> None:
    fast, slow = parse_cluster("8xH100").hosts[0], parse_cluster("8xL40S").hosts[0]
    cluster = Cluster("mixed", (fast, Host(slow.device, 8, slow.link)), SLOW)
    assert group_of(cluster, range(16)).intra == slow.link


@pytest.mark.parametrize(
    ("text", "kind", "num_bytes", "measured_seconds"),
    [
        # nccl-tests and all_reduce_bench: stas00/ml-engineering@744d01e, network/README.md
        ("8xA100-80GB", "all_reduce", 2**34, 127997.0e-6),
        ("8xA100-80GB", "all_reduce", 2**30, 8203.9e-6),
        ("8xH200", "all_reduce", 2**34, 62340.8e-6),
        ("8xH200", "all_gather", 2**34, 41594.9e-6),
        ("8xH200", "reduce_scatter", 2**34, 41422.9e-6),
        ("4x8xH200@efa-p5", "all_reduce", 2**32, 22806.8e-6),
        ("8xB200", "all_reduce", 2**34, 35551.4e-6),
        ("4x8xB200@efa-p5", "all_reduce", 2**34, 87181.8e-6),
        # Azure/AI-benchmarking-guide@8fd0c6e
        ("8xH100", "all_reduce", 2**28, 1109.6e-6),
        ("8xH100", "all_reduce", 2**20, 41.99e-6),
        # aws-samples/awsome-distributed-training@7217859, nccl-tests
        ("2x8xA100-80GB@efa-p4d", "all_reduce", 2**31, 51406.0e-6),
    ],
)
def test_published_nccl_times_are_met_within_15_percent(
    text: str, kind: CollectiveKind, num_bytes: int, measured_seconds: float
) -> None:
    cluster = parse_cluster(text)
    group = group_of(cluster, range(cluster.num_devices))
    assert collective_seconds(kind, num_bytes, group) == pytest.approx(measured_seconds, rel=0.15)


def test_nvlink_is_faster_in_every_generation() -> None:
    rates = [find_link(f"nvlink{generation}").bytes_per_second for generation in (2, 3, 4, 5)]
    assert rates == sorted(rates)
