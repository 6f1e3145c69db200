"""The Python API: arguments, and training alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from handmade import pipeline_plan
from torch import Tensor, nn

import autoparallel
from autoparallel.options.plan_options import plan_options
from autoparallel.planner.errors import CaptureError, UsageError
from autoparallel.target.from_python import batch_function, make_target


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (outputs - batch["y"]).square().mean()


def batch(rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 4, generator=generator),
        "y": torch.randn(rows, 1, generator=generator),
    }


def test_a_decorated_class_is_the_class_itself() -> None:
    assert autoparallel.parallelize(Net) is Net
    decorated = autoparallel.parallelize(example_batch=batch(), cluster="8xH100")(Net)
    assert decorated is Net
    assert isinstance(decorated(), nn.Module)


def test_a_parallelized_instance_is_the_instance_itself() -> None:
    model = Net()
    assert autoparallel.parallelize(model, example_batch=batch()) is model


@pytest.mark.parametrize("thing", [int, 3, lambda: None])
def test_only_modules_are_parallelized(thing: object) -> None:
    with pytest.raises(UsageError, match="AP140"):
        autoparallel.parallelize(example_batch=batch())(thing)  # type: ignore[type-var]


def test_a_wrong_option_is_refused_where_it_is_given() -> None:
    with pytest.raises(UsageError, match="AP112"):
        autoparallel.parallelize(example_batch=batch(), parallel="tpp=2")
    with pytest.raises(UsageError, match="AP141"):
        autoparallel.parallelize(example_batch=batch(), microbatch=2)  # type: ignore[call-overload]


def test_options_are_those_of_the_command_line() -> None:
    options = plan_options(64, memory_limit="40GiB", parallel="tp=2", num_candidates=3)
    assert options.memory_limit_bytes == 40 * 2**30
    assert options.forced.tp == 2
    assert options.num_candidates == 3


def test_alone_a_step_is_an_ordinary_training_step() -> None:
    model, plain = Net(), Net()
    step = autoparallel.Step(model, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4)
    for _ in range(3):
        optimizer.zero_grad()
        expected = loss_fn(plain(batch()["x"]), batch())
        expected.backward()
        optimizer.step()
        loss = step(batch())
        assert torch.equal(loss, expected.detach())
        assert not loss.requires_grad
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_the_optimizer_of_a_step_can_be_given() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    step = autoparallel.Step(
        model, loss_fn=loss_fn, build_optimizer=lambda params: torch.optim.SGD(params, lr=0.0)
    )
    step(batch())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_model_without_a_loss_is_told_so() -> None:
    class Pair(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return self.linear(x), x

    with pytest.raises(CaptureError, match="loss"):
        autoparallel.Step(Pair())({"x": batch()["x"]})


def test_a_plan_for_many_devices_is_refused_alone() -> None:
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 8"):
        autoparallel.Step(Net(), plan=pipeline_plan())


def test_a_batch_stands_for_batches_of_any_size() -> None:
    sized = batch_function(batch(6))
    made = sized(2, None)
    assert {name: tuple(part.shape) for name, part in made.items()} == {"x": (2, 4), "y": (2, 1)}
    assert all(part.is_meta for part in made.values())


def test_a_plan_needs_a_model_and_a_batch() -> None:
    with pytest.raises(UsageError, match="example_batch is missing"):
        autoparallel.plan(Net())
    with pytest.raises(UsageError, match="is not a model"):
        make_target(3, batch(), None)  # type: ignore[arg-type]


def test_a_module_is_planned_from_python() -> None:
    plan = autoparallel.plan(
        Net(), batch(8), cluster="2xH100", loss_fn=loss_fn, parallel="dp=2,zero=1"
    )
    assert plan.model.num_parameters == 5
    assert plan.model.global_batch == 8
    assert [len(stage.devices) for stage in plan.stages] == [2]
    assert "dp=2" in autoparallel.describe(plan)


def test_planning_a_module_leaves_it_as_it_was() -> None:
    model = Net()
    before = {name: (value, value.clone()) for name, value in model.state_dict().items()}
    autoparallel.plan(model, batch(), cluster="cpu:2", loss_fn=loss_fn)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0].data_ptr()
        assert torch.equal(value, before[name][1])


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = Net()
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match="AP851"):
        autoparallel.plan(model, batch(), cluster="cpu:2")
