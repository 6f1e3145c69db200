"""``Step``: the options of real training, by every plan and on one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_python, run_torchrun
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import autoparallel
from autoparallel.planner.errors import RunError, UsageError
from autoparallel.training.callbacks import StepRecord

SCRIPT = Path(__file__).parents[1] / "support" / "steps_of_torchrun.py"
PLANS = (
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=3",
    "tp=2",
    "pp=2,microbatches=2",
    "pp=2,microbatches=4,schedule=zb-h1",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.drop(self.norm(self.first(x)))) - y).square().mean()


def batch(rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(rows, width, generator=generator) for name, width in (("x", 4), ("y", 1))
    }


def run_script(*arguments: str, alone: bool = False) -> str:
    done = run_python(*arguments) if alone else run_torchrun(*arguments, timeout_seconds=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "plans",
    [PLANS[2:3], pytest.param((*PLANS[:2], *PLANS[3:]), marks=pytest.mark.slow)],
    ids=["zero 3", "others"],
)
def test_every_plan_trains_as_the_plain_loop_does_with_all_options(plans: tuple[str, ...]) -> None:
    said = run_script(str(SCRIPT), *plans)
    for plan in plans:
        assert said.count(f"equal {plan}\n") == 2
        assert said.count(f"guarded {plan}\n") == 2


def test_one_device_trains_as_the_plain_loop_does_with_all_options() -> None:
    assert run_script(str(SCRIPT), "dp=1", alone=True) == "equal dp=1\nguarded dp=1\n"


def test_evaluation_changes_nothing_and_drops_nothing() -> None:
    model = Net()
    step = autoparallel.Step(model)
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.norm.train()
    losses = {float(step.evaluate(batch(rows=3))) for _ in range(3)}
    assert len(losses) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_is_a_dict_or_a_tuple() -> None:
    losses = []
    for given in (batch(), tuple(batch().values())):
        step = autoparallel.Step(Net())
        torch.manual_seed(0)
        losses.append(float(step(given)))
    assert losses[0] == losses[1]


def test_a_scheduler_that_follows_the_loss_is_given_it() -> None:
    step = autoparallel.Step(
        Net(),
        build_optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        build_scheduler=lambda o: ReduceLROnPlateau(o, patience=0, threshold=1e9),
    )
    for _ in range(3):
        step(batch())
    assert step.scheduler.get_last_lr()[0] < 1.0


def test_training_goes_on_from_a_state_dict_as_if_unbroken() -> None:
    def make() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        return autoparallel.Step(
            Net(),
            scaler=scaler,
            build_optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
            build_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.1),
        )

    whole, first, second = make(), make(), make()
    for _ in range(3):
        whole(batch())
        first(batch())
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == whole.state_dict()
    for step in (whole, second):
        step(batch())
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert second.state_dict() == whole.state_dict()


def test_a_state_counts_batches_and_updates() -> None:
    """Random numbers of a batch follow from how many there were before it."""
    step = autoparallel.Step(Net(), accumulate=2)
    for _ in range(4):
        step(batch())
    state = step.state_dict()
    assert (state["batches_begun"], state["updates"]) == (4, 2)


def test_an_input_that_is_not_finite_is_named_with_its_row() -> None:
    step = autoparallel.Step(Net(), on_nan="stop")
    bad = batch()
    bad["x"][4, 1] = float("nan")
    with pytest.raises(RunError, match="AP910") as raised:
        step(bad)
    assert "'x'" in raised.value.what
    assert raised.value.where == "row 4"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_value": -1.0}, "max_value"),
        ({"max_norm": 1.0, "max_value": 1.0}, "not by both"),
        ({"accumulate": 0}, "accumulate"),
        ({"on_nan": "hope"}, "ignore, skip, stop"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match="AP900") as raised:
        autoparallel.Step(Net(), **options)
    assert word in raised.value.what


def test_builders_that_return_something_else_are_refused() -> None:
    with pytest.raises(UsageError, match="AP902"):
        autoparallel.Step(Net(), build_scheduler=lambda optimizer: None)
    with pytest.raises(UsageError, match="AP903"):
        autoparallel.Step(Net(), build_optimizer=lambda params: None)  # type: ignore[arg-type,return-value]


def test_clipping_by_value_is_torchs() -> None:
    found, plain = Net(), Net()
    step = autoparallel.Step(
        found, max_value=0.01, build_optimizer=lambda p: torch.optim.SGD(p, lr=1.0)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    torch.manual_seed(0)
    step(batch())
    torch.manual_seed(0)
    plain(**batch()).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    optimizer.step()
    for one, other in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_callbacks_of_a_step_are_told_of_each_update(tmp_path: Path) -> None:
    said: list[str] = []

    class Say(autoparallel.Callback):
        def on_step(self, record: StepRecord) -> None:
            said.append(f"{record.step} {record.unit} {record.throughput * record.seconds:.0f}")

        def on_end(self) -> None:
            said.append("ended")

        def close(self) -> None:
            said.append("closed")

    path = tmp_path / "metrics.jsonl"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    step = autoparallel.Step(
        model,
        loss_fn=lambda outputs, batch: outputs.square().mean(),
        accumulate=2,
        callbacks=lambda: [Say(), autoparallel.JsonLines(path)],
    )
    losses = [float(step((torch.ones(3, 4),))) for _ in range(4)]
    assert said == ["1 samples 6"]
    step.finish()
    step.finish()
    assert said == ["1 samples 6", "2 samples 6", "ended", "closed"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    means = [sum(losses[:2]) / 2, sum(losses[2:]) / 2]
    assert [line["loss"] for line in lines] == pytest.approx(means)
    assert all(line["grad_norm"] > 0 for line in lines)


def test_a_callback_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="AP907"):
        autoparallel.Step(nn.Linear(2, 1), callbacks=lambda: [print])  # type: ignore[list-item]
