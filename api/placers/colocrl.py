"""Placer that decides block after block, after ColocRL.

Mirhoseini et al. 2017, "Device Placement Optimization with Reinforcement Learning" (ICML,
https://proceedings.mlr.press/v70/mirhoseini17a.html): a sequential policy assigns a device to every
group of ops, the running time of the placement is the reward, and policy gradients train it. Here a
group is a block. The policy first chooses the number of stages, then for every block in order that
it stays in the open stage, or begins a stage of a chosen number of devices. Later decisions depend
only on the open stage and on the remaining stages and devices, so a network of this state replaces
the paper's recurrent network. Before training it draws every pipeline with a given number of stages
with equal probability. In: a record of a space. Out: the record, filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autoparallel.placers.network import Adam, Ints, Perceptron, logit_gradient, sample, softmax
from autoparallel.placers.record import Record
from autoparallel.placers.space import Space, block_shares
from autoparallel.planner.inter_op.inter_op import Floats, Pipeline, StageChoice

BATCH = 10
"""Number of pipelines that the policy draws for each of its gradient updates."""

HIDDEN = 32
LEARNING_RATE = 0.02
ENTROPY = 0.03
"""Weight of the policy's entropy bonus in the first update; it falls linearly to zero."""

NUMBERS_ENTROPY = 30.0
"""Factor of ``ENTROPY`` for the distribution of the number of stages."""

BASELINE_DECAY = 0.8


@dataclass
class _Open:
    """Pipeline that is built block by block: its complete ``stages``, and a last stage, from block
    ``start`` on ``size`` devices, that further blocks may join; ``left`` counts it and the rest."""

    left: int
    start: int = 0
    first: int = 0
    size: int = 0
    stages: list[StageChoice] = field(default_factory=list)

    def begin(self, block: int, size: int) -> None:
        """Close the open stage before ``block``, and begin a stage of ``size`` devices there."""
        if block > 0:
            self.close(block)
            self.left -= 1
        self.start, self.size = block, size

    def close(self, block: int) -> None:
        self.stages.append(StageChoice(self.start, block, self.first, self.size))
        self.first += self.size

    def prior(self, space: Space, block: int) -> Floats:
        """Return, for each action for ``block``, the scaled number of pipelines that it leaves.

        Action 0 adds the block to the open stage; action i begins a stage of the i-th size there.
        """
        if block == 0:
            return np.concatenate([[0.0], space.begins(self.left, 0, 0)])
        ways = space.ways(self.left, self.first, self.size, self.start)
        begins = np.zeros(len(space.sizes))
        if ways[block] > 0:
            begins = space.begins(self.left - 1, self.first + self.size, block)
        return np.concatenate([ways[block + 1 :].sum(keepdims=True), begins])


@dataclass(frozen=True)
class _Step:
    """Network inputs, action probabilities and drawn actions for one block, in all drawn pipelines.
    An action adds the block to the current stage, or begins a stage of some size."""

    x: Floats
    hidden: Floats
    probabilities: Floats
    actions: Ints


@dataclass
class _Policy:
    """Policy that draws pipelines: ``numbers`` are logits of the number of stages, ``network`` maps
    the state at a block to logits of actions.

    ``work`` is, for each block, the cost of all blocks from it on, in multiples of a mean block.
    """

    space: Space
    work: Floats
    numbers: Floats
    network: Perceptron
    slowest: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(space: Space, rng: np.random.Generator) -> _Policy:
        inputs = space.problem.table.num_blocks + max(space.numbers) + len(space.sizes) + 10
        return _Policy(
            space,
            np.append(np.cumsum(block_shares(space)[::-1])[::-1], 0.0),
            np.zeros((1, len(space.numbers))),
            Perceptron.of(rng, inputs, HIDDEN, 1 + len(space.sizes)),
        )

    def features(self, pipeline: _Open, block: int) -> Floats:
        """Return the network's input at ``block``: the block, stages left, devices of the open
        stage, and the shares of work and devices from ``loads`` and ``fills``."""
        space, table = self.space, self.space.problem.table
        place = np.zeros(table.num_blocks)
        place[block] = 1.0
        left = np.zeros(max(space.numbers))
        left[pipeline.left - 1] = 1.0
        size = np.zeros(len(space.sizes))
        if pipeline.size:
            size[space.sizes.index(pipeline.size)] = 1.0
        blocks = self.work[block] / self.work[0]
        devices = (table.num_devices - pipeline.first - pipeline.size) / table.num_devices
        shares = [
            blocks,
            devices,
            devices / max(blocks, 1e-9),
            1.0,
            *self.loads(pipeline, block),
            *self.fills(pipeline, block),
        ]
        return np.concatenate([place, left, size, shares])

    def loads(self, pipeline: _Open, block: int) -> list[float]:
        """Return four ratios: the open stage's share of the remaining work over its share of the
        remaining devices, and over an even share per stage; without ``block``, then with it."""
        table, ahead = self.space.problem.table, max(self.work[pipeline.start], 1e-9)
        devices = pipeline.size / (table.num_devices - pipeline.first)
        found = []
        for stop in (block, block + 1):
            load = (self.work[pipeline.start] - self.work[stop]) / ahead
            found += [load / devices if devices else 0.0, load * pipeline.left]
        return [min(load, 3.0) - 1.0 for load in found]

    def fills(self, pipeline: _Open, block: int) -> list[float]:
        """Return the open stage's seconds, without ``block`` and with it, relative to the slowest
        stage of the best known pipeline with as many stages."""
        cost = self.space.costs.get((pipeline.left, pipeline.first, pipeline.size))
        slowest = self.slowest.get(pipeline.left + len(pipeline.stages))
        if cost is None or slowest is None or block == 0:
            return [0.0, 0.0]
        own = cost[pipeline.start, block : block + 2] / slowest
        return [min(float(fill), 2.0) - 1.0 for fill in own]

    def learn_from(self, best: Iterable[Pipeline]) -> None:
        """Store, by number of stages, the slowest stage's seconds in the best known pipeline."""
        for pipeline in best:
            own = self.space.stage_seconds(pipeline.stages)
            assert own is not None
            self.slowest[len(own)] = max(own)

    def draw(
        self, count: int, rng: np.random.Generator
    ) -> tuple[list[tuple[StageChoice, ...]], list[_Step], Ints]:
        """Draw ``count`` pipelines; return their stages, the actions block by block, and the index
        of each pipeline's number of stages in ``space.numbers``."""
        space, blocks = self.space, self.space.problem.table.num_blocks
        odds = np.repeat(softmax(self.numbers, np.ones_like(self.numbers)), count, 0)
        chosen = sample(odds, rng)
        written = [_Open(space.numbers[index]) for index in chosen]
        steps = []
        for block in range(blocks):
            x = np.stack([self.features(each, block) for each in written])
            prior = np.stack([each.prior(space, block) for each in written])
            logits, hidden = self.network.forward(x)
            probabilities = softmax(logits, prior)
            actions = sample(probabilities, rng)
            steps.append(_Step(x, hidden, probabilities, actions))
            for pipeline, action in zip(written, actions, strict=True):
                if action > 0:
                    pipeline.begin(block, space.sizes[action - 1])
        for pipeline in written:
            pipeline.close(blocks)
        return [tuple(pipeline.stages) for pipeline in written], steps, chosen

    def gradients(
        self, steps: list[_Step], chosen: Ints, advantages: _Advantages, entropy_weight: float
    ) -> list[Floats]:
        """Return the policy-gradient loss's gradients of ``numbers`` and of the network's
        parameters, averaged over pipelines; ``chosen`` are indices of their numbers of stages."""
        count = len(chosen)
        odds = np.repeat(softmax(self.numbers, np.ones_like(self.numbers)), count, 0)
        first = logit_gradient(
            odds, chosen, advantages.of_numbers, entropy_weight * NUMBERS_ENTROPY
        )
        x = np.concatenate([step.x for step in steps])
        hidden = np.concatenate([step.hidden for step in steps])
        gradient = logit_gradient(
            np.concatenate([step.probabilities for step in steps]),
            np.concatenate([step.actions for step in steps]),
            np.tile(advantages.of_blocks, len(steps)),
            entropy_weight,
        )
        own, _ = self.network.backward(x, hidden, gradient / count)
        return [first.sum(axis=0, keepdims=True) / count, *own]


@dataclass(frozen=True, slots=True)
class _Advantages:
    """Advantages of each drawn pipeline: of the choice of its number of stages (``of_numbers``),
    and of its blocks' actions for that number (``of_blocks``)."""

    of_numbers: Floats
    of_blocks: Floats


@dataclass
class _Baseline:
    """Moving averages of the reward −log T (T: step time), over all pipelines and by number of
    stages, and its moving deviation.

    An average per number of stages separates the placement of blocks from the choice of the number.
    """

    by_number: Floats
    overall: float = math.nan
    deviation: float = 0.0

    def advantages(self, rewards: Floats, chosen: Ints) -> _Advantages:
        """Return the advantages of the drawn pipelines, and update the moving averages."""
        if math.isnan(self.overall):
            self.overall = float(rewards.mean())
        for number in np.unique(chosen):
            own = float(rewards[chosen == number].mean())
            if math.isnan(self.by_number[number]):
                self.by_number[number] = own
        rest = rewards - self.by_number[chosen]
        spread = max(self.deviation, float(rest.std()), 1e-9)
        found = _Advantages((rewards - self.overall) / spread, rest / spread)
        move = 1 - BASELINE_DECAY
        self.overall += move * (float(rewards.mean()) - self.overall)
        self.deviation += move * (float(rest.std()) - self.deviation)
        for number in np.unique(chosen):
            self.by_number[number] += move * float(rest[chosen == number].mean())
        return found


def learn(record: Record, rng: np.random.Generator) -> None:
    """Draw and price pipelines, and train the policy, until ``record`` has all that it may hold.

    An advantage is −log T (T: step time) minus its moving average, divided by the moving deviation,
    so it does not depend on the unit of time.
    """
    policy = _Policy.of(record.space, rng)
    adam = Adam([policy.numbers, *policy.network.parameters], LEARNING_RATE)
    baseline = _Baseline(np.full(len(record.space.numbers), math.nan))
    while (left := record.left) > 0:
        pipelines, steps, chosen = policy.draw(min(BATCH, left), rng)
        rewards = np.array([record.reward(pipeline) for pipeline in pipelines])
        policy.learn_from(record.best.values())
        advantages = baseline.advantages(rewards, chosen)
        entropy_weight = ENTROPY * (1 - record.num_evaluations / record.limit)
        adam.step(policy.gradients(steps, chosen, advantages, entropy_weight))
        record.mark()
