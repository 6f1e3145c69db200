"""Tokens are sent to experts while other ops run, and in halves: each plan equals one device.

As ``test_verification``: float64, two AdamW steps, losses, gradients and weights to 1e-9. Plans of
CPUs send all rows at once, as nothing is gained there; here they are made to send halves.

A rank starts each exchange before the compute that hides it, and waits after it: under the rules of
NCCL (``strict_group``), where what an exchange fills is nonsense until the wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
from kept_captures import capture_once
from one_device import build_optimizer
from processes import run_processes
from test_verification import GLOBAL_BATCH, SEQ, check_verified, verify_all
from test_verification import captured as captured_model
from test_verification import target as target_of
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.layout import HALVED, SENT, NodeLayout, is_halved
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import Verification
from autoparallel.target.load import load_target

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


def planned_model(model: str, parallel: str, num_ranks: int) -> Plan:
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=parse_parallel(parallel))
    cluster, program = parse_cluster(f"cpu:{num_ranks}"), captured_model(model, "fp32")[1]
    return plan_program(program, target_of(model), cluster, options)


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
    plans = {case: planned_model(*case, num_ranks) for case in cases}
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


WIDTH = 56
"""The width of the shared experts alone, by which their products are known."""
LAYERS = 2
TARGET = load_target("hf:tests/zoo/qwen2_moe", {"shared_expert_intermediate_size": WIDTH})

WHOLE = (
    "start 0, shared, wait 0, experts, start 1, wait 1",
    "start 0, wait 0, experts, start 1, shared, wait 1",
)
HALVES = (
    "start 0, start 1, shared, wait 0, experts, start 2, wait 1, experts, start 3, wait 2, wait 3",
    "start 0, start 1, wait 0, experts, start 2, wait 1, experts, start 3, shared, wait 2, wait 3",
)
"""The order in a layer's forward and in its backward."""


@cache
def captured(precision: str) -> tuple[Deferred, Program]:
    return capture_once(TARGET, TARGET.example_batch(2, SEQ), precision)


def planned(*, in_halves: bool) -> str:
    forced = parse_parallel("dp=2,ep=2,zero=1,microbatches=1")
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=forced)
    plan = plan_program(captured("fp32")[1], TARGET, parse_cluster("cpu:2"), options)
    return dumps(halved(plan) if in_halves else plan)


@dataclass
class Actions(TorchDispatchMode):
    """The exchanges' starts and waits, and the products of experts between them, in order."""

    found: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        sizes = [size for each in args if isinstance(each, torch.Tensor) for size in each.shape]
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.found += ["shared"] * (WIDTH in sizes)
        elif function is torch.ops.aten.bmm.default:
            self.found.append("experts")
        return function(*args, **(kwargs or {}))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        start = ProcessCommunicator.exchange

        def exchange(own: ProcessCommunicator, *given: Any) -> Any:
            self.found.append(f"start {self.count}")
            self.count += 1
            return Waited(start(own, *given), self, f"wait {self.count - 1}")

        ProcessCommunicator.exchange = exchange  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            ProcessCommunicator.exchange = start  # type: ignore[method-assign]


@dataclass
class Waited:
    exchange: Any
    actions: Actions
    name: str

    def wait(self) -> torch.Tensor:
        self.actions.found.append(self.name)
        return self.exchange.wait()


def trained(text: str) -> list[str]:
    """On a rank: the actions of a step, without repetitions."""
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured("fp64")
    cpu = torch.device("cpu")
    trainer = Trainer(program, plan, deferred, device=cpu, build=build_optimizer)
    actions = Actions()
    batch = random_batch(program.with_batch_size(GLOBAL_BATCH).graph, seed=0)
    with actions.recorded():
        result = trainer.step(batch)
    assert torch.isfinite(torch.tensor(result.read().loss))
    return [name for name, _ in groupby(actions.found)]


def expected(forward: str, backward: str) -> list[str]:
    """The actions of all layers, with the exchanges numbered through."""
    found: list[str] = []
    for layer, text in enumerate((forward,) * LAYERS + (backward,) * LAYERS):
        size = text.count("start")
        for each in text.split(", "):
            name, _, number = each.partition(" ")
            found.append(f"{name} {int(number) + layer * size}" if number else name)
    return found


@pytest.mark.parametrize(("in_halves", "order"), [(False, WHOLE), (True, HALVES)])
def test_each_exchange_runs_beside_the_compute_that_its_price_names(
    in_halves: bool, order: tuple[str, str]
) -> None:
    for found in run_processes(2, trained, planned(in_halves=in_halves), backend="strict"):
        assert found == expected(*order)
