"""Optimizers in host memory and gradients in half precision, against training without them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from kept_captures import capture_once
from marks import slow
from processes import run_processes

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.memory import (
    DEFAULT,
    Offload,
    StateOptions,
    policy,
    state_bytes,
)
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Precision
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.parameters.parameters import StageParameter
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.update import update
from autoparallel.runtime.update.optimizer import GradientNorm
from autoparallel.runtime.update.update import UpdateOptions
from autoparallel.target.load import load_target
from benchmarks.memory.step_memory import states_before_last_backward

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"n_layer": 2, "d_model": 64, "n_head": 2, "seq": 16, "vocab": 64}
BATCH, SEQ, STEPS = 8, 16, 3
CPU = torch.device("cpu")
HALF = StateOptions("compute")
OFFLOADED = StateOptions("compute", "optimizer")


def captured(precision: Precision) -> tuple[Deferred, Program]:
    target = load_target(str(ROOT / "examples/gpt.py"), SETTINGS)
    return capture_once(target, target.example_batch(2, SEQ), precision)


def planned(parallel: str, precision: Precision, states: StateOptions = DEFAULT) -> str:
    """The plan's text, for two devices."""
    options = PlanOptions(
        global_batch=BATCH,
        seq=SEQ,
        precision=precision,
        gradient_dtype=states.gradient_dtype,
        forced=replace(
            parse_parallel(f"microbatches=4,{parallel}"),
            offload=states.offload,
        ),
    )
    target = load_target(str(ROOT / "examples/gpt.py"), SETTINGS)
    _, program = captured(precision)
    return dumps(plan_program(program, target, parse_cluster("cpu:2"), options))


def trainer_of(text: str) -> Trainer:
    plan = loads(text)
    deferred, program = captured(plan.model.precision)
    return Trainer(program, plan, deferred, device=CPU)


def batches(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    graph = trainer.program.graph.with_batch_size(BATCH)
    return [dict(random_batch(graph, seed=seed)) for seed in range(STEPS)]


@dataclass(frozen=True)
class Case:
    """A ZeRO stage and an update; the norm of step ``bad_step`` is not finite."""

    zero: int
    options: UpdateOptions
    bad_step: int | None = None


CASES = (
    Case(0, UpdateOptions(max_value=0.01, on_nan="skip"), bad_step=1),
    Case(1, UpdateOptions(max_norm=0.5)),
    Case(2, UpdateOptions()),
    Case(3, UpdateOptions(max_norm=0.5, on_nan="skip"), bad_step=0),
)


def with_bad_norm(trainer: Trainer) -> None:
    """Have the next norm that is asked for be infinite."""

    def norm() -> GradientNorm:
        del trainer.runner.norm
        found = trainer.runner.norm()
        found.value()
        return GradientNorm(torch.tensor(float("inf"), dtype=torch.float64), None)

    trainer.runner.norm = norm  # type: ignore[method-assign]


def train(text: str, case: Case) -> dict[str, torch.Tensor]:
    """A rank's masters after three steps."""
    update.PART_BYTES = 50_000
    trainer = trainer_of(text)
    trainer.use_update(case.options)
    for step, batch in enumerate(batches(trainer)):
        if step == case.bad_step:
            with_bad_norm(trainer)
        trainer.step(batch)
    parted = trainer.steps.update.parted
    assert (parted is not None) == (trainer.plan.offload != "none")
    assert parted is None or len(parted.parts) > 1
    assert int(trainer.steps.update.skipped) == (case.bad_step is not None)
    return {p.name: p.local.clone() for p in trainer.model.all_parameters()}


def train_both(jobs: list[tuple[Case, str, str]]) -> None:
    for case, plain, offloaded in jobs:
        expected, found = train(plain, case), train(offloaded, case)
        for name, value in expected.items():
            assert torch.equal(value, found[name]), (case, name)


def test_an_optimizer_in_host_memory_changes_no_bit() -> None:
    """In float32, under every ZeRO stage: with clipping, and with updates that are skipped. Nor do
    gradients and parameters there."""
    levels = [
        *((case, f"dp=2,zero={case.zero}", "optimizer") for case in CASES),
        (CASES[0], "tp=2", "gradients"),
        (CASES[1], "dp=2,zero=2", "gradients"),
        (CASES[3], "dp=2,zero=3", "parameters"),
        (Case(3, UpdateOptions(accumulate=3)), "dp=2,zero=3", "parameters"),
    ]
    jobs = [
        (case, planned(parallel, "fp32"), planned(parallel, "fp32", StateOptions(offload=states)))
        for case, parallel, states in levels
    ]
    run_processes(2, train_both, jobs)


def measure(cases: list[str]) -> list[dict[str, int]]:
    found = []
    for text in cases:
        trainer = trainer_of(text)
        *others, last = batches(trainer)
        for batch in others:
            trainer.step(batch)
        found.append(states_before_last_backward(trainer, last))
    return found


@pytest.mark.parametrize("states", [slow(StateOptions()), slow(HALF), OFFLOADED])
def test_ranks_hold_the_bytes_that_are_predicted(states: StateOptions) -> None:
    """Parameters, gradients and optimizer states in bf16 as a step's last backward begins."""
    texts = [planned(f"dp=2,zero={zero}", "bf16", states) for zero in range(4)]
    rules = policy("bf16", "adamw", states)
    for rank in run_processes(2, measure, texts):
        for zero, (text, held) in enumerate(zip(texts, rank, strict=True)):
            numel = loads(text).model.num_parameters
            expected = state_bytes(numel, rules, zero, 2)
            host = rules.host_bytes * numel // (2 if zero else 1)
            parameters, gradients = held["master"] + held["parameters"], held["gradients"]
            total = expected.total + host
            assert sum(held.values()) == pytest.approx(total, rel=0.02), zero
            assert gradients == pytest.approx(expected.gradients, rel=0.1), zero
            in_host = 0 if states.offload == "none" else numel * 4 // (2 if zero else 1)
            assert parameters == pytest.approx(expected.parameters + in_host, rel=0.02), zero


@pytest.mark.parametrize(
    ("parallel", "states"), [("dp=2,zero=2", "gradients"), ("dp=2,zero=3", "parameters")]
)
def test_host_memory_has_the_bytes_that_are_predicted(parallel: str, states: Offload) -> None:
    """Of gradients and shards, which are no longer in memory that would be a GPU's."""
    text = planned(parallel, "bf16", StateOptions(offload=states))
    numel, rules = loads(text).model.num_parameters, policy("bf16", "adamw", StateOptions())
    for (held,) in run_processes(2, measure, [text]):
        assert held["gradients"] == pytest.approx(numel * rules.gradient_bytes / 2, rel=0.1)
        parameters = held["master"] + held["parameters"]
        copy = rules.gathered_bytes / (2 if states == "parameters" else 1)
        copy += rules.gathered_bytes / 2 if states == "gradients" else 0  # the shard, and whole
        assert parameters == pytest.approx(numel * (rules.parameter_bytes / 2 + copy), rel=0.02)


def losses(texts: list[str]) -> list[list[float]]:
    found = []
    for text in texts:
        trainer = trainer_of(text)
        batch = batches(trainer)[0]
        found.append([float(trainer.step(batch).loss) for _ in range(3)])
    return found


@pytest.mark.slow
def test_gradients_in_half_precision_train_as_those_in_float32_do() -> None:
    """The losses of three steps on one batch agree to bf16's precision, and fall."""
    texts = [
        planned(f"dp=2,zero={zero}", "bf16", states)
        for zero, states in ((0, StateOptions()), (1, HALF), (3, HALF), (2, OFFLOADED))
    ]
    for found in run_processes(2, losses, texts):
        for of_text in found:
            assert of_text == pytest.approx(found[0], rel=0.01)
            assert of_text[-1] < of_text[0]


def save_and_load(folder: str, first: str, others: list[str]) -> None:
    """Each plan goes on from the same checkpoint as the one that wrote it."""
    trainer = trainer_of(first)
    one, two, _ = batches(trainer)
    trainer.step(one)
    trainer.save(folder, step=1, optimizer=trainer.optimizer)
    expected = float(trainer.step(two).loss), float(trainer.step(one).loss)
    for number, text in enumerate(others):
        other = trainer_of(text)
        assert other.load(folder, optimizer=other.optimizer) == 1
        other.save(f"{folder}-{number}", step=1, optimizer=other.optimizer)
        found = float(other.step(two).loss), float(other.step(one).loss)
        assert found == pytest.approx(expected, rel=1e-5)
        again = trainer_of(first)
        again.load(f"{folder}-{number}", optimizer=again.optimizer)
        found = float(again.step(two).loss), float(again.step(one).loss)
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_checkpoints_load_with_and_without_offloading(tmp_path: Path) -> None:
    """From states on the device into host memory, under other ZeRO stages, and back."""
    levels = (("dp=2,zero=3", "optimizer"), ("tp=2", "gradients"), ("dp=2,zero=3", "parameters"))
    others = [planned(parallel, "fp32", StateOptions(offload=own)) for parallel, own in levels]
    run_processes(2, save_and_load, str(tmp_path / "kept"), planned("dp=2,zero=1", "fp32"), others)


def test_a_master_in_host_memory_is_no_copy_of_the_device() -> None:
    run_processes(1, hold_apart, planned_on_one())


def planned_on_one() -> str:
    options = PlanOptions(
        global_batch=BATCH, seq=SEQ, forced=parse_parallel("dp=1,offload=optimizer")
    )
    target = load_target(str(ROOT / "examples/gpt.py"), SETTINGS)
    _, program = captured("fp32")
    return dumps(plan_program(program, target, parse_cluster("cpu:1"), options))


def hold_apart(text: str) -> None:
    trainer = trainer_of(text)

    def pointers(parameter: StageParameter) -> set[int]:
        return {parameter.held.data_ptr(), parameter.local.data_ptr()}

    assert all(len(pointers(parameter)) == 2 for parameter in trainer.model.all_parameters())
    trainer.step(batches(trainer)[0])
    for parameter in trainer.model.all_parameters():
        assert torch.equal(parameter.held, parameter.local)
