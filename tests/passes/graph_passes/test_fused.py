"""Fused projections: cut into their parts, the loss and every gradient stay what they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import plain_build, record_build
from autoparallel.passes.programs.interpret import run

BATCH, SEQ, HEADS, WIDTH = 2, 6, 4, 8
HIDDEN = HEADS * WIDTH


def halves(y: Tensor) -> Tensor:
    gate, value = y.chunk(2, -1)
    return F.silu(gate) * value


def slices(y: Tensor) -> Tensor:
    """Grouped-query attention's parts: two of one size, one of another."""
    q, k, v = y[..., :16], y[..., 16:24], y[..., 24:]
    return q.sum(-1) * k.sum(-1) * v.sum(-1)


def heads(y: Tensor) -> Tensor:
    """As vision transformers fold and order them: (3, batch, heads, seq, width)."""
    q, k, v = y.reshape(BATCH, SEQ, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v)


def packed(y: Tensor) -> Tensor:
    """As ``nn.MultiheadAttention`` takes its packed projection apart."""
    parts = y.unflatten(-1, (3, HIDDEN)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return parts[0] * parts[1] - parts[2]


def interleaved(y: Tensor) -> Tensor:
    """Every head has its own three parts, so heads are whole already."""
    q, k, v = y.view(BATCH, SEQ, HEADS, 3 * WIDTH).chunk(3, -1)
    return q * k + v


def also_whole(y: Tensor) -> Tensor:
    """The whole result is used too."""
    return y.chunk(2, -1)[0].sum() + y.square().sum()


def overlapping(y: Tensor) -> Tensor:
    return y[..., :10].sum() * y[..., 5:].sum()


class Fused(nn.Module):
    def __init__(self, out: int, cut: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, out, bias=bias)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.projection(x)).square().mean()


class Transposed(nn.Module):
    """As Hugging Face's GPT-2 multiplies: by a weight of (in, out), rows flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN))
        self.bias = nn.Parameter(torch.randn(3 * HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, HIDDEN), self.weight).view(BATCH, SEQ, -1)
        q, k, v = y.split(HIDDEN, dim=2)
        return (q * k + v).square().mean()


def check(build: Callable[[], nn.Module]) -> Counter[str]:
    """The captured graph equals the plain module; returns how often it has each op."""
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    graph = capture(record_build(build).model, (x,), dtype="float64").graph
    model = plain_build(build, 0).double()
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss, expected = run(graph, {**values, "input_0": x}), model(x)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, list(values.values()))
    torch.testing.assert_close(found, torch.autograd.grad(expected, list(model.parameters())))
    assert {n.name: n.spec.shape for n in graph.parameters} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    return Counter(node.op.split(".")[1] for node in graph if node.kind == "op")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("out", "cut", "parts"), [(64, halves, 2), (32, slices, 3), (96, heads, 3), (96, packed, 3)]
)
def test_a_fused_projection_is_one_product_per_part(
    out: int, cut: Callable[[Tensor], Tensor], parts: int, bias: bool
) -> None:
    ops = check(lambda: Fused(out, cut, bias))
    assert ops["linear"] == parts
    assert ops["split_with_sizes"] == 1 + bias
    assert not ops["chunk"] + ops["unbind"] + ops["slice"]


def test_a_weight_that_stands_transposed_is_cut_along_its_columns() -> None:
    ops = check(Transposed)
    assert ops["addmm"] == 3
    assert ops["split_with_sizes"] == 2


@pytest.mark.parametrize(("out", "cut"), [(96, interleaved), (64, also_whole), (16, overlapping)])
def test_a_projection_that_is_not_cut_into_parts_stays_whole(
    out: int, cut: Callable[[Tensor], Tensor]
) -> None:
    ops = check(lambda: Fused(out, cut))
    assert ops["linear"] == 1
    assert not ops["split_with_sizes"]
