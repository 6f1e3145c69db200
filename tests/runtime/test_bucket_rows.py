"""Buckets with more rows and layouts of their own: steps equal to those of one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import slow
from processes import run_processes
from test_verification import SEQ, build_optimizer, captured, target

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import shard
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.data.batches import mark_inputs
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.reference import Reference, run_reference
from autoparallel.runtime.verify.verify import Verification, verify

ROWS = 2
BUCKETS = ((4, 2), (4, 8), (8, 4))
"""Lengths and rows. Two rows cannot be split over four ranks."""
LENGTHS_AND_ROWS = ((SEQ, 2), (4, 8), (7, 4), (3, 2), (11, 2), (3, 8), (SEQ, 2))
CASES = (
    ("gpt", "cp=4,zero=3"),
    ("llama", "dp=2,cp=2,recompute=selective"),
)
MORE = (
    ("dropped", "cp=2,tp=2,zero=1,microbatches=2,recompute=full"),
    ("gpt-tied", "cp=2,pp=2,microbatches=2,schedule=1f1b"),
    ("llama", "cp=4,microbatches=2,zero=2"),
    ("mixtral", "cp=2,ep=2,zero=1"),
    ("gpt", "dp=4,zero=3"),
)


def planned(model: str, parallel: str) -> str:
    """A plan for two rows; for four with dp=4."""
    forced = parse_parallel(parallel)
    rows = max(ROWS, forced.dp or 1)
    options = PlanOptions(global_batch=rows, seq=SEQ, forced=forced)
    program = captured(model, "fp32")[1]
    return dumps(plan_program(program, target(model), parse_cluster("cpu:4"), options))


def batches(model: str, rows: int) -> list[dict[str, torch.Tensor]]:
    """Long and short batches, some of whose targets are ignored anyway."""
    found = []
    for step, (length, number) in enumerate(LENGTHS_AND_ROWS):
        graph = captured(model, "fp64")[1].graph.with_batch_size(number * rows // ROWS)
        batch = {name: each[:, :length] for name, each in random_batch(graph, seed=step).items()}
        for name in batch.keys() & {"targets", "labels"}:
            batch[name][0, : length // 2] = -100
        found.append(batch)
    return found


def trainer_of(model: str, text: str, buckets: object) -> Trainer:
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(model, "fp64")
    return Trainer(
        program,
        plan,
        deferred,
        device=torch.device("cpu"),
        build=build_optimizer,
        buckets=buckets,  # type: ignore[arg-type]
    )


def verified(model: str, text: str) -> tuple[Verification, list[bool]]:
    """The verification, and for each batch whether "cp" split its rows."""
    rows = loads(text, "test").model.global_batch
    trainer = trainer_of(model, text, [(each, many * rows // ROWS) for each, many in BUCKETS])
    found, every, by_rows = target(model), batches(model, rows), []

    def loss(module: torch.nn.Module, inputs) -> torch.Tensor:  # type: ignore[no-untyped-def]
        batch = trainer.program.batch(inputs)
        return find_loss(call_model(module, batch), batch, found.loss_fn)

    def reference() -> Reference:
        module = plain_build(found.build_model, 0).double()
        with promote_to_float64():
            return run_reference(module, every, loss=loss, build_optimizer=build_optimizer)

    checked = verify(trainer, every, reference)
    for batch in every:
        trainer.runner.fit(batch)
        assert trainer.runner.shape.length in (None, 4, 8)
        (stage, *_) = trainer.runner.executors.values()
        axes = trainer.plan.stages[0].mesh.axes
        cp = axes.index("cp") if "cp" in axes else 0
        held = [each.layout for each in stage.program.inputs.values()]
        by_rows.append("cp" in axes and any(each[cp] == shard(0) for each in held))
    return checked, by_rows


def verify_all(cases: list[tuple[str, str]]) -> list[tuple[Verification, list[bool]]]:
    return [verified(model, text) for model, text in cases]


@pytest.mark.parametrize("cases", [CASES, slow(MORE)], ids=["few", "more"])
def test_batches_of_more_rows_and_other_layouts_train_as_on_one_device(
    cases: tuple[tuple[str, str], ...],
) -> None:
    plans = [(model, planned(model, parallel)) for model, parallel in cases]
    found = run_processes(4, verify_all, plans, timeout_seconds=280)[0]
    for (model, parallel), (each, by_rows) in zip(cases, found, strict=True):
        assert each.tolerance == 1e-9
        assert each.passed, (model, parallel, each.failures[:3])
        if parallel.startswith("cp=4,zero=3"):
            assert by_rows == [False, True, True, False, False, True, False]
        elif model == "gpt" and "dp=4" in parallel:
            assert not any(by_rows)


def losses_of_shares(model: str, text: str) -> tuple[list[float], list[float]]:
    """Losses of steps for which each rank is given the global batch, and only its own rows."""
    losses = []
    for is_share in (False, True):
        trainer, found = trainer_of(model, text, BUCKETS), []
        for batch in batches(model, ROWS):
            rows = len(next(iter(batch.values())))
            held = trainer.runner.batches.held(rows)
            if is_share:
                assert held is not None
                batch = mark_inputs({n: each[list(held.indices())] for n, each in batch.items()})
                batch.global_rows = rows
            found.append(float(trainer.step(batch).loss))
        losses.append(found)
    return losses[0], losses[1]


def test_ranks_may_be_given_their_own_rows_alone() -> None:
    """Those of their part of the planned layouts, though "cp" splits rows in a bucket."""
    plan = planned("llama", "dp=2,cp=2,zero=3")
    for whole, shares in run_processes(4, losses_of_shares, "llama", plan):
        assert shares == pytest.approx(whole, rel=1e-12)


def refusals(text: str) -> list[str]:
    """What a rank is told about buckets, and about batches that fit none."""
    told = []
    for buckets in ({4: 0}, {4: 3}, [(8, 4), (4, 4)], {SEQ: 4}, (5,)):
        with pytest.raises(UsageError) as caught:
            trainer_of("gpt", text, buckets)
        told.append(str(caught.value))
    trainer = trainer_of("gpt", text, {4: 8})
    graph = captured("gpt", "fp64")[1].graph
    for length, rows in ((5, 8), (SEQ, 8), (4, 16)):
        batch = random_batch(graph.with_batch_size(rows), seed=0)
        with pytest.raises(UsageError) as caught:
            trainer.step({name: each[:, :length] for name, each in batch.items()})
        told.append(str(caught.value))
    return told


def test_other_batches_are_refused_on_every_rank() -> None:
    found = run_processes(4, refusals, planned("gpt", "dp=2,cp=2"))
    for told in found:
        codes = [text[6:11] for text in told]
        assert codes == ["AP836"] + ["AP561"] * 4 + ["AP836"] * 2 + ["AP130"]
        assert "3 rows of 4 positions" in told[1]
        assert "2 rows of 5 positions" in told[4]
        assert "no bucket" in told[5]
