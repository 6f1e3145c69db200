"""Practices are compared with plans by hand-made figures, and land in the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoparallel.options.parse import parse_parallel
from autoparallel.planner.errors import PlanError
from autoparallel.planner.plan import Plan
from benchmarks.planning import practice
from benchmarks.planning.practice import (
    BEGIN,
    END,
    SETTINGS,
    Compared,
    Setting,
    compared,
    main,
    with_practice,
)

SMALL = Setting(
    "GPT on two CPUs",
    "examples/gpt.py",
    "cpu:2",
    8,
    16,
    "pp=2,recompute=none,schedule=1f1b",
    "by hand",
    micro_batch=2,
    precision="fp32",
    settings={"n_layer": 2, "d_model": 32, "n_head": 2, "seq": 16},
)


def row(name: str, practice_seconds: float | None, plan_seconds: float) -> dict[str, object]:
    terms = dict.fromkeys(practice.TERMS, 1.0)
    return {
        "name": name,
        "practice": "dp=2",
        "practice_seconds": practice_seconds,
        "measured_seconds": None,
        "plan": "tp=2",
        "plan_seconds": plan_seconds,
        "gap": 0.0,
        "source": "by hand",
        "practice_terms": terms,
        "plan_terms": terms,
    }


def test_every_practice_can_be_asked_for() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS) >= 10
    for setting in SETTINGS:
        assert parse_parallel(setting.practice) is not None


def test_the_tables_hold_all_settings_and_reasons_for_much_faster_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 instead of 10 seconds is 20 % faster and needs a reason, 9.5 is not."""
    first, second, third = (setting.name for setting in SETTINGS[:3])
    rows = [row(second, 10.0, 9.5), row(first, 10.0, 8.0), row(third, None, 7.0)]
    values, page = tmp_path / "rows.json", tmp_path / "page.md"
    values.write_text(json.dumps(rows))
    page.write_text(f"before {BEGIN} old {END} after")
    main(["--only", "-", "--json", str(values), "--write", str(page)])
    text = page.read_text()
    assert text.startswith(f"before {BEGIN}")
    assert text.endswith(f"{END} after")
    assert " old " not in text
    lines = text.splitlines()
    assert [line.split(" | ")[0] for line in lines if "by hand" in line] == [
        f"| {first}",
        f"| {second}",
        f"| {third}",
    ]
    assert "| 20.0% |" in text
    assert "does not fit" in text
    reasons = [line for line in lines if "→" in line and line.startswith("| ")]
    assert len(reasons) == 1
    assert reasons[0].startswith(f"| {first} | 1 → 1")


def test_a_practice_that_does_not_fit_leaves_recomputation_open() -> None:
    asked: list[str] = []

    def planned(parallel: str, micro_batch: int | None) -> Plan:
        asked.append(parallel)
        if "recompute" in parallel:
            raise PlanError("AP301", "it does not fit")
        return "a plan"  # type: ignore[return-value]

    found, note = with_practice(planned, SMALL)
    assert found == "a plan"
    assert practice.OPEN in note
    assert asked == [SMALL.practice, "pp=2,schedule=1f1b"]


def test_a_setting_is_planned_with_and_without_its_practice() -> None:
    found: Compared = compared(SMALL, 10.0)
    assert "pp=2" in found.practice
    assert found.practice_seconds is not None
    assert found.gain is not None
    assert found.gain >= -1e-6  # the plan may be the practice
    assert found.practice_terms["bubble"] > 0
    assert sum(found.practice_terms.values()) == pytest.approx(found.practice_seconds, rel=0.2)
