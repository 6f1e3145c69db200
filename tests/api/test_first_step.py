"""A first step that is not that of the model alone is stopped before it trains anything."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from forced_plans import adopting, settled
from marks import slow
from processes import run_processes, set_torchrun_variables
from test_verification import captured, planned
from torch import Tensor, nn
from torch.compiler import is_exporting

import autoparallel
from autoparallel.passes.local.input_rows import StageRows
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan_file import loads
from autoparallel.runtime.data.rank_batch import whole_batch
from autoparallel.runtime.verify.first_step import FirstStep, _difference, _norm, is_quick


def _batch() -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(1)),)


class Net(nn.Module):
    """A model that is captured as another one than it is, in the way of ``fault``."""

    def __init__(self, fault: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.filter = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        h = self.fault(self, self.norm(self.drop(F.relu(self.a(x)))))
        return F.mse_loss(self.b(h), x[:, :4]) + 0.01 * (self.filter.abs() * h).square().mean()


class Heads(Net):
    """Returns no loss."""

    def forward(self, x: Tensor) -> Any:
        h = self.fault(self, self.norm(self.drop(F.relu(self.a(x)))))
        return self.b(h), h * self.filter.abs()


_KINDS: dict[type, int] = {}


def _cached(net: Any, h: Tensor) -> Tensor:
    """No fault: a cache that grows where the plain model is computed, on one rank alone."""
    return h * _KINDS.setdefault(type(h), 1)


def _without_gradient(net: Any, h: Tensor) -> Tensor:
    return h + (h if is_exporting() else h.detach()) / 2


def _real(net: Any, h: Tensor) -> Tensor:
    weight = net.filter.real if is_exporting() else net.filter
    return (h * weight).abs()


def _written(net: Any, h: Tensor) -> Tensor:
    weight = net.b.weight if is_exporting() else net.b.weight.clamp(-0.05, 0.05)
    return h + F.linear(h, weight).mean()


def _statistics(net: Any, h: Tensor) -> Tensor:
    net.seen.add_(1.0 if is_exporting() else 2.0)
    return h


FAULTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a number of the rows": (lambda net, h: h * 8 / (2 if is_exporting() else len(h)), "loss"),
    "a region without gradients": (_without_gradient, "gradient of a.weight"),
    "a complex parameter": (_real, "loss"),
    "a write to a parameter": (_written, "loss"),
    "a number of the script": (lambda net, h: h * (0.5 if is_exporting() else 1.0), "loss"),
    "a random number": (
        lambda net, h: h * (0.1 if is_exporting() else float(torch.rand(()))),
        "loss",
    ),
    "a precision": (
        lambda net, h: h if is_exporting() else (h * 30).to(torch.float8_e5m2).float() / 30,
        "loss",
    ),
    "other weights": (
        lambda net, h: h + (net.b.weight.mean() + 1 if is_exporting() else net.b.weight.mean()),
        "loss",
    ),
    "a running statistic": (_statistics, "norm of seen"),
}


def _told(
    kind: type[nn.Module], name: str, plan: str, *, asked: bool | None, rows: slice = slice(None)
) -> str:
    """What training on rows of the batch says, by its first two steps."""
    fault = FAULTS[name][0] if name in FAULTS else _cached
    model = autoparallel.parallelize(
        kind(fault),
        example_batch=_batch(),
        global_batch=8,
        parallel=settled(plan),
        profile="analytic",
        check_first_step=asked,
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        for batch in (_batch(), _batch()):
            model(*(tensor[rows] for tensor in batch))
    except AutoparallelError as error:
        assert all(map(torch.equal, before, model.parameters()))
        assert all(parameter.grad is None for parameter in model.parameters())
        return f"{error.code} {error.what} {error.why}"
    return "equal"


def _all(plan: str, kind: type[nn.Module], names: tuple[str, ...]) -> dict[str, str]:
    set_torchrun_variables()
    found = {name: _told(kind, name, plan, asked=True) for name in names}
    if "none" in names:
        found["not asked"] = _told(kind, "a number of the rows", plan, asked=False)
    return found


@pytest.mark.parametrize(
    ("plan", "kind", "names"),
    [
        ("dp=2", Net, ("none", *FAULTS)),
        slow("tp=2", Heads, ("none", "a region without gradients", "a number of the script")),
        slow("dp=2,zero=3", Net, ("none", "a region without gradients", "a running statistic")),
    ],
)
def test_each_kind_of_silent_difference_is_stopped(
    plan: str, kind: type[nn.Module], names: tuple[str, ...]
) -> None:
    for result in run_processes(2, _all, plan, kind, names):
        for name, told in result.items():
            if name in ("none", "not asked"):
                assert told == "equal", (name, told)
            else:
                assert told.startswith("AP943 the first step by the plan is not that of"), name
                assert kind is Heads or FAULTS[name][1] in told, (name, told)


def _by_rows(kind: type[nn.Module], names: tuple[str, ...]) -> dict[str, str]:
    set_torchrun_variables()
    own = slice(4 * dist.get_rank(), 4 * (dist.get_rank() + 1))
    return {name: _told(kind, name, "dp=2", asked=True, rows=own) for name in names}


@pytest.mark.parametrize("kind", [Net, slow(Heads)])
def test_a_step_of_own_rows_on_each_rank_is_compared(kind: type[nn.Module]) -> None:
    for result in run_processes(2, _by_rows, kind, ("none", "a number of the rows")):
        assert result["none"] == "equal"
        assert result["a number of the rows"].startswith("AP943")


class Tied(nn.Module):
    """The bias of its head has two names, and stands in the last stage alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(6, 4)
        self.head.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return (self.head(h) - x[:, :4]).square().mean()


def _of_tied() -> tuple[float, float]:
    """The first loss of a pipeline's step, and that of the model alone."""
    set_torchrun_variables()
    model = adopting("pp=2")(Tied(), _batch(), check_first_step=True)
    step = autoparallel.Step(
        model,
        build_optimizer=lambda named_parameters: torch.optim.SGD([p for _, p in named_parameters]),
    )
    return float(step(_batch())), float(Tied()(*_batch()))


def test_a_tied_weight_of_another_stage_is_compared_under_each_of_its_names() -> None:
    for found, expected in run_processes(2, _of_tied):
        assert found == pytest.approx(expected, rel=1e-5)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored labels": F.cross_entropy,
    "masked mean": lambda out, y: (
        (out.square().sum(1) * (y > 2)).sum() / (y > 2).sum().clamp(min=3)
    ),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
}


class Meeting(nn.Module):
    """A model whose samples meet in batch norm."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[self.loss](self.b(self.norm(self.a(x))), y)


def _accumulated(loss: str) -> tuple[float, float, str]:
    """The loss of a step of two micro-batches, the sum of the losses of two halves alone, and what
    is said."""
    set_torchrun_variables()
    batch = (*_batch(), torch.tensor([-100, 1, 2, 3, 0, 2, -100, -100]))
    model = adopting("dp=2,microbatches=2")(Meeting(loss), batch, check_first_step=True)
    step = autoparallel.Step(
        model,
        build_optimizer=lambda named_parameters: torch.optim.SGD([p for _, p in named_parameters]),
    )
    alone = Meeting(loss)
    halves = [alone(*(tensor[half] for tensor in batch)) for half in (slice(4), slice(4, 8))]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return float(step(batch)), float(sum(halves)), said.getvalue()


@pytest.mark.parametrize("loss", LOSSES)
def test_where_samples_meet_each_micro_batch_divides_by_its_own_targets(loss: str) -> None:
    """As when gradients are accumulated: a mean is the mean of the means, a sum is the sum, whose
    parts the model alone cannot be compared with."""
    results = run_processes(2, _accumulated, loss)
    for found, expected, _ in results:
        assert found == pytest.approx(expected / (1 if loss == "sum" else 2), rel=1e-5)
    assert ("AP949" in results[0][2]) == (loss == "sum")


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (4, 0)])
def test_a_batch_is_put_together_from_shares(sizes: tuple[int, ...]) -> None:
    """Two micro-batches of four rows, of which an input has two entries for each."""
    batch = {"x": torch.arange(16), "y": torch.arange(24).reshape(3, 8), "z": torch.tensor(5)}
    rows, shares = StageRows((0,), sizes, {"x": 0, "y": 1}, ()), []
    for part in range(2):
        held = rows.held(part, 2)
        at = torch.tensor(held.indices())
        x = batch["x"].reshape(8, 2)[at].flatten()
        share = {"x": x, "y": batch["y"][:, at], "z": batch["z"]}
        if not sizes[part]:
            share = {name: torch.full_like(tensor, -1) for name, tensor in share.items()}
        shares.append((held, share))
    for order in (shares, shares[::-1]):
        whole = whole_batch(order, {"x": 0, "y": 1})
        assert all(torch.equal(whole[name], tensor) for name, tensor in batch.items())


def test_pieces_that_overlap_count_once_in_a_norm() -> None:
    """A stage that splits a tied weight, and one that holds all of it."""
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    pieces = [
        (((0, 6), (0, 2)), whole[:, :2]),
        (((0, 6), (2, 4)), whole[:, 2:]),
        (((0, 6), (0, 4)), whole),
        (((6, 6), (0, 4)), whole[6:]),
    ]
    assert _norm(pieces) == pytest.approx(float(whole.double().norm()))


def test_a_loss_that_is_rounding_of_1_is_no_difference() -> None:
    norms = {"weight": 1.0}
    for precision, loss, other in (("bf16", -0.0031, -0.0027), ("fp32", 2e-7, -1e-7)):
        alone, own = FirstStep(loss, norms, {}), FirstStep(other, norms, {})
        assert _difference(alone, own, precision) is None
        own = FirstStep(loss + 0.1, norms, {})
        assert _difference(alone, own, precision) is not None


def test_a_model_whose_masks_would_not_fit_is_not_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph with a window has no mask, but the model itself writes four of 16 by 16 positions."""
    plan, graph = loads(planned("window", "dp=2"), "test"), captured("window", "fp32")[1].graph
    least = 2 * plan.prediction.peak_memory_bytes
    for more, quick in ((4 * 16 * 16, False), (4 * 16 * 16 + 1, True)):
        memory = SimpleNamespace(available=2 * (least + more))
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert is_quick(plan, graph) == quick
