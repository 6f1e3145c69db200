"""Models with adapters, several inputs, two towers, own ops: each plan equals one device.

As ``test_verification``: float64, two AdamW steps, losses, gradients and weights to 1e-9.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from marks import slow
from one_device import build_optimizer, reference_of
from processes import run_processes
from trained_models import target

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred, record_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_rows
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference
from autoparallel.runtime.verify.verify import Verification, verify

GLOBAL_BATCH = 8
PARALLEL = ("dp=2", "tp=2", "pp=2")
ZERO = ("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3")
MODELS = ("lora", "several", "seq2seq", "towers", "own", "opaque", "rowwise")
CASES = [(m, p) for m in MODELS for p in PARALLEL] + [("lora", p) for p in ZERO]
QUICK = (("lora", "tp=2"), ("opaque", "dp=2"))


@cache
def captured(model: str, precision: str) -> tuple[Deferred, Program]:
    found = target(model)
    deferred = record_build(found.build_model, seed=0)
    program = capture_rows(
        found, deferred.model, global_batch=GLOBAL_BATCH, seq=None, precision=precision
    )  # type: ignore[arg-type]
    return deferred, program


@cache
def planned(model: str, parallel: str) -> Plan:
    _, program = captured(model, "fp32")
    options = PlanOptions(global_batch=GLOBAL_BATCH, forced=parse_parallel(parallel))
    return plan_program(program, target(model), parse_cluster("cpu:2"), options)


def reference(model: str, batches: Any) -> Reference:
    return reference_of(target(model), captured(model, "fp64")[1], batches)


def verify_all(cases: list[tuple[str, str]]) -> list[Verification]:
    """On a rank: each (model, plan file) verified in turn."""
    found = []
    for model, text in cases:
        plan = loads(text, "test")
        plan = replace(plan, model=replace(plan.model, precision="fp64"))
        deferred, program = captured(model, "fp64")
        trainer = Trainer(
            program, plan, deferred, device=torch.device("cpu"), build=build_optimizer
        )
        graph = program.graph.with_batch_size(GLOBAL_BATCH)
        batches = [random_batch(graph, seed=step, dtype="float64") for step in range(2)]
        found.append(verify(trainer, batches, lambda: reference(model, batches)))  # noqa: B023
    return found


@cache
def results(quick: bool) -> dict[tuple[str, str], Verification]:
    cases = [case for case in CASES if (case in QUICK) == quick]
    plans = [(model, dumps(planned(model, parallel))) for model, parallel in cases]
    found = run_processes(2, verify_all, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


@pytest.mark.parametrize(
    ("model", "parallel"), [case if case in QUICK else slow(*case) for case in CASES]
)
def test_a_plan_of_a_model_that_people_train_equals_one_device(model: str, parallel: str) -> None:
    found = results((model, parallel) in QUICK)[model, parallel]
    assert found.passed, found.failures[:5]
    assert found.tolerance == 1e-9
    assert {d.quantity for d in found.differences} == {"loss", "gradient", "weight"}
    if model == "lora":
        trained = {d.name for d in found.differences if d.quantity == "gradient"}
        assert len(trained) == 18


def test_a_loss_over_the_whole_batch_is_planned_at_the_global_batch_at_once() -> None:
    plan = planned("towers", "dp=2")
    assert plan.num_microbatches == 1
    assert captured("towers", "fp32")[1].graph.batch_size == GLOBAL_BATCH


@pytest.mark.parametrize("parallel", ["dp=2", "dp=2,zero=3"])
def test_frozen_parameters_count_neither_gradients_nor_optimizer_states(parallel: str) -> None:
    graph = captured("lora", "fp32")[1].graph
    trained = sum(p.spec.num_bytes for p in graph.parameters if p.spec.requires_grad)
    held = sum(p.spec.num_bytes for p in graph.parameters)
    memory = planned("lora", parallel).stages[0].prediction.memory_bytes
    shards = 2 if "zero=3" in parallel else 1
    assert memory["gradients"] * shards == trained
    assert memory["optimizer"] * shards == pytest.approx(2 * trained, rel=0.01)
    assert memory["parameters"] * shards == pytest.approx(held, rel=0.3)


def test_a_users_op_is_split_by_its_annotation() -> None:
    layouts = planned("own", "tp=2").stages[0].layouts
    split = {name: held.labels[0] for name, held in layouts.items() if "project" in name}
    assert set(split.values()) & {"i", "o", "b0", "b1"}
