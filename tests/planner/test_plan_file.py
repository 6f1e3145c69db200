"""A plan survives its file; a damaged file is refused with the key."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from handmade import flat_plan, pipeline_plan
from hypothesis import given
from hypothesis import strategies as st
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.layout import INVARIANT, PARTIAL, REPLICATE, NodeLayout, shard
from autoparallel.planner.plan import Plan, ProfileUse
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.request import Forced, Request

PLACEMENTS = st.sampled_from([REPLICATE, INVARIANT, PARTIAL, shard(0), shard(1), shard(12)])
LAYOUTS = st.tuples(PLACEMENTS, PLACEMENTS)
LETTERS = st.characters(exclude_categories=["C"])
"""A file with control characters is refused."""
NODES = st.builds(
    NodeLayout,
    st.lists(LAYOUTS, max_size=3).map(tuple),
    st.lists(LAYOUTS, min_size=1, max_size=3).map(tuple),
    st.lists(st.text(LETTERS, max_size=3), max_size=2).map(tuple),
)
FLOATS = st.floats(allow_nan=False)


@pytest.mark.parametrize("made", [flat_plan, pipeline_plan])
def test_handmade_plans_survive(made: Any) -> None:
    original = made()
    assert loads(dumps(original)) == original
    assert dumps(loads(dumps(original))) == dumps(original)


@pytest.mark.parametrize(
    "forced",
    [Forced(pp=2), Forced(dp=2, tp=2, zero=2), pytest.param(Forced(), marks=pytest.mark.slow)],
)
def test_found_plans_survive(forced: Forced) -> None:
    graph, blocks = mlp(3, rows=8)
    found = plan(graph, blocks, cluster(4), Request(8, forced=forced, settings={"layers": 3}))
    assert loads(dumps(found)) == found
    assert dumps(loads(dumps(found))) == dumps(found)


@given(st.dictionaries(st.text(LETTERS, max_size=8), NODES, max_size=4), FLOATS, st.booleans())
def test_any_layouts_and_figures_survive(
    layouts: dict[str, NodeLayout], seconds: float, as_setting: bool
) -> None:
    original = flat_plan()
    stage = replace(original.stages[0], layouts=layouts)
    prediction = replace(original.prediction, step_seconds=seconds)
    model = replace(original.model, seq=None, settings={"flag": as_setting, "text": "é\n"})
    changed = replace(original, stages=(stage,), prediction=prediction, model=model)
    assert loads(dumps(changed)) == changed


def damaged(original: Plan, path: list[Any], value: Any) -> str:
    table = json.loads(dumps(original))
    at = table
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("path", "value", "code", "key"),
    [
        (["schema"], 99, "AP502", "99"),
        (["schema"], 5, "AP502", "5"),
        (["model", "global_batch"], KeyError, "AP503", "model.global_batch"),
        (["stages", 0, "colour"], "red", "AP503", "stages[0].colour"),
        (["stages", 0, "zero"], "two", "AP504", "stages[0].zero"),
        (["stages", 0, "zero"], True, "AP504", "stages[0].zero"),
        (["stages", 0, "mesh", "shape"], [2], "AP504", "stages[0].mesh"),
        (["stages", 0, "layouts", "linear", "inputs", 0], "S(x)", "AP504", "inputs[0]"),
        (["stages", 0, "blocks", 0, "recompute"], "half", "AP504", "recompute"),
        (["prediction", "step_seconds"], "soon", "AP504", "prediction.step_seconds"),
        (["cluster"], {}, "AP504", "cluster"),
        (["num_microbatches"], 7777, "AP505", "num_microbatches"),
        (["stages", 0, "zero"], 3, "AP505", "stages"),
        (["checksums"], {}, "AP505", "alternatives"),
    ],
)
def test_a_damaged_file_is_refused_with_the_key(
    path: list[Any], value: Any, code: str, key: str
) -> None:
    with pytest.raises(PlanError) as caught:
        loads(damaged(flat_plan(), path, value), "plan.json")
    assert caught.value.code == code
    assert key in caught.value.what
    assert caught.value.where == "plan.json"


@pytest.mark.parametrize("text", ["", "not json", "[1, 2]", dumps(flat_plan())[:500]])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        loads(text)
    assert caught.value.code == "AP501"


def test_states_in_host_memory_survive() -> None:
    plan = replace(flat_plan(), offload="optimizer")
    assert loads(dumps(plan)) == plan


def test_a_field_that_older_files_lack_is_omitted_where_it_says_nothing() -> None:
    original = flat_plan()
    assert original.undivided_batch is None
    assert "undivided_batch" not in json.loads(dumps(original))
    told = replace(original, undivided_batch="samples meet in mul")
    assert loads(dumps(told)) == told


def test_unequal_shares_of_the_batch_survive() -> None:
    original = flat_plan()
    stage = replace(original.stages[0], shares=(3, 5))
    changed = replace(original, stages=(stage, *original.stages[1:]))
    assert loads(dumps(changed)) == changed


def test_a_plan_with_its_profile_survives() -> None:
    original = flat_plan()
    prediction = replace(
        original.prediction,
        sources_of={"compute": {"measured": 0.9, "spec": 0.05}, "communication": {"spec": 0.05}},
        profile=ProfileUse("CPU", "", "2.13.0", 2, "measured with torch 2.12", 0.06),
    )
    changed = replace(original, prediction=prediction)
    assert loads(dumps(changed)) == changed
