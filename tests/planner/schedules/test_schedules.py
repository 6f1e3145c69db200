"""Schedules: golden tables, torch's own orders, and properties that every schedule has."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_tables import peak_in_flight

from autoparallel.cost_model.simulator.actions import (
    Action,
    Schedule,
    Wiring,
    compute_only,
    format_table,
    parse_action,
    parse_table,
)
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planner.requests.request import SCHEDULES as RUN_SCHEDULES
from autoparallel.planner.schedules.check import check_schedule
from autoparallel.planner.schedules.orders import depths, round_size
from autoparallel.planner.schedules.schedules import LOOPED, SCHEDULES, build_schedule, in_flight

V_SHAPED = ("zbv", "dualpipev")
SINGLE = sorted(set(SCHEDULES) - set(LOOPED) - {*V_SHAPED, "chimera"})
single_sizes = st.tuples(st.sampled_from(SINGLE), st.integers(1, 7), st.integers(1, 12), st.just(1))
looped_sizes = st.builds(
    lambda name, ranks, microbatches, chunks: (name, ranks * chunks, microbatches, chunks),
    st.sampled_from(LOOPED),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 3),
).filter(lambda size: size[0] == "bfs" or round_size(size[1] // size[3], size[2]) > 0)
v_sizes = st.builds(
    lambda name, ranks, more: (name, 2 * ranks, more + 2 * ranks * (name == "dualpipev"), 2),
    st.sampled_from(V_SHAPED),
    st.integers(1, 5),
    st.integers(1, 12),
)
two_way_sizes = st.builds(
    lambda half, microbatches: ("chimera", 2 * half, microbatches, 1),
    st.integers(1, 4),
    st.integers(2, 20),
)
by_stage_sizes = single_sizes | looped_sizes | v_sizes
sizes = by_stage_sizes | two_way_sizes


def built(size: tuple[str, int, int, int], **options) -> Schedule:
    name, num_stages, num_microbatches, num_chunks = size
    return build_schedule(name, num_stages, num_microbatches, num_chunks=num_chunks, **options)


def orders(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> str:
    table = built((name, num_stages, num_microbatches, num_chunks)).table
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
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE 0STEP\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 "
        "1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1REDUCE 1STEP\n"
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1 2REDUCE 2STEP"
    )


def test_interleaved_1f1b_is_the_picture_of_megatron():
    """Narayanan et al. 2021 (arXiv:2104.04473), figure 4 bottom: four ranks, two chunks each.

    Device 1 of the figure warms up with 1 2 3 4 of chunk 1, 1 2 3 4 of chunk 2, 5 6 7 of
    chunk 1; device 4 with 1 2 3 4 of chunk 1.
    """
    lines = orders("interleaved-1f1b", 8, 8, 2).splitlines()
    assert lines[0] == (
        "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 "
        "0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 "
        "0B2 0B3 4B4 4B5 4B6 4B7 0B4 0B5 0B6 0B7"
    )
    assert lines[3] == (
        "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 "
        "3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 7B6 7F7 7B7 3B4 3B5 3B6 3B7"
    )


def test_the_whole_table_of_a_small_interleaved_1f1b():
    """A receive stands before its use, unless it is asked for ahead."""
    schedule = build_schedule("interleaved-1f1b", 4, 2, num_chunks=2)
    assert format_table(schedule.table) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 "
        "2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1 "
        "0REDUCE 2REDUCE 0STEP 2STEP\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 "
        "3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 "
        "1REDUCE 3REDUCE 1STEP 3STEP"
    )
    ahead = build_schedule("interleaved-1f1b", 4, 2, num_chunks=2, ahead=2)
    assert format_table(ahead.table[1:]) == (
        "1RECV_F0 1RECV_F1 3RECV_F0 1F0 1SEND_F0 1F1 1SEND_F1 3RECV_F1 3F0 3B0 3SEND_B0 "
        "1RECV_B0 3F1 1RECV_B1 3B1 3SEND_B1 1B0 1SEND_B0 1B1 1SEND_B1 "
        "1REDUCE 3REDUCE 1STEP 3STEP"
    )


def test_receives_ahead_rely_on_work_that_overtakes_them():
    """Rank 0 would wait for the gradient of what it has not sent."""
    with pytest.raises(PlanError, match="deadlock"):
        check_schedule(build_schedule("1f1b", 2, 2, ahead=2))


def test_looped_bfs_runs_each_chunk_for_all_microbatches():
    assert orders("bfs", 4, 3, 2) == (
        "0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0\n"
        "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0"
    )


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [
        ("interleaved-1f1b", "ScheduleInterleaved1F1B"),
        ("bfs", "ScheduleLoopedBFS"),
        ("zb-h1", "ScheduleInterleavedZeroBubble"),
    ],
)
@pytest.mark.parametrize(
    ("ranks", "chunks", "num_microbatches"),
    [(1, 2, 3), (2, 2, 4), (2, 3, 2), (4, 2, 8), (4, 3, 10), (4, 2, 3), (8, 4, 16), (3, 1, 6)],
)
def test_looped_orders_equal_torch_pipelining(name, torch_name, ranks, chunks, num_microbatches):
    """Rank by rank, without the idle slots that torch lists; rounds may be uneven to the ranks."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(getattr(pipelining, torch_name))
    if not hasattr(theirs, "_calculate_single_rank_operations"):
        pytest.skip("this torch does not list its actions")
    theirs.pp_group_size, theirs._stages = ranks, [None] * chunks
    theirs.n_local_stages, theirs._n_microbatches = chunks, num_microbatches
    theirs.number_of_rounds = max(1, num_microbatches // ranks)
    theirs.microbatches_per_round = num_microbatches // theirs.number_of_rounds
    expected = []
    for rank in range(ranks):
        row = theirs._calculate_single_rank_operations(rank)
        expected.append(" ".join(str(action) for action in row if action is not None))
    assert orders(name, ranks * chunks, num_microbatches, chunks).splitlines() == expected


@pytest.mark.parametrize(
    ("arguments", "chunks", "message"),
    [
        (("1f1b", 4, 4), 2, "runs one chunk per rank"),
        (("zbv", 6, 4), 3, "runs 2 chunks per rank"),
        (("dualpipev", 8, 7), 2, "at least as many micro-batches as stages"),
        (("chimera", 3, 4), 1, "an even number of ranks"),
        (("chimera", 4, 1), 1, "at least two micro-batches"),
        (("bfs", 4, 4), 3, "into 3 chunks"),
        (("bfs", 4, 4), 0, "into 0 chunks"),
        (("interleaved-1f1b", 8, 9), 2, "cannot be divided into rounds"),
    ],
)
def test_chunks_that_a_schedule_cannot_have_are_a_usage_error(arguments, chunks, message):
    with pytest.raises(UsageError, match=message):
        build_schedule(*arguments, num_chunks=chunks)


@pytest.mark.parametrize("name", RUN_SCHEDULES)
def test_what_the_search_chooses_among_runs_one_stage_per_rank(name):
    assert name in SCHEDULES
    assert len(build_schedule(name, 3, 6, num_chunks=1).table) == 3


@pytest.mark.parametrize("name", SINGLE)
def test_a_pipeline_of_one_stage_sends_nothing(name):
    (row,) = build_schedule(name, 1, 3).table
    assert not any("SEND" in action.kind or "RECV" in action.kind for action in row)


@given(sizes)
def test_every_schedule_passes_the_checks(size):
    check_schedule(built(size))


@given(by_stage_sizes)
def test_the_promised_activations_in_flight_are_those_of_the_table(size):
    name, num_stages, num_microbatches, num_chunks = size
    promised = tuple(
        SCHEDULES[name].in_flight(num_stages, num_microbatches, stage, num_chunks)
        for stage in range(num_stages)
    )
    assert peak_in_flight(built(size)) == promised


@given(sizes)
def test_a_table_survives_its_text(size):
    table = built(size).table
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


@pytest.mark.parametrize("text", ["", "F0", "1F", "1X0", "1STEP3.1", "1REDUCE0.1", "-1F0"])
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action"):
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
        ("0SEND_F1 ", "", "1RECV_F1 waits for a message that is never sent"),
        ("1F0 1B0", "1B0 1F0", "1B0 comes before 1F0"),
        ("1RECV_F1 1F1", "1F1 1RECV_F1", "rank 1 at 1F1"),
        ("0F1", "0F1 0F1", "0F1 appears twice"),
        ("0F1", "0F1 0F2", "0F2 names a micro-batch"),
        ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0", "0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1", "deadlock"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "deadlock"),
        ("0REDUCE ", "", "0STEP has no REDUCE after the last backward"),
        ("0B1 0REDUCE", "0REDUCE 0B1", "0STEP has no REDUCE after the last backward"),
        ("0STEP", "", "0STEP is missing"),
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
    assert caught.value.why == "rank 0 at 0RECV_B0; rank 1 at 1RECV_F0"


def test_a_split_backward_frees_its_activations_at_the_weight_half():
    table = parse_table("0F0 0I0 0F1 0W0 0I1 0W1 0REDUCE 0STEP")
    schedule = Schedule("split", 2, (0,), table)
    check_schedule(schedule)
    assert peak_in_flight(schedule) == (2,)


def test_a_rank_may_own_several_stages():
    table = parse_table("0F0 1F0 1B0 0B0 0REDUCE 1REDUCE 0STEP 1STEP")
    check_schedule(Schedule("folded", 1, (0, 0), table))
    assert Action("F", 1, 0) in table[0]


FORK = ((0, 1), (0, 2), (1, 3), (2, 3))


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "inference"])
@pytest.mark.parametrize("edges", [FORK, ((0, 2), (1, 2)), ((0, 1), (1, 2), (2, 4), (3, 4))])
def test_stages_of_any_graph_have_sound_tables(name, num_microbatches, edges):
    num_stages = 1 + max(target for _, target in edges)
    schedule = build_schedule(name, num_stages, num_microbatches, edges=edges)
    check_schedule(schedule)
    held = tuple(
        in_flight(name, depth, num_stages, num_microbatches)
        for depth in depths(Wiring.of(num_stages, edges))
    )
    assert peak_in_flight(schedule) == held


def test_a_fork_sends_once_to_all_and_receives_once_from_all():
    table = build_schedule("1f1b", 4, 1, edges=FORK).table
    assert format_table(table) == (
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0STEP\n"
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0 1REDUCE 1STEP\n"
        "2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2REDUCE 2STEP\n"
        "3RECV_F0 3F0 3B0 3SEND_B0 3REDUCE 3STEP"
    )


def test_a_message_that_one_of_two_makes_is_missed():
    schedule = build_schedule("1f1b", 4, 1, edges=FORK)
    row = tuple(action for action in schedule.table[2] if str(action) != "2SEND_F0")
    damaged = replace(schedule, table=(*schedule.table[:2], row, schedule.table[3]))
    with pytest.raises(PlanError, match="3RECV_F0 waits for a message that is never sent"):
        check_schedule(damaged)


def test_edges_of_a_chain_make_the_usual_table():
    edges = ((0, 1), (1, 2))
    assert build_schedule("1f1b", 3, 4, edges=edges) == build_schedule("1f1b", 3, 4)


def test_a_looped_schedule_runs_no_graph():
    with pytest.raises(UsageError, match="parallel branches") as caught:
        build_schedule("bfs", 4, 4, num_chunks=2, edges=FORK)
    assert caught.value.code == "AP154"
