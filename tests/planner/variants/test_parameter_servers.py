"""Plans with parameter servers: roles, errors, prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_verification import SEQ, captured, target

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.summary import plan_summary
from autoparallel.planner.variants.parameter_servers import server_plan
from autoparallel.planning.plan import plan_program


def planned(parallel: str, cluster: str = "cpu:4") -> Plan:
    options = PlanOptions(
        global_batch=12, seq=SEQ, forced=parse_parallel(parallel), profile="analytic"
    )
    program = captured("gpt", "fp32")[1]
    return plan_program(program, target("gpt"), parse_cluster(cluster), options)


def test_a_forced_plan_is_priced_as_evaluate_prices_it_and_survives_its_file() -> None:
    plan = planned("servers=2,consistency=ssp,staleness=2,microbatches=4")
    assert plan_summary(plan) == "2 workers, 2 servers · SSP 2 · 4 × 3"
    assert loads(dumps(plan)) == plan
    program = captured("gpt", "fp32")[1]
    found = evaluate(program.graph, program.blocks, plan, plan.cluster)
    assert found.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
    assert found.peak_memory_bytes == plan.prediction.peak_memory_bytes


def test_a_slower_link_makes_the_step_longer_and_asp_waits_for_nobody() -> None:
    program = captured("gpt", "fp32")[1]
    plan = planned("servers=2,microbatches=4")
    host = plan.cluster.hosts[0]
    thin = replace(host, link=replace(host.link, bytes_per_second=1e6))
    slow = replace(plan, cluster=replace(plan.cluster, hosts=(thin,)))
    found = evaluate(program.graph, program.blocks, slow, slow.cluster)
    assert found.step_seconds > 1.5 * plan.prediction.step_seconds
    assert plan.servers is not None
    free = replace(slow, servers=replace(plan.servers, consistency="asp"))
    eased = evaluate(program.graph, program.blocks, free, free.cluster)
    assert eased.step_seconds <= found.step_seconds * (1 + 1e-9)


def test_roles_are_the_last_ranks_or_beside_the_first_workers() -> None:
    cluster = parse_cluster("cpu:4")
    own = server_plan(parse_parallel("servers=1"), cluster, 4, 12)
    assert (own.workers, own.servers, own.shares) == ((0, 1, 2), (3,), (2, 1, 1))
    assert not own.replicas
    beside = server_plan(parse_parallel("servers=2,place=beside"), cluster, 4, 12)
    assert (beside.workers, beside.servers) == ((0, 1, 2, 3), (0, 1))


@pytest.mark.parametrize(
    ("parallel", "code"),
    [
        ("servers=4", "AP950"),
        ("servers=2,consistency=asp,microbatches=3", "AP951"),
        ("servers=2,tp=2", "AP952"),
        ("servers=2,zero=1", "AP952"),
        ("servers=2,schedule=1f1b", "AP952"),
        ("servers=2,consistency=ssp", "AP957"),
        ("servers=2,consistency=bsp,staleness=1", "AP957"),
        ("consistency=asp", "AP120"),
    ],
)
def test_what_cannot_be_is_refused(parallel: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(parallel)
    assert caught.value.code == code


def test_servers_on_gpus_are_refused() -> None:
    with pytest.raises(UsageError, match="AP953"):
        planned("servers=2", "8xH100")


def thin(text: str, bytes_per_second: float = 1e8) -> Cluster:
    """A cluster of one host with so thin a link."""
    cluster = parse_cluster(text)
    (host,) = cluster.hosts
    link = replace(host.link, bytes_per_second=bytes_per_second)
    return replace(cluster, hosts=(replace(host, link=link),))


def with_slow_device() -> Cluster:
    """Three hosts of one device, the last one four times slower."""
    cluster = thin("cpu:1")
    (host,) = cluster.hosts
    device = host.device
    slow = replace(
        device,
        name="slow",
        peak_flops={k: v / 4 for k, v in device.peak_flops.items()},
        memory_bytes_per_second=device.memory_bytes_per_second / 4,
    )
    return replace(cluster, hosts=(host, host, replace(host, device=slow)), inter_link=host.link)


def found(
    cluster: Cluster, *, allow: tuple[str, ...] = ("servers",), deny: str = "pp,tp,zero"
) -> Plan:
    """The search's own plan; by default only data parallelism is left beside servers."""
    options = PlanOptions(global_batch=64, seq=SEQ, profile="analytic", allow=allow, deny=(deny,))
    return plan_program(captured("gpt", "fp32")[1], target("gpt"), cluster, options)


def names(plan: Plan) -> list[str]:
    return [each.summary for each in plan.alternatives]


def test_servers_win_over_a_thin_link_where_they_are_faster() -> None:
    """Their plan is the one that is priced when it is forced, and the other is told of."""
    cluster = thin("cpu:2")
    plan, without = found(cluster), found(cluster, allow=())
    assert plan.servers is not None
    assert without.servers is None
    assert not any("server" in name for name in names(without))
    assert plan_summary(plan) == "2 workers, 2 servers beside them · BSP · 2 × 32"
    assert plan.prediction.step_seconds * 1.02 < without.prediction.step_seconds
    assert plan_summary(without) in names(plan)
    assert not any("SP 2" in name or "ASP" in name for name in names(plan))
    program = captured("gpt", "fp32")[1]
    priced = evaluate(program.graph, program.blocks, plan, cluster)
    assert priced.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)


def test_stale_updates_are_priced_only_where_they_are_allowed() -> None:
    plan = found(thin("cpu:2"), allow=("servers", "ssp", "asp"))
    told = [plan_summary(plan), *names(plan)]
    assert {"SSP 2", "ASP", "BSP"} == {name.split(" · ")[1] for name in told if "server" in name}


def test_the_slow_device_becomes_the_server() -> None:
    plan = found(with_slow_device())
    assert plan.servers is not None
    assert plan.servers.servers == (2,)
    assert plan.servers.workers == (0, 1)


def test_servers_that_are_slower_are_alternatives() -> None:
    plan = found(thin("cpu:2", 1e7))
    assert plan.servers is None
    assert any("2 servers beside them" in name for name in names(plan))


@pytest.mark.parametrize("cluster", [parse_cluster("cpu:2"), thin("2xA100-80GB", 1e6)])
def test_servers_are_not_offered_over_fast_links_or_on_gpus(cluster: Cluster) -> None:
    plan = found(cluster)
    assert plan.servers is None
    assert not any("server" in name for name in names(plan))


@pytest.mark.parametrize(
    ("deny", "parallel"),
    [("servers", "servers=2"), ("ssp", "servers=2,consistency=ssp,staleness=1")],
)
def test_servers_that_are_forced_and_denied_are_refused(deny: str, parallel: str) -> None:
    with pytest.raises(UsageError, match="AP186"):
        PlanOptions(forced=parse_parallel(parallel), deny=(deny,))
