"""Plans without a mesh axis that shards nothing, unless its degree is forced."""

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


def axes(**options: Any) -> list[str]:
    gpt = example()
    found = autoparallel.plan(
        lambda: gpt.build_model(n_layer=3, d_model=128),
        gpt.example_batch,
        cluster="8xH100",
        **options,
    )
    return axis_lines(found.stages)


@pytest.mark.parametrize("global_batch", [1, 2, 7])
def test_every_axis_of_a_plan_shards_something(global_batch: int) -> None:
    lines = axes(global_batch=global_batch)
    assert lines
    assert not [line for line in lines if "shards 0 of" in line]


def test_a_forced_degree_is_kept() -> None:
    lines = axes(global_batch=1, parallel="tp=8")
    assert [line.split()[0] for line in lines] == ["tp=8"]
