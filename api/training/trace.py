"""Trace of a run: recorded steps beside the predicted step, and their differences by action.

In: a plan, its schedule, and the steps recorded on every rank. Out: a Chrome trace with a measured
and a predicted process per rank, whose tracks have the same names; and a table of the mean seconds
of each kind of action.

Measured compute begins when its messages have arrived. The end of a message is known only if the
receiver waited for it; other messages end with their call. Gradient reductions are measured from
the point where a rank waits for them, so they do not appear beside compute.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from autoparallel.cost_model.simulator.actions import (
    COMPUTE,
    FORWARD,
    REDUCE,
    SEND_FORWARD,
    SENDS,
    STEP,
    Action,
    Schedule,
    chain,
)
from autoparallel.cost_model.simulator.simulator import simulate
from autoparallel.cost_model.simulator.timeline import Event, Exposed, Stream, Timeline
from autoparallel.cost_model.simulator.trace import NAMES, TraceEvent, labels, timeline_events
from autoparallel.options.outputs import writing
from autoparallel.options.words import seconds_text
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.variants.replicas import placed_stages
from autoparallel.report.drawing import plan_costs
from autoparallel.report.printing import plain_table
from autoparallel.runtime.profile.recording import RecordedAction, RecordedStep, StepRecorder
from autoparallel.runtime.step.trainer import RankTrainer, Trainer

DEFAULT_FILE = "trace.json"
WARMUP_STEPS = 2
"""Number of first steps that are not recorded, if enough steps follow."""
WAITED_SECONDS = 1e-5
"""Length of a wait for a message above which the wait's end counts as the message's arrival."""

Steps = Sequence[RecordedStep]


class RunTrace:
    """Recorder of the timelines of some steps of a run; does nothing if no steps are requested."""

    def __init__(self, num_steps: int, path: str | None, *, first: int, last: int) -> None:
        """Choose ``num_steps`` steps to record from the run's steps ``first`` to ``last``."""
        begin = max(first, min(first + WARMUP_STEPS, last + 1 - num_steps))
        self._steps = range(begin, begin + num_steps)
        self._path = path or DEFAULT_FILE
        self._recorder: StepRecorder | None = None

    def begin(self, step: int, trainer: RankTrainer) -> None:
        """Begin recording ``step`` if it is one of the chosen steps."""
        if step in self._steps:
            assert isinstance(trainer, Trainer)
            self._recorder = self._recorder or StepRecorder(trainer)
            self._recorder.begin()

    def end(self, step: int) -> None:
        """End recording ``step``."""
        if step in self._steps and self._recorder is not None:
            self._recorder.end()

    def write(self, plan: Plan, schedule: Schedule, *, rank: int) -> None:
        """Write the trace file and print the table, on rank 0. Collective over all ranks."""
        if self._recorder is None:
            return
        steps = self._recorder.gather()
        if rank == 0:
            predicted = predicted_timeline(plan, schedule)
            trace = compared_trace(plan, schedule, steps, predicted)
            with writing(self._path, "--trace"):
                Path(self._path).write_text(json.dumps(trace), encoding="utf-8")
            print_differences(plan, schedule, steps, predicted, Console(width=80, highlight=False))
            print(f"written to {self._path}; open it in https://ui.perfetto.dev", flush=True)


def check_trace(num_steps: int, path: str | None, steps: int) -> None:
    """Raise UsageError AP381 if ``num_steps`` exceeds ``steps``, or is 0 with a ``path`` given."""
    if path is not None and num_steps == 0:
        raise UsageError("AP381", "--trace without --trace-steps", fix="--trace-steps 3")
    if num_steps > steps:
        raise UsageError(
            "AP381",
            f"--trace-steps {num_steps} of a run of {steps} steps",
            fix=f"--trace-steps {steps} or fewer",
        )


def predicted_timeline(plan: Plan, schedule: Schedule) -> Timeline:
    """Simulate the plan's step from the predicted costs of its stages."""
    costs = plan_costs(plan)
    edges = schedule.edges
    if edges is not None and edges != chain(schedule.num_stages) and not schedule.parts:
        sent = [stage.prediction.seconds.get("send", 0.0) for stage in plan.stages]
        outgoing = [source for source, _ in edges]
        each = [sent[source] / outgoing.count(source) for source in outgoing]
        zeros = [0.0] * len(each)
        costs = replace(
            costs,
            edges=edges,
            send_seconds=each,
            send_backward_seconds=each,
            send_latency_seconds=zeros,
            send_call_seconds=zeros,
            receive_call_seconds=zeros,
        )
    return simulate(schedule, costs)


def rows_of(plan: Plan, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return, for each pipeline rank, the global ranks of its devices."""
    devices: dict[int, tuple[int, ...]] = {}
    for stage, place in enumerate(placed_stages(plan)):
        devices.setdefault(schedule.stage_rank[stage], place.devices)
    return tuple(devices[row] for row in range(schedule.num_ranks))


def compared_trace(
    plan: Plan, schedule: Schedule, steps: Sequence[Steps], predicted: Timeline
) -> dict[str, Any]:
    """Return the Chrome trace of every rank's recorded steps, each with the predicted step."""
    rows = rows_of(plan, schedule)
    row_of = {rank: row for row, own in enumerate(rows) for rank in own}
    num_ranks, num_steps = len(steps), min((len(own) for own in steps), default=0)
    used: dict[int, set[Stream]] = defaultdict(set)
    events: list[TraceEvent] = []
    zero = min((own[0].start_seconds for own in steps if own), default=0.0)
    for number in range(num_steps):
        begins = min(steps[rank][number].start_seconds for rank in row_of) - zero
        for lane, ranks in enumerate(_lanes(rows)):
            own = [steps[rank][number] for rank in ranks]
            measured = measured_timeline(schedule, own, zero)
            drawn = {
                row for row, rank in enumerate(ranks) if _lane_of(rows[row], rank, rows) == lane
            }
            name = f"{number}.{lane}."
            events += timeline_events(measured, ranks, name=f"measured{name}", drawn=drawn)
            events += timeline_events(
                predicted,
                [num_ranks + rank for rank in ranks],
                begins_seconds=begins,
                name=f"predicted{name}",
                drawn=drawn,
            )
            for row, rank in enumerate(ranks):
                own_events = (*measured.events[row], *predicted.events[row])
                used[rank] |= {event.stream for event in own_events}
    names = [
        label
        for rank, row in sorted(row_of.items())
        for at, what in ((rank, "measured"), (num_ranks + rank, "predicted"))
        for label in labels(
            at,
            f"rank {rank} {what} (pipeline rank {row})",
            used[rank],
            2 * rank + (what == "predicted"),
        )
    ]
    return {
        "traceEvents": [*names, *sorted(events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
        "otherData": {
            "predicted_step_seconds": float(predicted.step_seconds),
            "measured_step_seconds": [
                max(steps[rank][number].end_seconds for rank in row_of)
                - min(steps[rank][number].start_seconds for rank in row_of)
                for number in range(num_steps)
            ],
        },
    }


def _lanes(rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield tuples with one device of each pipeline rank, such that all devices occur; ``rows`` are
    the devices of each pipeline rank."""
    most = max(map(len, rows))
    for lane in range(most):
        yield tuple(own[lane * len(own) // most] for own in rows)


def _lane_of(own: Sequence[int], rank: int, rows: Sequence[Sequence[int]]) -> int:
    """Return the index of the first tuple of ``_lanes`` with device ``rank``, one of the devices
    ``own`` of its pipeline rank."""
    return -(-own.index(rank) * max(map(len, rows)) // len(own))


def measured_timeline(schedule: Schedule, steps: Sequence[RecordedStep], zero: float) -> Timeline:
    """Return the timeline of a step recorded on each pipeline rank, in seconds after ``zero``."""
    takers = {
        _taker_key(each.action): each
        for step in steps
        for each in step.actions
        if each.action.kind in COMPUTE
    }
    rows = [tuple(_events(schedule, step, takers, zero)) for step in steps]
    ends = [event.end_seconds for row in rows for event in row]
    count = len(steps)
    return Timeline(
        step_seconds=max(ends, default=0.0),
        bubble_fraction=0.0,
        events=tuple(rows),
        exposed=(Exposed(),) * count,
        slowdown_seconds=(0.0,) * count,
        peak_activation_bytes=(0,) * count,
        peak_memory_bytes=(0,) * count,
        memory_bytes=((),) * count,
        replicas=(1,) * count,
    )


TakerKey = tuple[bool, int, int, int]
"""Key of a message: whether it goes forward, then the receiver's stage, micro-batch and slice."""


def _taker_key(action: Action) -> TakerKey:
    kind, stage, microbatch, part = action
    return kind in (FORWARD, SEND_FORWARD), stage, microbatch, part


def _events(
    schedule: Schedule, step: RecordedStep, takers: dict[TakerKey, RecordedAction], zero: float
) -> Iterator[Event]:
    ends: dict[str, float] = {}
    found: list[Event] = []
    for each in step.actions:
        kind, stage, m, part = each.action
        start, end = each.start_seconds - zero, each.end_seconds - zero
        if kind in COMPUTE:
            found.append(Event(each.action, each.ready_seconds - zero, end, "compute"))
        elif kind == REDUCE:
            found.append(Event(each.action, start, end, "gradient sync"))
        elif kind in SENDS:
            is_forward = kind == SEND_FORWARD
            stream: Stream = "send forward" if is_forward else "send backward"
            wiring = schedule.messages
            for to in (wiring.consumers if is_forward else wiring.producers)[stage]:
                taker = takers.get((is_forward, to, m, part))
                arrived = end
                if taker is not None and taker.ready_seconds - taker.start_seconds > WAITED_SECONDS:
                    arrived = max(end, taker.ready_seconds - zero)
                began = max(start, ends.get(stream, 0.0))  # slices of a track do not overlap
                ends[stream] = max(began, arrived)
                found.append(Event(each.action, began, ends[stream], stream, to))
    yield from found
    yield from _updates(schedule, step, zero)


def _updates(schedule: Schedule, step: RecordedStep, zero: float) -> Iterator[Event]:
    """Yield the optimizer update of each stage, with equal parts of the measured time."""
    stages = [each.action for each in step.actions if each.action.kind == STEP]
    if schedule.is_asynchronous:
        for each in step.actions:
            if each.action.kind == STEP:
                yield Event(
                    each.action, each.start_seconds - zero, each.end_seconds - zero, "compute"
                )
        return
    seconds = (step.end_seconds - step.update_seconds) / max(1, len(stages))
    for at, action in enumerate(stages):
        start = step.update_seconds - zero + at * seconds
        yield Event(action, start, start + seconds, "compute")


@dataclass(frozen=True, slots=True)
class ActionDifference:
    """Predicted and measured mean seconds of a kind of action (forward, send, …) in a stage."""

    stage: int
    kind: str
    predicted_seconds: float
    measured_seconds: float


def differences(
    plan: Plan, schedule: Schedule, steps: Sequence[Steps], predicted: Timeline
) -> list[ActionDifference]:
    """Return mean predicted and measured seconds of each kind of action (forward, send, …) in each
    stage, over all recorded ``steps`` of all ranks."""
    rows, found = rows_of(plan, schedule), []
    expected: dict[tuple[int, str], list[float]] = defaultdict(list)
    measured: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in (event for own in predicted.events for event in own):
        expected[event.action.stage, event.action.kind].append(
            event.end_seconds - event.start_seconds
        )
    for lane in _lanes(rows):
        for number in range(min(len(own) for own in steps)):
            timeline = measured_timeline(schedule, [steps[rank][number] for rank in lane], 0.0)
            for event in (event for own in timeline.events for event in own):
                measured[event.action.stage, event.action.kind].append(
                    event.end_seconds - event.start_seconds
                )
    for stage in range(schedule.num_stages):
        for kind in NAMES:
            if (stage, kind) in expected and (stage, kind) in measured:
                both = mean(expected[stage, kind]), mean(measured[stage, kind])
                if kind == REDUCE:  # an event for each of its parts
                    both = sum(expected[stage, kind]), both[1]
                found.append(ActionDifference(stage, kind, *both))
    return found


def print_differences(
    plan: Plan, schedule: Schedule, steps: Sequence[Steps], predicted: Timeline, console: Console
) -> None:
    """Print a table of predicted and measured seconds, and their ratio."""
    table = plain_table(
        ("stage", "right"),
        ("action", "left"),
        ("predicted", "right"),
        ("measured", "right"),
        ("measured / predicted", "right"),
    )
    for each in differences(plan, schedule, steps, predicted):
        table.add_row(
            str(each.stage),
            NAMES[each.kind],
            seconds_text(each.predicted_seconds),
            seconds_text(each.measured_seconds),
            _ratio(each.measured_seconds, each.predicted_seconds),
        )
    ranks = [rank for own in rows_of(plan, schedule) for rank in own]
    whole = mean(
        max(steps[rank][number].end_seconds for rank in ranks)
        - min(steps[rank][number].start_seconds for rank in ranks)
        for number in range(min(len(own) for own in steps))
    )
    table.add_row(
        "",
        "whole step",
        seconds_text(predicted.step_seconds),
        seconds_text(whole),
        _ratio(whole, predicted.step_seconds),
    )
    console.print(f"\nMean seconds of an action in {len(steps[ranks[0]])} recorded steps")
    console.print(table)


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else "–"
