"""Errors that a script meets: each is raised, and then its fix is run.

Other cases are in ``tests/support/``: of a forward's code in ``fixes_in_forwards.py``, of classes,
outputs and batches in ``fixes_in_scripts.py``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fixes_in_forwards import CASES, LABELS, PLANS, Net, Of, X, case, trained
from fixes_in_scripts import WithLoss, unsharded
from forced_plans import Adopt, adopting
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoparallel
from autoparallel.planner.errors import AutoparallelError

pytestmark = pytest.mark.slow


@case
class AP920(Of):
    """A tensor where there was none, then an ``example_batch`` with it."""

    others = (X.flip(0),)

    @staticmethod
    def good(model: Net, z: Tensor, other: Tensor | None = None) -> Tensor:
        return z if other is None else z + other

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        trained(adopt(Net(cls.good), (X,)), X, *cls.others)


@case
class AP921:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        model.eval()(X).sum().backward()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        """A gradient for evaluation alone, by the whole weights."""
        model = adopt(Net(), (X,))
        trained(model)
        inputs = X.clone().requires_grad_()
        with unsharded(model.eval()):
            model(inputs).square().sum().backward()
        assert inputs.grad is not None
        return [float(inputs.grad.norm())]


@case
class AP922:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        model.dropout.eval()
        trained(model)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = Net()
        model.dropout.eval()
        return trained(adopt(model, (X,)))


class Called(Net):
    """Its ``__call__`` scales what the forward returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 0.5


@case
class AP923:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        model.a.register_forward_hook(lambda module, given, out: out * 2)
        trained(model)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        """On the model itself, on a parameter, and on a part of it before parallelize."""
        plain, seen = Called(), []
        plain.a.register_forward_hook(lambda module, given, out: out * 2)
        plain.register_forward_hook(lambda module, given, out: out * 3)
        model = adopt(plain, (X,))
        model.register_forward_pre_hook(lambda module, given: seen.append(given[0].sum()))
        model.register_forward_pre_hook(lambda module, given: (given[0] + 0.5,))
        model.b.bias.register_hook(lambda gradient: gradient * 0.5)
        losses = trained(model)
        with torch.no_grad():
            evaluated = model.eval()(X).square().sum()
        return [*losses, float(evaluated), *map(float, seen)]


@case
class AP923OfStep:
    """``Step`` runs no hook of the model itself; what one does can stand in the forward."""

    plans = ("dp=2,microbatches=2",)

    @staticmethod
    def run(adopt: Adopt, model: nn.Module, *, hooked: bool) -> list[float]:
        batch = {"x": X, "labels": LABELS}
        model = adopt(model, batch)
        if hooked:
            model.register_forward_hook(lambda module, given, out: out * 2)
        step = autoparallel.Step(
            model, loss_fn=lambda out, batch: F.cross_entropy(out, batch["labels"])
        )
        return [float(step(batch)) for _ in range(2)]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, Net(), hooked=True)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, Net(lambda model, z: z * 2), hooked=False)


@case
class AP924:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        model.double()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        return trained(adopt(Net().double(), (X.double(),)), X.double())


@case
class AP925:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        plain = Net()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        trained(adopt(plain, (X,)), optimizer=optimizer)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        """After parallelize, and for parts of the model after ``join``."""
        model = adopt(Net(), (X,))
        if hasattr(model, "join"):
            model.join()
        part = torch.optim.SGD(model.a.parameters(), lr=0.1)
        return trained(model, optimizer=part) + trained(model)


@case
class AP925OfPenalty:
    """A weight that a term of the loss was given before the first call."""

    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        term = model.a.weight.square().sum()
        (F.cross_entropy(model(X), LABELS) + term).backward()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = adopt(Net(), (X,))
        weight = dict(model.named_parameters())["a.weight"]
        term = autoparallel.whole(weight).square().sum()
        (F.cross_entropy(model(X), LABELS) + term).backward()
        return [float(autoparallel.whole(weight.grad).norm())]


@case
class AP926:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        with model.unsharded(), torch.no_grad():
            model.a.weight.mul_(0.5)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = adopt(Net(), (X,))
        losses = trained(model)
        with unsharded(model), torch.no_grad():
            model.a.weight.mul_(0.5)
            state = copy.deepcopy(model.state_dict())
            model.a.weight.mul_(2.0)
        model.load_state_dict(state)
        return losses + trained(model)


@case
class AP927:
    @staticmethod
    def run(adopt: Adopt, *, before: bool) -> list[float]:
        model, inputs = adopt(WithLoss(), (X, LABELS)), X.clone()
        outputs = model(inputs, LABELS)
        outputs["loss"].backward()
        found = [float(outputs["logits"].square().sum())] if before else []
        inputs.zero_()
        return found or [float(outputs["logits"].square().sum())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, before=False)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, before=True)


@case
class AP929:
    @staticmethod
    def run(adopt: Adopt, *, early: bool) -> list[float]:
        plain = Net()
        plain.b.requires_grad_(early)
        model = adopt(plain, (X,))
        losses = trained(model) if early else trained(model, steps=1)
        model.b.requires_grad_(not early)  # frozen later, or trained later
        return losses + trained(model)

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, early=False)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, early=True)


@case
class AP930:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        copy.deepcopy(model)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = adopt(Net(), (X,))
        trained(model)
        with unsharded(model):
            state = copy.deepcopy(model.state_dict())
        other = Net()
        other.load_state_dict(state)
        return [float(other(X).square().sum())]


@case
class AP933:
    plans = ("dp=2,microbatches=2",)

    @staticmethod
    def run(adopt: Adopt, **options: Any) -> list[float]:
        model = adopt(WithLoss(), (X, LABELS), **options)
        inputs = X.clone().requires_grad_()
        model(inputs, LABELS)["loss"].backward()
        assert inputs.grad is not None
        return [float(inputs.grad.norm())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        scaled = X.clone().requires_grad_() * 2  # nothing before the model is trained through it
        return cls.run(adopt, parallel="dp=2,microbatches=1") + trained(
            adopt(WithLoss(), (X, LABELS)), scaled.detach(), LABELS
        )


@case
class AP934:
    plans = ("dp=2,microbatches=2",)

    @staticmethod
    def wrong(adopt: Adopt) -> None:
        loss = adopt(WithLoss(), (X, LABELS))(X, LABELS)["loss"]
        (loss * 0.5).backward(retain_graph=True)
        (loss * 2.0).backward()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = adopt(WithLoss(), (X, LABELS))
        loss = model(X, LABELS)["loss"]
        (loss * 0.5 + loss * 2.0).backward()
        return [float(autoparallel.whole(model.net.a.weight.grad).norm())]


@case
class AP935:
    plans = ("dp=2,microbatches=2",)

    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(WithLoss(), (X, LABELS))
        checkpoint(model, X, LABELS, use_reentrant=False)["loss"].backward()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        return trained(adopt(WithLoss(), (X, LABELS)), X, LABELS)


@case
class AP936:
    @staticmethod
    def run(adopt: Adopt, *, writes: bool) -> list[float]:
        model = adopt(Net(), (X,))
        losses = trained(model)
        if writes:
            model.load_state_dict({"b.bias": torch.ones(4)}, strict=False)
        else:
            model.b.bias.data = model.b.bias.data * 2
        return losses + trained(model)

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, writes=False)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, writes=True)


@case
class AP941:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            trained(adopt(Net(), (X,)))

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        """The call outside of autocast; a plan in its dtype is compared in ``test_autocast``."""
        model = adopt(Net(), (X,))
        losses = trained(model)
        in_bf16 = adopt(Net(), (X,), precision="bf16")
        with torch.autocast("cpu", torch.bfloat16):
            assert trained(in_bf16) == pytest.approx(losses, rel=0.05)
        return losses


@case
class AP942(Of):
    @staticmethod
    def run(adopt: Adopt, value: float) -> list[float]:
        model = Net(lambda model, z: z * model.factor)
        model.factor = 1.0
        model = adopt(model, (X,))
        losses = trained(model)
        model.factor = value
        return losses + trained(model)

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, 2.0 + torch.distributed.get_rank())

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, 2.0)


@case
class AP945:
    plans = ("dp=2,zero=2",)

    @staticmethod
    def run(adopt: Adopt, shift: int) -> list[float]:
        model = adopt(Net(), (X,))
        loss = F.cross_entropy(model(X), (LABELS + shift) % 4)
        loss.backward()
        return [float(loss)]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, torch.distributed.get_rank())

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, 1)


class Keeps(Net):
    """A term of its loss, kept on the model, in a buffer, or returned."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        z = self.a(x)
        term = z.square().mean()
        if self.how == "attribute":
            self.term = term
        else:
            self.kept.copy_(term.detach())
        return {"loss": F.cross_entropy(self.b(z), LABELS) + term, "term": term}


@case
class AP946:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Keeps("attribute"), (X,))
        trained(model)
        float(model.term)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = adopt(Keeps("buffer"), (X,))
        outputs = model(X)
        outputs["loss"].backward()
        return [float(outputs["term"]), float(model.kept)]


@case
class AP947:
    @staticmethod
    def penalty(critic: Any) -> list[float]:
        inputs = X.clone().requires_grad_()
        scores = critic(inputs).sum()
        gradient = torch.autograd.grad(scores, inputs, create_graph=True)[0]
        gradient.square().sum().backward()
        return [float(critic.a.weight.grad.norm())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.penalty(adopt(Net(), (X,)))

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        """The critic stays plain, beside a parallel model."""
        return cls.penalty(Net()) + trained(adopt(Net(), (X,)))


def _results(plan: str, names: list[str]) -> dict[str, tuple[str, list[float]]]:
    """On a rank: for each case the code that ``wrong`` ended in, and what ``fixed`` computes."""
    set_torchrun_variables()
    found = {}
    for name in names:
        code = "no error"
        try:
            CASES[name].wrong(adopting(plan))  # type: ignore[attr-defined]
        except AutoparallelError as error:
            code = error.code
        found[name] = code, CASES[name].fixed(adopting(plan))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("plan", [*PLANS, "dp=2,microbatches=2"])
def test_a_script_computes_what_the_model_computes_once_it_does_as_the_error_says(
    plan: str,
) -> None:
    names = [name for name, each in CASES.items() if plan in getattr(each, "plans", PLANS)]
    plain = {
        name: CASES[name].fixed(lambda model, example, **_: model)  # type: ignore[attr-defined]
        for name in names
    }
    for found in run_processes(2, _results, plan, names, timeout_seconds=400):
        codes = {name: code for name, (code, _) in found.items()}
        assert codes == {name: name[:5] for name in names}
        for name, (_, values) in found.items():
            assert values == pytest.approx(plain[name], rel=1e-4), name
