"""Gradients summed by every algorithm, and in both orders, held to one device in float64."""

from __future__ import annotations

from dataclasses import replace

from processes import run_processes
from test_verification import planned, verify_all

from autoparallel.planner.plan_file import loads
from autoparallel.runtime.update.gradients import PlannedSums

FOUR = (
    "dp=4,allreduce=tree",
    "dp=4,allreduce=recursive_doubling,microbatches=2",
    "dp=2,tp=2,allreduce=ring",
    "dp=2,pp=2,allreduce=halving_doubling,microbatches=4",
    "dp=4,gradients=priority,microbatches=2",
)


def test_gradients_of_every_algorithm_and_order_equal_one_devices() -> None:
    plans = [("gpt", planned("gpt", parallel)) for parallel in FOUR]
    plans.append(("gpt-tied", planned("gpt-tied", FOUR[-1])))
    found = run_processes(4, verify_all, plans)[0]
    assert [each.passed for each in found] == [True] * len(plans), found


def test_a_plan_for_gpus_leaves_its_algorithms_to_the_library() -> None:
    """NCCL's names are no tables: on CPUs, too, such a plan runs by the library."""
    plan = loads(planned("gpt", "dp=2,zero=0"))
    (host,) = plan.cluster.hosts
    device = replace(host.device, kind="cuda")
    cluster = replace(plan.cluster, hosts=(replace(host, device=device),))
    (stage,) = plan.stages
    assert PlannedSums.of(plan, stage).sums == stage.gradient_sums != ()
    assert PlannedSums.of(replace(plan, cluster=cluster), stage) == PlannedSums()
