"""Linear layers in 8 bits, on a GPU or emulated, held to torchao's own ``Float8Linear``."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.passes.ops.eight_bits import (
    eight_bit_linear,
    load_torchao,
    of_data,
    of_weights,
)
from autoparallel.planner.errors import MachineError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(
    rows: int, width: int, device: str = "cpu"
) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    """Data ``[2, rows / 2, 32]``, a layer from 32 to ``width``, and a gradient of its result."""
    torch.manual_seed(0)
    data = torch.randn((2, rows // 2, 32), dtype=torch.bfloat16)
    layer = nn.Linear(32, width, dtype=torch.bfloat16)
    gradient = torch.randn((2, rows // 2, width), dtype=torch.bfloat16)
    return data.to(device), layer.to(device), gradient.to(device)


def run(call: Any, data: torch.Tensor, gradient: torch.Tensor, *weights: Any) -> list[torch.Tensor]:
    """A call's result, and its gradients of the data and the weights."""
    data = data.clone().requires_grad_()
    result = call(data)
    return [result, *torch.autograd.grad(result, [data, *weights], gradient)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_linear_layer_and_the_halves_of_its_backward_are_torchaos(device: str) -> None:
    training = pytest.importorskip("torchao.float8")
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no units for 8-bit products")
    data, layer, gradient = operands(16, 48, device)
    own = run(
        lambda x: eight_bit_linear(x, layer.weight, layer.bias),
        data,
        gradient,
        layer.weight,
        layer.bias,
    )
    plain = run(layer, data, gradient, layer.weight, layer.bias)
    config = training.Float8LinearConfig(emulate=device == "cpu")
    (converted,) = training.convert_to_float8_training(nn.Sequential(layer), config=config)
    theirs = run(converted, data, gradient, converted.weight, converted.bias)
    for found, expected, in_bf16 in zip(own, theirs, plain, strict=True):
        assert torch.equal(found, expected)
        assert (found - in_bf16).norm() < 0.1 * in_bf16.norm()
    assert not any(torch.equal(*pair) for pair in zip(own[:3], plain[:3], strict=True))

    with torch.no_grad():
        assert torch.equal(of_data(gradient, layer.weight, data, ()), own[1])
        shapes = (layer.weight.shape, layer.bias.shape)
        of_weight, of_bias = of_weights(gradient, data, shapes, ())
    assert of_weight is not None
    assert of_bias is not None
    assert torch.equal(of_weight, own[2])
    assert torch.equal(of_bias, own[3])


@pytest.mark.parametrize(("rows", "width"), [(16, 40), (10, 48)])
def test_sides_that_the_kernels_do_not_take_stay_in_bf16(rows: int, width: int) -> None:
    data, layer, gradient = operands(rows, width)
    weights = (layer.weight, layer.bias)
    own = run(lambda x: eight_bit_linear(x, *weights), data, gradient, *weights)
    for found, expected in zip(own, run(layer, data, gradient, *weights), strict=True):
        assert torch.equal(found, expected)
    assert torch.allclose(of_data(gradient, layer.weight, data, ()), own[1], atol=1e-2)
    shapes = (layer.weight.shape, layer.bias.shape)
    for half, expected in zip(of_weights(gradient, data, shapes, ()), own[2:], strict=True):
        assert torch.allclose(half, expected, atol=1e-1)


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)
    load_torchao.cache_clear()
    data, layer, _ = operands(16, 48)
    with pytest.raises(MachineError, match="fp8 needs torchao") as caught:
        eight_bit_linear(data, layer.weight)
    assert caught.value.code == "AP413"
    assert "pip install" in str(caught.value)
    assert "bf16" in str(caught.value)
