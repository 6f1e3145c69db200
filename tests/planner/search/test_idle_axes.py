"""A mesh axis that shards nothing is avoided, unless its degree is forced or the plan is faster."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autoparallel
from autoparallel.analysis.sharding import axis_lines

GPT = Path(__file__).parents[3] / "examples/gpt.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gpt", GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(**options: Any) -> autoparallel.Plan:
    gpt = example()
    return autoparallel.plan(
        lambda: gpt.build_model(n_layer=3, d_model=128),
        gpt.example_batch,
        cluster="8xH100",
        **options,
    )


def idle_axes(plan: autoparallel.Plan) -> list[str]:
    return [line for line in axis_lines(plan.stages) if "shards 0 of" in line]


def test_every_axis_of_a_plan_shards_something() -> None:
    found = planned(global_batch=2)
    assert axis_lines(found.stages)
    assert not idle_axes(found)


@pytest.mark.parametrize("global_batch", [1, 7])
def test_an_axis_that_shards_nothing_stays_only_in_a_plan_that_is_faster(global_batch: int) -> None:
    """A stage of several devices may run on them alike, where the stages beside it gain by it."""
    found = planned(global_batch=global_batch)
    for parallel in ("pp=1", "pp=2", "pp=4", "tp=8", "tp=4,pp=2"):
        other = planned(global_batch=global_batch, parallel=parallel)
        if idle_axes(found) and not idle_axes(other):
            assert found.prediction.step_seconds * 1.02 < other.prediction.step_seconds


def test_a_forced_degree_is_kept() -> None:
    lines = axis_lines(planned(global_batch=1, parallel="tp=8").stages)
    assert [line.split()[0] for line in lines] == ["tp=8"]
