"""Traces of runs: measured beside predicted, in the format's rules, with equal names."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_python
from trace_schema import faults

from autoparallel.__main__ import run_command
from autoparallel.cost_model.simulator.actions import COMPUTE, SENDS, Action
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.trace import chrome_trace
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.planning.plan_files import load_plan
from autoparallel.runtime.profile.recording import RecordedAction, RecordedStep
from autoparallel.training.trace import (
    RunTrace,
    check_trace,
    compared_trace,
    differences,
    predicted_timeline,
    rows_of,
)

TARGET = str(Path(__file__).resolve().parents[1] / "models" / "regression.py")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    arguments = [
        "--cluster",
        "2x1xcpu",
        "--global-batch",
        "8",
        "--no-cache",
        "--parallel",
        "pp=2,microbatches=4,schedule=1f1b",
    ]
    assert run_command(["plan", TARGET, *arguments, "-o", str(path)]) == 0
    return path


def as_recorded(timeline: Timeline, row: int, schedule: Any) -> RecordedStep:
    """A step that runs just as predicted: each action of the row at its predicted time."""
    events: dict[Action, list[Any]] = defaultdict(list)
    for event in timeline.events[row]:
        events[event.action].append(event)
    actions, last = [], 0.0
    for action in schedule.table[row]:
        own = events.get(action, [])
        start = min((event.start_seconds for event in own), default=last)
        end = max((event.end_seconds for event in own), default=last)
        if action.kind in SENDS:
            end = start
        if action.kind in COMPUTE:
            actions.append(RecordedAction(action, last, start, end))
        else:
            actions.append(RecordedAction(action, start, start, end))
        last = end if action.kind in COMPUTE else last
    updates = [event for event in timeline.events[row] if event.action.kind == "STEP"]
    begins = min(event.start_seconds for event in updates)
    ends = max(event.end_seconds for event in updates)
    return RecordedStep(0.0, tuple(actions), begins, ends)


def widened(plan: Plan, *sizes: int) -> Plan:
    """The plan with stages of so many devices."""
    stages, first = [], 0
    for stage, size in zip(plan.stages, sizes, strict=True):
        stages.append(replace(stage, devices=tuple(range(first, first + size))))
        first += size
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (4, 2), (1, 3)])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_trace_has_both_timelines_of_every_rank(
    planned: Path, sizes: tuple[int, int], num_steps: int
) -> None:
    plan = widened(load_plan(planned), *sizes)
    schedule = build_schedule("1f1b", 2, 4)
    predicted = predicted_timeline(plan, schedule)
    rows = rows_of(plan, schedule)
    assert [len(row) for row in rows] == list(sizes)
    own = [[as_recorded(predicted, row, schedule)] * num_steps for row in (0, 1)]
    steps = [own[row] for row, ranks in enumerate(rows) for _ in ranks]
    trace = compared_trace(plan, schedule, steps, predicted)
    assert faults(trace) == []
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    count = sum(sizes)
    assert len(names) == 2 * count
    tracks: dict[int, set[str]] = defaultdict(set)
    slices: dict[int, int] = defaultdict(int)
    for event in events:
        if event["name"] == "thread_name":
            tracks[event["pid"]].add(event["args"]["name"])
        slices[event["pid"]] += event["ph"] == "X"
    for rank in range(count):
        assert names[rank].replace("measured", "predicted") == names[count + rank]
        assert tracks[rank] == tracks[count + rank]
        assert slices[rank] > 0
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


def test_a_run_just_as_predicted_has_ratios_of_one(planned: Path) -> None:
    plan, schedule = load_plan(planned), build_schedule("1f1b", 2, 4)
    predicted = predicted_timeline(plan, schedule)
    assert predicted.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=0.01)
    steps = [[as_recorded(predicted, row, schedule)] for row in (0, 1)]
    found = differences(plan, schedule, steps, predicted)
    assert {(each.stage, each.kind) for each in found} >= {
        (stage, kind) for stage in (0, 1) for kind in ("F", "B", "STEP")
    }
    for each in found:
        if each.kind not in SENDS:
            assert each.measured_seconds == pytest.approx(each.predicted_seconds), each


def test_a_slower_backward_shows_in_its_row_alone(planned: Path) -> None:
    plan, schedule = load_plan(planned), build_schedule("1f1b", 2, 4)
    predicted = predicted_timeline(plan, schedule)
    own = as_recorded(predicted, 1, schedule)
    slow = tuple(
        replace(each, end_seconds=2 * each.end_seconds - each.ready_seconds)
        if each.action.kind == "B"
        else each
        for each in own.actions
    )
    steps = [[as_recorded(predicted, 0, schedule)], [replace(own, actions=slow)]]
    ratios = {
        (each.stage, each.kind): each.measured_seconds / each.predicted_seconds
        for each in differences(plan, schedule, steps, predicted)
        if each.kind in COMPUTE
    }
    assert ratios == {key: pytest.approx(2.0 if key == (1, "B") else 1.0) for key in ratios}
    assert len(ratios) == 4


def broken(trace: dict[str, Any], change: str) -> dict[str, Any]:
    events = [dict(event) for event in trace["traceEvents"]]
    flow = next(event for event in events if event["ph"] == "f")
    piece = next(event for event in events if event["ph"] == "X")
    if change == "key":
        del piece["dur"]
    elif change == "flow":
        events.remove(flow)
    elif change == "time":
        flow["ts"] = 0
    elif change == "overlap":
        events.append({**piece, "ts": piece["ts"] + piece["dur"] / 2})
    elif change == "name":
        events = [event for event in events if event["name"] != "thread_name"]
    return {"traceEvents": events}


@pytest.mark.parametrize("change", ["key", "flow", "time", "overlap", "name"])
def test_the_check_of_traces_finds_faults(planned: Path, change: str) -> None:
    trace = chrome_trace(predicted_timeline(load_plan(planned), build_schedule("1f1b", 2, 4)))
    assert faults(trace) == []
    assert faults(broken(trace, change))


@pytest.mark.parametrize(
    ("num_steps", "first", "last", "recorded"),
    [(3, 1, 20, [3, 4, 5]), (3, 1, 4, [2, 3, 4]), (2, 11, 12, [11, 12]), (0, 1, 9, [])],
)
def test_steps_after_the_warm_up_are_recorded_if_there_are_enough(
    num_steps: int, first: int, last: int, recorded: list[int]
) -> None:
    assert list(RunTrace(num_steps, None, first=first, last=last)._steps) == recorded


def test_what_cannot_be_recorded_is_said() -> None:
    with pytest.raises(UsageError, match="AP381"):
        check_trace(5, None, 4)
    with pytest.raises(UsageError, match="AP381"):
        check_trace(0, "trace.json", 4)
    check_trace(4, "trace.json", 4)


def test_a_run_writes_a_trace_and_prints_the_table(planned: Path) -> None:
    folder = planned.parent
    arguments = ["--steps", "4", "--trace-steps", "2", "--trace", "own.json", "--trust"]
    done = run_python("-m", "autoparallel", "run", str(planned), *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("Mean seconds") : done.stdout.index("written to")]
    assert max(map(len, table.splitlines())) <= 80
    assert re.search(r"^ +1 +backward +\S+ \S+ +\S+ \S+ +[0-9.]+$", done.stdout, re.MULTILINE)
    trace = json.loads((folder / "own.json").read_text())
    assert faults(trace) == []
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    compute = [e for e in slices if e["pid"] in (0, 1) and e["name"][1:2] in ("F", "B")]
    assert len(compute) == 2 * 2 * 8  # steps, ranks, forwards and backwards of 4 micro-batches
    assert len(trace["otherData"]["measured_step_seconds"]) == 2
