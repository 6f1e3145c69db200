"""Under the modes of a capture torch computes the same values as without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.tracing.modes import explicit_ops, promote_to_float64, unmoved_modules
from autoparallel.planner.errors import CaptureError

X = torch.tensor([[0.5, -1.0], [2.0, 3.0], [1.5, 0.25]])
Y = X.flip(0)


def data_of(x: Tensor) -> Tensor:
    return (x.data * 2).requires_grad_(False)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: functional.gaussian_nll_loss(x, Y, 0.5),
        lambda x: functional.gaussian_nll_loss(x, Y, torch.tensor([0.5, 0.25, 1.0])),
        lambda x: functional.gaussian_nll_loss(x, Y, Y.abs(), full=True, reduction="sum"),
        lambda x: functional.gaussian_nll_loss(x, Y, Y.clamp(min=0), reduction="none"),
        lambda x: x.to(torch.empty(0, dtype=torch.float64)),
        lambda x: x.to(tensor=torch.empty(0, dtype=torch.bfloat16)),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu", torch.float64, False, True),
        lambda x: x.type_as(torch.empty(0, dtype=torch.float64)),
        lambda x: x.cpu().half(),
        data_of,
    ],
)
def test_explicit_ops_give_the_values_and_the_dtype_that_torch_gives(
    forward: Callable[[Tensor], Tensor],
) -> None:
    expected = forward(X.clone())
    with explicit_ops():
        found = forward(X.clone())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_a_cast_that_changes_nothing_and_a_copy_are_new_tensors() -> None:
    with explicit_ops():
        assert X.to(X.dtype) is not X
        assert X.to("cpu") is X
        assert X.to("cpu", copy=True) is not X


def test_assigning_data_writes_the_values_and_refuses_another_shape() -> None:
    x = torch.zeros(2)
    with explicit_ops():
        x.data = torch.tensor([1.0, 2.0])
        assert x.tolist() == [1.0, 2.0]
        with pytest.raises(CaptureError, match=r"it was \(2,\) and becomes \(3,\)") as raised:
            x.data = torch.ones(3)
    assert raised.value.code == "AP208"


def test_instance_norm_updates_its_statistics_as_torch_does() -> None:
    x = torch.randn(4, 3, 5)
    expected, found = (nn.InstanceNorm1d(3, track_running_stats=True) for _ in range(2))
    result = expected(x)
    with explicit_ops():
        assert torch.allclose(found(x), result, atol=1e-6)
    assert torch.allclose(found.running_mean, expected.running_mean)
    assert torch.allclose(found.running_var, expected.running_var)


def test_float64_is_kept_whatever_a_forward_asks_for() -> None:
    with promote_to_float64():
        assert X.half().dtype == torch.float64
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        assert (X + torch.ones(2)).dtype == torch.float64
    assert torch.zeros(2).dtype == torch.float32


def test_modules_are_not_moved_but_cast() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with unmoved_modules(within=model):
        assert model.to("meta") is model
        assert model.weight.device.type == "cpu"
        assert model.to(torch.float64).weight.dtype == torch.float64
        assert other.to("meta").weight.device.type == "meta"
    with unmoved_modules():
        assert nn.Linear(2, 2).to("meta").weight.device.type == "cpu"
    assert model.to("meta").weight.device.type == "meta"
