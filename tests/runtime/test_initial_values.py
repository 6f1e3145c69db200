"""Starting values of the ranks of a plan: the same for every plan, made once, and only those."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kept_captures import capture_once
from processes import run_processes
from torch import Tensor, nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization import deferred_init
from autoparallel.passes.initialization.deferred_init import (
    Init,
    materialize,
    plain_build,
    record_build,
)
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

SEQ = 16
PARALLEL = ("dp=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp=2")
SETTINGS = {"n_layer": 4, "d_model": 32, "n_head": 4, "seq": SEQ, "tied": True}


@cache
def target() -> Target:
    return load_target("examples/gpt.py", SETTINGS)


def captured(model: nn.Module) -> Program:
    _, program = capture_once(target(), target().example_batch(2, SEQ), "fp32")
    return replace(program, model=model)


def plan_texts() -> list[str]:
    program = captured(record_build(target().build_model).model)
    options = [
        PlanOptions(global_batch=8, seq=SEQ, forced=parse_parallel(each)) for each in PARALLEL
    ]
    cluster = parse_cluster("cpu:2")
    return [dumps(plan_program(program, target(), cluster, each)) for each in options]


def _trained(texts: list[str], init: Init) -> list[int]:
    """On a rank: how often the build was replayed for each plan, its values checked."""
    deferred = record_build(target().build_model, 5, init)
    program = captured(deferred.model)
    if init == "exact":
        plain = plain_build(target().build_model, 5)
        whole: dict[str, Tensor] = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    else:
        whole = {}
        names = [name for name, _ in deferred.model.named_parameters()]
        materialize(deferred, names, lambda name, tensor: whole.update({name: tensor}))
    replays = []
    real = deferred_init.cpu_seed
    for text in texts:
        told: list[str] = []
        count = 0

        def counted(seed: int | Tensor):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            return real(seed)

        deferred_init.cpu_seed = counted  # type: ignore[assignment]
        trainer = Trainer(
            program,
            loads(text, "test"),
            deferred,
            device=torch.device("cpu"),
            progress=lambda what, *_, told=told: told.append(what),
        )
        deferred_init.cpu_seed = real
        replays.append(count)
        assert told.count("making initial values") >= 4
        for stage in trainer.model.stages.values():
            for name in stage.held_names():
                if name not in whole:
                    continue
                box = tuple(slice(start, stop) for start, stop in stage.region_of(name))
                held = stage.by_name.get(name)
                value = stage.buffer(name) if held is None else held.local
                assert torch.equal(value, whole[name].detach()[box]), (text, name)
    return replays


@pytest.mark.parametrize("init", ["sharded", "exact"])
def test_every_plan_starts_from_the_same_values_by_one_replay_on_each_rank(init: Init) -> None:
    counts = run_processes(2, _trained, plan_texts(), init)
    assert counts == [[1] * len(PARALLEL)] * 2


def _given(text: str) -> None:
    deferred = record_build(target().build_model, 5)
    program = captured(deferred.model)
    without = deferred.without(name for name, _ in deferred.model.named_parameters())

    def refused(*_: object) -> None:
        raise AssertionError(f"rank {dist.get_rank()} draws")

    deferred_init.exact_replay = refused  # type: ignore[assignment]
    Trainer(program, loads(text, "test"), without, device=torch.device("cpu"))


def test_nothing_is_drawn_for_parameters_that_are_given() -> None:
    run_processes(2, _given, plan_texts()[0])


def test_files_are_read_once_however_often_values_are_made(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(6, 6).state_dict(), path)
    builds = 0

    def build() -> nn.Module:
        nonlocal builds
        builds += 1
        model = nn.Linear(6, 6)
        model.load_state_dict(torch.load(path))
        return model

    deferred = record_build(build)
    for _ in range(3):
        materialize(deferred, ["weight", "bias"], lambda *_: None)
    assert (builds, len(deferred.log.reals if deferred.log else ())) == (1, 2)
