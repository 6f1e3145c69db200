"""register_op: what it makes of functions, and what check_op proves and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel import UsageError, VerificationError
from autoparallel.planning.capture import capture_model
from autoparallel.testing import check_op


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@autoparallel.register_op("*b s h, h o -> *b s o")
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@autoparallel.register_op("b s, b s => b s, b _")
def gated(x: Tensor, gate: Tensor, scale: float = 2.0, *, square: bool = True):  # type: ignore[no-untyped-def]
    mixed = x * torch.sigmoid(gate) * scale
    return mixed.square() if square else mixed, gate.sum(-1, keepdim=True)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


Straight = autoparallel.register_op("*b => *b")(_Straight)


@torch.library.custom_op("autoparallel_test::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


scaled.register_fake(lambda x, factor: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)
autoparallel.register_op("*b -> *b")(scaled)


def test_a_function_is_proven_in_every_layout_of_its_annotation() -> None:
    proof = check_op(project, double(2, 6, 4), double(4, 6))
    assert set(proof.split) == {"b0", "s", "h", "o"}
    assert len(proof.layouts) > 20


def test_an_op_of_torch_library_and_an_autograd_function_are_proven() -> None:
    assert check_op(scaled, double(4, 6), 3.0).split == ("b0", "b1")
    assert check_op(Straight, double(4, 6)).split == ("b0", "b1")


def test_keyword_arguments_and_several_outputs_are_taken() -> None:
    with pytest.raises(UsageError, match="AP166") as found:
        check_op(gated, double(4, 6), double(4, 6), square=False)
    assert "dimensions s" in found.value.what


def test_a_registered_op_keeps_its_own_backward() -> None:
    x = double(3).requires_grad_()
    Straight.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_a_wrong_annotation_is_refused_with_the_layout_that_failed() -> None:
    wrong = autoparallel.register_op("b s => b s", name="wrong_softmax")(
        lambda x: torch.softmax(x, -1)
    )
    with pytest.raises(VerificationError, match="AP602") as found:
        check_op(wrong, double(4, 6))
    assert "s: S(1) -> S(1)" in found.value.where


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("a b c", "exactly one"),
        ("a b -> a c", "in no input"),
        ("a a -> a", "twice"),
        ("a *b -> a *b", "come first"),
        ("[a -> a", "brackets"),
        ("a, b -> a", "1 tensors"),
    ],
)
def test_a_bad_annotation_is_a_usage_error(annotation: str, why: str) -> None:
    def square(x: Tensor) -> Tensor:
        return x * x

    with pytest.raises(UsageError, match=r"AP16[01]") as found:
        autoparallel.register_op(annotation)(square)
    assert why in found.value.why


def test_arguments_that_do_not_fit_and_ops_that_are_not_registered_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="AP161"):
        check_op(project, double(2, 6, 4), double(2, 4, 6))
    with pytest.raises(UsageError, match="AP165"):
        check_op(torch.nn.functional.relu, double(4))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight).square().mean()


def test_a_capture_keeps_the_op_whole_and_carries_its_rule() -> None:
    program = capture_model(Own(), {"x": torch.randn(2, 4, 8)}, None, "fp32")
    (node,) = [node for node in program.graph if "project" in node.op]
    assert node.rule is not None
    assert node.rule.annotation == "*b s h, h o -> *b s o"
    assert program.graph.batch_dims[node.name] == (0,)


class Unregistered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 5 * gradient


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Unregistered.apply(self.linear(x)).square().mean()  # type: ignore[no-any-return]


def test_a_function_that_is_not_registered_is_captured_whole_with_its_backward() -> None:
    program = capture_model(Quantized(), {"x": torch.randn(2, 4)}, None, "fp32")
    assert [node.op.split(".")[0] for node in program.graph if "Unregistered" in node.op] == [
        "autoparallel_opaque"
    ]
