"""Tokens that are sent to experts while other ops run, and in halves: each plan equals one device.

As ``test_verification``: float64, two AdamW steps, losses, gradients and weights to 1e-9. Plans of
CPUs send all rows at once, as nothing is gained there; here they are made to send halves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from processes import run_processes
from test_verification import GLOBAL_BATCH, SEQ, captured, check_verified, target, verify_all

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.graph.layout import HALVED, SENT, NodeLayout, is_halved
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.verify.verify import Verification

Case = tuple[str, str]
TWO: tuple[Case, ...] = (
    ("shared", "dp=2,ep=2,zero=3,microbatches=2,recompute=selective"),
    ("shared", "dp=2,ep=2,zero=1,recompute=full"),
)
FOUR: tuple[Case, ...] = (
    ("shared", "dp=2,tp=2,ep=4"),
    ("shared", "dp=2,cp=2,ep=4,zero=3,recompute=selective"),
    ("mixtral", "dp=4,ep=4,zero=3,microbatches=2,recompute=full"),
    ("shared", "dp=2,ep=2,pp=2,zero=2,microbatches=4,schedule=1f1b"),
    ("shared", "dp=2,ep=2,pp=2,zero=1,microbatches=4,schedule=zb-h1"),
    ("mixtral", "dp=2,ep=2,pp=2,zero=1,microbatches=4,schedule=zbv"),
    ("mixtral", "dp=2,tp=2,ep=4,zero=1"),
)


def planned(model: str, parallel: str, num_ranks: int) -> Plan:
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=parse_parallel(parallel))
    cluster, program = parse_cluster(f"cpu:{num_ranks}"), captured(model, "fp32")[1]
    return plan_program(program, target(model), cluster, options)


def halved(plan: Plan) -> Plan:
    """The plan with all exchanges in halves, whether that gains or not."""

    def relabelled(layout: NodeLayout) -> NodeLayout:
        labels = tuple(HALVED if label == SENT else label for label in layout.labels)
        return replace(layout, labels=labels)

    stages = []
    for stage in plan.stages:
        layouts = {name: relabelled(layout) for name, layout in stage.layouts.items()}
        stages.append(replace(stage, layouts=layouts))
    found = replace(plan, stages=tuple(stages))
    assert not any(is_halved(each) for stage in plan.stages for each in stage.layouts.values())
    assert any(is_halved(each) for stage in stages for each in stage.layouts.values())
    return found


@cache
def results(num_ranks: int, cases: tuple[Case, ...]) -> dict[tuple[Case, bool], Verification]:
    """Every case, as planned and in halves, in one set of processes."""
    plans = {case: planned(*case, num_ranks) for case in cases}
    asked = {(case, False): plan for case, plan in plans.items() if case[0] == "shared"}
    asked |= {(case, True): halved(plan) for case, plan in plans.items()}
    texts = [(case[0], dumps(plan)) for (case, _), plan in asked.items()]
    found = run_processes(num_ranks, verify_all, texts, timeout_seconds=500)
    return dict(zip(asked, found[0], strict=True))


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("case", TWO, ids=" ".join)
def test_experts_beside_others_on_two_ranks_equal_one_device(case: Case, in_halves: bool) -> None:
    check_verified(results(2, TWO)[case, in_halves])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=" ".join)
def test_experts_beside_others_on_four_ranks_equal_one_device(case: Case) -> None:
    found = [each for (of, _), each in results(4, FOUR).items() if of == case]
    assert len(found) == (2 if case[0] == "shared" else 1)
    for each in found:
        check_verified(each)
