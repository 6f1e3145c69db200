"""Models whose arguments, outputs and calls have other forms train as plain PyTorch does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from forced_plans import Adopt, adopting
from marks import slow
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

Figures = list[tuple[str, float]]
STEPS = 3
_PLACES = torch.arange(48.0).view(8, 6)


def _trained(
    model: Any, calls: Callable[[int], tuple[Any, ...]], loss: Any, **named: Any
) -> Figures:
    """The losses of a few steps, the norms of the gradients, and the sum of the weights."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    found: Figures = []
    for step in range(STEPS):
        outputs = model(*calls(step), **named)
        value = loss(outputs)
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [("loss", float(value)), ("norm", float(norm))]
    return found


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


class Recurrent(nn.Module):
    """The time first, the state an argument: ``(time, rows, features)``."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        y, state = self.lstm(x, state)
        return self.head(y), state


def carried_state(adopt: Adopt) -> Figures:
    zeros = torch.zeros(2, 8, 8).double()
    model: Any = adopt(Recurrent().double(), (_drawn(5, 8, 6), (zeros, zeros)))
    weight = next(model.parameters())
    state = weight.new_zeros(2, 8, 8), weight.new_zeros(2, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: Figures = []
    for step in range(STEPS):
        state = (state[0].detach(), state[1].detach())
        y, state = model(_drawn(5, 8, 6, seed=step), state)
        loss = y.square().mean() + state[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(("loss", float(loss)))
    return found


class Tables(nn.Module):
    """Indices stacked as ``(tables, rows)``."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.dense, self.top = nn.Linear(6, 8), nn.Linear(32, 1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        looked = [each(indices[k], offsets[k]) for k, each in enumerate(self.tables)]
        return self.top(torch.cat([self.dense(dense), *looked], 1))


def stacked_tables(adopt: Adopt) -> Figures:
    def batch(seed: int) -> tuple[Tensor, ...]:
        numbers = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, 20, (3, 8), generator=numbers)
        return _drawn(8, 6, seed=seed), torch.stack([torch.arange(8)] * 3), indices

    model = adopt(Tables().double(), batch(0))
    return _trained(model, batch, lambda outputs: outputs.square().mean())


class Sequence(nn.Module):
    """Token numbers ``(time, rows)`` alone, whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(20, 8, sparse=True), nn.EmbeddingBag(20, 8, sparse=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens)).to(torch.float64)
        return self.head(self.layers(self.table(tokens), mask=mask) + self.bag(tokens.T))


def time_first(adopt: Adopt) -> Figures:
    numbers = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 20, (5, 8), generator=numbers) for _ in range(STEPS)]
    model: Any = adopt(Sequence().double(), (batches[0],))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found: Figures = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(("loss", loss.item()))
    return found


class Convolved(nn.Module):
    """A graph network: nodes and their adjacency, no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.b(torch.relu(adjacency @ self.a(x)))


def one_graph(adopt: Adopt) -> Figures:
    adjacency = ((_drawn(12, 12, seed=5) > 0.5).double() / 12).to_sparse()
    model = adopt(Convolved().double(), (_drawn(12, 6), adjacency), global_batch=1)
    return _trained(
        model,
        lambda step: (_drawn(12, 6, seed=step), adjacency),
        lambda outputs: outputs.square().mean(),
    )


@dataclass
class Inner:
    z: Tensor


@dataclass
class Sample:
    """A batch that holds another structure."""

    x: Tensor
    inner: Inner
    y: Tensor | None = None


class Structured(nn.Module):
    """Takes a dataclass, and returns one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, sample: Sample) -> dict[str, Any]:
        h = torch.relu(self.a(sample.x + sample.inner.z))
        return {"made": Sample(self.b(h), Inner(h)), "scale": 2.0}


def dataclasses_in_and_out(adopt: Adopt) -> Figures:
    def batch(seed: int) -> tuple[Sample]:
        return (Sample(_drawn(8, 6, seed=seed), Inner(_drawn(8, 6, seed=seed + 9))),)

    def loss(outputs: dict[str, Any]) -> Tensor:
        made = outputs["made"]
        return outputs["scale"] * made.x.square().mean() + made.inner.z.mean()

    return _trained(adopt(Structured().double(), batch(0)), batch, loss)


class Options(NamedTuple):
    scale: float
    mask: Tensor | None


class Nested(nn.Module):
    """Trees, flags and None among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(
        self, inputs: dict[str, Any], options: Options, deep: bool = False, extra: Any = None
    ) -> dict[str, Tensor]:
        h = torch.relu(self.a(inputs["views"][0] + inputs["views"][1]))
        h = torch.tanh(h) if deep else h
        y = self.b(h) * options.scale
        y = y if options.mask is None else y * options.mask
        return {"y": y if extra is None else y + extra}


def nested_arguments(adopt: Adopt) -> Figures:
    def batch(seed: int) -> tuple[Any, ...]:
        views = [_drawn(8, 6, seed=seed), _drawn(8, 6, seed=seed + 50)]
        return {"views": views}, Options(0.5, _drawn(8, 4, seed=seed + 9)), True, None

    model = adopt(Nested().double(), batch(0))
    return _trained(model, batch, lambda outputs: outputs["y"].square().mean())


class Routed(nn.Module):
    """An output and a scalar that is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(-1)
        y = sum(p[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return y, p.mean(0).pow(2).sum()


def scalar_that_is_no_loss(adopt: Adopt) -> Figures:
    model = adopt(Routed().double(), (_drawn(8, 6),), loss=None)
    return _trained(
        model,
        lambda step: (_drawn(8, 6, seed=step),),
        lambda outputs: outputs[0].square().mean() + 0.1 * outputs[1],
    )


def _network(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for given, made in itertools.pairwise(sizes):
        layers += [nn.Linear(given, made), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1]).double()


def adversaries(adopt: Adopt) -> Figures:
    """Two models; the generator's gradient goes through the discriminator's input."""
    made: Any = adopt(_network(4, 16, 6), (_drawn(8, 4),))
    judge: Any = adopt(_network(6, 16, 16, 1), (_drawn(8, 6),))
    makes = torch.optim.Adam(made.parameters(), 1e-2)
    judges = torch.optim.Adam(judge.parameters(), 1e-2)
    found: Figures = []
    for step in range(STEPS):
        real, noise = _drawn(8, 6, seed=step), _drawn(8, 4, seed=step + 20)
        judges.zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made(noise).detach())).mean()
        loss.backward()
        judges.step()
        makes.zero_grad()
        other = F.softplus(-judge(made(noise))).mean()
        other.backward()
        makes.step()
        found += [("judge", float(loss)), ("made", float(other))]
    return found


def plain_generator(adopt: Adopt) -> Figures:
    """Only the discriminator is parallel; an input has the gradient that it has alone."""
    judge: Any = adopt(_network(6, 16, 1), (_drawn(8, 6),))
    made = _network(4, 16, 6)
    optimizer = torch.optim.SGD([*made.parameters(), *judge.parameters()], 0.1)
    found: Figures = []
    for step in range(STEPS):
        x = _drawn(8, 6, seed=step).requires_grad_()
        loss = judge(made(_drawn(8, 4, seed=step))).square().mean() + judge(x).sin().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert x.grad is not None
        found += [("loss", float(loss)), ("x", float((x.grad * _PLACES).sum()))]
    return found


class Regressed(nn.Module):
    """A model that returns its loss, with a method that the script calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.a(x)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.b(self.features(x)), y)


def adversarial_examples(adopt: Adopt) -> Figures:
    """Each batch is moved along the sign of the loss's gradient before it is trained on."""
    model: Any = adopt(Regressed().double(), (_drawn(8, 6), _drawn(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: Figures = []
    for step in range(STEPS):
        x, y = _drawn(8, 6, seed=step).requires_grad_(), _drawn(8, 4, seed=step + 30)
        model(x, y).backward()
        assert x.grad is not None
        optimizer.zero_grad()
        loss = model(x.detach() + 0.1 * x.grad.sign(), y)
        loss.backward()
        optimizer.step()
        found += [("loss", float(loss)), ("x", float((x.grad * _PLACES).sum()))]
    return found


def trained_method(adopt: Adopt) -> Figures:
    """A method is trained beside the forward, and evaluated."""
    example = _drawn(8, 6), _drawn(8, 4)
    model: Any = adopt(Regressed().double(), example, methods=["features"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: Figures = []
    for step in range(STEPS):
        x, y = _drawn(8, 6, seed=step), _drawn(8, 4, seed=step + 30)
        loss = model(x, y) + 0.1 * model.features(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()
            found += [("loss", float(loss)), ("features", float(model.features(x).sum()))]
            model.train()
    return found


class Agent(nn.Module):
    """Methods alone, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = _network(6, 16, 1), _network(6, 16, 4)

    def value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        spread = torch.distributions.Categorical(logits=self.actor(x))
        if action is None:
            action = spread.sample()
        return action, spread.log_prob(action), spread.entropy(), self.critic(x)


def agent_without_forward(adopt: Adopt) -> Figures:
    example = _drawn(8, 6), torch.zeros(8, dtype=torch.int64)
    model: Any = adopt(Agent(), example, methods=["act", "value"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    found: Figures = []
    for step in range(STEPS):
        with torch.no_grad():
            torch.manual_seed(step)
            action, before, _, value = model.act(_drawn(8, 6, seed=step))
            value = value + model.value(_drawn(8, 6, seed=step + 1))
        _, after, entropy, again = model.act(_drawn(8, 6, seed=step), action)
        loss = ((after - before).exp() * value.flatten()).mean() - 0.1 * entropy.mean()
        loss = loss + (again - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [("loss", float(loss)), ("action", float(action.sum()))]
    return found


class Switched(nn.Module):
    """Flags, texts and numbers that differ between calls, and a number among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.temperature = 1.0

    def forward(
        self, x: Tensor, way: str | None = None, *, scale: float = 1.0, both: bool = False
    ) -> dict[str, Any]:
        h = torch.relu(self.a(x))
        y = self.c(torch.tanh(self.a(x))) + self.b(h) if way == "c" else self.b(h) + self.c(h)
        found = {"y": y * scale + (self.b(h) if both else 0), "temperature": self.temperature}
        return {**found, "h": h} if both else found


def other_arguments(adopt: Adopt) -> Figures:
    """The model is planned with a dict of one tensor; the calls' other arguments change."""
    model: Any = adopt(Switched().double(), {"x": _drawn(8, 6)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: Figures = []
    calls = [{}, {"way": "c"}, {"scale": 0.5}, {"both": True}, {"way": "c", "both": True}, {}]
    for step, given in enumerate(calls * 2):
        model.temperature = 1.0 / (1 + step)
        made = model(_drawn(8, 6, seed=step), **given)
        loss = made["y"].square().mean() + (made["h"].mean() if "h" in made else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [("loss", float(loss)), ("temperature", made["temperature"])]
    return found


class Variadic(nn.Module):
    """Takes its arguments by ``*args`` or ``**kwargs``, whose number it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, *more: float | None, **named: Any) -> Tensor:
        scale = sum(1.0 if each is None else each for each in more) + named.get("scale", 0.5)
        y = self.b(torch.relu(self.a(x))) * (scale + len(named))
        return y + self.b.bias if named.get("twice") else y


def further_arguments(adopt: Adopt) -> Figures:
    named: Any = adopt(Variadic().double(), {"x": _drawn(8, 6)})
    placed: Any = adopt(Variadic().double(), (_drawn(8, 6), 0.5, None))
    found: Figures = []
    calls = [{"scale": 0.25}, {}, {"twice": True}, {"other": None}, {}]
    for step, given in enumerate(calls):
        x = _drawn(8, 6, seed=step)
        found += _trained(named, lambda _, x=x: (x,), lambda y: y.square().mean(), **given)
        found += _trained(placed, lambda _, x=x, s=step: (x, 1.5 + s, None), torch.sum)
    return found


CASES = (
    other_arguments,
    further_arguments,
    time_first,
    carried_state,
    stacked_tables,
    one_graph,
    nested_arguments,
    dataclasses_in_and_out,
    scalar_that_is_no_loss,
    adversaries,
    plain_generator,
    adversarial_examples,
    trained_method,
    agent_without_forward,
)


def _computed(plan: str) -> dict[str, Figures]:
    set_torchrun_variables()
    found = {}
    for case in CASES:
        torch.manual_seed(0)
        found[case.__name__] = case(adopting(plan))
    return found


@pytest.mark.parametrize("plan", [slow("dp=2"), "tp=2", slow("dp=2,zero=3")])
def test_a_form_of_call_computes_what_it_computes_alone(plan: str) -> None:
    for found in run_processes(2, _computed, plan):
        for case in CASES:
            torch.manual_seed(0)
            expected = case(lambda model, example, **_: model)
            assert [name for name, _ in found[case.__name__]] == [name for name, _ in expected]
            values = [value for _, value in found[case.__name__]]
            assert values == pytest.approx([v for _, v in expected], rel=1e-9), case.__name__
