"""Planning as commands and Python ask for it: what is made of the plan that the search found."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.options import parse_parallel
from autoparallel.planner.plan import Plan
from autoparallel.planning import (
    PlanOptions,
    capture_target,
    find_cluster,
    make_plan,
    plan_program,
)
from autoparallel.targets import load_target

GPT = load_target("examples/gpt.py", {"n_layer": 4, "d_model": 512, "n_head": 8, "seq": 512})
OPTIONS = PlanOptions(
    global_batch=64,
    seq=512,
    precision="bf16",
    profile="analytic",
    forced=parse_parallel("pp=2,microbatches=4,schedule=1f1b"),
)
CLUSTER = "2xH100"


def peak(plan: Plan) -> int:
    return plan.prediction.peak_memory_bytes


def test_a_plan_keeps_the_limit_with_its_messages_and_communicators() -> None:
    without = peak(plan_program(capture_target(GPT, OPTIONS), GPT, find_cluster(CLUSTER), OPTIONS))
    final = peak(make_plan(GPT, CLUSTER, OPTIONS))
    limit = final - 50_000_000
    assert without < limit < final  # the search takes the plan for one that fits
    found = make_plan(GPT, CLUSTER, replace(OPTIONS, memory_limit_bytes=limit))
    assert peak(found) <= limit
