"""Random numbers that a script draws for a planned model's weights are those of the model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from forced_plans import Adopt, adopting
from marks import slow
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

import autoparallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x)))).square().mean()


def _noise(model: Any) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
        parameter.mul_(1 + torch.rand_like(parameter))


def _masks(model: Any) -> None:
    model.a.weight.mul_(torch.bernoulli(torch.full_like(model.a.weight, 0.5)))
    model.b.weight.copy_(F.dropout(model.b.weight, 0.5))
    model.a.bias.add_(torch.randint_like(model.a.bias, 5))


def _filled(model: Any) -> None:
    nn.init.xavier_uniform_(model.a.weight)
    nn.init.trunc_normal_(model.b.weight, std=0.1)
    model.norm.weight.exponential_()
    model.a.bias.bernoulli_(0.5)
    model.b.bias.normal_(generator=torch.Generator().manual_seed(3))


DRAWS: dict[str, Callable[[Any], Any]] = {
    "noise": _noise,
    "masks": _masks,
    "filled": _filled,
    "begun again": lambda model: [model.a.reset_parameters(), model.b.reset_parameters()],
}


def _weights(adopt: Adopt, name: str, seed: int) -> list[list[float]]:
    """The weights, a number that is drawn next, and a loss."""
    torch.manual_seed(0)
    x = torch.randn(8, 6).double()
    model: Any = adopt(Net().double(), (x,))
    model(x).backward()
    torch.manual_seed(seed)
    with torch.no_grad():
        DRAWS[name](model)
    found = [autoparallel.whole(parameter) for parameter in model.parameters()]
    return [each.detach().flatten().tolist() for each in (*found, torch.rand(1), model(x))]


def _on_rank(plan: str, seeds: tuple[int, int]) -> dict[str, list[list[float]]]:
    set_torchrun_variables()
    return {name: _weights(adopting(plan), name, seeds[dist.get_rank()]) for name in DRAWS}


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,zero=3", slow("dp=2"), slow("dp=2,zero=1")])
def test_draws_for_weights_are_those_of_the_model_alone(plan: str) -> None:
    for found in run_processes(2, _on_rank, plan, (5, 5)):
        for name, values in found.items():
            expected = _weights(lambda model, _: model, name, 5)
            for own, alone in zip(values, expected, strict=True):
                assert own == pytest.approx(alone, rel=1e-12), name


def test_ranks_with_other_seeds_take_what_the_first_one_draws() -> None:
    first, second = run_processes(2, _on_rank, "dp=2,zero=3", (5, 6))
    for name in DRAWS:
        assert first[name][:6] == second[name][:6]
        assert first[name][6] != second[name][6]


def _of_another_mesh() -> bool:
    """Whether torch draws for a tensor of a mesh on which no model is planned, as before."""
    set_torchrun_variables()
    adopting("tp=2")(Net(), (torch.randn(8, 6),))(torch.randn(8, 6))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("another",))
    zeros = dist.tensor.distribute_tensor(torch.zeros(4, 4), mesh, [dist.tensor.Shard(0)])
    torch.manual_seed(0)
    plain = torch.randn(4, 4)
    torch.manual_seed(0)
    return torch.equal(torch.randn_like(zeros).full_tensor(), plain)


def test_tensors_of_a_scripts_own_mesh_are_left_to_torch() -> None:
    assert run_processes(2, _of_another_mesh) == [False, False]
