"""Shorter batches on real processes: the loss, gradients and steps of one device on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import slow
from processes import run_processes
from test_verification import GLOBAL_BATCH, SEQ, build_optimizer, captured, planned, target

from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import PlanError
from autoparallel.planner.plan_file import loads
from autoparallel.runtime.messages.watchdog import BETWEEN_STEPS
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference, run_reference
from autoparallel.runtime.verify.verify import Verification, verify

CASES = (
    ("gpt", "pp=2,microbatches=4,schedule=1f1b"),
    ("gpt", "pp=2,microbatches=4,schedule=terapipe,slices=3"),
    ("gpt", "dp=2,zero=2,microbatches=2"),
    ("gpt", "tp=2"),
    ("llama", "pp=2,microbatches=4,schedule=zb-h1"),
    ("dropout", "pp=2,microbatches=4,schedule=1f1b,recompute=full"),
    ("packed", "dp=2"),
    ("packed", "pp=2,microbatches=4"),
    ("window", "dp=2"),
)
BUCKET_CASES = (
    ("gpt", "pp=2,microbatches=4,chunks=2,schedule=interleaved-1f1b"),
    ("dropout", "dp=2,zero=2,microbatches=2"),
    ("dropped", "pp=2,microbatches=2,schedule=gpipe,recompute=full"),
    ("gpt", "pp=2,microbatches=4,schedule=zb-h1"),
)
MORE_BUCKETS = (
    ("gpt", "pp=2,microbatches=4,schedule=1f1b"),
    ("gpt", "tp=2"),
    ("llama", "pp=2,microbatches=4,schedule=zb-h1"),
)
LENGTHS = (11, SEQ, 5)
BUCKETS = (6, 12)


def batches(model: str) -> list[dict[str, torch.Tensor]]:
    """Batches of several lengths, some of whose targets are ignored anyway."""
    graph = captured(model, "fp64")[1].graph.with_batch_size(GLOBAL_BATCH)
    found = []
    for step, length in enumerate(LENGTHS):
        batch = {
            name: tensor[:, :length] for name, tensor in random_batch(graph, seed=step).items()
        }
        for name in batch.keys() & {"targets", "labels"}:
            batch[name][: GLOBAL_BATCH // 3, : length // 2] = -100
        found.append(batch)
    return found


def verified(model: str, text: str, buckets: tuple[int, ...] = ()) -> Verification:
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(model, "fp64")
    trainer = Trainer(
        program, plan, deferred, device=torch.device("cpu"), build=build_optimizer, buckets=buckets
    )
    if buckets:
        check_buckets(trainer)
    found = target(model)

    def loss(module: torch.nn.Module, inputs) -> torch.Tensor:
        batch = program.batch(inputs)
        return find_loss(call_model(module, batch), batch, found.loss_fn)

    def reference() -> Reference:
        module = plain_build(found.build_model, 0).double()
        with promote_to_float64():
            return run_reference(module, batches(model), loss=loss, build_optimizer=build_optimizer)

    return verify(trainer, batches(model), reference)


def count_deferred(graph: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_module" for node in graph.graph.nodes)


def check_buckets(trainer: Trainer) -> None:
    """A batch runs at the shortest bucket that it fits; what crosses stages is of its length."""
    for batch, wanted in zip(batches("gpt"), (12, None, 6), strict=True):
        trainer.runner.fit(
            {
                name: batch[key]
                for name, key in zip(trainer.program.inputs, ("tokens", "targets"), strict=True)
            }
        )
        assert trainer.runner.shape.length == wanted
    for stage in trainer.model.stages.values():
        for block in stage.blocks:
            counts = {count_deferred(graph) for graph in block.graphs}
            assert len(counts) == 1, "as many gradients of weights are put off at every length"
            assert counts == {0} or trainer.schedule.name == "zb-h1"
        for program, length in zip(stage.programs, (SEQ, *BUCKETS), strict=True):
            for boundary in (*program.sends, *program.receives):
                if len(boundary.spec.shape) == 3:
                    assert boundary.spec.shape[1] == length


def verify_all(cases: list[tuple[str, str]], buckets: tuple[int, ...] = ()) -> list[Verification]:
    return [verified(model, text, buckets) for model, text in cases]


@pytest.mark.slow
def test_shorter_batches_train_as_on_one_device() -> None:
    plans = [(model, planned(model, parallel)) for model, parallel in CASES]
    found = run_processes(2, verify_all, plans, timeout_seconds=280)[0]
    for case, each in zip(CASES, found, strict=True):
        assert each.tolerance == 1e-9
        assert each.passed, (case, each.failures[:3])


@pytest.mark.parametrize("cases", [BUCKET_CASES, slow(MORE_BUCKETS)], ids=["few", "more"])
def test_batches_in_buckets_of_lengths_train_as_on_one_device(
    cases: tuple[tuple[str, str], ...],
) -> None:
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(2, verify_all, plans, BUCKETS, timeout_seconds=280)[0]
    for case, each in zip(cases, found, strict=True):
        assert each.tolerance == 1e-9
        assert each.passed, (case, each.failures[:3])


def refusals(text: str) -> str:
    """What a rank is told about a shorter batch, before it has begun to do anything."""
    told: list[str] = []
    deferred, program = captured("bidirectional", "fp32")
    trainer = Trainer(
        program,
        loads(text, "test"),
        deferred,
        device=torch.device("cpu"),
        progress=lambda what, waits_for=(): told.append(what),
    )
    told.clear()  # What making the trainer told.
    batch = {n: torch.zeros(GLOBAL_BATCH, 9, dtype=torch.int64) for n in program.inputs}
    with pytest.raises(PlanError) as caught:
        trainer.step(batch)
    assert set(told) <= {"waiting until all ranks' batches are compared", BETWEEN_STEPS}
    return str(caught.value)


def test_what_padding_would_change_is_refused_on_every_rank_before_any_message() -> None:
    found = run_processes(2, refusals, planned("bidirectional", "pp=2,microbatches=4"))
    for text in found:
        assert text.startswith("error[AP560]: sequences shorter than planned cannot be run")
        assert "matmul" in text
