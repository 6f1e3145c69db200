"""Placer that improves a placement, one block at a time, after Placeto.

Addanki et al. 2019, "Placeto: Learning Generalizable Device Placement Algorithms for Distributed
Machine Learning" (https://arxiv.org/abs/1906.08879): an episode starts from a placement and visits
the nodes of the graph in order; at each the policy may move the node, and the reward is the
reduction of step time. It sees every node through message passing over the graph, without names.
Here a node is a block, a placement is a pipeline (``moves``), and episodes start from random
placements. In: a record of a space. Out: the record, filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.placers.moves import Stages, moves, num_moves
from autoparallel.placers.network import (
    Adam,
    Ints,
    MessagePassing,
    Perceptron,
    logit_gradient,
    sample,
    softmax,
)
from autoparallel.placers.record import Record
from autoparallel.placers.space import Space, block_shares
from autoparallel.planner.inter_op.inter_op import Floats

BATCH = 4
"""Number of episodes (passes that visit each block once) that run in parallel."""

VISITS = 8
"""Number of block visits per update; later rewards are ignored, as the discount makes them
small."""

HIDDEN = 16
LEARNING_RATE = 0.01
ENTROPY = 0.03
"""Weight of the policy's entropy bonus in the first update; it falls linearly to zero."""

DISCOUNT = 0.9
BASELINE_DECAY = 0.8
NUM_FEATURES = 15


@dataclass(frozen=True)
class _Step:
    """Visit of one block in all parallel episodes: inputs and layers of the networks, probabilities
    of moves, and the drawn moves (``actions``)."""

    block: int
    x: Floats
    layers: list[Floats]
    seen: Floats
    hidden: Floats
    probabilities: Floats
    actions: Ints


@dataclass
class _Policy:
    """Policy that draws a move of a block: message passing between blocks gives embeddings, from
    which ``head`` gives logits of the moves."""

    space: Space
    shares: Floats
    graph: MessagePassing
    head: Perceptron

    @staticmethod
    def of(space: Space, rng: np.random.Generator) -> _Policy:
        blocks = space.problem.table.num_blocks
        edges = space.problem.edges
        if edges is None:
            edges = tuple((block, block + 1) for block in range(blocks - 1))
        return _Policy(
            space,
            block_shares(space),
            MessagePassing.of(rng, NUM_FEATURES, HIDDEN, edges, blocks),
            Perceptron.of(rng, 3 * HIDDEN + NUM_FEATURES, 2 * HIDDEN, num_moves(space)),
        )

    @property
    def parameters(self) -> list[Floats]:
        return [*self.graph.parameters, *self.head.parameters]

    def features(self, stages: Stages, block: int) -> Floats:
        """Return an array (blocks, features) about a pipeline while ``block`` is visited: work per
        block, and seconds of its stage and both neighbours, now and with a border at the block."""
        space, table = self.space, self.space.problem.table
        seconds = np.array(space.stage_seconds(stages))
        relative = np.concatenate([[0.0], seconds / seconds.max(), [0.0]])
        of_stage = np.stack(
            [
                relative[1:-1],
                relative[:-2],
                relative[2:],
                np.array([stage.num_devices for stage in stages]) / table.num_devices,
                np.arange(len(stages), 0, -1) / max(space.numbers),
            ],
            axis=1,
        )
        found = np.zeros((table.num_blocks, NUM_FEATURES))
        found[:, :5] = np.repeat(of_stage, [stage.stop - stage.start for stage in stages], axis=0)
        found[:, 5] = self.shares
        found[[stage.start for stage in stages], 6] = 1.0
        found[[stage.stop - 1 for stage in stages], 7] = 1.0
        found[block, 8] = 1.0
        found[:block, 9] = 1.0
        found[:, 10] = 1.0
        borders = self.borders(stages) / seconds.max()
        found[:, 11:] = np.minimum(np.where(np.isfinite(borders), borders, 2.0), 2.0) - 1.0
        return found

    def borders(self, stages: Stages) -> Floats:
        """Return seconds (blocks, 4) of two adjacent stages after moving the border between them to
        a block: previous and own stage, border behind the block; own and next, border before it."""
        space = self.space
        keys = [
            (len(stages) - i, stage.first_device, stage.num_devices)
            for i, stage in enumerate(stages)
        ]
        found = np.full((space.problem.table.num_blocks, 4), np.inf)
        for i, stage in enumerate(stages):
            own = slice(stage.start, stage.stop)
            after = slice(stage.start + 1, stage.stop + 1)
            if i > 0:
                found[own, 0] = space.costs[keys[i - 1]][stages[i - 1].start, after]
                found[own, 1] = space.costs[keys[i]][after, stage.stop]
            if i + 1 < len(stages):
                found[own, 2] = space.costs[keys[i]][stage.start, own]
                found[own, 3] = space.costs[keys[i + 1]][own, stages[i + 1].stop]
        return found

    def view(self, x: Floats, embeddings: Floats, block: int) -> Floats:
        """Return the network's input for moves of ``block``: its embedding, the mean embeddings of
        the blocks before and behind it, and its features."""
        before, after = embeddings[:, :block], embeddings[:, block + 1 :]
        return np.concatenate(
            [
                embeddings[:, block],
                before.sum(axis=1) / max(before.shape[1], 1),
                after.sum(axis=1) / max(after.shape[1], 1),
                x[:, block],
            ],
            axis=1,
        )

    def visit(
        self, placements: list[Stages], block: int, rng: np.random.Generator
    ) -> tuple[_Step, list[Stages]]:
        """Draw a move of the block in each episode; return the visit and the moved pipelines."""
        options = [moves(self.space, stages, block) for stages in placements]
        allowed = np.array([[each is not None for each in found] for found in options])
        x = np.stack([self.features(stages, block) for stages in placements])
        layers = self.graph.forward(x)
        seen = self.view(x, layers[-1], block)
        logits, hidden = self.head.forward(seen)
        probabilities = softmax(logits, allowed.astype(np.float64))
        actions = sample(probabilities, rng)
        moved = []
        for found, action in zip(options, actions, strict=True):
            chosen = found[action]
            assert chosen is not None, "a masked move was drawn"
            moved.append(chosen)
        return _Step(block, x, layers, seen, hidden, probabilities, actions), moved

    def gradients(self, step: _Step, advantages: Floats, entropy_weight: float) -> list[Floats]:
        """Return a visit's loss gradients of all network parameters, averaged over episodes."""
        gradient = logit_gradient(step.probabilities, step.actions, advantages, entropy_weight)
        head, view = self.head.backward(step.seen, step.hidden, gradient / len(advantages))
        own, before, after, _ = np.split(view, [HIDDEN, 2 * HIDDEN, 3 * HIDDEN], axis=1)
        of_nodes = np.zeros_like(step.layers[-1])
        block, last = step.block, of_nodes.shape[1] - 1
        of_nodes[:, block] = own
        of_nodes[:, :block] = before[:, None] / max(block, 1)
        of_nodes[:, block + 1 :] = after[:, None] / max(last - block, 1)
        return [*self.graph.backward(step.x, step.layers, of_nodes), *head]


def learn(record: Record, rng: np.random.Generator) -> None:
    """Run episodes and train the policy until ``record`` has all pipelines that it may hold.

    The advantage of a move is the discounted sum of the gains in −log T (T: step time) from it on,
    minus the block's moving average of this sum, divided by the moving deviation.
    """
    space = record.space
    policy = _Policy.of(space, rng)
    adam = Adam(policy.parameters, LEARNING_RATE)
    baseline = np.zeros(space.problem.table.num_blocks)
    deviation = 0.0
    while record.left > 0:
        for steps, returns in _episodes(policy, record, rng):
            own = float(returns.std())
            deviation = BASELINE_DECAY * deviation + (1 - BASELINE_DECAY) * own
            visited = [step.block for step in steps]
            advantages = (returns - baseline[visited, None]) / max(deviation, own, 1e-9)
            entropy_weight = ENTROPY * (1 - record.num_evaluations / record.limit)
            parts = [
                policy.gradients(step, each, entropy_weight)
                for step, each in zip(steps, advantages, strict=True)
            ]
            adam.step([sum(arrays, np.zeros(1)) for arrays in zip(*parts, strict=True)])
            baseline[visited] += (1 - BASELINE_DECAY) * (returns.mean(axis=1) - baseline[visited])
        record.mark()


def _episodes(
    policy: _Policy, record: Record, rng: np.random.Generator
) -> Iterator[tuple[list[_Step], Floats]]:
    """Run ``BATCH`` episodes in parallel, each a visit of every block; yield groups of up to
    ``VISITS`` visits, each with its returns (discounted sums of rewards)."""
    num_blocks = record.space.problem.table.num_blocks
    placements = [record.space.draw(rng) for _ in range(min(BATCH, record.left))]
    rewards = [np.array([record.reward(stages) for stages in placements])]
    steps: list[_Step] = []
    for block in range(num_blocks):
        if record.left < len(placements):
            break
        step, moved = policy.visit(placements, block, rng)
        steps.append(step)
        rewards.append(
            np.array(
                [
                    last if now == before else record.reward(now)
                    for last, now, before in zip(rewards[-1], moved, placements, strict=True)
                ]
            )
        )
        placements = moved
        if len(steps) == VISITS:
            yield steps, _returns(rewards)
            steps, rewards = [], rewards[-1:]
    if steps:
        yield steps, _returns(rewards)


def _returns(rewards: Sequence[Floats]) -> Floats:
    """Return, for each visit and episode, the discounted sum of gains in reward from the visit on.
    ``rewards`` are the rewards before the first visit and after each."""
    found = np.diff(np.array(rewards), axis=0)
    for index in range(len(found) - 2, -1, -1):
        found[index] += DISCOUNT * found[index + 1]
    return found
