"""Classes, outputs, methods and batches that a parallel model refuses, and the errors' fixes.

The form of a case is that of ``fixes_in_forwards``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fixes_in_forwards import LABELS, Net, X, case, trained
from forced_plans import Adopt
from torch import Tensor, nn

import autoparallel
from autoparallel.runtime.launch.watched_script import advice_for


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """``model.unsharded()`` of a parallel model."""
    if not hasattr(model, "unsharded"):
        yield
        return
    with model.unsharded():
        yield


class WithLoss(nn.Module):
    """Its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@case
class AP928:
    @staticmethod
    def run(adopt: Adopt, **options: Any) -> list[float]:
        model = adopt(WithLoss(), (X, LABELS), **options)
        outputs = model(X, LABELS)
        total = outputs["loss"] + outputs["logits"].square().mean()
        total.backward()
        return [float(total), float(autoparallel.whole(model.net.a.weight.grad).norm())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, loss=None)


class Tower(nn.Module):
    """Reads a weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layers[0](x), self.layers[1].weight)


@case
class AP931:
    @staticmethod
    def run(adopt: Adopt, *, gathers: bool) -> list[float]:
        model = adopt(Tower(), (X,))
        losses = trained(model)
        model.eval()
        if not gathers:
            return [*losses, float(model(X).square().sum())]
        with unsharded(model):
            return [*losses, float(model(X).square().sum())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, gathers=False)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, gathers=True)


def cross_entropy(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch["labels"])


def stepped(adopt: Adopt, sizes: tuple[int, ...]) -> list[float]:
    """The losses of ``Step`` on batches of ``sizes`` rows."""
    model = adopt(Net(), {"x": X, "labels": LABELS}, loss_fn=cross_entropy)
    step = autoparallel.Step(model, loss_fn=cross_entropy)
    return [float(step({"x": X[:rows], "labels": LABELS[:rows]})) for rows in sizes]


@case
class AP932:
    plans = ("dp=2,microbatches=2",)

    @staticmethod
    def wrong(adopt: Adopt) -> None:
        trained(adopt(Net(), (X,)))

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        one = adopt(Net(), (X,), parallel="dp=2,microbatches=1")
        return trained(one) + stepped(adopt, (8, 8))


@case
class AP938:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        decorated = adopt(Net, (X,))
        type("Further", (decorated,), {})()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        further = type("Further", (Net,), {"forward": lambda self, x: Net.forward(self, x) * 2})
        return trained(adopt(further, (X,))()) + trained(adopt(further(), (X,)))


@case
class AP939:
    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net, (X,))()
        nn.init.zeros_(model.a.weight)
        trained(model)

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        class Zero(Net):
            def __init__(self) -> None:
                super().__init__()
                nn.init.zeros_(self.a.weight)

        plain = Net()
        nn.init.zeros_(plain.a.weight)
        return trained(adopt(Zero, (X,))()) + trained(adopt(plain, (X,)))


@case
class AP940:
    plans = ("dp=2,zero=2",)

    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        F.cross_entropy(model(X[:7]), LABELS[:7]).backward()

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        return stepped(adopt, (8, 7)) + trained(adopt(Net(), (X,)))


@case
class AP943:
    """A captured program that is not the model: its weights train all the same, if told to."""

    @staticmethod
    def run(adopt: Adopt, *, check: bool) -> list[float]:
        def middle(model: Net, z: Tensor) -> Tensor:
            return z * 2 if torch.compiler.is_exporting() else z

        losses = trained(adopt(Net(middle), (X,), check_first_step=check))
        return [float(losses[1] < losses[0])]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, check=True)

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, check=False)


@case
class AP944:
    plans = ("tp=2",)

    @staticmethod
    def wrong(adopt: Adopt) -> None:
        model = adopt(Net(), (X,))
        trained(model)
        try:
            (model.a.weight - torch.eye(8)).square().sum()
        except RuntimeError as error:
            raise advice_for(error) or error from error

    @staticmethod
    def fixed(adopt: Adopt) -> list[float]:
        model = adopt(Net(), (X,))
        if hasattr(model, "join"):
            model.join()
        distance = (autoparallel.whole(model.a.weight) - torch.eye(8)).square().sum()
        (F.cross_entropy(model(X), LABELS) + distance).backward()
        return [float(autoparallel.whole(model.a.weight.grad).norm())]


class Scores(Net):
    def scores(self, x: Tensor) -> Tensor:
        return self(x).softmax(-1)


@case
class AP948:
    @staticmethod
    def run(adopt: Adopt, methods: Any) -> list[float]:
        model = adopt(Scores(), (X,), methods=methods)
        return [*trained(model), float(model.eval().scores(X).square().sum())]

    @classmethod
    def wrong(cls, adopt: Adopt) -> None:
        cls.run(adopt, ["score"])

    @classmethod
    def fixed(cls, adopt: Adopt) -> list[float]:
        return cls.run(adopt, ["scores"])
