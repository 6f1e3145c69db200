"""Training follows what a script changes, and what a forward draws or counts, as plain PyTorch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from forced_plans import Adopt, adopting, settled
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import autoparallel
from autoparallel.planner.errors import AutoparallelError

WEIGHTS = (0.0, 0.25, 1.0, 0.3)
SETTINGS = {"weight": 0.0}
WEIGHT = 0.0


def _batch(seed: int) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)),)


class Net(nn.Module):
    """``extra`` is the only part of the forward that differs between cases."""

    weight_of_class = 0.0

    def __init__(self, extra: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.0)
        self.extra = extra
        self.weight = 0.0
        self.calls, self.is_long, self.act = 0, False, "relu"
        self.config = SimpleNamespace(loss=SimpleNamespace(weight=0.0))
        self.options: dict[str, Any] = {"weights": [0.0]}
        self.weigh: Callable[[], float] = lambda: 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return (self.b(h) + self.extra(self, h)).square().mean()

    def scaled(self, h: Tensor) -> Tensor:
        return h


def _weighted(read: Callable[[Any], float]) -> Callable[[Any, Tensor], Tensor]:
    return lambda net, h: read(net) * h[:, :4] + (1 - read(net)) * h[:, 4:8]


def _set_global(value: float) -> None:
    global WEIGHT
    WEIGHT = value


def _counted(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h[:, :4] * min(1.0, net.calls / 3)


def _deep(net: Any, h: Tensor) -> Tensor:
    return torch.sin(h[:, :4]) + h[:, 4:8] if net.is_long else h[:, :4]


NUMBERS: dict[str, tuple[Callable[[Any], float], Callable[[Any, float], None]]] = {
    "attribute": (lambda net: net.weight, lambda net, w: setattr(net, "weight", w)),
    "object": (
        lambda net: net.config.loss.weight,
        lambda net, w: setattr(net.config.loss, "weight", w),
    ),
    "list": (
        lambda net: net.options["weights"][0],
        lambda net, w: net.options["weights"].__setitem__(0, w),
    ),
    "class": (
        lambda net: net.weight_of_class,
        lambda net, w: setattr(Net, "weight_of_class", w),
    ),
    "global": (lambda net: WEIGHT, lambda net, w: _set_global(w)),
    "dict of a file": (lambda net: SETTINGS["weight"], lambda net, w: SETTINGS.update(weight=w)),
    "function": (lambda net: net.weigh(), lambda net, w: setattr(net, "weigh", lambda: w)),
}
FOLLOWED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, float], None]]] = {
    **{name: (_weighted(read), write) for name, (read, write) in NUMBERS.items()},
    "argument of a function": (
        lambda net, h: F.layer_norm(h[:, :4], (4,), eps=0.1 + net.weight),
        lambda net, w: setattr(net, "weight", w),
    ),
    "branch": (_deep, lambda net, w: setattr(net, "is_long", w > 0.5)),
    "text": (
        lambda net, h: getattr(F, net.act)(h[:, :4]),
        lambda net, w: setattr(net, "act", "gelu" if w > 0.5 else "silu"),
    ),
    "method": (
        lambda net, h: net.scaled(h)[:, :4],
        lambda net, w: setattr(net, "scaled", torch.tanh) if w > 0.5 else None,
    ),
    "counter of the forward": (_counted, lambda net, w: None),
    "drawn number": (lambda net, h: h[:, :4] * random.random(), lambda net, w: None),
    "drawn by numpy": (lambda net, h: h[:, :4] * np.random.beta(2, 2), lambda net, w: None),
    "drawn mask": (
        lambda net, h: (h * torch.tensor(np.random.rand(16) < 0.5))[:, :4],
        lambda net, w: None,
    ),
    "drawn order": (
        lambda net, h: h[:, torch.from_numpy(np.random.permutation(16))][:, :4],
        lambda net, w: None,
    ),
    "drawn branch": (
        lambda net, h: torch.sin(h[:, :4]) if random.random() < 0.5 else h[:, :4],
        lambda net, w: None,
    ),
}


def losses(name: str, adopt: Adopt) -> list[float]:
    extra, write = FOLLOWED[name]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Net(extra)
    write(net, WEIGHTS[0])
    net = adopt(net, _batch(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step, weight in enumerate(WEIGHTS):
        write(net, weight)
        loss = net(*_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return [*found, random.random(), float(np.random.rand()), net.calls]


def _run_all(plan: str, names: tuple[str, ...]) -> dict[str, list[float]]:
    set_torchrun_variables()
    return {name: losses(name, adopting(plan)) for name in names}


FEW = ("object", "branch", "counter of the forward", "drawn number", "drawn mask")


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("dp=2,zero=3,microbatches=2", FEW),
        pytest.param("dp=2", tuple(FOLLOWED), marks=pytest.mark.slow),
        pytest.param("tp=2", tuple(FOLLOWED), marks=pytest.mark.slow),
        pytest.param("dp=2,zero=3", tuple(FOLLOWED), marks=pytest.mark.slow),
    ],
)
def test_a_value_that_changes_between_steps_is_followed(plan: str, names: tuple[str, ...]) -> None:
    results = run_processes(2, _run_all, plan, names)
    for name in names:
        alone = losses(name, lambda model, example: model)
        for result in results:
            assert result[name] == pytest.approx(alone, rel=1e-4), name


def _refusals(rank: int) -> dict[str, str]:
    def told(net: nn.Module, change: Callable[[], None]) -> str:
        net(*_batch(0))
        change()
        try:
            net(*_batch(0))
        except AutoparallelError as error:
            return f"{error.code} {error.what}"
        return "nothing was refused"

    adopt = adopting("dp=2")
    differing = Net(FOLLOWED["attribute"][0])
    head = Net(lambda net, h: net.c(h) if net.is_long else h[:, :4])
    head.c = nn.Linear(16, 4)
    head = adopt(head, _batch(0))
    return {
        "differs": told(
            adopt(differing, _batch(0)), lambda: setattr(differing, "weight", 0.5 + rank)
        ),
        "other layers": told(head, lambda: setattr(head, "is_long", True)),
    }


def _untraceable(net: Any, h: Tensor) -> Tensor:
    """Runs in an export, and not on fake tensors alone."""
    if type(h) is FakeTensor and get_proxy_mode() is None:
        raise RuntimeError("no values")
    return h[:, :4] * net.weight


def _scaled_mean(outputs: Tensor, batch: Any, scale: float = 1.0) -> Tensor:
    return outputs.square().mean() * scale


def _untraced() -> tuple[float, float, str]:
    """The loss of a model that no trace runs, that of a partial function, and the refusal."""
    set_torchrun_variables()
    torch.manual_seed(0)
    whole = Net(_untraceable)
    whole.weight = 0.5
    alone = float(whole(*_batch(0)))
    model = adopting("dp=2")(whole, _batch(0))
    own = float(model(*_batch(0)))
    whole.weight = 0.75
    try:
        model(*_batch(0))
    except AutoparallelError as error:
        return own - alone, _loss_of_partial(), f"{error.code} {error.what}"
    return own - alone, _loss_of_partial(), "nothing was refused"


def _loss_of_partial() -> float:
    """How much the loss of a function with bound arguments differs from the plain one."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    loss_fn = functools.partial(_scaled_mean, scale=0.25)
    alone = float(loss_fn(net(*_batch(0)), _batch(0)))
    model = autoparallel.parallelize(
        net, example_batch=_batch(0), global_batch=8, parallel=settled("dp=2"), loss_fn=loss_fn
    )
    return float(autoparallel.Step(model)(_batch(0))) - alone


def test_code_that_no_trace_runs_trains_and_its_changes_are_refused() -> None:
    for apart, of_partial, told in run_processes(2, _untraced):
        assert apart == pytest.approx(0, abs=1e-6)
        assert of_partial == pytest.approx(0, abs=1e-6)
        assert told == "AP936 weight of the model was changed after the model was planned"


def _run_refusals() -> dict[str, str]:
    set_torchrun_variables()
    return _refusals(torch.distributed.get_rank())


def test_a_value_that_no_program_can_follow_is_named() -> None:
    for result in run_processes(2, _run_refusals):
        assert result["differs"].startswith("AP942 weight of the model differs between ranks")
        assert result["other layers"].startswith(
            "AP936 is_long of the model was changed after the model was planned"
        )


class Deep(nn.Module):
    """Repeated layers that read a number and a truth value of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.weight, self.is_long = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.weight * torch.tanh(layer(x))
            x = torch.sin(x) if self.is_long else x
        return x.square().mean()


def _trained_deep(adopt: Adopt) -> list[float]:
    torch.manual_seed(0)
    model: Any = adopt(Deep().double(), (_batch(0)[0].double(),))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step, weight in enumerate((1.0, 0.5, 0.25, 0.3, 0.1)):
        model.weight, model.is_long = weight, step in (1, 3)
        loss = model(_batch(step)[0].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _deep() -> list[float]:
    set_torchrun_variables()
    return _trained_deep(adopting("dp=2,zero=1"))


def test_a_number_of_repeated_layers_is_followed() -> None:
    expected = _trained_deep(lambda model, example: model)
    for found in run_processes(2, _deep):
        assert found == pytest.approx(expected, rel=1e-9)
