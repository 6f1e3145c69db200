"""Gradients that a forward takes (penalties, forces) are trained through as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from forced_plans import Adopt, adopting
from kept_captures import ranks_share_captures
from marks import slow
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.planner.errors import CaptureError


class Energy(nn.Module):
    """A network and what is done with the gradient of its outputs with respect to its input."""

    def __init__(self, network: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.use = network, use

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.network(x)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.use(energy, slope)


class Stopped(nn.Module):
    """A gradient that is not trained through weighs the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _mixed()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.network(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        assert not slope.requires_grad
        return (energy * slope.square().sum(1, keepdim=True)).mean()


def _mixed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 8),
        nn.Softmax(1),
        nn.Linear(8, 1),
    )


def _convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(72, 1),
    )


def _penalty(energy: Tensor, slope: Tensor) -> Tensor:
    """The gradient's norm is to be one (Gulrajani et al. 2017)."""
    return F.softplus(energy).mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


def _force(energy: Tensor, slope: Tensor) -> Tensor:
    return energy.square().mean() + (slope - 0.5).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "penalty": (lambda: Energy(_mixed(), _penalty), (8, 6)),
    "force": (lambda: Energy(_mixed(), _force), (8, 6)),
    "convolved": (lambda: Energy(_convolved(), _penalty), (8, 2, 8, 8)),
    "stopped": (Stopped, (8, 6)),
}


def _trained(adopt: Adopt, name: str) -> list[float]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    numbers = torch.Generator().manual_seed(1)
    batches = [torch.randn(shape, generator=numbers).double() for _ in range(3)]
    model: Any = adopt(build().double(), (batches[0],))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for batch in batches:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss.item(), float(norm)]
    return found


def _all(plan: str) -> dict[str, list[float]]:
    set_torchrun_variables()
    found = {}
    for name in MODELS:
        with ranks_share_captures(__file__, name):
            found[name] = _trained(adopting(plan), name)
    return found


@pytest.mark.parametrize("plan", [slow("dp=2"), "tp=2"])
def test_a_gradient_inside_the_forward_is_trained_through(plan: str) -> None:
    for found in run_processes(2, _all, plan):
        for name, values in found.items():
            expected = _trained(lambda model, example: model, name)
            assert values == pytest.approx(expected, rel=1e-9), name


class Backward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.a(x).sum().backward()
        return self.a(x).mean()


class Functional(Backward):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: self.a(row[None]).sum()))
        return slope(x).square().mean()


@pytest.mark.parametrize(("model", "code"), [(Backward, "AP214"), (Functional, "AP215")])
def test_other_gradients_inside_the_forward_are_refused(model: type[nn.Module], code: str) -> None:
    with pytest.raises(CaptureError) as refused:
        capture(model(), (torch.zeros(2, 6),))
    assert refused.value.code == code
