"""The Chrome trace: its structure, and that it says what the timeline says."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from event_simulation import beside_compute

from autoparallel.cost_model.simulator.simulator import simulate
from autoparallel.cost_model.simulator.stage_costs import Buckets, StageCosts
from autoparallel.cost_model.simulator.timeline import STREAMS
from autoparallel.cost_model.simulator.trace import chrome_trace
from autoparallel.planner.schedules.schedules import build_schedule

CASES = [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("bfs", 3), ("inference", 1)]


def timeline_of(name: str, chunks: int):
    stages = 3 * chunks
    costs = StageCosts(
        [1.0] * stages,
        [2.0] * stages,
        send_seconds=[0.25] * (stages - 1),
        activation_bytes=[100] * stages,
        static_bytes=[7] * stages,
        step_seconds=[0.5] * stages,
        gradient_sync_seconds=[3.0] * stages,
        gather_seconds=[1.0] * stages,
    )
    schedule = build_schedule(name, stages, 6, num_chunks=chunks)
    return simulate(
        schedule, beside_compute(costs, 1.25, [Buckets.equal(4)] * stages), replicas=[8] * 3
    )


@pytest.fixture(params=CASES, ids=lambda case: case[0])
def traced(request):
    timeline = timeline_of(*request.param)
    return timeline, json.loads(json.dumps(chrome_trace(timeline)))["traceEvents"]


def test_every_event_has_the_keys_of_its_phase(traced):
    """M, X, s, f and C, as the Trace Event Format has them."""
    needed = {
        "M": {"name", "args"},
        "X": {"name", "cat", "ts", "dur"},
        "C": {"name", "ts", "args"},
        "s": {"name", "cat", "id", "ts"},
        "f": {"name", "cat", "id", "ts", "bp"},
    }
    for event in traced[1]:
        assert needed[event["ph"]] | {"pid", "tid"} <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_slices_are_the_timeline_and_the_last_ends_with_the_step(traced):
    timeline, events = traced
    slices = [event for event in events if event["ph"] == "X"]
    expected = Counter(
        (rank, STREAMS.index(event.stream), str(event.action))
        for rank, own in enumerate(timeline.events)
        for event in own
    )
    assert Counter((e["pid"], e["tid"], e["name"]) for e in slices) == expected
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(timeline.step_seconds * 1e6)


def test_slices_of_a_thread_do_not_overlap(traced):
    threads = defaultdict(list)
    for event in traced[1]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for spans in threads.values():
        for (start, duration), (after, _) in pairwise(sorted(spans)):
            assert start + duration <= after + 1e-6


def test_every_arrow_goes_from_a_message_to_the_compute_that_it_starts(traced):
    _, events = traced
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    finishes = {event["id"]: event for event in events if event["ph"] == "f"}
    slices = [event for event in events if event["ph"] == "X"]
    messages = [event for event in slices if event["name"].count("SEND")]
    assert len(starts) == len(finishes) == len(messages) > 0
    assert starts.keys() == finishes.keys()
    spans = {(e["pid"], e["tid"], e["ts"]): e for e in slices}
    for name, start in starts.items():
        message = spans[start["pid"], start["tid"], start["ts"]]
        taker = spans[finishes[name]["pid"], finishes[name]["tid"], finishes[name]["ts"]]
        assert message["ts"] + message["dur"] <= taker["ts"] + 1e-6
        step = 1 if "SEND_F" in message["name"] else -1
        assert taker["args"]["stage"] == message["args"]["stage"] + step
        assert taker["args"]["micro-batch"] == message["args"]["micro-batch"]
        assert STREAMS[taker["tid"]] == "compute"


def test_the_memory_counter_peaks_where_the_timeline_does(traced):
    timeline, events = traced
    for rank, peak in enumerate(timeline.peak_memory_bytes):
        own = [e for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(e["args"]["bytes"] for e in own) == peak
        assert [e["ts"] for e in own] == sorted(e["ts"] for e in own)


def test_processes_and_threads_have_names(traced):
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in traced[1] if e["ph"] == "M"}
    assert names["process_name", 2, 0] == {"name": "pipeline rank 2 (8 devices)"}
    used = {(e["pid"], e["tid"]) for e in traced[1] if e["ph"] == "X"}
    for rank, thread in used:
        assert names["thread_name", rank, thread] == {"name": STREAMS[thread]}
