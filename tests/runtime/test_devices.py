"""What holds on every device: on a GPU where there is one, on a CPU always."""

from __future__ import annotations

import pytest
import torch

from autoparallel.cost_model.profile.case import OpCase, TensorCase, canonical
from autoparallel.cost_model.profile.clocks import stopwatch
from autoparallel.cost_model.profile.measure import Budget, measure

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_counted_dropout_draws_the_same_everywhere(device: str) -> None:
    x = torch.arange(1.0, 4097.0).reshape(64, 64)
    expected = torch.ops.autoparallel.counter_dropout(x, 0.25, number=3, key=7)
    found = torch.ops.autoparallel.counter_dropout(x.to(device), 0.25, number=3, key=7)
    assert found.device.type == device
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=0.0)
    assert 0.2 < float((expected == 0).float().mean()) < 0.3


@pytest.mark.parametrize("device", DEVICES)
def test_the_stopwatch_tells_a_large_product_from_a_small_one(device: str) -> None:
    watch, seconds = stopwatch(device), []
    for size in (64, 1024):
        a = torch.ones(size, size, device=device)
        (a @ a).sum().item()
        samples = watch.samples(lambda a=a: a @ a, 5)  # type: ignore[misc]
        assert 1 <= len(samples) <= 5
        seconds.append(min(samples))
    assert 0 < seconds[0] < seconds[1]


@pytest.mark.parametrize("device", DEVICES)
def test_an_op_is_measured_forward_and_backward(device: str) -> None:
    tensors = (TensorCase((64, 8), "float32", True), TensorCase((4, 8), "float32", True))
    case = OpCase("aten.linear.default", tensors, canonical([{"tensor": 0}, {"tensor": 1}], {}))
    found = measure(case, device, budget=Budget(case_seconds=0.05))  # type: ignore[arg-type]
    assert found.forward_seconds > 0
    assert found.backward_seconds > 0
