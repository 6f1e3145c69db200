"""The corpus: its baseline is whole, its table judges rightly, and a sample is planned no worse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_interpreters import ForkedInterpreter

from benchmarks.corpus import checkouts
from benchmarks.corpus.baseline import PLANS, records, reference
from benchmarks.corpus.cases import CASES, QUICK
from benchmarks.corpus.rows import Row, heading, is_worse, line, row_of, summary
from benchmarks.corpus.run import main

ROOT = Path(__file__).resolve().parents[2]


def test_every_case_has_a_baseline_and_nothing_else_does() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 60
    known = records()
    assert set(known) == set(names)
    planned = {name for name in names if "code" not in known[name]}
    assert {file.name for file in PLANS.iterdir()} == {f"{name}.json.xz" for name in planned}


def test_no_search_of_the_baseline_was_cut_short() -> None:
    assert not [name for name, record in records().items() if record.get("stopped")]


def test_a_reference_is_a_plan_or_a_code() -> None:
    assert reference("refused-degrees") == {"code": "AP127"}
    assert '"schedule": "zbv"' in reference("zbv")["plan"]


def answered(seconds: float = 1.0, other: float = 1.0, **found: Any) -> dict[str, Any]:
    """What a worker answers: a plan that takes ``seconds`` beside a reference's."""
    prices = [
        {"step_seconds": each, "predicted_seconds": each, "peak_bytes": 8}
        for each in (seconds, other)
    ]
    return {
        "found": {"plan": "{}", "cpu_seconds": 2.0, "peak_bytes": 100, **found},
        "priced": prices,
    }


PLAN = {"plan": "{}"}


@pytest.mark.parametrize(
    ("steps", "worse"),
    [((1.0, 1.0), False), ((0.9, 1.005), False), ((0.9, 1.02), True), ((1.0, 1.005), True)],
)
def test_one_percent_in_one_case_or_anything_in_the_mean_is_worse(
    steps: tuple[float, ...], worse: bool
) -> None:
    rows = [row_of(f"{step}", PLAN, [answered(step)]) for step in steps]
    assert is_worse(rows) == worse


@pytest.mark.parametrize(
    ("reference", "found", "failure"),
    [
        ({"code": "AP301"}, {"code": "AP301"}, ""),
        ({"code": "AP301"}, {"code": "AP127"}, "AP127, but the baseline has AP301"),
        ({"code": "AP301"}, {}, "a plan, but the baseline has AP301"),
        (PLAN, {"code": "AP301", "what": "too large"}, "AP301, but the baseline has a plan"),
    ],
)
def test_another_outcome_is_a_failure(
    reference: dict[str, str], found: dict[str, str], failure: str
) -> None:
    row = row_of("case", reference, [answered(**found)])
    assert row.failure.startswith(failure)
    assert is_worse([row]) == bool(failure)


def test_an_error_in_a_worker_and_a_plan_that_cannot_be_priced_are_failures() -> None:
    broken = row_of("case", PLAN, [{"failure": "Traceback\nKeyError: 1\n"}])
    assert "FAILED: KeyError: 1" in line(broken)
    unpriced = {**answered(), "priced": [{"failure": "no such node"}, {"step_seconds": 1.0}]}
    assert is_worse([broken])
    assert row_of("case", PLAN, [unpriced]).failure == "no such node"


def test_of_several_turns_the_least_times_are_compared() -> None:
    answers = [answered(cpu_seconds=seconds) for seconds in (3.0, 2.2)]
    others = [answered(cpu_seconds=seconds, peak_bytes=80) for seconds in (2.0, 5.0)]
    row = row_of("case", PLAN, answers, others)
    assert row.cpu_ratio == pytest.approx(1.1)
    assert row.planner_bytes_ratio == pytest.approx(1.25)


def test_the_table_has_80_columns_and_the_summary_names_what_to_look_at() -> None:
    rows = [
        row_of("slow", PLAN, [answered(1.02)], [answered()]),
        Row("refused", code="AP301", cpu_seconds=1.0),
        Row("elsewhere", 1.0, 1.0, predicted_seconds=0.9, baseline_bytes=1, peak_bytes=1),
    ]
    assert max(len(text) for text in (heading(True), *map(line, rows))) <= 80
    text = summary(rows)
    assert "more than 1 % slower: slow" in text
    assert "not priced by evaluate as predicted: elsewhere" in text


class ForkedWorker(ForkedInterpreter):
    """An interpreter that is asked in lines of text."""

    def __init__(self, args: Sequence[str], *, text: bool, **options: Any) -> None:
        super().__init__(args, **options)
        assert text
        self.stdin, self.stdout = TextIOWrapper(self.stdin), TextIOWrapper(self.stdout)

    def communicate(self) -> None:
        self.stdin.close()
        self.wait()
        self.stdout.close()


def test_a_case_is_planned_no_worse_than_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedWorker})
    monkeypatch.setattr(checkouts, "subprocess", forking)
    exit_code = main(["--cases", "gpipe,refused-degrees", "--jobs", "1"])
    output = capsys.readouterr().out
    assert exit_code == 0, output
    assert "2 cases" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_is_planned_no_worse_than_before() -> None:
    command = [sys.executable, "benchmarks/corpus/run.py", "--quick", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(QUICK)} cases" in done.stdout
