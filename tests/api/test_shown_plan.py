"""Plans as users get them: equal to the planner's, shown in notebooks, read by pandas."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import GIB, pipeline_plan

import autoparallel
from autoparallel.html.notebooks import TABLES, ShownPlan, with_display
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan_file import dumps


def test_a_shown_plan_equals_the_planners_and_no_other() -> None:
    plan = pipeline_plan()
    same = with_display(plan)
    assert isinstance(same, autoparallel.Plan)
    assert plan == same
    assert same == plan
    assert dumps(same) == dumps(plan)
    assert replace(same, schedule="gpipe") != plan
    assert plan != replace(same, schedule="gpipe")
    assert same != "a text"


def test_a_changed_copied_or_pickled_plan_is_still_shown() -> None:
    plan = with_display(pipeline_plan())
    for other in (
        replace(plan, num_microbatches=8),
        copy.deepcopy(plan),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert type(other) is ShownPlan


def test_a_loaded_plan_is_shown(tmp_path: Path) -> None:
    autoparallel.save_plan(pipeline_plan(), tmp_path / "plan.json")
    plan = autoparallel.load_plan(tmp_path / "plan.json")
    assert "<table>" in plan._repr_html_()
    assert "2.10 s" in plan._repr_html_()


def test_stages_memory_weights_and_candidates_are_rows_of_plain_values() -> None:
    plan = pipeline_plan()
    stages = TABLES["stages"](plan)
    assert [row["ranks"] for row in stages] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stages[0]["forward_seconds"] == 0.0381
    assert TABLES["memory"](plan)[1]["optimizer"] == 16 * GIB
    candidates = TABLES["candidates"](plan)
    assert [row["chosen"] for row in candidates] == [True, False, False, False]
    assert candidates[3]["step_seconds"] is None
    weights = {row["weight"]: row["layout"] for row in TABLES["weights"](plan)}
    assert weights["attn.qkv.weight"] == "dim 0 sharded over tp"


@pytest.mark.parametrize("what", TABLES)
def test_every_table_is_a_data_frame(what: str) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    plan = with_display(pipeline_plan())
    found = plan.to_frame(what)
    assert isinstance(found, pandas.DataFrame)
    assert found.to_dict("records")[0].keys() == TABLES[what](plan)[0].keys()
    assert len(found) == len(TABLES[what](plan))


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"AP340(.|\n)*pip install pandas"):
        with_display(pipeline_plan()).to_frame()


def test_an_unknown_table_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"AP341(.|\n)*did you mean stages"):
        with_display(pipeline_plan()).to_frame("stage")
