"""Random functions of torch with counted numbers: distributed as torch's, the same in any part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.passes.tracing.counter_random import counter_random
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.planner.errors import CaptureError

N = 100_000
EMPTY = torch.empty(N)
WEIGHTS = torch.tensor([1.0, 0.0, 3.0]).expand(N, 3)

DRAWS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "randint": (lambda: torch.randint(3, 9, (N,)), 5.5, 35 / 12),
    "randint by name": (lambda: torch.randint(high=6, size=(N,)), 2.5, 35 / 12),
    "randint of large numbers": (lambda: torch.randint(2**40, (N,)) / 2**40, 0.5, 1 / 12),
    "randint_like": (lambda: torch.randint_like(EMPTY, 4), 1.5, 1.25),
    "random_": (lambda: torch.empty(N, dtype=torch.int32).random_(1, 5), 2.5, 1.25),
    "uniform_": (lambda: torch.empty(N).uniform_(-2, 4), 1.0, 3.0),
    "normal_": (lambda: torch.empty(N).normal_(1, 3), 1.0, 9.0),
    "normal of tensors": (lambda: torch.normal(EMPTY.fill_(2), EMPTY.clone().fill_(3)), 2.0, 9.0),
    "normal of a size": (lambda: torch.normal(1.0, 2.0, (N,)), 1.0, 4.0),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.25),
    "log_normal_": (
        lambda: torch.empty(N).log_normal_(0, 0.5),
        math.exp(1 / 8),
        (math.exp(1 / 4) - 1) * math.exp(1 / 4),
    ),
    "geometric_": (lambda: torch.empty(N).geometric_(0.25), 4.0, 12.0),
    "cauchy_": (lambda: torch.empty(N).cauchy_().atan(), 0.0, math.pi**2 / 12),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.25)), 0.25, 3 / 16),
    "multinomial": (lambda: torch.multinomial(WEIGHTS, 1), 1.5, 0.75),
    "multinomial, replacing": (lambda: torch.multinomial(WEIGHTS[0], N, True), 1.5, 0.75),
    "first of two": (lambda: torch.multinomial(WEIGHTS + 1, 2)[:, 0], 9 / 7, 38 / 49),
}


@pytest.mark.parametrize("name", DRAWS)
def test_mean_and_variance_are_those_of_the_distribution(name: str) -> None:
    draw, mean, variance = DRAWS[name]
    with counter_random(key=5):
        found = draw().double()
    assert abs(float(found.mean()) - mean) < 5 * math.sqrt(variance / N)
    assert float(found.var()) == pytest.approx(variance, rel=0.05)


def test_a_permutation_has_every_number_once() -> None:
    with counter_random():
        first, second = torch.randperm(1000), torch.randperm(1000)
    assert sorted(first.tolist()) == list(range(1000))
    assert not torch.equal(first, second)


def test_what_weighs_nothing_is_never_drawn() -> None:
    with counter_random():
        for drawn in (torch.multinomial(WEIGHTS, 2), torch.multinomial(WEIGHTS[0], N, True)):
            assert not bool((drawn == 1).any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_in_half_precision_are_below_1_and_finite(dtype: torch.dtype) -> None:
    like = torch.empty(N, dtype=dtype)
    with counter_random():
        assert float(torch.rand_like(like).max()) < 1
        for drawn in (torch.randn_like(like), torch.empty_like(like).exponential_()):
            assert drawn.dtype == dtype
            assert bool(torch.isfinite(drawn).all())


def test_a_hard_gumbel_softmax_picks_one_and_has_the_gradient_of_the_soft_one() -> None:
    logits = torch.randn(N, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(N, 3, dtype=torch.float64)
    gradients = []
    for hard in (True, False):
        with counter_random():
            found = functional.gumbel_softmax(logits, 0.7, hard)
        gradients += torch.autograd.grad((found * scores).sum(), logits)
        assert torch.allclose(found.sum(-1), torch.ones(N, dtype=torch.float64))
    assert torch.allclose(*gradients)


class Drawing(nn.Module):
    """Calls every kind of function on what a small layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.table(torch.multinomial(h.detach().softmax(-1), 3)).sum(1)
        h = h + self.table(torch.randint(0, 8, (x.shape[0],), device=x.device))
        h = h * torch.empty_like(h).exponential_() + torch.normal(h.detach(), 0.1)
        h = h[:, torch.randperm(8)] + torch.randint_like(h, 3)
        return (functional.gumbel_softmax(h, hard=True) * h).sum()


def test_a_captured_graph_draws_what_the_plain_model_draws() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    program = capture(record_build(Drawing).model, (x[:2],), dtype="float64").with_batch_size(4)
    model = plain_build(Drawing, 0).double()
    with promote_to_float64(), counter_random():
        expected = model(x)
    constants = evaluate(program, [n.name for n in program.graph if n.kind == "constant"])
    found = run(program.graph, {**dict(model.named_parameters()), **constants, "input_0": x})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda x: torch.poisson(x.exp()),
    "_standard_gamma": lambda x: torch._standard_gamma(x.exp()),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.1, True),
    "random": lambda x: torch.empty_like(x).random_(),
    "a function of complex numbers": lambda x: torch.randn(x.shape, dtype=torch.complex64).real,
    "rand with out=": lambda x: torch.rand(x.shape, out=torch.empty(x.shape)),
    "rand with a generator": lambda x: torch.rand(x.shape, generator=torch.Generator()),
}


class Applying(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return (h + self.function(h)).sum()


def captured(function: Callable[[Tensor], Tensor]) -> Any:
    return capture(record_build(lambda: Applying(function)).model, (torch.randn(2, 8),))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_counted_is_refused_by_name(name: str) -> None:
    with pytest.raises(CaptureError, match=f"draws random numbers with {name}") as caught:
        captured(REFUSED[name])
    assert caught.value.code == "AP211"
    assert "test_distributions.py" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.rrelu(x, training=False),
        lambda x: functional.alpha_dropout(x, 0.1, False),
    ],
)
def test_random_ops_that_draw_nothing_are_captured_as_they_are(
    function: Callable[[Tensor], Tensor],
) -> None:
    program, x = captured(function), torch.randn(2, 8)
    model = plain_build(lambda: Applying(function), 0)
    constants = evaluate(program, [n.name for n in program.graph if n.kind == "constant"])
    found = run(program.graph, {**dict(model.named_parameters()), **constants, "input_0": x})
    assert not any("counter" in node.op for node in program.graph)
    torch.testing.assert_close(found, model(x))
