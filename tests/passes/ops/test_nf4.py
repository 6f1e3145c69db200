"""Weights in NF4: the bytes and values of torchao's, and the product of its linear layer."""

from __future__ import annotations

import sys

import pytest
import torch

from autoparallel.cost_model.ops.memory import nf4_bytes
from autoparallel.passes.ops import nf4
from autoparallel.passes.ops.nf4 import load_nf4, nf4_linear, pack_nf4, round_nf4, unpack_nf4
from autoparallel.planner.errors import MachineError

to_nf4 = pytest.importorskip("torchao.quantization").NF4Tensor.from_tensor

SHAPE = (192, 256)


def weight(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [2**22, 2**15], ids=["one chunk", "two chunks"])
def test_a_weight_is_read_bit_for_bit_as_torchao_reads_it(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "CHUNK", chunk)
    own = weight(dtype)
    packed = pack_nf4(own)
    assert packed.dtype == torch.uint8
    assert packed.numel() == nf4_bytes(own.numel())
    expected = to_nf4(own, 64, 256).get_original_weight()
    assert torch.equal(unpack_nf4(packed, own.shape, dtype), expected)


def test_float64_is_quantized_in_float32() -> None:
    own = weight(torch.float64)
    assert torch.equal(round_nf4(own), round_nf4(own.float()).double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradient_are_those_of_torchaos_linear_layer(
    dtype: torch.dtype, has_bias: bool
) -> None:
    own, bias = weight(dtype), weight(dtype)[:, 0] if has_bias else None
    found = torch.randn(2, 8, SHAPE[1]).to(dtype).requires_grad_()
    expected = found.detach().clone().requires_grad_()
    made = nf4_linear(found, pack_nf4(own), bias, SHAPE)
    plain = torch.nn.functional.linear(expected, to_nf4(own, 64, 256), bias)
    exact = dtype == torch.float32 or not has_bias  # torchao adds the bias to a rounded product
    torch.testing.assert_close(made, plain, **({} if exact else {"rtol": 1e-2, "atol": 1e-2}))
    gradient = torch.randn(made.shape).to(dtype)
    made.backward(gradient)
    plain.backward(gradient)
    torch.testing.assert_close(found.grad, expected.grad)


def test_the_backward_keeps_the_bytes_and_dequantizes_again() -> None:
    data, kept = torch.randn(4, SHAPE[1], requires_grad=True), list[torch.Tensor]()
    packed = pack_nf4(weight(torch.float32))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nf4_linear(data, packed, None, SHAPE)
    assert [tensor.data_ptr() for tensor in kept] == [packed.data_ptr()]


def test_a_machine_without_torchao_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    load_nf4.cache_clear()
    with pytest.raises(MachineError, match="needs torchao") as raised:
        pack_nf4(weight(torch.float32))
    assert raised.value.code == "AP413"
