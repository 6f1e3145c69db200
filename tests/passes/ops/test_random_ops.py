"""Counted random numbers: what they are like, and that parts of them are parts of one whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from communicator import make_communicators
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.ops.collectives import Rank
from autoparallel.passes.ops.random_ops import dropout_part, step_key, uniform_part
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.passes.tracing.counter_random import batch_dims, counter_random
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.graph.layout import Mesh

dropout = torch.ops.autoparallel.counter_dropout
uniform = torch.ops.autoparallel.counter_uniform


def drawn(rate: float = 0.5, number: int = 0, key: int = 0) -> Tensor:
    """Kept elements less their expected share, over their standard deviation."""
    ones = torch.ones(32, 64, 128, dtype=torch.float64)
    kept = dropout(ones, rate, number=number, key=key).sign()
    return (kept - (1 - rate)) / math.sqrt(rate * (1 - rate))


def deviations(product: Tensor) -> float:
    """How far the mean of products of independent elements is from 0, in standard deviations."""
    return abs(float(product.mean())) * math.sqrt(product.numel())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate: float) -> None:
    found = drawn(rate)
    assert deviations(found) < 4
    for dims in itertools.combinations(range(3), 2):
        means = found.mean(dims)
        assert float(means.abs().max()) * math.sqrt(found.numel() / means.numel()) < 5


def test_what_is_kept_is_scaled_up() -> None:
    x = torch.randn(64, 64, dtype=torch.float64)
    y = dropout(x, 0.25, number=1)
    assert torch.allclose(y[y != 0], x[y != 0] / 0.75)
    assert torch.equal(dropout(x, 1.0, number=1), torch.zeros_like(x))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_neighbours_are_independent(dim: int) -> None:
    found = drawn()
    size = found.shape[dim] - 1
    assert deviations(found.narrow(dim, 0, size) * found.narrow(dim, 1, size)) < 4


def test_rectangles_are_independent() -> None:
    found = drawn()
    one, other = found[:, :-1] * found[:, 1:], found[:, :, :-1]
    assert deviations(one[:, :, :-1] * one[:, :, 1:]) < 4
    assert deviations(other[:-1] * found[1:, :, 1:]) < 4


def test_other_calls_and_other_steps_draw_others() -> None:
    found = drawn()
    assert deviations(found * drawn(number=1)) < 4
    assert deviations(found * drawn(key=step_key(0, 1))) < 4
    assert deviations(drawn(key=step_key(0, 1)) * drawn(key=step_key(1, 0))) < 4
    assert torch.equal(found, drawn())


def test_uniform_numbers_fill_the_unit_interval() -> None:
    found = uniform(torch.empty(1000, 1000, dtype=torch.float32), number=0)
    assert float(found.min()) >= 0.0
    assert float(found.max()) < 1.0
    counts = torch.histc(found, 100, 0.0, 1.0)
    assert float(((counts - 1e4) ** 2 / 1e4).sum()) < 150


def test_the_backward_drops_the_same_and_saves_nothing() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = dropout(x, 0.4, number=3)
    assert not saved
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.allclose(x.grad * x, y)


def test_micro_batches_together_draw_what_the_whole_batch_draws() -> None:
    x = torch.randn(3, 8, 4, dtype=torch.float64)
    mesh = Mesh(("tp",), (1,))
    rank = Rank(mesh, (0,), make_communicators(mesh)[0])
    rank.draws.key = step_key(7, 3)
    parts, numbers = [], []
    for microbatch in range(4):
        rank.draws.microbatch = microbatch
        part = x[1:, microbatch * 2 : microbatch * 2 + 2]
        place = {"number": 5, "start": (1, 0, 0), "batch": (1, 2)}
        parts.append(dropout_part(rank, part, 0.5, **place))
        numbers.append(uniform_part(rank, part, **place))
    key = step_key(7, 3)
    assert torch.equal(torch.cat(parts, 1), dropout(x, 0.5, number=5, key=key)[1:])
    assert torch.equal(torch.cat(numbers, 1), uniform(x, number=5, key=key)[1:])


class Noisy(nn.Module):
    """Every random call that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.channels = nn.Dropout1d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(self.linear(x), 0.5)
        functional.dropout(y, 0.5)
        y = self.channels(y) + torch.randn_like(y) * torch.rand(x.shape[0], 1, 1)
        y = y * torch.bernoulli(torch.full_like(y, 0.8))
        y = y * torch.empty(x.shape[0], 1, 1).bernoulli_(0.7)
        q = y[:, None]
        mask = torch.ones(q.shape[-2], q.shape[-2]).tril().bool()
        z = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.2)
        return (z * z).sum()


class MultiheadAttention(nn.Module):
    """torch's own attention, by both of its ways."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x)[0]
        return (self.attention(y, y, y, need_weights=False)[0] ** 2).sum()


@pytest.mark.parametrize(("build", "rows"), [(Noisy, 4), (MultiheadAttention, 2)])
def test_a_captured_graph_draws_what_the_plain_model_draws(build: Any, rows: int) -> None:
    x = torch.randn(rows, 6, 8, dtype=torch.float64)
    program = capture(record_build(build).model, (x[:2],), dtype="float64").with_batch_size(rows)
    assert not [n.op for n in program.graph if n.op.startswith(("aten.dropout", "aten.rand"))]
    model = plain_build(build, 0).double()
    with promote_to_float64(), counter_random():
        expected = model(x)
    with promote_to_float64(), counter_random(step_key(0, 1)):
        other = model(x)
    constants = evaluate(program, [n.name for n in program.graph if n.kind == "constant"])
    found = run(program.graph, {**dict(model.named_parameters()), **constants, "input_0": x})
    assert torch.allclose(found, expected, rtol=1e-12)
    assert not torch.allclose(found, other, rtol=1e-3)


def test_the_plain_model_on_micro_batches_draws_what_the_whole_batch_draws() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    program = capture(record_build(Noisy).model, (x[:2],), dtype="float64")
    model = plain_build(Noisy, 0).double()
    with promote_to_float64(), counter_random():
        expected = model(x)
    total = torch.zeros((), dtype=torch.float64)
    for index, part in enumerate(x.split(2)):
        with (
            promote_to_float64(),
            counter_random(microbatch=index, batch_dims=batch_dims(program.graph)),
        ):
            total += model(part)
    assert torch.allclose(total, expected, rtol=1e-12)


def test_attention_with_no_dropped_weight_is_the_fused_one() -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    options = {"is_causal": True, "enable_gqa": True}
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    with counter_random():
        found = functional.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **options)
    assert torch.allclose(found, expected, atol=1e-6)


def test_attention_of_torch_without_dropout_draws_nothing() -> None:
    x = torch.randn(2, 6, 8)
    model = MultiheadAttention(dropout=0.0)
    with counter_random() as draws:
        found = model(x)
    assert draws.count == 0
    assert torch.allclose(found, model(x))
