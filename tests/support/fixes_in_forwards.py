"""Models whose forward cannot be captured as it stands, and the same with the error's fix.

Each case is a class whose ``wrong`` ends in the error of its name and whose ``fixed`` does as the
error says, and then computes what the model computes alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from forced_plans import Adopt
from torch import Tensor, nn

import autoparallel

PLANS = ("dp=2,zero=2", "tp=2")
X = torch.linspace(-1, 1, 64).reshape(8, 8).sin() * 3
LABELS = torch.arange(8) % 4
CASES: dict[str, type] = {}


def case(cls: type) -> type:
    CASES[cls.__name__] = cls
    return cls


class Net(nn.Module):
    """A layer, something that a case does with its result, and another layer."""

    def __init__(self, middle: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("mean", torch.zeros(8))
        self.middle = middle

    def forward(self, x: Tensor, *others: Any) -> Any:
        z = self.a(x)
        z = z if self.middle is None else self.middle(self, z, *others)
        return self.b(self.dropout(torch.tanh(z))) if isinstance(z, Tensor) else z


def trained(model: Any, *inputs: Any, optimizer: Any = None, steps: int = 2) -> list[float]:
    """The losses of a few steps, and what the model then computes."""
    inputs = inputs or (X,)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        out = model(*inputs)
        loss = F.cross_entropy(out, LABELS) if isinstance(out, Tensor) else out["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


class Of:
    """A case in which the middle of the model decides."""

    bad: Any
    good: Any
    others: tuple[Any, ...] = ()

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        trained(adopt(Net(cls.bad), (X,)))

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return trained(adopt(Net(cls.good), (X, *cls.others)), X, *cls.others)


@case
class AP202(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        return z * 2 if z.sum() > 0 else z

    @staticmethod
    def good(model: Net, z: Tensor) -> Tensor:
        return torch.where(z.sum() > 0, z * 2, z)


@case
class AP208(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        model.mean.data = z.detach()[0, :4]
        return z

    @staticmethod
    def good(model: Net, z: Tensor) -> Tensor:
        model.mean.data = z.detach().mean(0)
        return z + model.mean


class Result:
    """An output of a class that pytree cannot take apart and build again."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@case
class AP209(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Any:
        return Result(z.square().mean())

    @staticmethod
    def good(model: Net, z: Tensor) -> Any:
        return {"loss": z.square().mean()}


@case
class AP210:
    @staticmethod
    def run(adopt: Adopt, middle: Any) -> list[float]:
        model = adopt(Net(middle), (X,))
        logits, weight = model(X)
        loss = F.cross_entropy(logits, LABELS) + weight.square().sum()
        loss.backward()
        return [float(loss), float(autoparallel.whole(model.a.weight.grad).norm())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, lambda model, z: (model.b(z), model.a.weight))

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, lambda model, z: (model.b(z), model.a.weight * 1))


@case
class AP211(Of):
    others = (torch.arange(8).flip(0),)

    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        return z[torch.randperm(8, generator=torch.Generator().manual_seed(0))]

    @staticmethod
    def good(model: Net, z: Tensor, order: Tensor) -> Tensor:
        return z + order[:, None]


@case
class AP212(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        z.detach()[:, 0] = 0
        return z

    @staticmethod
    def good(model: Net, z: Tensor) -> Tensor:
        changed = z.detach().clone()
        changed[:, 0] = 0
        return z + (changed - z).detach()


@case
class AP213(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        model.a.weight.data.clamp_(-0.2, 0.2)
        return z

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        """After the optimizer's step, and a changed copy."""
        model = adopt(Net(lambda model, z: z @ model.a.weight.clamp(-0.2, 0.2)), (X,))
        losses = trained(model)
        with torch.no_grad():
            model.b.weight.clamp_(-0.2, 0.2)
        return losses + trained(model)


@case
class AP214(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        z.square().sum().backward(retain_graph=True)
        return z

    @staticmethod
    def good(model: Net, z: Tensor) -> Tensor:
        energy = model.b(torch.tanh(z)).square().sum()
        return z + torch.autograd.grad(energy, z, create_graph=True)[0]


@case
class AP215(Of):
    @staticmethod
    def bad(model: Net, z: Tensor) -> Tensor:
        return z + torch.func.grad(lambda given: torch.tanh(model.b(given)).sum())(z)

    @staticmethod
    def good(model: Net, z: Tensor) -> Tensor:
        outputs = torch.tanh(model.b(z))
        return z + torch.autograd.grad(outputs.sum(), z, create_graph=True)[0]


@case
class AP216:
    @staticmethod
    def model(momentum: float | None) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 4)
        return nn.Sequential(*layers)

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        trained(adopt(cls.model(None), (X,)))

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return trained(adopt(cls.model(0.1), (X,)))
