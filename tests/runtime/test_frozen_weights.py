"""Frozen weights: their bytes on ranks as predicted, and what trains beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kept_captures import capture_once
from marks import slow
from processes import run_processes
from torch import nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.memory.stage_memory import stage_memory
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Precision
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target
from autoparallel.target.target import Target
from benchmarks.memory.step_memory import states_before_last_backward

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"n_layer": 2, "d_model": 64, "n_head": 2, "seq": 16, "vocab": 64}
BATCH, SEQ = 8, 16
TRAINED = "mlp.up.weight"


def target() -> Target:
    """A GPT of which one weight of each layer is trained."""
    own = load_target(str(ROOT / "examples/gpt.py"), SETTINGS)

    def build() -> nn.Module:
        model = own.build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(TRAINED))
        return model

    return replace(own, build_model=build, name="frozen gpt")


def captured(precision: Precision) -> tuple[Deferred, Program]:
    own = target()
    return capture_once(own, own.example_batch(2, SEQ), precision)


def planned(parallel: str, precision: Precision, offload: bool = False) -> str:
    forced = parse_parallel(f"microbatches=2,{parallel}{',offload=optimizer' if offload else ''}")
    options = PlanOptions(global_batch=BATCH, seq=SEQ, precision=precision, forced=forced)
    program = captured(precision)[1]
    return dumps(plan_program(program, target(), parse_cluster("cpu:2"), options))


def measure(texts: list[str]) -> list[tuple[dict[str, int], list[float], set[str]]]:
    """On a rank: bytes of each plan's states, losses of four steps, dtypes of frozen weights."""
    found = []
    for text in texts:
        plan = loads(text)
        deferred, program = captured(plan.model.precision)
        trainer = Trainer(program, plan, deferred, device=torch.device("cpu"))
        batch = dict(random_batch(program.graph.with_batch_size(BATCH), seed=0))
        losses = [float(trainer.step(batch).loss) for _ in range(3)]
        held = states_before_last_backward(trainer, batch)
        losses.append(float(trainer.step(batch).loss))
        frozen = {
            str(parameter.master.dtype)
            for parameter in trainer.model.all_parameters()
            if not parameter.spec.requires_grad
        }
        found.append((held, losses, frozen))
    return found


@pytest.mark.parametrize(
    "offload", [slow(True), False], ids=["optimizer in host memory", "all on the device"]
)
def test_master_and_optimizer_bytes_are_those_of_the_trained_weights(offload: bool) -> None:
    cases = ["dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,schedule=1f1b"]
    texts = [planned(parallel, "bf16", offload) for parallel in cases]
    ranks = run_processes(2, measure, texts)
    program = captured("bf16")[1]
    graph = program.graph
    numel = sum(node.spec.numel for node in graph.parameters)
    trained = sum(node.spec.numel for node in graph.parameters if node.spec.requires_grad)
    assert 0 < trained < numel / 2
    for at, (case, text) in enumerate(zip(cases, texts, strict=True)):
        states = [rank[at][0] for rank in ranks]
        copies = 2 if case == "dp=2,zero=0" else 1
        counts = 4096  # of the optimizer's steps
        assert sum(held["master"] for held in states) == 4 * copies * trained, case
        assert sum(held["optimizer"] for held in states) <= 8 * copies * trained + counts, case
        assert {dtype for rank in ranks for dtype in rank[at][2]} == {"torch.bfloat16"}
        predicted = stage_memory(loads(text), graph, program.blocks)
        for rank, held in enumerate(states):
            exact = predicted[rank if len(predicted) > 1 else 0]
            both = exact.get("master", 0) + exact["optimizer"]  # in one host's memory, offloaded
            assert both == pytest.approx(held["master"] + held["optimizer"], rel=0.05, abs=counts)
        if copies == 2:  # the copies that compute, of frozen and trained weights
            assert states[0]["parameters"] == pytest.approx(2 * numel, rel=0.02)


def test_frozen_weights_in_half_precision_compute_what_those_with_masters_did() -> None:
    """Only their copies in bfloat16 were ever computed with: every plan has the same losses."""
    texts = [planned(each, "bf16") for each in ("dp=2,zero=0", "dp=2,zero=3", "tp=2", "pp=2")]
    alone, *others = [losses for _, losses, _ in run_processes(2, measure, texts)[0]]
    assert alone[-1] < alone[0]
    for losses in others[:1]:
        assert losses == pytest.approx(alone, rel=2e-3)
