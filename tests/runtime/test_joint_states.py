"""States sharded over all ranks that hold a parameter whole: checkpoints, norms, what travels.

Mixtral in float64 on four ranks, whose mesh has "dp", "ep", "cp" or "tp". Two steps are compared
with one device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from marks import slow
from one_device import build_optimizer, reference_of
from processes import run_processes
from test_verification import GLOBAL_BATCH, SEQ, batches, captured, target
from test_verification_meshes import mesh_degrees

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import collect

MODEL = "mixtral"
ZERO_1, ZERO_3 = "dp=4,ep=2,zero=1", "dp=4,ep=4,zero=3"
SLICED = "dp=2,tp=2,ep=2,etp=2,zero=2"


@cache
def planned(parallel: str) -> str:
    """The plan file of the model under the forced degrees."""
    options = PlanOptions(global_batch=GLOBAL_BATCH, seq=SEQ, forced=parse_parallel(parallel))
    cluster = parse_cluster(f"cpu:{prod(mesh_degrees(parallel).values())}")
    return dumps(plan_program(captured(MODEL, "fp32")[1], target(MODEL), cluster, options))


def trainer_of(text: str) -> Trainer:
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision="fp64"))
    deferred, program = captured(MODEL, "fp64")
    return Trainer(program, plan, deferred, device=torch.device("cpu"), build=build_optimizer)


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights of the model, put together from the ranks' regions; every element is NaN that no
    region has."""
    graph = trainer.program.graph
    pieces = collect(trainer.model.all_parameters(), graph, attrgetter("value"))
    found = {}
    for name, own in pieces.items():
        found[name] = torch.full(graph[name].spec.shape, float("nan"), dtype=torch.float64)
        for region, values in own:
            found[name][tuple(slice(start, stop) for start, stop in region)] = values
    return found


def _move(folder: str, source: str, targets: list[str]) -> list[dict[str, float]]:
    """Train a step under ``source``, save, and go on under each of ``targets``: on the first rank
    each weight's largest difference from one device."""
    first, second = batches(MODEL)
    truth = reference_of(target(MODEL), captured(MODEL, "fp64")[1], [first, second])
    trainer = trainer_of(source)
    norm = trainer.step(first).norm
    expected = sum(each.square().sum() for each in truth.gradients.values()) ** 0.5
    assert norm is not None
    assert float(norm.value()) == pytest.approx(float(expected), rel=1e-9)
    trainer.save(folder, step=1, optimizer=trainer.optimizer)
    found = []
    for text in targets:
        trainer = trainer_of(text)
        assert trainer.load(folder, optimizer=trainer.optimizer) == 1
        trainer.step(second)
        trainer.settle()
        weights = whole_weights(trainer)
        found.append(
            {name: float((own - truth.weights[name]).abs().max()) for name, own in weights.items()}
        )
    return found


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (ZERO_1, [ZERO_3, "dp=2,tp=2,zero=2"]),
        (ZERO_3, [ZERO_1, SLICED]),
        (SLICED, [ZERO_3, "dp=4,zero=0"]),
        slow("dp=4,zero=3", [ZERO_1, ZERO_3, "dp=2,ep=2,pp=2,zero=2"]),
        slow("dp=2,cp=2,zero=3", [ZERO_3, "tp=4"]),
    ],
)
def test_a_checkpoint_moves_between_plans_with_and_without_an_axis_of_experts(
    tmp_path: Path, source: str, targets: list[str]
) -> None:
    texts = [planned(each) for each in targets]
    (found, *_) = run_processes(4, _move, str(tmp_path), planned(source), texts)
    for differences in found:
        assert len(differences) > 10
        assert all(each < 1e-9 for each in differences.values())
