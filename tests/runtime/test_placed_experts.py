"""Hot experts on other ranks than their owners: steps, checkpoints and counts equal one device's.

Mixtral with four experts, in float64 on four ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from one_device import build_optimizer, loss_of, reference_of
from processes import run_processes
from test_joint_states import MODEL, trainer_of, whole_weights
from test_verification import (
    GLOBAL_BATCH,
    SEQ,
    batches,
    captured,
    check_verified,
    target,
    verify_all,
)

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.graph.expert_dims import is_expert_layer
from autoparallel.planner.plan import ExpertPlacement, PlacedExpert
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.planning.routing import begin_counting, write_routing
from autoparallel.runtime.verify.reference import run_reference

FOLDED, PIPELINED = "dp=2,tp=2,ep=4,zero=1,microbatches=2", "dp=2,ep=2,pp=2,zero=2,microbatches=4"
RECOMPUTED = "dp=4,ep=4,zero=3,microbatches=2,recompute=full"
PLACES = {
    2: (PlacedExpert(0, (0, 1)), PlacedExpert(3, (0,))),
    4: (PlacedExpert(0, (0, 1, 3)), PlacedExpert(1, (2,)), PlacedExpert(2, (0, 2))),
}
"""Placed experts by number of ranks: expert 0 has copies, and one is computed elsewhere."""


@cache
def planned(parallel: str, num_ranks: int = 4, is_placed: bool = True) -> str:
    """The plan file of the model under the forced degrees, with the experts placed."""
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=parse_parallel(parallel))
    program = captured(MODEL, "fp32")[1]
    plan = plan_program(program, target(MODEL), parse_cluster(f"cpu:{num_ranks}"), options)
    layers = [node.name for node in program.graph if is_expert_layer(node)]
    stages = [
        replace(
            stage,
            placements=tuple(
                ExpertPlacement(name, (1,) * 4, 2, 2.0, 1.0, PLACES[stage.expert_degree])
                for name in layers
            ),
        )
        for stage in plan.stages
        if is_placed
    ]
    return dumps(replace(plan, stages=tuple(stages) or plan.stages))


CASES = (FOLDED, RECOMPUTED, f"{PIPELINED},schedule=zb-h1")


@cache
def results() -> dict[str, Any]:
    plans = [(MODEL, planned(case)) for case in CASES]
    return dict(zip(CASES, run_processes(4, verify_all, plans)[0], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_plan_with_placed_experts_equals_one_device(case: str) -> None:
    check_verified(results()[case])


def _go_on(folder: str, text: str, first: int, last: int) -> dict[str, Any]:
    """On a rank: the weights after steps ``first`` to ``last`` under a plan, from the checkpoint
    of the step before; the last step is saved."""
    trainer = trainer_of(text)
    if first:
        assert trainer.load(folder, optimizer=trainer.optimizer) == first
    for step in range(first, last):
        trainer.step(batches(MODEL)[step % 2])
    trainer.settle()
    trainer.save(folder, step=last, optimizer=trainer.optimizer)
    return {name: weight.numpy() for name, weight in whole_weights(trainer).items()}


@pytest.mark.parametrize(
    ("source", "other"),
    [("dp=4,ep=4,zero=3", FOLDED), slow(FOLDED, "dp=4,ep=2,zero=1")],
)
def test_a_checkpoint_moves_from_placed_experts_to_one_device_and_back(
    tmp_path: Path, source: str, other: str
) -> None:
    folder, alone = str(tmp_path), planned("zero=0", 1, is_placed=False)
    run_processes(4, _go_on, folder, planned(source), 0, 1)
    run_processes(1, _go_on, folder, alone, 1, 2)
    (found, *_) = run_processes(4, _go_on, folder, planned(other), 2, 3)
    first, second = batches(MODEL)
    truth = reference_of(target(MODEL), captured(MODEL, "fp64")[1], [first, second, first])
    assert found.keys() == truth.weights.keys()
    for name, weight in found.items():
        assert abs(weight - truth.weights[name].numpy()).max() < 1e-9, name


def _counted(path: str, text: str) -> None:
    """On a rank: train two steps by a plan, and write the counts."""
    trainer = trainer_of(text)
    begin_counting(trainer.model)
    for batch in batches(MODEL):
        trainer.step(batch)
    with trainer.runner.uncounted():
        trainer.runner.backward(batches(MODEL)[0])
    trainer.settle()
    write_routing(trainer.model, path)


@cache
def hooked_counts() -> list[list[int]]:
    """The tokens of each expert in two steps of the plain model, layer by layer."""
    module = plain_build(target(MODEL).build_model, 0).double()
    counts: dict[str, torch.Tensor] = {}
    for name, part in module.named_modules():
        if name.endswith("mlp.experts"):
            counts[name] = torch.zeros(4, dtype=torch.int64)

            def count(_: Any, args: Any, name: str = name) -> None:
                counts[name] += torch.bincount(args[1].reshape(-1), minlength=4)

            part.register_forward_pre_hook(count)
    program = captured(MODEL, "fp64")[1]
    with promote_to_float64():
        loss = loss_of(target(MODEL), program)
        run_reference(module, batches(MODEL), loss=loss, build_optimizer=build_optimizer)
    return [each.tolist() for each in counts.values()]


@pytest.mark.parametrize("parallel", [f"{PIPELINED},recompute=full", slow(FOLDED), slow("dp=4")])
def test_counts_are_those_of_hooks_in_the_plain_model(tmp_path: Path, parallel: str) -> None:
    """Over data-parallel ranks, micro-batches and stages; neither the forward that a backward
    repeats nor a trial counts."""
    path = tmp_path / "routing.json"
    run_processes(4, _counted, str(path), planned(parallel, is_placed=parallel != "dp=4"))
    table = json.loads(path.read_text())
    layers = [each.name for each in captured(MODEL, "fp64")[1].graph if is_expert_layer(each)]
    assert [layer["name"] for layer in table["layers"]] == layers
    assert [layer["counts"] for layer in table["layers"]] == hooked_counts()
    for layer in table["layers"]:
        assert (layer["num_experts"], layer["chosen"]) == (4, 2)
        assert layer["tokens"] == 2 * GLOBAL_BATCH * SEQ
    assert [path] == list(tmp_path.iterdir())


def test_the_plan_file_keeps_placements() -> None:
    text = planned(FOLDED)
    assert loads(text, "test").stages[0].placements[0].experts == PLACES[4]
    assert "placements" not in planned(FOLDED, is_placed=False)
