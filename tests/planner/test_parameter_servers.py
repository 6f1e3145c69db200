"""Plans with parameter servers: roles, errors, prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_verification import SEQ, captured, target

from autoparallel.cost_model.resolve import parse_cluster
from autoparallel.options import parse_parallel
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate import evaluate
from autoparallel.planner.parameter_servers import server_plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.summary import plan_summary
from autoparallel.planning import PlanOptions, plan_program


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
    own = server_plan(parse_parallel("servers=1"), cluster, 4)
    assert (own.workers, own.servers, own.shares) == ((0, 1, 2), (3,), (2, 1, 1))
    assert not own.replicas
    beside = server_plan(parse_parallel("servers=2,place=beside"), cluster, 4)
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
