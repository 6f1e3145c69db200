"""``autoparallel.save`` and ``load`` in a user's script: alone, under torchrun, and in between."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import run_python, run_torchrun
from forced_plans import settled
from processes import run_processes, set_torchrun_variables
from torch import nn

import autoparallel
from autoparallel.planner.errors import UsageError

SCRIPT = """
import sys
import torch, autoparallel
from torch import nn
from torch.nn import functional

parallel, first, last, load, save = sys.argv[1:]

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("steps", torch.zeros(()))
    def forward(self, x):
        with torch.no_grad():
            self.steps.add_(1)
        return x + torch.tanh(self.linear(x)) * (2 * self.scale)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(8, 1)
    def forward(self, x, y):
        return functional.mse_loss(self.head(self.layers(x)), y)

def batch():
    return {"x": torch.randn(8, 8), "y": torch.randn(8, 1)}

def build(parameters):
    parameters = list(parameters)
    if PIPELINE:
        return torch.optim.AdamW(parameters, lr=0.05)
    biases = [p for p in parameters if p.ndim == 1]
    return torch.optim.AdamW([{"params": [p for p in parameters if p.ndim > 1]},
                              {"params": biases, "weight_decay": 0.0}], lr=0.05)

class Data:
    taken = 0
    def state_dict(self):
        return {"taken": self.taken}
    def load_state_dict(self, state):
        self.taken = state["taken"]

PIPELINE = "pp" in parallel
# Another seed for a run that goes on: all that matters has to come from the checkpoint.
torch.manual_seed(int(first))
net = Net()
torch.manual_seed(100 + int(first))
model = autoparallel.parallelize(net, example_batch=batch(), parallel=parallel)
if PIPELINE:
    trained = step = autoparallel.Step(model, build_optimizer=build)
    optimizer = None
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, 8)
else:
    trained, optimizer = model, build(model.parameters())
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
                    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)], [2])
data = Data()
extras = {"scheduler": scheduler, "data": data}
if load != "-":
    done = autoparallel.load(load, trained, optimizer, **extras)
    assert done == int(first) == data.taken
for i in range(int(first), int(last)):
    if PIPELINE:
        loss = step(batch())
    else:
        optimizer.zero_grad()
        loss = model(**batch())
        loss.backward()
        optimizer.step()
    scheduler.step()
    data.taken += 1
    sys.stdout.write(f"loss {i} {float(loss):.9f} {scheduler.get_last_lr()[0]:.6f}\\n")
if save != "-":
    autoparallel.save(save, trained, optimizer, step=int(last), keep=1, asynchronous=True,
                      **extras)
"""
ALONE = "alone"


def losses(script: Path, kind: str, *arguments: object) -> dict[int, tuple[float, float]]:
    """The loss and the learning rate of each step, in one process or under torchrun."""
    run = run_python if kind == ALONE else run_torchrun
    parallel = "dp=2" if kind == ALONE else kind
    done = run(str(script), settled(parallel), *map(str, arguments))
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"loss (\d+) ([\d.]+) ([\d.]+)", done.stdout)
    return {int(step): (float(loss), float(rate)) for step, loss, rate in found}


def test_a_run_goes_on_under_any_plan_and_alone_as_if_unbroken(tmp_path: Path) -> None:
    """Weights, constant and changing buffers, weight decay of groups, scheduler, generator."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    saved = tmp_path / "run"
    whole = losses(script, ALONE, 0, 5, "-", "-")
    found = losses(script, ALONE, 0, 2, "-", saved)
    steps = {"tp=2": (2, 3), "dp=2,zero=3": (3, 4), ALONE: (4, 5)}
    for kind, (first, last) in steps.items():
        found |= losses(script, kind, first, last, saved, saved)
        assert os.listdir(saved) == [f"step-{last:08d}"]
    assert found.keys() == whole.keys()
    for step, expected in whole.items():
        assert found[step] == pytest.approx(expected, rel=1e-5), step
    assert len({loss for loss, _ in whole.values()}) == 5


def test_a_pipeline_goes_on_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace('self.register_buffer("steps", torch.zeros(()))', "").replace(
            "self.steps.add_(1)", "pass"
        )
    )
    plan, saved = "pp=2,microbatches=2", tmp_path / "run"
    whole = losses(script, plan, 0, 4, "-", "-")
    losses(script, plan, 0, 2, "-", saved)
    assert losses(script, plan, 2, 4, saved, "-") == {step: whole[step] for step in (2, 3)}


class Plain(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight


def trained() -> tuple[Plain, torch.optim.Optimizer]:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.second(model.first(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_plain_module_and_its_optimizer_come_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.02
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    autoparallel.save(tmp_path, model, optimizer, step=3, scaler=scaler)
    other = Plain()
    second = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.1)
    fresh = torch.amp.GradScaler("cpu")
    assert autoparallel.load(tmp_path, other, second, scaler=fresh) == 3
    expected = model.state_dict()
    assert all(torch.equal(expected[name], t) for name, t in other.state_dict().items())
    assert second.param_groups[0]["lr"] == 0.02
    assert second.param_groups[0]["momentum"] == 0.9
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        momentum = optimizer.state[one]["momentum_buffer"]
        assert torch.equal(second.state[another]["momentum_buffer"], momentum)
    assert fresh.get_scale() == 8.0


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    import random

    model = Plain()
    autoparallel.save(tmp_path, model, step=1)
    expected = torch.rand(3), random.random()
    torch.rand(5)
    autoparallel.load(tmp_path, model)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


class Summed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def restored_numbers(folder: str) -> tuple[list[float], list[float]]:
    """On a rank: numbers drawn after a checkpoint was saved, and again after it was loaded."""
    set_torchrun_variables()
    model = autoparallel.parallelize(
        Summed(), example_batch=(torch.ones(4, 4),), parallel=settled("dp=2"), profile="analytic"
    )
    torch.manual_seed(dist.get_rank())
    autoparallel.save(folder, model, step=1)
    drawn = torch.rand(3).tolist()
    autoparallel.load(folder, model)
    return drawn, torch.rand(3).tolist()


def test_every_rank_draws_its_own_numbers_again(tmp_path: Path) -> None:
    (first, again), (second, other) = run_processes(2, restored_numbers, str(tmp_path))
    assert first == again
    assert second == other
    assert first != second


def refusal(*arguments: Any, **named: Any) -> str:
    with pytest.raises(UsageError) as caught:
        autoparallel.load(*arguments, **named)
    return str(caught.value)


def test_a_checkpoint_that_does_not_fit_is_refused_with_what_differs(tmp_path: Path) -> None:
    model, optimizer = trained()
    autoparallel.save(tmp_path, model, optimizer, step=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wide = refusal(tmp_path, Plain(5))
    assert "AP885" in wide
    assert "first.weight is (4, 4) in the checkpoint and (5, 5) in the model" in wide
    assert "the checkpoint lacks weight, bias; the model lacks first.weight" in refusal(
        tmp_path, nn.Linear(4, 4)
    )
    adam = torch.optim.Adam(model.parameters())
    assert "AP889" in refusal(tmp_path, model, adam)
    assert "AP888" in refusal(tmp_path, model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert "AP132" in refusal(tmp_path / "elsewhere", model)
    autoparallel.save(tmp_path / "weights", model, step=1)
    assert "no optimizer state" in refusal(tmp_path / "weights", model, optimizer)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_groups_that_were_apart_are_not_loaded_into_one(tmp_path: Path) -> None:
    model = Plain()
    own = list(model.parameters())
    groups = [{"params": own[:1]}, {"params": own[1:], "lr": 0.3}]
    autoparallel.save(tmp_path, model, torch.optim.SGD(groups, lr=0.1), step=1)
    found = refusal(tmp_path, model, torch.optim.SGD(own, lr=0.1))
    assert "AP884" in found
    assert "lr 0.1 and 0.3" in found


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (("no model",), {}, "AP890"),
        ((Plain(), "no optimizer"), {}, "AP890"),
        ((Plain(),), {"data": 3}, "AP890"),
        ((Plain(),), {"keep": 0}, "AP890"),
        ((Plain(), torch.optim.SGD([torch.ones(2)], lr=0.1)), {}, "AP883"),
    ],
)
def test_what_cannot_be_saved_is_refused(
    tmp_path: Path, arguments: tuple[Any, ...], named: dict[str, Any], code: str
) -> None:
    with pytest.raises(UsageError, match=code):
        autoparallel.save(tmp_path, *arguments, step=1, **named)


def test_a_state_that_is_no_data_is_refused(tmp_path: Path) -> None:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(UsageError, match=r"AP882[\s\S]*part.function is a builtin_function"):
        autoparallel.save(tmp_path, Plain(), step=1, part=Part())
