"""Schedules: golden tables, torch's own orders, and properties that every schedule has."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.cost_model.actions import (
    Action,
    Schedule,
    compute_only,
    format_table,
    parse_action,
    parse_table,
)
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planner.schedule_check import check_schedule, peak_in_flight
from autoparallel.planner.schedules import SCHEDULES, build_schedule

sizes = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 7), st.integers(1, 12))


def orders(name: str, num_stages: int, num_microbatches: int) -> str:
    table = build_schedule(name, num_stages, num_microbatches).table
    return format_table([compute_only(row) for row in table])


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert orders("gpipe", 2, 3) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_1f1b_is_the_picture_of_pipedream_flush():
    """Narayanan et al. 2021 (arXiv:2104.04473), figure 4 top, with four micro-batches."""
    assert orders("1f1b", 4, 4) == (
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n"
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3\n"
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3\n"
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"
    )


def test_eager_1f1b_warms_up_twice_as_long():
    assert orders("eager-1f1b", 3, 6) == (
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5\n"
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5\n"
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5"
    )


def test_the_whole_table_of_a_small_1f1b():
    assert format_table(build_schedule("1f1b", 3, 2).table) == (
        "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1 0REDUCE 0STEP\n"
        "1RECV_F0 1RECV_F1 1RECV_B0 1F0 1SEND_F0 1RECV_B1 1F1 1SEND_F1 "
        "1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE 1STEP\n"
        "2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 2B1 2SEND_B1 2REDUCE 2STEP"
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_pipeline_of_one_stage_sends_nothing(name):
    (row,) = build_schedule(name, 1, 3).table
    assert not any("SEND" in action.kind or "RECV" in action.kind for action in row)


@settings(max_examples=120, deadline=None)
@given(sizes, st.integers(0, 4))
def test_every_schedule_passes_the_checks_at_every_prefetch(size, prefetch):
    check_schedule(build_schedule(*size, prefetch=prefetch))


@settings(max_examples=120, deadline=None)
@given(sizes)
def test_the_promised_activations_in_flight_are_those_of_the_table(size):
    name, num_stages, num_microbatches = size
    promised = tuple(
        SCHEDULES[name].in_flight(num_stages, num_microbatches, stage)
        for stage in range(num_stages)
    )
    assert peak_in_flight(build_schedule(*size)) == promised


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_a_table_survives_its_text(size):
    table = build_schedule(*size).table
    assert parse_table(format_table(table)) == table


@pytest.mark.parametrize(
    ("name", "torch_name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")]
)
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 1), (2, 2), (2, 5), (4, 4), (4, 8)]
)
def test_compute_orders_equal_torch_pipelining(name, torch_name, num_stages, num_microbatches):
    """Its list for the last stage of 1F1B counts forwards from 1, so they are counted again."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(getattr(pipelining, torch_name))
    if not hasattr(theirs, "_get_pipeline_order"):
        pytest.skip("this torch does not list its actions")
    theirs._num_stages, theirs._n_microbatches = num_stages, num_microbatches
    table = theirs._get_pipeline_order()
    expected = []
    for rank in range(num_stages):
        count: Counter[str] = Counter()
        for action in table[rank]:
            kind = action.computation_type.value
            if kind in ("F", "B"):
                expected.append(f"{rank}{kind}{count[kind]}")
                count[kind] += 1
    assert orders(name, num_stages, num_microbatches).split() == expected


@pytest.mark.parametrize(
    "text", ["1F0", "12SEND_B34", "0RECV_F7", "3W1", "2I0", "1REDUCE", "0STEP"]
)
def test_an_action_survives_its_text(text):
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "1F", "1X0", "1STEP3", "1REDUCE0", "-1F0"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action"):
        parse_action(text)


@pytest.mark.parametrize("arguments", [("zigzag", 2, 2), ("1f1b", 0, 2), ("1f1b", 2, 0)])
def test_an_unknown_schedule_or_an_empty_one_is_a_usage_error(arguments):
    with pytest.raises(UsageError):
        build_schedule(*arguments)


def edited(old: str, new: str, *, name: str = "1f1b") -> Schedule:
    """A small schedule of which one piece of text was replaced."""
    schedule = build_schedule(name, 2, 2)
    text = format_table(schedule.table)
    assert old in text
    return replace(schedule, table=parse_table(text.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F1 ", "", "0F1 is missing"),
        ("0B1 ", "", "0B1 is missing"),
        ("1RECV_F1 ", "", "1RECV_F1 is missing"),
        ("0SEND_F1 ", "", "1RECV_F1 waits for a message that nobody sends"),
        ("1F0 1B0", "1B0 1F0", "1B0 comes before 1F0"),
        ("0F1", "0F1 0F1", "0F1 is there twice"),
        ("0F1", "0F1 0F2", "0F2 names a micro-batch"),
        ("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0", "rank 1 posts 1RECV_F1 where"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "deadlock"),
        ("0REDUCE ", "", "0REDUCE is missing"),
        ("0B1 0REDUCE", "0REDUCE 0B1", "0REDUCE is not between"),
        ("0STEP", "0STEP 1STEP", "1STEP is in the row of pipeline rank 0"),
        ("0STEP", "0STEP 7STEP", "7STEP names a stage"),
        ("1STEP", "1SEND_F0 1STEP", "1SEND_F0 has no stage to send to"),
    ],
)
def test_a_damaged_table_is_refused_by_name(old, new, message):
    with pytest.raises(PlanError, match=message):
        check_schedule(edited(old, new))


def test_ranks_that_wait_for_each_other_are_a_deadlock():
    """Stage 0 takes its gradient before it sends what the gradient depends on."""
    table = parse_table(
        "0RECV_B0 0F0 0B0 0SEND_F0 0REDUCE 0STEP\n1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1STEP"
    )
    with pytest.raises(PlanError, match="deadlock") as caught:
        check_schedule(Schedule("crossed", 1, (0, 1), table))
    assert caught.value.why == "rank 0 at 0B0; rank 1 at 1F0"


def test_a_split_backward_frees_its_activations_at_the_weight_half():
    table = parse_table("0F0 0I0 0F1 0W0 0I1 0W1 0REDUCE 0STEP")
    schedule = Schedule("split", 2, (0,), table)
    check_schedule(schedule)
    assert peak_in_flight(schedule) == (2,)


def test_a_rank_may_own_several_stages():
    table = parse_table("0F0 1F0 1B0 0B0 0REDUCE 1REDUCE 0STEP 1STEP")
    check_schedule(Schedule("folded", 1, (0, 0), table))
    assert Action("F", 1, 0) in table[0]
