"""Routing files: written by a run, checked against the model, and planned by."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import run_python

from autoparallel.analysis.sharding import axis_lines
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.plan_options import PlanOptions, plan_options
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import plan_program
from autoparallel.planning.plan_files import save_plan
from autoparallel.planning.routing import loads_of
from autoparallel.target.load import load_target

MODEL = "hf:tests/models/mixtral"
HOT = [[600, 100, 100, 100], [50, 200, 500, 150]]


@cache
def captured(name: str) -> Program:
    settings = {} if name == MODEL else {"n_layer": 1, "d_model": 16, "n_head": 2, "vocab": 16}
    return capture_target(load_target(name, settings), PlanOptions(8, 32))


def table() -> dict[str, Any]:
    layers = [
        {"name": name, "num_experts": 4, "chosen": 2, "tokens": 450, "counts": counts}
        for name, counts in zip(("experts", "experts_1"), HOT, strict=True)
    ]
    return {"format": "autoparallel.routing", "version": 1, "layers": layers}


def written(folder: Path, given: Any) -> str:
    path = folder / "routing.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return str(path)


def changed(key: str, value: Any) -> dict[str, Any]:
    """Return the table with ``value`` as its ``key``: at its top, or else in its last layer."""
    found = deepcopy(table())
    (found if key in found else found["layers"][-1])[key] = value
    return found


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "its format is not autoparallel.routing"),
        (changed("format", "other"), "its format is not autoparallel.routing"),
        (changed("version", 2), "it has version 2, not 1"),
        (changed("layers", {}), "it has no list named layers"),
        (changed("layers", [3]), "a layer has other keys than name, num_experts"),
        (changed("layers", table()["layers"][:1]), "it has no layer experts_1; its layers: exp"),
        (changed("name", "third"), "it has no layer experts_1; its layers: experts, third"),
        (changed("counts", [450, 450]), "the counts of layer 'experts_1' do not fit"),
        (changed("tokens", 451), "the counts of layer 'experts_1' do not fit"),
        (changed("counts", [1, 2, 3.5, 4]), "a value of layer 'experts_1' is not a whole number"),
        (changed("counts", [-1, 300, 300, 301]), "a value of layer 'experts_1' is not a whole"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, given: Any, why: str) -> None:
    path = written(tmp_path, given)
    with pytest.raises(UsageError, match="AP176") as error:
        loads_of(captured(MODEL), path)
    assert why in error.value.why
    assert path in error.value.where
    assert "--count-routing" in error.value.fix


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        loads_of(captured(MODEL), str(tmp_path / "none.json"))
    wrong = table()
    for layer in wrong["layers"]:
        layer |= {"chosen": 1, "tokens": 900}
    with pytest.raises(UsageError, match=r"has 1 of 4 experts for each token, the model 2 of 4"):
        loads_of(captured(MODEL), written(tmp_path, wrong))
    more = table()
    more["layers"].append({**more["layers"][0], "name": "third"})
    with pytest.raises(UsageError, match="the model has no layer of experts third"):
        loads_of(captured(MODEL), written(tmp_path, more))
    with pytest.raises(UsageError, match="AP177"):
        loads_of(captured("examples/gpt.py"), written(tmp_path, table()))


def planned(routing: str | None, rows: int = 1 << 14) -> Plan:
    options = plan_options(rows, 32, parallel="dp=4,ep=4,zero=1,microbatches=1", routing=routing)
    cluster = parse_cluster("1x4xH100")
    return plan_program(captured(MODEL), load_target(MODEL, {}), cluster, options)


def test_a_plan_says_the_placement_that_measured_loads_want(tmp_path: Path) -> None:
    """It is slower than the plan for even loads; a plan's file serves as a routing file, too."""
    path = written(tmp_path, table())
    even, uneven, few = planned(None), planned(path), planned(path, 8)
    assert not any(stage.placements for stage in even.stages)
    assert even.prediction.step_seconds < uneven.prediction.step_seconds
    (stage,) = uneven.stages
    assert [list(each.counts) for each in stage.placements] == HOT
    assert all(each.experts and each.placed < each.busiest for each in stage.placements)
    (line,) = [line for line in axis_lines(uneven.stages) if "measured loads" in line]
    assert "times the mean, not 2.44: " in line
    assert "are computed by other ranks" in line
    (line,) = [line for line in axis_lines(few.stages) if "measured loads" in line]
    assert line.endswith("the busiest rank gets 2.44 times the mean")
    save_plan(uneven, tmp_path / "plan.json")
    again = loads_of(captured(MODEL), str(tmp_path / "plan.json"))
    assert [list(each) for each in again.counts.values()] == HOT
    save_plan(even, tmp_path / "even.json")
    with pytest.raises(UsageError, match="it has no layer experts; its layers: none"):
        loads_of(captured(MODEL), str(tmp_path / "even.json"))


def autoparallel(*arguments: str) -> tuple[int, str, str]:
    found = run_python("-m", "autoparallel", *arguments)
    return found.returncode, found.stdout, found.stderr


def test_a_run_counts_what_plan_and_simulate_read(tmp_path: Path) -> None:
    path, plan = str(tmp_path / "routing.json"), str(tmp_path / "plan.json")
    options = ("--global-batch", "8", "--seq", "16", "--profile", "analytic")
    own = (MODEL, "--cluster", "cpu:2", "--parallel", "dp=2,ep=2,microbatches=2", *options)
    code, _, errors = autoparallel(
        "run", *own, "--steps", "2", "--count-routing", path, "--check-first-step"
    )
    assert code == 0, errors
    layers = json.loads(Path(path).read_text())["layers"]
    assert [layer["tokens"] for layer in layers] == [2 * 8 * 16] * 2
    for command in ("simulate", "plan"):
        code, shown, errors = autoparallel(command, *own, "--routing", path)
        assert code == 0, errors
        assert "experts by measured loads: the busiest rank gets" in " ".join(shown.split())
    code, _, errors = autoparallel("plan", *own, "--routing", path, "--no-cache", "-o", plan)
    assert code == 0, errors
    code, shown, errors = autoparallel("explain", plan, "zero")
    assert code == 0, errors


def test_a_model_without_experts_is_not_counted(tmp_path: Path) -> None:
    small = ("--set", "n_layer=1", "--set", "d_model=16", "--set", "n_head=2", "--set", "vocab=16")
    given = ("examples/gpt.py", "--cluster", "cpu:1", "--seq", "16", "--global-batch", "4", *small)
    code, _, errors = autoparallel("run", *given, "--count-routing", str(tmp_path / "a.json"))
    assert code == 2
    assert "error[AP177]: the model has no layer of experts" in errors
    code, _, errors = autoparallel("run", *given, "--count-routing", str(tmp_path / "no" / "a"))
    assert code == 2
    assert "AP101" in errors
