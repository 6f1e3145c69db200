"""The step of priced stages: the same seconds as by hand, with and without overlap."""

import pytest

from autoparallel.cost_model.stage_costs import Overlap
from autoparallel.planner.pricing.prices import Seconds
from autoparallel.planner.pricing.stage_cost import StageCost
from autoparallel.planner.pricing.step import Pipeline, simulate_stages, stage_costs


def stage(**seconds: float) -> StageCost:
    receive = seconds.pop("receive", 0.0)
    return StageCost(Seconds(**seconds), (receive, 2 * receive), {"parameters": 1.0}, 64.0)


PAIR = [
    stage(
        forward_compute=1.0, forward_communication=0.5, backward_compute=2.0,
        backward_states=1.0, gradient_sync=4.0, optimizer=0.25, receive=receive,
    )
    for receive in (0.0, 0.125)
]  # fmt: skip

GPIPE = Pipeline("gpipe", 4)


def test_without_overlap_gradients_are_summed_after_the_last_backward():
    """(N+D-1)(f+b) = 5 × 4.5, a message up and down, then sum and step of stage 0."""
    timeline = simulate_stages(GPIPE, PAIR)
    assert timeline.step_seconds == 5 * 4.5 + 0.125 + 0.25 + 4 + 0.25
    assert [each.gradient_sync for each in timeline.exposed] == [4.0, 4.0]
    assert [each.inside for each in timeline.exposed] == [4 * 1.5] * 2
    assert timeline.peak_activation_bytes == (256, 256)


def test_with_overlap_buckets_begin_with_the_shares_of_the_last_backward():
    """Of 3 s in 3 shares, 4 s in 3 buckets start after the first: 1 s + 4 s instead of 3 + 4."""
    late = simulate_stages(GPIPE, PAIR)
    early = simulate_stages(GPIPE, PAIR, overlap=Overlap(1, [3, 3]))
    assert early.step_seconds == pytest.approx(late.step_seconds - 2)
    slow = simulate_stages(GPIPE, PAIR, overlap=Overlap(1.5, [3, 3]))
    assert slow.step_seconds > early.step_seconds


def test_messages_up_and_down_have_their_own_seconds():
    costs = stage_costs(PAIR)
    assert (costs.send_seconds, costs.send_backward_seconds) == ([0.125], [0.25])


def test_stages_may_share_a_rank():
    """Four equal stages on two ranks: (D-1)/(D-1+KN) is 1/9 of the step without messages."""
    stages = [stage(forward_compute=1.0, backward_compute=2.0) for _ in range(4)]
    timeline = simulate_stages(Pipeline("interleaved-1f1b", 4, num_chunks=2), stages)
    assert timeline.bubble_fraction == pytest.approx(1 / 9)
