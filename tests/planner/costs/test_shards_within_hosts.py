"""ZeRO within groups of ranks: prices by hand, choices of a mesh, what the search chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import cluster, mlp, spec

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.collectives.collectives import collective_seconds, group_of
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import RUNTIME
from autoparallel.planner.costs.mesh_prices import NO_GROUPS, Sharding
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planner.find_plan import plan
from autoparallel.planner.graph.layout import REPLICATE, Mesh, shard
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.summary import plan_summary

FOUR = Mesh(("dp",), (4,))
TWO_HOSTS = cluster(2, num_hosts=2)
NUMEL = 1 << 20


def prices_on(
    mesh: Mesh, on: Cluster = TWO_HOSTS, ranks: tuple[int, ...] = (0, 1, 2, 3), degree: int = 0
) -> Prices:
    assumptions = replace(RUNTIME, shard_degree=degree, copies_states=False)
    return Prices(mesh, on, ranks, "fp32", "adamw", rules, assumptions=assumptions)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_collectives_stay_within_a_host_and_one_sum_of_shards_crosses_hosts(zero: int) -> None:
    """4 bytes an element: gathered and scattered over ranks 0 and 1; half of it summed over 0 and
    2, once per step. Adam's states and the update are those of half of the elements."""

    def streamed(kind: str, num_bytes: int, *ranks: int) -> float:
        group = group_of(TWO_HOSTS, ranks)
        return collective_seconds(kind, num_bytes, group) - collective_seconds(kind, 1, group)

    prices = prices_on(FOUR)
    seconds, held = prices.parameter(spec(NUMEL), (REPLICATE,), zero, 2)
    gather = streamed("all_gather", 4 * NUMEL, 0, 1)
    scatter = streamed("reduce_scatter", 4 * NUMEL, 0, 1)
    across = streamed("all_reduce", 2 * NUMEL, 0, 2)
    once, each = gather * (zero < 3), gather * (zero == 3)
    assert seconds.parameter_gather == pytest.approx(once)
    assert seconds.forward_states == pytest.approx(each)
    assert seconds.backward_states == pytest.approx(each + scatter * (zero >= 2))
    assert seconds.gradient_sync == pytest.approx(across + scatter * (zero == 1))
    whole, _ = prices.parameter(spec(NUMEL), (REPLICATE,), 0)
    assert seconds.optimizer == pytest.approx(whole.optimizer / 2)
    copy = 4 * NUMEL * (zero < 3)
    gradients = 4 * NUMEL // (1 if zero == 1 else 2)
    assert held[:3] == (2 * NUMEL + copy, gradients, 4 * NUMEL)


def test_a_block_waits_for_the_latencies_of_all_three_collectives() -> None:
    within, across = group_of(TWO_HOSTS, (0, 1)), group_of(TWO_HOSTS, (0, 2))
    found = prices_on(FOUR).block_sync(3, 2)
    assert found.forward_states == pytest.approx(collective_seconds("all_gather", 1, within))
    assert found.gradient_sync == pytest.approx(collective_seconds("all_reduce", 1, across))


def test_experts_that_all_ranks_of_a_group_hold_apart_are_not_sharded() -> None:
    """Only ranks 0 and 2 have the same experts: their gradients are all-reduced as under ZeRO 0."""
    prices, held = prices_on(Mesh(("dp", "ep"), (2, 2))), (REPLICATE, shard(0))
    assert prices.parameter(spec(4, 8), held, 3, 2) == prices.parameter(spec(4, 8), held, 0)


def test_the_choices_of_a_mesh_follow_its_hosts() -> None:
    within = [Sharding(zero, 2) for zero in (1, 2, 3)]
    assert prices_on(FOUR).shardings[4:] == (*within,)
    assert prices_on(Mesh(("dp", "cp"), (2, 2))).shardings[4:] == (*within,)
    assert prices_on(Mesh(("dp", "tp"), (2, 2))).shardings[4:] == ()  # one rank of dp on a host
    assert prices_on(FOUR, cluster(4)).shardings[4:] == ()
    assert prices_on(FOUR, cluster(1, num_hosts=4)).shardings[4:] == ()
    assert prices_on(Mesh(("dp",), (3,)), ranks=(0, 1, 2)).shardings[4:] == ()
    assert prices_on(FOUR, degree=NO_GROUPS).shardings[4:] == ()
    forced = prices_on(FOUR, cluster(4), degree=2)
    assert [forced.shardings[at] for at in forced.allowed_shardings((0, 1, 3))] == [
        Sharding(1, 2),
        Sharding(3, 2),
    ]


def test_least_states_are_those_over_all_ranks_and_come_last() -> None:
    prices = prices_on(FOUR)
    assert prices.allowed_shardings((0, 1, 2, 3))[-1] == 3
    assert prices.allowed_shardings((0, 1))[-1] == 1
    within_2 = prices.sharding_number(Sharding(2, 2))
    more = [prices.shardings[at] for at in prices.sharding_more(within_2, (0, 1, 2, 3))]
    assert more == [Sharding(2, 2), Sharding(2), Sharding(3), Sharding(3, 2)]


@pytest.mark.parametrize("denied", [False, True])
def test_a_plan_shards_within_hosts_where_links_between_them_are_slow(denied: bool) -> None:
    """ZeRO 3 over all ranks gathers between hosts in every micro-batch."""
    graph, blocks = mlp(4)
    on = cluster(2, num_hosts=2, bytes_per_second=1e7, flops=1e9)
    features = Features(frozenset({"hsdp"} if denied else ()))
    forced = Forced(dp=4, zero=3, num_microbatches=2)
    found = plan(graph, blocks, on, Request(16, forced=forced, features=features))
    (stage,) = found.stages
    assert (stage.zero, stage.shard_degree) == (3, 0 if denied else 2)
    assert ("ZeRO 3 within 2" in plan_summary(found)) is not denied
    assert loads(dumps(found), "plan.json").stages == found.stages
    if not denied:
        all_ranks = replace(Request(16, forced=forced), features=Features(frozenset({"hsdp"})))
        slower = plan(graph, blocks, on, all_ranks).prediction.step_seconds
        assert found.prediction.step_seconds < slower


@pytest.mark.parametrize(("shard_degree", "expected"), [(2, 2), (4, 0)])
def test_a_forced_number_of_ranks_is_kept(shard_degree: int, expected: int) -> None:
    """On one host, where the search has no groups; four of four ranks are all."""
    forced = Forced(dp=4, zero=1, shard=shard_degree)
    found = plan(*mlp(2), cluster(4), Request(8, forced=forced))
    assert [(stage.zero, stage.shard_degree) for stage in found.stages] == [(1, expected)]


def test_groups_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="shard=3 does not divide dp=4") as caught:
        plan(*mlp(2), cluster(4), Request(8, forced=Forced(dp=4, shard=3)))
    assert caught.value.fix == "shard= one of 2, 4, or leave shard out"
    for refused in ({"zero": 0}, {"allreduce": "ring"}):
        with pytest.raises(UsageError, match="shard=2"):
            Forced(shard=2, **refused)
    with pytest.raises(UsageError, match="hsdp is both fixed and denied"):
        Request(8, forced=Forced(shard=2), features=Features(frozenset({"hsdp"})))


def test_a_plan_file_with_impossible_groups_is_damaged() -> None:
    found = plan(*mlp(2), TWO_HOSTS, Request(8, forced=Forced(dp=4, zero=3, shard=2)))
    stage = replace(found.stages[0], shard_degree=3)
    with pytest.raises(PlanError, match="shard_degree"):
        loads(dumps(replace(found, stages=(stage,))), "plan.json")
