"""The step of priced stages: the same seconds as by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest
from random_suites import seeds

from autoparallel.planner.costs.prices import Seconds
from autoparallel.planner.costs.seconds import COLLECTIVES_OF_STATES, Groups, objective_weights
from autoparallel.planner.evaluate.step import (
    KnownSteps,
    MessageSeconds,
    Pipeline,
    simulate_stages,
    simulated_step,
    stage_costs,
)
from autoparallel.planner.stage.stage_cost import StageCost


def stage(**seconds: float) -> StageCost:
    receive = seconds.pop("receive", 0.0)
    return StageCost(Seconds(**seconds), (receive, 2 * receive), {"parameters": 1.0}, 64.0)


def in_blocks(cost: StageCost, number: int) -> StageCost:
    """The stage, cut into ``number`` equal blocks."""
    one = np.array([cost.seconds]) / number
    return replace(cost, groups=Groups(np.repeat(one, number, axis=0), np.ones(number, dtype=int)))


def pair(slowed: float, num_blocks: int = 1) -> list[StageCost]:
    """Two stages, whose sums of gradients slow compute by so much in all."""
    return [
        in_blocks(
            stage(
                forward_compute=1.0,
                forward_communication=0.5,
                backward_compute=2.0,
                backward_communication=1.0,
                gradient_sync=4.0,
                sync_slowed=slowed,
                optimizer=0.25,
                receive=receive,
            ),
            num_blocks,
        )
        for receive in (0.0, 0.125)
    ]


PAIR = pair(slowed=4.0)

GPIPE = Pipeline("gpipe", 4)


def test_where_compute_stops_gradients_are_summed_after_the_last_backward():
    """(N+D-1)(f+b) = 5 × 4.5, a message up and down for each of 4 micro-batches, as receives
    stand at their use, then sum and step of stage 0."""
    timeline = simulate_stages(GPIPE, PAIR)
    assert timeline.step_seconds == 5 * 4.5 + 4 * (0.125 + 0.25) + 4 + 0.25
    assert [each.gradient_sync for each in timeline.exposed] == [4.0, 4.0]
    assert [each.inside for each in timeline.exposed] == [4 * 1.5] * 2
    assert timeline.peak_activation_bytes == (256, 256)


def test_gradients_are_summed_block_by_block_beside_the_last_backward():
    """Of 3 s in 3 shares, 4 s in 3 blocks start after the first: 1 s + 4 s instead of 3 + 4."""
    late = simulate_stages(GPIPE, PAIR)
    early = simulate_stages(GPIPE, pair(slowed=0.0, num_blocks=3))
    assert early.step_seconds == pytest.approx(late.step_seconds - 2)
    slow = simulate_stages(GPIPE, pair(slowed=4 / 3, num_blocks=3))
    assert slow.step_seconds > early.step_seconds


def test_what_collectives_of_states_add_to_a_pass() -> None:
    """Of 4 blocks, 4 s in all: 1 s is waited for; 3 s run beside 3/4 of 12 or of 2 s of compute."""
    own = stage(
        forward_compute=12.0,
        forward_communication=1.0,
        forward_states=4.0,
        forward_slowed=1.0,
        backward_states=4.0,
        backward_slowed=1.0,
    )
    assert in_blocks(own, 4).forward_seconds == 12 + 1 + 1 + 0.75
    short = replace(own, seconds=own.seconds._replace(forward_compute=2.0))
    four = in_blocks(short, 4)
    assert four.forward_seconds == 2 + 1 + 1 + (3 - 1.5)
    assert replace(four, shares_links=False).forward_seconds == 2 + 1 + 1 + 0.75
    assert short.forward_seconds == 2 + 1 + 4
    whole = in_blocks(replace(short, seconds=short.seconds._replace(forward_slowed=4.0)), 4)
    assert whole.forward_seconds == 2 + 1 + 4


def in_unlike_blocks(*blocks: Seconds, shares_links: bool = True) -> StageCost:
    seconds = np.array(blocks)
    return replace(
        stage(**Seconds(*seconds.sum(axis=0).tolist())._asdict()),
        groups=Groups(seconds, np.ones(len(blocks), dtype=int)),
        shares_links=shares_links,
    )


def test_what_gathering_and_scattering_each_block_adds() -> None:
    """Three blocks compute for 1, 4 and 2 s forward and twice as long backward. Gathering them
    takes 2, 1 and 6 s, scattering their gradients 1, 9 and 3 s.

    Forward: 2 s of waiting for the first block; the second arrives beside the first's 1 s; the
    third needs 2 s more than the second's 4 s. 2 + 0 + 2 = 4 s.
    Backward: 6 s of waiting for the third block. Beside its 4 s the second is gathered (1 s).
    Beside the second's 8 s the first is gathered (2 s) and the third scattered (3 s). Beside the
    first's 2 s the second is scattered (9 s, 7 more). The first is scattered last (1 s).
    6 + 0 + 0 + 7 + 1 = 14 s."""
    compute, gather, scatter = (1.0, 4.0, 2.0), (2.0, 1.0, 6.0), (1.0, 9.0, 3.0)
    cost = in_unlike_blocks(
        *(
            Seconds(
                forward_compute=c, backward_compute=2 * c, forward_states=g, backward_states=g + s
            )
            for c, g, s in zip(compute, gather, scatter, strict=True)
        )
    )
    assert cost.forward_seconds == 7 + 4
    assert cost.backward_seconds == 14 + 6 + 7 + 1


def test_what_gathering_and_summing_once_adds_as_simulated() -> None:
    """The formula of the first forward and the last backward is what the simulator finds."""
    rng = random.Random(0)
    for _ in range(50):
        share = rng.choice((0.0, 0.3, 0.9))
        blocks = []
        for _ in range(rng.randint(1, 6)):
            gather, sync = (rng.choice((0.0, rng.uniform(0, 4))) for _ in range(2))
            blocks.append(
                Seconds(
                    forward_compute=rng.uniform(0.1, 3),
                    backward_compute=rng.uniform(0.1, 3),
                    parameter_gather=gather,
                    gather_slowed=share * gather,
                    gradient_sync=sync,
                    sync_slowed=share * sync,
                    optimizer=0.5,
                )
            )
        cost = in_unlike_blocks(*blocks)
        step = simulate_stages(Pipeline("1f1b", 1), [cost]).step_seconds
        assert step == pytest.approx(cost.objective(1))


@pytest.mark.parametrize("seed", seeds(12))
def test_the_sum_of_the_solvers_is_never_above_the_objective(seed: int) -> None:
    rng = random.Random(seed)
    blocks = []
    once = rng.random() < 0.5  # gathering and summing in every micro-batch, or once
    for _ in range(rng.randint(1, 9)):
        values = {name: rng.choice((0.0, rng.uniform(0, 4))) for name in Seconds._fields}
        for collectives, slowed in COLLECTIVES_OF_STATES:
            values[slowed.name.lower()] = rng.random() * values[collectives.name.lower()]
        for name in ("states", "slowed"):  # the backward gathers what the forward does, too
            values[f"backward_{name}"] += values[f"forward_{name}"]
        for name in ("forward_", "backward_") if once else ("parameter_", "gradient_"):
            for resource in COLLECTIVES_OF_STATES:
                if resource[0].name.lower().startswith(name):
                    values |= {each.name.lower(): 0.0 for each in resource}
        blocks.append(Seconds(**values))
    count, shares = rng.randint(1, 8), rng.random() < 0.5
    cost = in_unlike_blocks(*blocks, shares_links=shares)
    objective = cost.objective(count)
    assert float(np.array(cost.seconds) @ objective_weights(count)) <= objective * (1 + 1e-9)


def test_messages_up_and_down_have_their_own_seconds():
    costs = stage_costs(PAIR)
    assert (costs.send_seconds, costs.send_backward_seconds) == ([0.125], [0.25])


def test_stages_may_share_a_rank():
    """Four equal stages on two ranks: (D-1)/(D-1+KN) is 1/9 of the step without messages."""
    stages = [stage(forward_compute=1.0, backward_compute=2.0) for _ in range(4)]
    timeline = simulate_stages(Pipeline("interleaved-1f1b", 4, num_chunks=2), stages)
    assert timeline.bubble_fraction == pytest.approx(1 / 9)


@pytest.mark.parametrize("seed", seeds(14))
def test_a_step_without_its_timeline_is_the_same(seed: int) -> None:
    rng = random.Random(seed)
    number = rng.randint(1, 5)
    costs = [
        stage(
            forward_compute=rng.uniform(0.5, 2),
            forward_communication=rng.choice([0.0, 0.25]),
            backward_compute=rng.uniform(1, 4),
            gradient_sync=rng.choice([0.0, 1.5]),
            sync_slowed=rng.choice([0.0, 0.3]),
            parameter_gather=rng.choice([0.0, 0.7]),
            optimizer=rng.uniform(0, 1),
            receive=rng.choice([0.0, 0.3, 2.0]),
        )
        for _ in range(number)
    ]
    edges = None
    if number > 2 and rng.random() < 0.5:  # the first stage feeds all between, these the last
        inner = range(1, number - 1)
        edges = (*((0, at, 1.0) for at in inner), *((at, number - 1, 0.5) for at in inner))
    name = rng.choice(["1f1b", "gpipe", "eager-1f1b", *([] if edges else ["zb-h1"])])
    pipeline = Pipeline(name, 2 * number, edges=edges)
    message = MessageSeconds(rng.choice([0.0, 0.1]), rng.choice([0.0, 0.2]))
    timeline = simulate_stages(pipeline, costs, message=message)
    found = simulated_step(pipeline, costs, message=message)
    assert found == (timeline.step_seconds, timeline.bubble_fraction)


def test_a_known_step_is_that_of_the_same_figures_only() -> None:
    known: KnownSteps = {}
    first = simulated_step(GPIPE, PAIR, known=known)
    assert simulated_step(GPIPE, list(PAIR), known=known) == first
    assert len(known) == 1
    slower = [PAIR[0], stage(forward_compute=1.5, backward_compute=3.0)]
    others = [
        simulated_step(GPIPE, PAIR, message=MessageSeconds(latency=0.5), known=known),
        simulated_step(GPIPE, PAIR, message=MessageSeconds(call=0.5), known=known),
        simulated_step(Pipeline("1f1b", 4), PAIR, known=known),
        simulated_step(Pipeline("gpipe", 5), PAIR, known=known),
        simulated_step(GPIPE, slower, known=known),
    ]
    assert len(known) == 6
    plain = simulate_stages(GPIPE, slower)
    assert others[-1].seconds == plain.step_seconds != first.seconds
