"""``autograd.grad`` and ``backward(inputs=...)`` of a planned model's parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forced_plans import Adopt, adopting
from marks import slow
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn
from torch.autograd import grad

import autoparallel
from autoparallel.planner.errors import UsageError


class Tasks(nn.Module):
    """A trunk whose outputs two tasks share, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(x))) * self.scale


class Loss(Tasks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


Figures = dict[str, list[float]]


def _figures(tensors: Any) -> list[float]:
    """The sizes of gradients, and -1 where there is none."""
    whole = [None if each is None else autoparallel.whole(each) for each in tensors]
    return [-1.0 if each is None else float(each.norm()) for each in whole]


def _computed(adopt: Adopt, *, is_loss: bool) -> Figures:
    torch.manual_seed(0)
    x, after = torch.randn(8, 6).double(), nn.Linear(4, 1).double()
    model: Any = adopt((Loss if is_loss else Tasks)().double(), (x,))

    def losses() -> tuple[Tensor, Tensor]:
        out = model(x)
        return (out, 2 * model(x)) if is_loss else (out.square().mean(), after(out).mean())

    found: Figures = {}
    parameters, head = list(model.parameters()), list(model.head.parameters())

    def note(name: str) -> None:
        every = [*parameters, *after.parameters()]
        found[name] = _figures(each.grad for each in every)

    sum(losses()).backward(inputs=head)  # type: ignore[union-attr]
    note("chosen")
    losses()[1].backward(inputs=[*head, parameters[0]])
    note("chosen again")
    first, second = losses()
    found["first"] = _figures(grad(first, parameters, retain_graph=True))
    found["second"] = _figures(torch.autograd.grad(second, [head[0], *model.trunk.parameters()]))
    note("after grad")
    penalty = autoparallel.whole(model.scale).square().sum()
    found["penalty"] = _figures(torch.autograd.grad(losses()[0] + penalty, parameters))
    unused, one = torch.zeros(2, requires_grad=True), torch.ones((), dtype=torch.float64)
    asked = [head[0], unused]
    found["unused"] = _figures(torch.autograd.grad(losses()[0], asked, allow_unused=True))
    found["zeros"] = _figures(torch.autograd.grad(losses()[0], asked, materialize_grads=True))
    found["scaled"] = _figures(torch.autograd.grad(losses()[:1], head, [3 * one]))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(losses()[0], asked)
    note("after an error")
    if not is_loss:
        out = model(x)
        found["inner"] = _figures(torch.autograd.grad(out.square().mean(), [head[0], out]))
    losses()[0].backward()
    note("all")
    return found


def _on_rank(plan: str) -> list[Figures]:
    set_torchrun_variables()
    forms = (True,) if "microbatches" in plan else (True, False)
    return [_computed(adopting(plan), is_loss=is_loss) for is_loss in forms]


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3", slow("dp=2"), slow("dp=2,microbatches=2")])
def test_chosen_gradients_are_those_of_the_model_alone(plan: str) -> None:
    for found in run_processes(2, _on_rank, plan):
        for is_loss, figures in zip((True, False), found, strict=False):
            for name, expected in _computed(lambda model, _: model, is_loss=is_loss).items():
                assert figures[name] == pytest.approx(expected, rel=1e-9), (is_loss, name)


def _of_second_order() -> list[str]:
    set_torchrun_variables()
    model: Any = adopting("dp=2")(Loss(), (torch.randn(8, 6),))
    told = []
    batched = {"is_grads_batched": True, "grad_outputs": torch.ones(2)}
    for option in ({"create_graph": True}, batched):
        with pytest.raises(UsageError) as caught:
            torch.autograd.grad(model(torch.randn(8, 6)), list(model.parameters()), **option)
        told.append(caught.value.code)
    return told


def test_gradients_of_gradients_of_parameters_are_refused() -> None:
    assert run_processes(2, _of_second_order) == [["AP947", "AP947"]] * 2
