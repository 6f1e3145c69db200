"""The simulator against closed forms."""

import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.simulator.actions import Schedule, parse_table
from autoparallel.cost_model.simulator.simulator import StageCosts, simulate, step_seconds
from autoparallel.planner.schedules.schedules import build_schedule

stages = st.integers(1, 7)
microbatches = st.integers(1, 12)
dyadic = st.integers(1, 64).map(lambda n: n / 16)


def uniform(num_stages: int, *, send: float = 0.0, forward: float = 1.0, backward: float = 2.0):
    return StageCosts(
        forward_seconds=[forward] * num_stages,
        backward_seconds=[backward] * num_stages,
        send_seconds=[send] * (num_stages - 1),
        activation_bytes=[1000] * num_stages,
        static_bytes=[50] * num_stages,
    )


@given(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), stages, microbatches, dyadic, dyadic)
def test_without_communication_the_bubble_is_that_of_the_closed_form(
    name, num_stages, num_microbatches, forward, backward
):
    """(D-1)/(D-1+N): Narayanan et al. 2021, section 2.2. Dyadic seconds make sums exact."""
    timeline = simulate(
        build_schedule(name, num_stages, num_microbatches),
        uniform(num_stages, forward=forward, backward=backward),
    )
    slots = num_stages - 1 + num_microbatches
    assert timeline.step_seconds == slots * (forward + backward)
    assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / slots, abs=1e-12)


fractions = st.fractions(min_value=Fraction(1, 50), max_value=50, max_denominator=97)


@given(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), stages, microbatches, fractions, fractions)
def test_the_bubble_is_exactly_that_of_the_closed_form(
    name, num_stages, num_microbatches, forward, backward
):
    """(D-1)/(D-1+N), in exact arithmetic."""
    timeline = simulate(
        build_schedule(name, num_stages, num_microbatches),
        StageCosts([forward] * num_stages, [backward] * num_stages),
    )
    assert timeline.bubble_fraction == Fraction(num_stages - 1, num_stages - 1 + num_microbatches)


@given(
    st.sampled_from(["interleaved-1f1b", "bfs"]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    fractions,
    fractions,
)
def test_chunks_divide_the_bubble_exactly(name, ranks, rounds, chunks, forward, backward):
    """(D-1)/(D-1+KN) for N a multiple of D: Narayanan et al. 2021, section 2.2."""
    num_microbatches, num_stages = ranks * rounds, ranks * chunks
    timeline = simulate(
        build_schedule(name, num_stages, num_microbatches, num_chunks=chunks),
        StageCosts([forward] * num_stages, [backward] * num_stages),
    )
    slots = ranks - 1 + chunks * num_microbatches
    assert timeline.step_seconds == slots * (forward + backward)
    assert timeline.bubble_fraction == Fraction(ranks - 1, slots)


def test_interleaving_costs_memory_that_is_flat_in_the_microbatches():
    """Rank r of D holds (K-1)D + 2(D-1-r) + 1 chunks: warm-up and one more. BFS holds all."""

    def peaks(name, count):
        schedule = build_schedule(name, 8, count, num_chunks=2)
        return simulate(schedule, uniform(8)).peak_activation_bytes

    assert [peaks("interleaved-1f1b", n) for n in (12, 16, 64)] == [(11000, 9000, 7000, 5000)] * 3
    assert [peaks("bfs", n) for n in (8, 64)] == [(16000,) * 4, (128000,) * 4]


def test_the_memory_of_1f1b_is_flat_in_the_microbatches_and_that_of_gpipe_grows():
    peaks = {
        name: [
            simulate(build_schedule(name, 4, n), uniform(4)).peak_activation_bytes
            for n in (8, 16, 64)
        ]
        for name in ("1f1b", "gpipe")
    }
    assert peaks["1f1b"] == [(4000, 3000, 2000, 1000)] * 3
    assert peaks["gpipe"] == [(n * 1000,) * 4 for n in (8, 16, 64)]


def test_static_bytes_are_in_the_peak_and_in_the_memory_over_time():
    timeline = simulate(build_schedule("1f1b", 2, 4), uniform(2))
    assert timeline.peak_memory_bytes == (2050, 1050)
    for changes in timeline.memory_bytes:
        assert changes[0] == (0.0, 50)
        assert changes[-1][1] == 50


def test_gpipe_pays_every_hop_once_per_direction():
    """(N+D-1)(f+b) + 2(D-1)c while a message is shorter than the compute that hides it."""
    timeline = simulate(build_schedule("gpipe", 4, 8, ahead=2), uniform(4, send=0.25))
    assert timeline.step_seconds == 11 * 3 + 2 * 3 * 0.25


def test_a_receive_at_its_use_shows_each_message():
    """Without receives ahead each of GPipe's 8 micro-batches pays its hop on the next stage."""
    ahead, plain = (
        simulate(build_schedule("gpipe", 2, 8, ahead=ahead), uniform(2, send=0.25)).step_seconds
        for ahead in (2, 0)
    )
    assert (ahead, plain) == (9 * 3 + 2 * 0.25, 9 * 3 + 2 * 8 * 0.25)


def test_1f1b_pays_the_round_trip_again_and_eager_1f1b_hides_it():
    """1F1B holds D-s micro-batches at stage s: a round trip is paid in every turn."""
    lazy = simulate(build_schedule("1f1b", 4, 16, ahead=2), uniform(4, send=0.25))
    eager = simulate(build_schedule("eager-1f1b", 4, 16, ahead=2), uniform(4, send=0.25))
    assert eager.step_seconds == 19 * 3 + 2 * 3 * 0.25
    assert lazy.step_seconds > 1.05 * eager.step_seconds


def test_the_slowest_stage_sets_the_pace():
    """The last stage computes without a break: f of the first, N (f + b) of its own, b back."""
    costs = StageCosts([1.0, 2.0], [2.0, 4.0])
    timeline = simulate(build_schedule("1f1b", 2, 6), costs)
    assert timeline.step_seconds == 1 + 6 * (2 + 4) + 2


def test_a_step_waits_for_its_own_stage_only():
    costs = StageCosts([1.0, 1.0], [2.0, 2.0], step_seconds=[5.0, 1.0])
    timeline = simulate(build_schedule("1f1b", 2, 2), costs)
    assert timeline.step_seconds == 3 * 3 + 5


def test_a_channel_carries_one_message_at_a_time():
    """Messages of 10 s follow each other although the sender computes one per second."""
    costs = StageCosts([1.0, 1.0], [1.0, 1.0], send_seconds=[10.0])
    timeline = simulate(build_schedule("inference", 2, 3, ahead=3), costs)
    assert timeline.step_seconds == 1 + 3 * 10 + 1
    assert timeline.exposed_seconds == (0.0, 28.0)


def test_a_ranks_messages_to_all_others_share_its_port():
    """Stage 0 sends 3 s to both others at 1: both are there at 7."""
    table = parse_table("0F0 0SEND_F0\n1RECV_F0 1F0\n2RECV_F0 2F0")
    costs = StageCosts([1.0] * 3, [1.0] * 3, send_seconds=[3.0, 3.0], edges=((0, 1), (0, 2)))
    timeline = simulate(Schedule("fan", 1, (0, 1, 2), table, edges=((0, 1), (0, 2))), costs)
    assert [row[-1].end_seconds for row in timeline.events[1:]] == [1 + 6 + 1] * 2


def test_latency_keeps_no_message_from_leaving():
    """Of 10 s 8 are latency: messages leave at 1, 3, 5 and the last is there at 15, not at 31."""
    costs = StageCosts([1.0] * 2, [1.0] * 2, send_seconds=[10.0], send_latency_seconds=[8.0])
    timeline = simulate(build_schedule("inference", 2, 3, ahead=3), costs)
    assert timeline.step_seconds == 1 + 2 + 2 + 10 + 1
    one = simulate(build_schedule("inference", 2, 1), costs)
    assert one.step_seconds == 1 + 10 + 1


def test_calls_take_their_ranks_time_and_the_message_leaves_at_once():
    """Sends at 1 and 2.5, posts before each forward; 2 s on the way: 1 + 2, then 2.5 + 2."""
    table = parse_table("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1")
    costs = StageCosts(
        [1.0] * 2,
        [1.0] * 2,
        send_seconds=[2.0],
        send_latency_seconds=[2.0],
        send_call_seconds=[0.5],
        receive_call_seconds=[0.25],
    )
    timeline = simulate(Schedule("calls", 2, (0, 1), table), costs)
    starts = [[e.start_seconds for e in row if e.stream == "compute"] for row in timeline.events]
    assert starts == [[0.0, 1.5], [3.0, 4.5]]
    assert timeline.exposed[0].messages == 1.0
    assert timeline.exposed[1].messages == 0.5 + (3 - 1) + (4.5 - 4)


def test_the_way_back_may_cost_something_else():
    costs = StageCosts([1.0] * 2, [1.0] * 2, send_seconds=[1.0], send_backward_seconds=[4.0])
    assert simulate(build_schedule("gpipe", 2, 1), costs).step_seconds == 1 + 1 + 1 + 1 + 4 + 1


def test_a_message_waits_until_its_receive_is_posted():
    table = parse_table("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1F0 1RECV_F1 1F1")
    costs = StageCosts([1.0, 5.0], [0.0, 0.0], send_seconds=[1.0])
    assert simulate(Schedule("late", 2, (0, 1), table), costs).step_seconds == 1 + 1 + 5 + 1 + 5


def test_halves_of_a_backward_add_up_to_it():
    whole = Schedule("whole", 1, (0,), parse_table("0F0 0B0"))
    split = Schedule("split", 1, (0,), parse_table("0F0 0I0 0W0"))
    costs = StageCosts([1.0], [3.0], weight_backward_seconds=[1.25], activation_bytes=[7])
    assert simulate(whole, costs).step_seconds == simulate(split, costs).step_seconds == 4.0
    assert [event.end_seconds for event in simulate(split, costs).events[0]] == [1.0, 2.75, 4.0]


def test_events_of_a_stream_do_not_overlap_and_a_message_lies_between_its_ends():
    timeline = simulate(build_schedule("eager-1f1b", 4, 6), uniform(4, send=0.5))
    for events in timeline.events:
        compute = [event for event in events if event.stream == "compute"]
        for before, after in pairwise(compute):
            assert before.end_seconds <= after.start_seconds
    streams = [event.stream for row in timeline.events for event in row]
    assert streams.count("send forward") == streams.count("send backward") == 3 * 6


def test_more_communication_is_never_faster():
    schedule = build_schedule("1f1b", 4, 8)
    steps = [simulate(schedule, uniform(4, send=c)).step_seconds for c in (0, 0.1, 0.5, 1, 3)]
    assert steps == sorted(steps)


def test_a_deadlock_and_costs_of_another_size_are_refused():
    table = parse_table("0RECV_B0 0F0 0B0 0SEND_F0\n1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(ValueError, match="deadlocks at 0B0, 1F0"):
        simulate(Schedule("crossed", 1, (0, 1), table), uniform(2))
    with pytest.raises(ValueError, match="costs of 2 stages"):
        simulate(build_schedule("1f1b", 3, 3), uniform(2))
    with pytest.raises(ValueError, match="send_seconds has 2 entries"):
        StageCosts([1.0, 1.0], [1.0, 1.0], send_seconds=[1.0, 1.0])


def test_schedules_and_the_simulator_do_not_import_torch():
    program = (
        "import sys; import autoparallel.cost_model.simulator.simulator; "
        "import autoparallel.planner.schedules.schedules, autoparallel.planner.schedules.check; "
        "import autoparallel.planner.costs.conversions; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


QI = {
    (8, "1.5B"): {24: 0.2431, 32: 0.1985, 64: 0.1240},
    (8, "6.2B"): {24: 0.2347, 32: 0.1898, 64: 0.1091},
    (16, "14.6B"): {48: 0.2552, 64: 0.2082, 128: 0.1251},
}
"""Bubble of 1F1B by (stages, model) and micro-batches, which the authors computed from profiled
times they do not print: Qi et al. 2023, arXiv:2401.10241, table 5."""


def bubble_with_messages(num_stages: int, num_microbatches: int, send: float) -> float:
    """Qi et al.'s rate: what is more than N (f + b), over the step; f + b is 1."""
    costs = uniform(num_stages, send=send, forward=1 / 3, backward=2 / 3)
    schedule = build_schedule("1f1b", num_stages, num_microbatches)
    return 1 - num_microbatches / simulate(schedule, costs).step_seconds


@pytest.mark.parametrize(
    "case",
    [case if case[0] < 16 else pytest.param(case, marks=pytest.mark.slow) for case in QI],
    ids=str,
)
def test_published_bubbles_of_1f1b_follow_from_one_message_time(case):
    """The message time that explains the longest step predicts the other two within 0.005.

    Without messages the rates would be (D-1)/(D-1+N), 0.01 to 0.03 less.
    """
    num_stages, _ = case
    rows = QI[case]
    longest = max(rows)
    low, high = 0.0, 0.1
    for _ in range(14):
        send = (low + high) / 2
        if bubble_with_messages(num_stages, longest, send) < rows[longest]:
            low = send
        else:
            high = send
    for count, published in rows.items():
        assert abs(bubble_with_messages(num_stages, count, low) - published) < 0.005
        assert published - (num_stages - 1) / (num_stages - 1 + count) > 0.008


FORK = ((0, 2), (1, 2))
TOWERS = StageCosts((2.0, 2.0, 1.0), (4.0, 4.0, 2.0), edges=FORK)
"""Two towers of 2 s forward and 4 s back, and a head of 1 s and 2 s that needs both."""


def test_towers_run_at_the_same_time():
    """Forward 2 and 1, back 2 and 4: 9 s, where one after the other they take 15."""
    forked = simulate(build_schedule("1f1b", 3, 1, edges=FORK), TOWERS)
    assert forked.step_seconds == 2 + 1 + 2 + 4
    chained = StageCosts(TOWERS.forward_seconds, TOWERS.backward_seconds)
    assert simulate(build_schedule("1f1b", 3, 1), chained).step_seconds == 15


def test_a_stage_waits_for_the_last_of_its_messages_which_share_its_port():
    """0.5 s and 3 s to the head: it starts at 2 + 3.5; back they come at 8.5 + 1 and + 3.5."""
    costs = StageCosts((2.0, 2.0, 1.0), (4.0, 4.0, 2.0), send_seconds=(0.5, 3.0), edges=FORK)
    timeline = simulate(build_schedule("1f1b", 3, 1, edges=FORK), costs)
    begins = {
        str(e.action): e.start_seconds
        for row in timeline.events
        for e in row
        if e.stream == "compute"
    }
    assert begins["2F0"] == 5.5
    assert (begins["0B0"], begins["1B0"]) == (9.5, 12)
    assert timeline.step_seconds == 16
    assert timeline.exposed[2].messages == 3.5


@pytest.mark.parametrize(("name", "seconds"), [("1f1b", 25), ("gpipe", 27)])
def test_towers_of_four_micro_batches_keep_busy(name, seconds):
    """1F1B: a tower is busy for 4·6 s and idle from 4 to 5, when the first gradient comes.

    GPipe: the head is done forward at 9, its first gradient comes at 11, then 4·4 s back.
    """
    timeline = simulate(build_schedule(name, 3, 4, edges=FORK), TOWERS)
    assert timeline.step_seconds == seconds
    busy = 2 * 4 * 6 + 4 * 3
    assert timeline.bubble_fraction == pytest.approx(1 - busy / (3 * seconds))


def test_costs_of_other_edges_are_refused():
    with pytest.raises(ValueError, match="edges"):
        simulate(build_schedule("1f1b", 3, 1, edges=((0, 1), (0, 2))), TOWERS)
    with pytest.raises(ValueError, match="send_seconds has 1 entries"):
        StageCosts((1.0,) * 3, (1.0,) * 3, send_seconds=(1.0,), edges=FORK)
    with pytest.raises(ValueError, match="no edge from stage 2 to 1"):
        build_schedule("1f1b", 3, 1, edges=((0, 1), (2, 1)))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("zb-h2", 1), ("interleaved", 3), ("zbv", 2), ("inference", 1)],
)
def test_the_seconds_of_a_step_are_those_of_its_timeline(name: str, chunks: int) -> None:
    number = 4 * chunks
    draw = [[1.0 + (7 * stage + way) % 5 for stage in range(number)] for way in range(4)]
    for messages in (1.0, 0.0):
        costs = StageCosts(
            draw[0],
            draw[1],
            send_seconds=[messages * each for each in draw[2][1:]],
            send_backward_seconds=[messages * each for each in draw[3][1:]],
            step_seconds=draw[3],
            gradient_sync_seconds=draw[2],
            gather_seconds=draw[0],
            send_latency_seconds=(0.5,) * (number - 1),
        )
        table = build_schedule(name, number, 8, num_chunks=chunks)
        assert step_seconds(table, costs) == simulate(table, costs).step_seconds
