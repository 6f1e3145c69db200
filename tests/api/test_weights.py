"""What a script does with the weights itself, by the lines of docs/scripts.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forced_plans import Adopt, adopting
from kept_captures import ranks_share_captures
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import autoparallel
from autoparallel.runtime.launch.watched_script import advice_for

Figures = list[tuple[str, Any]]
whole = autoparallel.whole


SILU = '[["functional.silu", [{"at": 0}], {}]]'


class Net(nn.Module):
    """One parameter has a single element: of two ranks one has nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).relu()) * self.scale).square().mean()


class Experts(Net):
    """Two of the four experts on each rank of "ep": their weights lie on another mesh than the
    rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 12, 6) / 3)
        self.down = nn.Parameter(torch.randn(4, 6, 12) / 3)
        self.router = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(2)
        made = torch.ops.autoparallel.experts(
            x, ids, scores, self.up, self.down, activation=SILU, num_experts=4
        )
        return super().forward(x + made)


def _batch(seed: int) -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)),)


def numbers(adopt: Adopt) -> Figures:
    model = adopt(Net(), _batch(0))
    model(*_batch(1)).backward()
    weight = model.b.weight
    grad = weight.grad
    assert grad is not None
    return [
        ("sum", grad.sum().item()),
        ("norm", float(weight.norm())),
        ("largest", weight.max().item()),
        ("number", int((weight > 0).sum())),
        ("any", bool((grad > grad.abs().max() / 2).any())),
        ("text", f"{weight.sum():.4f}"),
        ("list", weight.detach().tolist()),
    ]


def penalties(adopt: Adopt) -> Figures:
    model = adopt(Net(), _batch(0))
    parameters = list(model.parameters())
    loss = model(*_batch(1)) + 0.1 * sum(whole(p).square().sum() for p in parameters)
    (loss + parameters_to_vector([whole(p) for p in parameters]).norm()).backward()
    return [("gradient", whole(p.grad).tolist()) for p in parameters]  # type: ignore[arg-type]


def averages(adopt: Adopt) -> Figures:
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    model = adopt(net, _batch(0))
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        model(*_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                before[name].lerp_(whole(p), 0.1)
                after[name].lerp_(p, 0.1)
    return [(name, whole(value).tolist()) for name, value in (*before.items(), *after.items())]


def norms(adopt: Adopt, net: type[Net] = Net) -> Figures:
    found: Figures = []
    for kind in (float("inf"), 1.0, 2.0):
        model = adopt(net(), _batch(0))
        model(*_batch(1)).backward()
        found.append(("norm", float(clip_grad_norm_(model.parameters(), 0.01, norm_type=kind))))
        found += [("gradient", whole(p.grad).tolist()) for p in model.parameters()]  # type: ignore[arg-type]
    return found


def everywhere(tensor: Tensor) -> Tensor:
    """The tensor, whole on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def lists(adopt: Adopt, net: type[Net] = Net) -> Figures:
    """Averages, and a step of an optimizer without tensors of its own, by multi-tensor ops; a
    scaler's gradients."""
    model = adopt(net(), _batch(0))
    parameters = list(model.parameters())
    averaged = [p.detach().clone() for p in parameters]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler.scale(model(*_batch(1))).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(parameters, 0.1)
    scaler.step(optimizer)
    torch._foreach_lerp_(averaged, [p.detach() for p in parameters], 0.25)
    torch._foreach_add_(averaged, [everywhere(p.detach()) for p in parameters])
    doubled = torch._foreach_mul(averaged, 2.0)
    return [("norm", float(norm)), *(("average", whole(each).tolist()) for each in doubled)]


def optimizers_of_whole_tensors(adopt: Adopt) -> Figures:
    found: Figures = []
    for kind in (torch.optim.Adafactor, torch.optim.Rprop):
        model = adopt(Net(), _batch(0))
        parameters = dict(model.named_parameters())
        copies = {n: nn.Parameter(whole(p.detach()).clone()) for n, p in parameters.items()}
        optimizer = kind(copies.values(), lr=0.1)
        for step in range(3):
            model.zero_grad()
            model(*_batch(step)).backward()
            for name, p in parameters.items():
                copies[name].grad = whole(p.grad)  # type: ignore[arg-type]
            optimizer.step()
            model.load_state_dict(copies, strict=False)
        found += [(name, whole(p.detach()).tolist()) for name, p in model.named_parameters()]
    return found


def optimizers(adopt: Adopt, net: type[Net] = Net) -> Figures:
    """Each trains the parameters themselves."""
    found: Figures = []
    for kind in (torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.RAdam):
        model = adopt(net(), _batch(0))
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(*_batch(step)).backward()
            optimizer.step()
        found += [(kind.__name__, whole(p.detach()).tolist()) for p in model.parameters()]
    return found


CASES = (numbers, penalties, averages, norms, lists, optimizers_of_whole_tensors, optimizers)


def _figures(plan: str) -> dict[str, Figures]:
    set_torchrun_variables()
    found = {}
    for case in CASES:
        torch.manual_seed(0)
        with ranks_share_captures(__file__, case.__name__):
            found[case.__name__] = case(adopting(plan))
    return found


ON_LISTS = (norms, lists, optimizers)


def _of_experts(plan: str) -> list[Figures]:
    set_torchrun_variables()
    found = []
    for case in ON_LISTS:
        torch.manual_seed(0)
        found.append(case(adopting(plan), Experts))
    return found


@pytest.mark.parametrize("zero", [1, 3])
def test_lists_of_weights_on_several_meshes_are_clipped_and_averaged_as_on_one_device(
    zero: int,
) -> None:
    results = run_processes(4, _of_experts, f"dp=4,ep=2,zero={zero}")
    for at, case in enumerate(ON_LISTS):
        torch.manual_seed(0)
        alone = case(lambda model, example: model, Experts)
        for result in results:
            for (name, value), (_, truth) in zip(result[at], alone, strict=True):
                torch.testing.assert_close(
                    torch.tensor(value), torch.tensor(truth), rtol=1e-4, atol=1e-5, msg=name
                )


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "tp=2"])
def test_weights_are_read_and_changed_as_those_of_the_model_alone(plan: str) -> None:
    results = run_processes(2, _figures, plan)
    for case in CASES:
        torch.manual_seed(0)
        alone = case(lambda model, example: model)
        for result in results:
            for (name, value), (_, truth) in zip(result[case.__name__], alone, strict=True):
                if isinstance(truth, str | bool):
                    assert value == truth, (case.__name__, name)
                else:
                    torch.testing.assert_close(
                        torch.tensor(value),
                        torch.tensor(truth),
                        rtol=1e-5,
                        atol=1e-6,
                        msg=lambda text, where=(case.__name__, name): f"{where}: {text}",
                    )


def _losses_apart() -> str:
    set_torchrun_variables()
    torch.manual_seed(0)
    model = adopting("dp=2")(nn.Linear(6, 4), _batch(0))
    labels = torch.full((8,), torch.distributed.get_rank())
    try:
        nn.functional.cross_entropy(model(*_batch(0)), labels).backward()
    except autoparallel.UsageError as error:
        return f"{error.code} {error.what}"
    return "nothing was refused"


def test_a_loss_that_differs_between_ranks_is_refused() -> None:
    told = run_processes(2, _losses_apart)
    assert told == ["AP945 the loss of the model's outputs differs between ranks"] * 2


def test_an_error_of_torch_about_spread_weights_is_followed_by_what_to_write() -> None:
    text = "aten.add.Tensor got mixed torch.Tensor and DTensor, need to"
    advice = advice_for(RuntimeError(text))
    assert advice is not None
    assert advice.code == "AP944"
    assert "autoparallel.whole" in advice.fix
    assert advice_for(RuntimeError("shapes do not match")) is None
