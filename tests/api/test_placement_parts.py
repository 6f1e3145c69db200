"""The parts of the placers: the space they draw from, their moves, and their gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from placement_tables import every_pipeline, random_problem, seconds_of
from random_suites import seeds

from autoparallel.placers.moves import Stages, moves
from autoparallel.placers.network import MessagePassing, Perceptron, logit_gradient, sample, softmax
from autoparallel.placers.space import Problem, space_of
from autoparallel.planner.inter_op.inter_op import Floats, StageChoice


def possible(problem: Problem) -> set[Stages]:
    return {
        stages
        for number in problem.num_stages
        for stages in every_pipeline(problem.table, number)
        if np.isfinite(seconds_of(problem, stages))
    }


@pytest.mark.parametrize("seed", seeds(12))
def test_the_space_counts_and_draws_exactly_the_pipelines_that_can_be_run(seed: int) -> None:
    problem = random_problem(seed, possible=0.7)
    space, every = space_of(problem), possible(problem)
    assert space.num_pipelines == pytest.approx(len(every))
    assert set(space.numbers) == {len(stages) for stages in every}
    if every:
        rng = np.random.default_rng(seed)
        assert {space.draw(rng) for _ in range(50)} <= every


def test_pipelines_of_one_number_of_stages_are_equally_likely() -> None:
    """Chi-square of 4,000 draws, far beyond its 99.9 % point if the draw were by decisions."""
    problem = random_problem(1, num_blocks=5, host=4, possible=1.0)
    space = space_of(Problem(problem.table, 1, (3,)))
    every = {stages for stages in possible(problem) if len(stages) == 3}
    rng = np.random.default_rng(0)
    drawn_counts = Counter(space.draw(rng) for _ in range(4000))
    expected = 4000 / len(every)
    chi = sum((drawn_counts[stages] - expected) ** 2 / expected for stages in every)
    degrees = len(every) - 1
    assert set(drawn_counts) == every
    assert chi < degrees + 4 * np.sqrt(2 * degrees)


def test_the_masks_allow_what_some_pipeline_does_and_nothing_else() -> None:
    problem = random_problem(11, num_blocks=6, host=4, possible=0.6)
    space, every = space_of(problem), possible(problem)
    assert len(every) > 3
    for stages in every:
        for index, stage in enumerate(stages):
            left = len(stages) - index
            ways = space.ways(left, stage.first_device, stage.num_devices, stage.start)
            ahead = {
                other[index].stop
                for other in every
                if len(other) == len(stages)
                and other[:index] == stages[:index]
                and other[index].num_devices == stage.num_devices
            }
            assert set(np.flatnonzero(ways)) == ahead


@pytest.mark.parametrize("seed", seeds(10))
def test_moves_lead_to_pipelines_that_can_be_run_and_the_first_stays(seed: int) -> None:
    problem = random_problem(seed, num_blocks=6, host=4, possible=0.8)
    space, every = space_of(problem), possible(problem)
    for stages in random.Random(seed).sample(sorted(every, key=str), min(10, len(every))):
        for block in range(6):
            found = moves(space, stages, block)
            assert found[0] == stages
            assert {each for each in found if each is not None} <= every


def test_moves_reach_every_pipeline_of_powers_of_two() -> None:
    problem = random_problem(2, num_blocks=5, host=4, possible=1.0)
    space, every = space_of(problem), possible(problem)
    seen = {next(iter(every))}
    new = set(seen)
    while new:
        new = {
            each
            for stages in new
            for block in range(5)
            for each in moves(space, stages, block)
            if each is not None
        } - seen
        seen |= new
    assert seen == every


def test_a_cut_and_a_join_are_what_they_say() -> None:
    problem = random_problem(2, num_blocks=4, host=4, possible=1.0)
    space = space_of(problem)
    one = (StageChoice(0, 4, 0, 4),)
    two = (StageChoice(0, 2, 0, 2), StageChoice(2, 4, 2, 2))
    assert moves(space, one, 2)[3 + space.sizes.index(2)] == two
    assert moves(space, two, 2)[1] == (StageChoice(0, 3, 0, 2), StageChoice(3, 4, 2, 2))
    assert moves(space, two, 1)[2] == (StageChoice(0, 1, 0, 2), StageChoice(1, 4, 2, 2))
    assert moves(space, two, 3)[1] == one
    assert moves(space, two, 0)[1] is None


def test_masked_actions_have_no_chance_and_are_never_drawn() -> None:
    rng = np.random.default_rng(0)
    logits, mask = rng.normal(0, 3, (200, 6)), rng.random((200, 6)) < 0.4
    mask[:, 3] |= ~mask.any(axis=1)
    found = softmax(logits, mask.astype(float))
    assert (found[~mask] == 0).all()
    assert found.sum(axis=1) == pytest.approx(1.0)
    for _ in range(20):
        assert mask[np.arange(200), sample(found, rng)].all()


def test_actions_are_drawn_as_often_as_their_chances_say() -> None:
    odds = np.repeat([[0.1, 0.0, 0.6, 0.3]], 20000, axis=0)
    share = np.bincount(sample(odds, np.random.default_rng(1)), minlength=4) / 20000
    assert share == pytest.approx(odds[0], abs=4 * np.sqrt(0.25 / 20000))


def difference(loss: Callable[[], float], parameter: Floats) -> Floats:
    """The gradient of ``loss`` by central differences."""
    found = np.zeros_like(parameter)
    for place in np.ndindex(parameter.shape):
        kept = parameter[place]
        parameter[place] = kept + 1e-6
        above = loss()
        parameter[place] = kept - 1e-6
        found[place] = (above - loss()) / 2e-6
        parameter[place] = kept
    return found


def test_the_gradients_are_those_of_reinforce_with_an_entropy_bonus() -> None:
    rng = np.random.default_rng(3)
    net = Perceptron.of(rng, 5, 4, 3)
    x, mask = rng.normal(size=(6, 5)), np.ones((6, 3))
    mask[2, 1] = mask[4, 0] = 0.0
    actions, advantages = np.array([0, 1, 2, 0, 1, 2]), rng.normal(size=6)

    def loss() -> float:
        p = softmax(net.forward(x)[0], mask)
        log = np.log(np.where(p > 0, p, 1.0))
        return float(-(advantages * log[np.arange(6), actions]).sum() + 0.2 * (p * log).sum())

    logits, hidden = net.forward(x)
    gradient = logit_gradient(softmax(logits, mask), actions, advantages, 0.2)
    own, of_x = net.backward(x, hidden, gradient)
    for parameter, found in zip([*net.parameters, x], [*own, of_x], strict=True):
        assert found == pytest.approx(difference(loss, parameter), abs=1e-7)


def test_the_gradients_pass_through_messages_over_a_graph_with_branches() -> None:
    rng = np.random.default_rng(4)
    graph = MessagePassing.of(rng, 3, 4, ((0, 1), (0, 2), (1, 3), (2, 3)), 4)
    x, direction = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 4))

    def loss() -> float:
        return float((graph.forward(x)[-1] * direction).sum())

    found = graph.backward(x, graph.forward(x), direction)
    for parameter, gradient in zip(graph.parameters, found, strict=True):
        assert gradient == pytest.approx(difference(loss, parameter), abs=1e-7)
