"""Without shared ports a step is never shorter for longer actions; with them it may be."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import numpy as np
import pytest

from autoparallel.planner.inter_op.pipeline_bound import least_seconds
from autoparallel.planner.inter_op.ways_kind import front
from autoparallel.planner.pricing.step import simulate_figures
from autoparallel.planner.requests.request import SCHEDULES
from autoparallel.planner.schedules.held import splits

SAME = 1 + 1e-9
Figures = list[list[float]]
SHAPES = {
    3: (None, ((0, 1, 1.0), (0, 2, 0.5), (1, 2, 1.0))),
    4: (None, ((0, 1, 1.0), (0, 2, 2.0), (1, 3, 1.0), (2, 3, 1.0))),
}


def random_figures(rng: random.Random, stages: int, width: int) -> Figures:
    """Of stages alike or not, with messages that are short or as long as passes."""
    even, messages = rng.random() < 0.5, rng.choice((0.05, 0.3, 1.0))
    found = []
    for stage in range(stages):
        own = [rng.choice((1.0, 1.0, 2.0)) if even else 2 * rng.random() for _ in range(width)]
        own[2:4] = [each * messages * (stage > 0) for each in own[2:4]]
        found.append(own)
    return found


def grown(rng: random.Random, figures: Figures) -> Figures:
    found = [list(own) for own in figures]
    stage, which = rng.randrange(len(found)), rng.randrange(len(found[0]))
    found[stage][which] += rng.random() * rng.choice((0.01, 0.1, 0.5))
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_alone_messages_come_no_later_and_longer_actions_no_earlier(
    schedule: str, stages: int
) -> None:
    rng, differ = random.Random(stages), 0
    for _ in range(40):
        figures = random_figures(rng, stages, 6 if splits(schedule) else 5)
        count, wait = rng.choice((2, 3, 4, 6)), rng.choice((0.0, 0.05))
        every = SHAPES.get(stages, (None,))
        edges = None if splits(schedule) else rng.choice(every)
        step = partial(simulate_figures, schedule, count, edges=edges, latency_seconds=wait)
        alone, shared = step(figures, shared=False), step(figures, shared=True)
        assert least_seconds(figures, count, edges) <= alone * SAME
        assert alone <= shared * SAME
        differ += shared > alone * SAME
        assert alone <= step(grown(rng, figures), shared=False) * SAME
    if stages == 2:
        assert not differ, "each rank has one neighbour"


def test_a_longer_pass_can_make_a_step_shorter_where_ports_are_shared() -> None:
    """The middle stage's backward of 2.5 seconds in place of 2 sends half a second later, and
    leaves its port to a message on which more hangs. So a way that is worse in everything may be
    in the best plan: why a bound of it is kept."""
    quick = [[3.0, 3.0, 0.0, 0.0, 0.0], [1.0, 2.0, 4.0, 2.0, 0.0], [4.0, 1.0, 4.0, 0.0, 0.0]]
    slow = [quick[0], [1.0, 2.5, 4.0, 2.0, 0.0], quick[2]]
    assert simulate_figures("1f1b", 3, quick) == 46.0
    assert simulate_figures("1f1b", 3, slow) == 45.5
    alone = [simulate_figures("1f1b", 3, each, shared=False) for each in (quick, slow)]
    assert alone == [42.0, 42.5]


@pytest.mark.parametrize("seed", range(30))
def test_no_way_that_was_left_out_is_below_the_steps_alone_of_those_kept(seed: int) -> None:
    """Every pipeline of three stages with five ways each, against those that nothing betters."""
    rng = random.Random(seed)
    schedule = rng.choice([name for name in SCHEDULES if not splits(name)])
    sets: list[Figures] = []
    for stage in range(3):
        ways = [random_figures(rng, 3, 5)[stage] for _ in range(2)]
        ways += [grown(rng, [rng.choice(ways)])[0] for _ in range(3)]
        sets.append(ways)
    kept = [[own[at] for at in front(np.array(own))] for own in sets]
    best = min(simulate_figures(schedule, 4, own) for own in product(*sets))
    found = [
        (simulate_figures(schedule, 4, own), simulate_figures(schedule, 4, own, shared=False))
        for own in product(*kept)
    ]
    least = min(min(step for step, _ in found), min(alone for _, alone in found))
    assert least <= best * SAME
    assert sum(map(len, kept)) < 15
