"""Plans of every kind on real processes, held to one device in float64.

Each model is planned under each set of forced degrees, run for two AdamW steps, and
compared: both losses, every gradient, every weight, to 1e-9 of its magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_captures import capture_once
from one_device import build_optimizer, reference_of
from processes import run_processes

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.update.gradients import GradientReducer
from autoparallel.runtime.verify.reference import Reference
from autoparallel.runtime.verify.verify import Verification, verify
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

SEQ = 16
GLOBAL_BATCH = 16
TWO = ("dp=2", "tp=2", "pp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,recompute=full")
FOUR = (
    "dp=2,tp=2",
    "dp=2,pp=2",
    "tp=2,pp=2",
    "pp=4,microbatches=8,schedule=gpipe",
    "pp=4,microbatches=8,schedule=1f1b",
    "dp=2,tp=2,zero=3",
)
TIED = ("pp=2", "pp=2,dp=2,zero=3,microbatches=4", "tp=2,pp=2")
RANDOM = (
    "dp=2",
    "tp=2",
    "pp=2,microbatches=4,recompute=full",
    "dp=2,zero=3,microbatches=2,recompute=full",
    "dp=2,pp=2,microbatches=4",
    "tp=2,pp=2,microbatches=2",
)
QUICK = (("gpt", "dp=2,zero=2"), ("llama", "tp=2"), ("gpt2", "tp=2,pp=2,microbatches=2"))
"""Models and degrees that are verified by default. The others are slow."""

GPT = {"n_layer": 4, "d_model": 32, "n_head": 4, "seq": SEQ}


@cache
def target(model: str) -> Target:
    """A small GPT (``gpt``, ``gpt-tied``), or Hugging Face Llama with grouped-query attention.

    With dropout: a GPT that has it everywhere (``dropout``), or everywhere but on attention's
    weights (``dropped``), or one that sees later positions (``bidirectional``), or both
    (``unmasked``); Hugging Face GPT-2.
    A loss over a vocabulary (``loss:z`` and others of ``tests/models/vocabulary_losses.py``).
    Attention with a window (``window``): Mistral; in packed documents (``packed``): Llama.
    A mixture with shared experts (``shared``): Qwen2-MoE; with two experts (``few``): Mixtral.
    """
    if model in ("gpt", "gpt-tied"):
        return load_target("examples/gpt.py", {**GPT, "tied": model == "gpt-tied"})
    if model == "dropout":
        return load_target("tests/models/gpt_dropout.py", {})
    if model == "bidirectional":
        return load_target("tests/models/gpt_dropout.py", {"causal": False})
    if model == "dropped":
        return load_target("tests/models/gpt_dropout.py", {"in_attention": False})
    if model.startswith("loss:"):
        return load_target("tests/models/vocabulary_losses.py", {"loss": model[5:]})
    if model == "packed":
        return load_target("hf:tests/models/llama", {"packed": True})
    if model == "window":
        return load_target("hf:tests/zoo/mistral", {"sliding_window": 5})
    if model == "unmasked":
        settings = {"causal": False, "in_attention": False}
        return load_target("tests/models/gpt_dropout.py", settings)
    if model == "few":
        return load_target("hf:tests/models/mixtral", {"num_local_experts": 2})
    if model == "shared":
        return load_target("hf:tests/zoo/qwen2_moe", {})
    folder = "models" if Path("tests/models", model).is_dir() else "zoo"
    return load_target(f"hf:tests/{folder}/{model}", {})


@cache
def captured(model: str, precision: str) -> tuple[Deferred, Program]:
    found = target(model)
    return capture_once(found, found.example_batch(2, SEQ), precision)


def num_devices(parallel: str) -> int:
    forced = parse_parallel(parallel)
    return (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)


def planned(model: str, parallel: str) -> str:
    """The plan file of ``model`` under the forced degrees."""
    forced = parse_parallel(parallel)
    _, program = captured(model, "fp32")
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=forced)
    cluster = parse_cluster(f"cpu:{num_devices(parallel)}")
    plan = plan_program(program, target(model), cluster, options)
    assert len(plan.stages) == (forced.pp or 1) * plan.num_chunks
    return dumps(plan)


@cache
def reference(model: str) -> Reference:
    """Two steps of the plain module on one device."""
    return reference_of(target(model), captured(model, "fp64")[1], batches(model))


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    graph = captured(model, "fp64")[1].graph.with_batch_size(GLOBAL_BATCH)
    return [random_batch(graph, seed=step) for step in range(2)]


def verify_all(cases: list[tuple[str, str]], break_gradients: bool = False) -> list[Verification]:
    """On a rank: each (model, plan file) verified in turn."""
    return [_verified(model, text, break_gradients) for model, text in cases]


def _verified(model: str, text: str, break_gradients: bool) -> Verification:
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(model, "fp64")
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"), build=build_optimizer)
    if break_gradients:
        for executor in trainer.runner.executors.values():
            executor._reducer = GradientReducer((), executor.stage.device_mesh)
    return verify(trainer, batches(model), lambda: reference(model))


ALL = (
    *product(("gpt", "llama"), (*TWO, *FOUR)),
    *product(("gpt-tied",), TIED),
    *product(("dropout", "gpt2"), RANDOM),
)


def is_quick(model: str, parallel: str) -> bool:
    return (model, parallel) in QUICK


def cases_of(models: Sequence[str], forced: Sequence[str]) -> list[Any]:
    """Parameters of a test: each model under each set of forced degrees."""
    return [
        pytest.param(model, parallel, marks=[] if is_quick(model, parallel) else pytest.mark.slow)
        for model in models
        for parallel in forced
    ]


def result(model: str, parallel: str) -> Verification:
    found = results(num_devices(parallel), is_quick(model, parallel))
    return found[model, parallel]


@cache
def results(num_ranks: int, quick: bool) -> dict[tuple[str, str], Verification]:
    """Every quick, or every slow case of that many ranks, run in one set of processes."""
    cases = [case for case in ALL if num_devices(case[1]) == num_ranks and is_quick(*case) == quick]
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=280)
    return dict(zip(cases, found[0], strict=True))


def check_verified(found: Verification) -> None:
    assert found.passed, found.failures[:5]
    assert found.tolerance == 1e-9
    assert {d.quantity for d in found.differences} == {"loss", "gradient", "weight"}
    assert len(found.differences) > 40
    assert found.worst("weight") > 0.0


@pytest.mark.parametrize(("model", "parallel"), cases_of(("gpt", "llama"), TWO))
def test_a_plan_on_two_ranks_equals_one_device(model: str, parallel: str) -> None:
    check_verified(result(model, parallel))


@pytest.mark.parametrize(("model", "parallel"), cases_of(("gpt", "llama"), FOUR))
def test_a_plan_on_four_ranks_equals_one_device(model: str, parallel: str) -> None:
    check_verified(result(model, parallel))


@pytest.mark.parametrize(("model", "parallel"), cases_of(("dropout", "gpt2"), RANDOM))
def test_dropout_is_the_same_for_every_plan(model: str, parallel: str) -> None:
    check_verified(result(model, parallel))


@pytest.mark.parametrize(("model", "parallel"), cases_of(("gpt-tied",), TIED))
def test_tied_embeddings_in_several_stages_equal_one_device(model: str, parallel: str) -> None:
    check_verified(result(model, parallel))


def test_a_run_that_forgets_to_sum_gradients_fails_and_names_the_first_block() -> None:
    plan = planned("gpt", "dp=2")
    found = run_processes(2, verify_all, [("gpt", plan)], True)[0][0]
    assert not found.passed
    first = found.failures[0]
    assert first.quantity == "gradient"
    assert first.block == "embedding"
    assert first.name == "tokens.weight"
