"""The GShard example: its gating, and its experts split so that tokens go by all-to-all."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from capture_models import example
from kept_captures import capture_once
from marks import slow
from processes import run_processes

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred, plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.layout import combine, conversion_steps, shard
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import run_reference
from autoparallel.runtime.verify.verify import verify
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

MOE = example("gshard_moe")
SEQ, ROWS = 8, 8
SMALL = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_ff": 32, "capacity": 3, "vocab": 32}
DISPATCHED = ("einsum_3", "relu", "einsum_4")
"""What runs between dispatch and combine; its tensors are (expert, group, place, …)."""


def test_a_token_goes_to_its_two_best_experts_until_they_are_full() -> None:
    torch.manual_seed(0)
    gate = MOE.Gate(d_model=8, n_expert=4, capacity=2).double()
    weights, balance = gate(torch.randn(3, 6, 8, dtype=torch.float64))
    assert weights.shape == (3, 6, 4, 2)
    assert ((weights > 0).sum((-2, -1)) <= 2).all()
    assert ((weights > 0).sum(1) <= 1).all(), "a place takes one token"
    total = weights.sum((-2, -1))
    assert ((total - 1).abs().lt(1e-12) | (total == 0)).all()
    assert (total == 0).any(), "some token finds no place"
    assert balance >= 0


@cache
def target() -> Target:
    return load_target("examples/gshard_moe.py", {**SMALL, "seq": SEQ})


@cache
def captured(precision: str) -> tuple[Deferred, Program]:
    return capture_once(target(), MOE.example_batch(2, SEQ), precision)


def planned(parallel: str) -> Plan:
    forced = parse_parallel(parallel)
    devices = (forced.dp or 1) * (forced.tp or 1) * (forced.ep or 1)
    options = PlanOptions(global_batch=ROWS, seq=SEQ, forced=forced)
    return plan_program(captured("fp32")[1], target(), parse_cluster(f"cpu:{devices}"), options)


def with_experts_split(plan: Plan) -> Plan:
    """A data-parallel plan of one stage whose experts are split over its ranks instead."""
    (stage,) = plan.stages
    graph = captured("fp32")[1].graph.with_batch_size(ROWS)
    layouts = dict(stage.layouts)
    for name in layouts:
        if name in DISPATCHED or name.endswith(("feed_forward.up", "feed_forward.down")):
            offered = axis_strategies(graph[name], graph, 2)
            layouts[name] = combine((next(s for s in offered if s.outputs == (shard(0),)),))
    return replace(plan, stages=(replace(stage, layouts=layouts),))


def verified(text: str) -> tuple[bool, Any]:
    """On a rank: whether two steps by a plan file equal one device, and what differs."""
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured("fp64")
    trainer = Trainer(
        program, plan, deferred, device=torch.device("cpu"), build=MOE.build_optimizer
    )
    graph = program.graph.with_batch_size(ROWS)
    batches = [random_batch(graph, seed=step) for step in range(2)]

    def loss(module: torch.nn.Module, inputs: Any) -> torch.Tensor:
        return module(**program.batch(inputs))

    def reference() -> Any:
        module = plain_build(target().build_model, 0).double()
        return run_reference(module, batches, loss=loss, build_optimizer=MOE.build_optimizer)

    found = verify(trainer, batches, reference)
    return found.passed, found.failures[:5]


@pytest.mark.parametrize("parallel", [slow("dp=2,tp=2"), "ep=2"])
def test_a_plan_equals_one_device(parallel: str) -> None:
    plan = planned(parallel)
    ranks = sum(len(stage.devices) for stage in plan.stages)
    passed, failures = run_processes(ranks, verified, dumps(plan), timeout_seconds=280)[0]
    assert passed, failures


def test_experts_split_over_the_data_axis_exchange_tokens_and_equal_one_device() -> None:
    plan = with_experts_split(planned("dp=2"))
    layouts = plan.stages[0].layouts
    assert layouts["layers.0.feed_forward.up"].outputs == ((shard(0),),)
    sent = conversion_steps(layouts["einsum_2"].outputs[0], layouts["einsum_3"].inputs[0])
    back = conversion_steps(layouts["einsum_4"].outputs[0], layouts["einsum_5"].inputs[1])
    assert [(s.source, s.target) for s in sent] == [(shard(1), shard(0))], "an all-to-all"
    assert [(s.source, s.target) for s in back] == [(shard(0), shard(1))], "and back"
    passed, failures = run_processes(2, verified, dumps(plan), timeout_seconds=280)[0]
    assert passed, failures


def test_expert_parallelism_is_data_parallelism_with_experts_apart() -> None:
    found, by_hand = planned("ep=2"), with_experts_split(planned("dp=2"))
    for name in (*DISPATCHED, "layers.0.feed_forward.up", "layers.0.feed_forward.down"):
        assert found.stages[0].layouts[name].outputs == by_hand.stages[0].layouts[name].outputs


def test_tensor_parallelism_splits_the_experts_by_the_planners_own_choice() -> None:
    layouts = planned("tp=2").stages[0].layouts
    assert layouts["layers.0.feed_forward.up"].outputs == ((shard(0),),)
    assert layouts["layers.0.feed_forward.down"].outputs == ((shard(0),),)
