"""Compute beside collectives: timelines worked out by hand, and a second simulator."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from event_simulation import beside_compute, expand
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.simulator.actions import Schedule, parse_table
from autoparallel.cost_model.simulator.simulator import simulate
from autoparallel.cost_model.simulator.stage_costs import ONE_BUCKET, Buckets, StageCosts
from autoparallel.planner.schedules.schedules import build_schedule

ONE = Schedule("one", 1, (0,), parse_table("0F0 0B0 0REDUCE 0STEP"))


def ends(timeline, stream, rank=0):
    return [event.end_seconds for event in timeline.events[rank] if event.stream == stream]


def test_buckets_are_summed_beside_the_backward_that_makes_them():
    """Shares of 1 s end at 3, 4, 5, 6; a bucket of ½ s follows each; the last is exposed."""
    costs = StageCosts([2.0], [4.0], gradient_sync_seconds=[2.0])
    timeline = simulate(ONE, beside_compute(costs, 1, [Buckets.equal(4)]))
    assert ends(timeline, "gradient sync") == [3.5, 4.5, 5.5, 6.5]
    assert timeline.step_seconds == 6.5
    assert timeline.exposed[0].gradient_sync == 0.5
    assert timeline.slowdown_seconds == (0.0,)


def test_compute_beside_a_collective_goes_slower():
    """Each share after the first does ¼ in its first ½ s, then ¾: 1.25 s."""
    costs = StageCosts([2.0], [4.0], gradient_sync_seconds=[2.0])
    timeline = simulate(ONE, beside_compute(costs, 2, [Buckets.equal(4)]))
    assert ends(timeline, "gradient sync") == [3.5, 4.75, 6.0, 7.25]
    assert ends(timeline, "compute") == [2.0, 6.75, 7.25]
    assert timeline.slowdown_seconds == (0.75,)


def test_sums_that_take_longer_than_the_backward_follow_each_other():
    """Buckets of 2 s from 3 on end at 11; beside them 3 s of backward take 6."""
    costs = StageCosts([2.0], [4.0], gradient_sync_seconds=[8.0])
    free = simulate(ONE, beside_compute(costs, 1, [Buckets.equal(4)]))
    assert (free.step_seconds, free.exposed[0].gradient_sync) == (11.0, 5.0)
    slow = simulate(ONE, beside_compute(costs, 2, [Buckets.equal(4)]))
    assert (slow.step_seconds, slow.exposed[0].gradient_sync) == (11.0, 2.0)
    assert slow.slowdown_seconds == (3.0,)


def test_a_forward_starts_with_its_first_bucket_of_parameters():
    """Buckets at 1 and 2; of the first share ½ is done by 2, so it ends at 3.5."""
    costs = StageCosts([4.0], [1.0], gather_seconds=[2.0])
    free = simulate(ONE, beside_compute(costs, 1, [Buckets.equal(2)]))
    assert (free.events[0][-2].end_seconds, free.exposed[0].gather) == (6.0, 1.0)
    slow = simulate(ONE, beside_compute(costs, 2, [Buckets.equal(2)]))
    assert ends(slow, "compute")[:1] == [5.5]
    assert slow.slowdown_seconds == (0.5,)


def test_a_forward_waits_for_each_bucket_of_parameters():
    """Buckets at 4 and 8: 1 s of compute, 3 s of waiting, 1 s of compute."""
    costs = StageCosts([2.0], [1.0], gather_seconds=[8.0])
    timeline = simulate(ONE, beside_compute(costs, 1, [Buckets.equal(2)]))
    assert ends(timeline, "compute") == [9.0, 10.0, 10.0]
    assert timeline.events[0][1].start_seconds == 4.0
    assert timeline.exposed[0].gather == 7.0
    assert timeline.bubble_fraction == 0.0


def test_nothing_is_hidden_where_all_compute_is_lost_beside_it():
    costs = StageCosts([2.0], [4.0], gradient_sync_seconds=[8.0], gather_seconds=[1.0])
    stopped = replace(costs, slowed_share=[1.0], buckets=[Buckets.equal(4)])
    one, other = simulate(ONE, stopped), simulate(ONE, costs)
    assert one.step_seconds == other.step_seconds == 15.0
    assert one.exposed[0] == other.exposed[0]


def test_without_overlap_everything_is_one_after_the_other():
    costs = StageCosts(
        [2.0], [4.0], gradient_sync_seconds=[8.0], gather_seconds=[3.0], step_seconds=[1.0]
    )
    timeline = simulate(ONE, costs)
    assert timeline.step_seconds == 3 + 2 + 4 + 8 + 1
    assert (timeline.exposed[0].gather, timeline.exposed[0].gradient_sync) == (3.0, 8.0)
    assert timeline.bubble_fraction == 0.0


def test_the_sum_of_one_chunk_slows_the_backward_of_the_next():
    """Chunk 1 backward to 4, its sum 4–6; chunk 0 does 1 of 2 s by 6, ends at 7, sums to 9."""
    table = parse_table("0F0 1F0 1B0 0B0 0REDUCE 1REDUCE 0STEP 1STEP")
    costs = StageCosts([1.0] * 2, [2.0] * 2, gradient_sync_seconds=[2.0] * 2)
    timeline = simulate(Schedule("two chunks", 1, (0, 0), table), beside_compute(costs, 2))
    assert timeline.step_seconds == 9.0
    assert ends(timeline, "gradient sync") == [6.0, 9.0]


def test_a_slowed_backward_delays_the_stage_before():
    """Stage 1's backward ends at 4.25 instead of 4, stage 0's at 6.5, its last bucket at 7."""
    costs = StageCosts([1.0] * 2, [2.0] * 2, gradient_sync_seconds=[1.0] * 2)
    costs = beside_compute(costs, 2, [Buckets.equal(2)] * 2)
    timeline = simulate(build_schedule("1f1b", 2, 1), costs)
    assert ends(timeline, "gradient sync", 1) == [3.5, 4.75]
    assert ends(timeline, "gradient sync", 0) == [5.75, 7.0]
    assert timeline.step_seconds == 7.0


def test_the_optimizer_of_one_chunk_is_slowed_by_the_sum_of_another():
    """Sums 4–6 and 6–8 (ready at 6); step 0 waits to 8, step 1 could go at 6 but comes after."""
    table = parse_table("0F0 1F0 1B0 0B0 1REDUCE 0REDUCE 1STEP 0STEP")
    costs = StageCosts(
        [1.0] * 2, [2.0] * 2, gradient_sync_seconds=[2.0] * 2, step_seconds=[1.0, 0.5]
    )
    timeline = simulate(Schedule("two chunks", 1, (0, 0), table), beside_compute(costs, 1))
    steps = [e for e in timeline.events[0] if e.action.kind == "STEP"]
    assert [(e.start_seconds, e.end_seconds) for e in steps] == [(6.0, 6.5), (8.0, 9.0)]


def test_shares_outside_of_one_and_no_buckets_are_refused():
    with pytest.raises(ValueError, match="shares of compute that is lost"):
        StageCosts([1.0], [1.0], slowed_share=[1.5])
    with pytest.raises(ValueError, match="at least one bucket"):
        StageCosts([1.0], [1.0], buckets=[Buckets((), (), (), ())])
    with pytest.raises(ValueError, match="of each all four shares"):
        StageCosts([1.0], [1.0], buckets=[Buckets((1.0,), (1.0,), (0.5, 0.5), (1.0,))])
    with pytest.raises(ValueError, match="buckets has 2 entries for 1"):
        StageCosts([1.0], [1.0], buckets=[ONE_BUCKET] * 2)
    with pytest.raises(ValueError, match="replicas of 2 ranks"):
        simulate(ONE, StageCosts([1.0], [1.0]), replicas=(1, 2))


def test_gathering_and_collectives_inside_are_exposed():
    costs = StageCosts(
        [2.0] * 2,
        [3.0] * 2,
        forward_communication_seconds=[0.5] * 2,
        backward_communication_seconds=[1.0, 0.75],
    )
    timeline = simulate(build_schedule("1f1b", 2, 4), costs)
    assert [each.inside for each in timeline.exposed] == [4 * 1.5, 4 * 1.25]


parts = st.integers(0, 12).map(lambda n: Fraction(n, 4))


def shares_of(weights):
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def buckets_of(number):
    """So many buckets, of which some may have nothing to send, or nothing to compute."""
    weights = st.lists(st.integers(0, 3), min_size=number, max_size=number).filter(any)
    return st.builds(Buckets, *[weights.map(shares_of)] * 4)


@st.composite
def runs(draw):
    """A schedule, costs of its stages in quarters, and their buckets."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "bfs"]))
    ranks = draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 2)) if name in ("interleaved-1f1b", "bfs") else 1
    rounds = draw(st.integers(1, 3))
    stages = ranks * chunks

    def some(values, count=stages):
        return draw(st.lists(values, min_size=count, max_size=count))

    costs = StageCosts(
        [each + 1 for each in some(parts)],
        [each + 1 for each in some(parts)],
        send_seconds=some(parts, stages - 1),
        send_backward_seconds=some(parts, stages - 1),
        send_latency_seconds=some(parts, stages - 1),
        send_call_seconds=some(parts, stages - 1),
        receive_call_seconds=some(parts, stages - 1),
        step_seconds=some(parts),
        gradient_sync_seconds=some(parts),
        gather_seconds=some(parts),
    )
    buckets = some(st.integers(1, 3).flatmap(buckets_of))
    return build_schedule(name, stages, ranks * rounds, num_chunks=chunks), costs, buckets


slowdowns = st.sampled_from([None, Fraction(1), Fraction(5, 4), Fraction(3)])


@given(runs(), slowdowns, st.integers(1, 3))
def test_one_rank_for_all_its_replicas_equals_simulating_every_device(run, slowdown, replicas):
    """The second simulator moves from completion to completion over all devices."""
    schedule, costs, buckets = run
    if slowdown is not None:
        costs = beside_compute(costs, slowdown, buckets)
    timeline = simulate(schedule, costs, replicas=[replicas] * schedule.num_ranks)
    every = expand(schedule, costs, replicas)
    assert timeline.step_seconds == every.step_seconds
    assert timeline.num_devices == replicas * schedule.num_ranks
    compute = {
        ((rank, replica), str(event.action)): event.end_seconds
        for rank, events in enumerate(timeline.events)
        for replica in range(replicas)
        for event in events
        if event.stream == "compute"
    }
    assert compute == every.ends


@given(runs(), st.sampled_from([Fraction(1), Fraction(5, 4), Fraction(3)]))
def test_work_done_is_time_times_rate(run, slowdown):
    """Of all compute but forwards that may wait for parameters within."""
    schedule, costs, buckets = run
    timeline = simulate(schedule, beside_compute(costs, slowdown, buckets))
    seconds = {"F": costs.forward_seconds, "B": costs.backward_seconds, "STEP": costs.step_seconds}
    for events in timeline.events:
        beside = [e for e in events if e.stream in ("gradient sync", "parameter gather")]
        gathered = {e.action.stage for e in events if e.stream == "parameter gather"}
        for event in events:
            kind, stage, m, _ = event.action
            if event.stream == "compute" and not (kind == "F" and m == 0 and stage in gathered):
                assert _done(event, beside, slowdown) == seconds[kind][stage]


def _done(event, beside, slowdown):
    """Work that fits between an event's ends at the two rates."""
    edges = sorted(
        {event.start_seconds, event.end_seconds}
        | {
            edge
            for other in beside
            for edge in (other.start_seconds, other.end_seconds)
            if event.start_seconds < edge < event.end_seconds
        }
    )
    total = Fraction(0)
    for start, end in pairwise(edges):
        busy = any(o.start_seconds < end and o.end_seconds > start for o in beside)
        total += (end - start) / (slowdown if busy else 1)
    return total
