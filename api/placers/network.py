"""Neural networks of the learned placers, and their gradients, in numpy.

In: features and priors. Out: the probability of every action; and from actions and their advantages
the gradient of

    L = − Σ A·log p(a) − β·Σ H(p)

(REINFORCE, Williams 1992, with an entropy bonus β). An action masked by a prior of 0 has
probability 0 and no gradient. Gradients are written by hand; a test compares them with finite
differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoparallel.planner.inter_op.inter_op import Floats

Ints = NDArray[np.int64]


def softmax(logits: Floats, prior: Floats) -> Floats:
    """Return prior·exp(logits), normalized over the last dimension (actions). Prior 0 is a mask."""
    allowed = prior > 0
    shifted = np.where(allowed, logits + np.log(np.where(allowed, prior, 1.0)), -np.inf)
    weights: Floats = np.exp(shifted - shifted.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def sample(probabilities: Floats, rng: np.random.Generator) -> Ints:
    """Draw the index of an action for every row of ``probabilities`` (batch, actions)."""
    bound = rng.random((len(probabilities), 1)) * probabilities.sum(axis=1, keepdims=True)
    below = np.cumsum(probabilities, axis=1) <= bound
    last = probabilities.shape[1] - 1 - np.argmax(probabilities[:, ::-1] > 0, axis=1)
    found: Ints = np.minimum(below.sum(axis=1), last)
    return found


def logit_gradient(
    probabilities: Floats, actions: Ints, advantages: Floats, entropy_weight: float
) -> Floats:
    """Return dL/dlogits = A·(p − onehot(a)) + β·p·(log p + H) for advantages A and entropy H."""
    gradient: Floats = probabilities * advantages[:, None]
    gradient[np.arange(len(actions)), actions] -= advantages
    log = np.log(np.where(probabilities > 0, probabilities, 1.0))
    entropy = -(probabilities * log).sum(axis=1, keepdims=True)
    gradient += entropy_weight * probabilities * (log + entropy)
    return gradient


def weights(rng: np.random.Generator, inputs: int, outputs: int, gain: float = 1.0) -> Floats:
    """Draw random initial weights (inputs, outputs) that preserve variance, times ``gain``."""
    return rng.normal(0.0, gain / np.sqrt(inputs), (inputs, outputs))


@dataclass
class Adam:
    """Adam (Kingma and Ba 2015) on arrays in place; gradients are clipped to a norm of 1."""

    parameters: Sequence[Floats]
    learning_rate: float
    steps: int = 0
    first: list[Floats] = field(default_factory=list)
    second: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = [np.zeros_like(each) for each in self.parameters]
        self.second = [np.zeros_like(each) for each in self.parameters]

    def step(self, gradients: Sequence[Floats]) -> None:
        self.steps += 1
        norm = np.sqrt(sum(float((each**2).sum()) for each in gradients))
        scale = 1.0 / max(norm, 1.0)
        for own, m, v, gradient in zip(
            self.parameters, self.first, self.second, gradients, strict=True
        ):
            m += 0.1 * (scale * gradient - m)
            v += 0.001 * ((scale * gradient) ** 2 - v)
            corrected = np.sqrt(v / (1 - 0.999**self.steps)) + 1e-8
            own -= self.learning_rate * (m / (1 - 0.9**self.steps)) / corrected


@dataclass
class Perceptron:
    """Two-layer network tanh(x·W1 + b1)·W2 + b2: (batch, inputs) to (batch, outputs)."""

    parameters: list[Floats]

    @staticmethod
    def of(rng: np.random.Generator, inputs: int, hidden: int, outputs: int) -> Perceptron:
        return Perceptron(
            [
                weights(rng, inputs, hidden),
                np.zeros(hidden),
                weights(rng, hidden, outputs, 0.1),
                np.zeros(outputs),
            ]
        )

    def forward(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the outputs, and the hidden layer for ``backward``."""
        w1, b1, w2, b2 = self.parameters
        hidden = np.tanh(x @ w1 + b1)
        return hidden @ w2 + b2, hidden

    def backward(self, x: Floats, hidden: Floats, gradient: Floats) -> tuple[list[Floats], Floats]:
        """Return the gradients of the parameters, and the gradient of x."""
        inner = (gradient @ self.parameters[2].T) * (1 - hidden**2)
        own = [x.T @ inner, inner.sum(axis=0), hidden.T @ gradient, gradient.sum(axis=0)]
        return own, inner @ self.parameters[0].T


@dataclass
class MessagePassing:
    """Network that embeds the nodes of a graph from their own and their neighbours' features.

        h⁰ = tanh(x·V),   hʳ⁺¹ = tanh([hʳ, A·hʳ, Aᵀ·hʳ]·Wʳ)

    A and Aᵀ average over a node's predecessors and successors: (batch, nodes, features) to (batch,
    nodes, hidden).
    """

    parameters: list[Floats]
    feeding: Floats
    fed: Floats

    @staticmethod
    def of(
        rng: np.random.Generator,
        inputs: int,
        hidden: int,
        edges: Sequence[tuple[int, int]],
        num_nodes: int,
    ) -> MessagePassing:
        adjacency = np.zeros((num_nodes, num_nodes))
        for source, target in edges:
            adjacency[target, source] = 1.0
        return MessagePassing(
            [weights(rng, inputs, hidden), *(weights(rng, 3 * hidden, hidden) for _ in range(2))],
            _means(adjacency),
            _means(adjacency.T),
        )

    def forward(self, x: Floats) -> list[Floats]:
        """Return h after every round; the last h are the embeddings."""
        layers = [np.tanh(x @ self.parameters[0])]
        for w in self.parameters[1:]:
            layers.append(np.tanh(self._messages(layers[-1]) @ w))
        return layers

    def _messages(self, h: Floats) -> Floats:
        return np.concatenate([h, self.feeding @ h, self.fed @ h], axis=2)

    def backward(self, x: Floats, layers: Sequence[Floats], gradient: Floats) -> list[Floats]:
        """Return the gradients of the parameters, given the gradient of the embeddings."""
        found: list[Floats] = []
        for index in range(len(layers) - 1, 0, -1):
            inner = gradient * (1 - layers[index] ** 2)
            messages = self._messages(layers[index - 1])
            found.insert(0, np.einsum("bni,bno->io", messages, inner))
            own, above, below = np.split(inner @ self.parameters[index].T, 3, axis=2)
            gradient = own + self.feeding.T @ above + self.fed.T @ below
        inner = gradient * (1 - layers[0] ** 2)
        return [np.einsum("bni,bno->io", x, inner), *found]


def _means(adjacency: Floats) -> Floats:
    means: Floats = adjacency / np.maximum(adjacency.sum(axis=1, keepdims=True), 1.0)
    return means
