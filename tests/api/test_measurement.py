"""What a run measured, kept beside its plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import pipeline_plan

from autoparallel.analysis.measurement import (
    MOST_STEPS,
    load_measurement,
    measured_path,
    measured_text,
)
from autoparallel.planner.errors import UsageError
from autoparallel.training.callbacks import StepRecord
from autoparallel.training.step_log import Figures, keep_measurement


def figures(*seconds: float) -> Figures:
    found = Figures()
    for at, each in enumerate(seconds):
        found.add(
            StepRecord(
                at, 1.0, 1.0, 100 + at, each, learning_rate=None, unit="tokens", throughput=1.0
            )
        )
    return found


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The median of all but the first two steps is 3, and the last step held the most."""
    plan = pipeline_plan()
    keep_measurement(plan, figures(9.0, 8.0, 2.0, 3.0, 5.0), 1, [tmp_path / "plan.json"])
    found = load_measurement(tmp_path / "plan.json")
    assert found is not None
    assert (found.step_seconds, found.memory_bytes, found.num_steps) == (3.0, 104, 5)
    assert found.each_step_seconds == (9.0, 8.0, 2.0, 3.0, 5.0)
    assert "step 3.00 s (predicted 2.10 s)" in measured_text(found, plan)


def test_the_measurement_of_another_plan_is_told_apart(tmp_path: Path) -> None:
    plan = pipeline_plan()
    keep_measurement(plan, figures(1.0), 2, [tmp_path / "plan.json"])
    found = load_measurement(tmp_path / "plan.json")
    assert found is not None
    assert "predicted 4.20 s" in measured_text(found, plan)
    assert "of another plan" not in measured_text(found, plan)
    assert "of another plan" in measured_text(found, replace(plan, num_microbatches=8))


def test_of_a_long_run_the_last_steps_are_kept(tmp_path: Path) -> None:
    seconds = [float(at) for at in range(1, MOST_STEPS + 11)]
    keep_measurement(pipeline_plan(), figures(*seconds), 1, [tmp_path / "plan.json"])
    found = load_measurement(tmp_path / "plan.json")
    assert found is not None
    assert found.each_step_seconds == tuple(seconds[10:])
    assert found.num_steps == MOST_STEPS + 10


def test_a_folder_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    keep_measurement(pipeline_plan(), figures(1.0), 1, [tmp_path / "file" / "plan.json"])
    assert "what was measured is not kept" in capsys.readouterr().out


def test_without_a_run_there_is_no_measurement(tmp_path: Path) -> None:
    assert load_measurement(tmp_path / "plan.json") is None


@pytest.mark.parametrize("change", ["not json", "a key", "a value", "another schema"])
def test_a_damaged_measurement_is_refused(tmp_path: Path, change: str) -> None:
    keep_measurement(pipeline_plan(), figures(1.0), 1, [tmp_path / "plan.json"])
    path = measured_path(tmp_path / "plan.json")
    table = json.loads(path.read_text())
    if change == "a key":
        del table["device"]
    elif change == "a value":
        table["step_seconds"] = "fast"
    elif change == "another schema":
        table["schema"] = 99
    path.write_text("{" if change == "not json" else json.dumps(table))
    with pytest.raises(UsageError, match="AP342"):
        load_measurement(tmp_path / "plan.json")
