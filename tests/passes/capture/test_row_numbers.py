"""Numbers that a model makes of the number of rows: those of the batch that runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_models import program_of
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.passes.capture.lower import Lowered
from autoparallel.passes.capture.row_numbers import with_numbers
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import LITERAL, run
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec

ROWS, WIDTH = 12, 6

Loss = Callable[[Tensor, Tensor], Tensor]


def rooted(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y) / z.shape[0] ** 0.5).square().sum()


def one_less(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() / (len(z) - 1)


def by_branch(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() * (1.0 if z.shape[0] > 8 else 100.0)


def by_longer_branch(z: Tensor, y: Tensor) -> Tensor:
    if z.shape[0] > 8:
        z = z.tanh()
    return (z - y).square().mean()


def linspaced(z: Tensor, y: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, len(z), dtype=z.dtype)
    return ((z - y).square().mean(1) * weights).mean()


def mean_of_linspace(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean() * torch.linspace(1.0, 4.0, len(z), dtype=z.dtype).square().mean()


def numbered_tensor(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum() / torch.tensor(float(len(z)), dtype=z.dtype)


def limited_index(z: Tensor, y: Tensor) -> Tensor:
    return (z - y)[:, : min(len(z), 4)].square().mean()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return (z - y.roll(len(y) // 4, 1)).square().mean()


def whole_slice(z: Tensor, y: Tensor) -> Tensor:
    return (z[: len(y)] - y).square().sum() / len(y)


def masked(z: Tensor, y: Tensor) -> Tensor:
    is_first = (torch.arange(len(z)) < 4).to(z.dtype)
    return ((z - y).square().mean(1) * is_first).sum() / is_first.sum()


def masked_by_many(z: Tensor, y: Tensor) -> Tensor:
    is_counted = (torch.arange(len(z)) < 10)[:, None].expand(-1, WIDTH)
    return (z - y).masked_fill(~is_counted, 0.0).square().mean()


def expanded(z: Tensor, y: Tensor) -> Tensor:
    scale = torch.full((z.shape[0], 1), 1.0 / z.shape[0], dtype=z.dtype)
    return ((z - y).square() * scale).sum()


LOSSES: dict[str, Loss] = {
    "sum / shape[0]": lambda z, y: (z - y).square().sum() / z.shape[0],
    "sum / len": lambda z, y: functional.l1_loss(z, y, reduction="sum") / len(y),
    "sum / numel": lambda z, y: (z - y).square().sum() / y.numel(),
    "sum * (1 / size(0))": lambda z, y: (z - y).square().sum() * (1 / z.size(0)),
    "max(1, n)": lambda z, y: functional.huber_loss(z, y, reduction="sum") / max(1, z.shape[0]),
    "batchmean": lambda z, y: functional.kl_div(
        z.log_softmax(1), y.softmax(1), reduction="batchmean"
    ),
    "log": lambda z, y: (z - y).square().mean() * math.log(z.shape[0]),
    "clamp": lambda z, y: (z - y).clamp(max=len(z) / 10).square().mean(),
    "power": lambda z, y: (z - y).square().mean() ** (1 + 1 / len(z)),
    "rows of a view": lambda z, y: (z - y).reshape(-1).square().sum() / (z.shape[0] * 3),
}
LOSSES |= {
    each.__name__: each
    for each in (
        rooted,
        one_less,
        by_branch,
        by_longer_branch,
        linspaced,
        mean_of_linspace,
        numbered_tensor,
        limited_index,
        shifted,
        whole_slice,
        masked,
        masked_by_many,
        expanded,
    )
}


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def captured(build: Callable[[], nn.Module], rows: int = ROWS) -> tuple[nn.Module, Any, Any]:
    """A model with its weights, its batch, and the program of that batch, in float64."""
    torch.manual_seed(0)
    model = build().double()
    batch = torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double()
    return model, batch, program_of(build, batch)


def loss_of(program: Any, model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> Tensor:
    """The loss of the program in ``count`` micro-batches, as executors add them up."""
    found = program.with_batch_size(len(batch[0]) // count)
    held = dict(model.named_parameters())
    constants = [node.name for node in found.graph if node.kind == "constant"]
    values = {**held, **evaluate(found, constants)}
    losses = []
    for parts in zip(*(part.chunk(count) for part in batch), strict=True):
        inputs = dict(zip(program.inputs, parts, strict=False))
        losses.append(run(found.graph, {**values, **inputs}))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", LOSSES)
def test_a_program_has_the_numbers_of_the_batch_that_runs(name: str) -> None:
    model, batch, program = captured(lambda: Model(LOSSES[name]))
    expected = model(*batch)
    assert torch.allclose(loss_of(program, model, batch, 1), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["sum / shape[0]", "batchmean", "clamp", "whole_slice"])
def test_micro_batches_divide_by_the_rows_of_the_whole_batch(name: str) -> None:
    model, batch, program = captured(lambda: Model(LOSSES[name]))
    assert program.graph.batch_dims
    sums = program.graph.accumulation.sums
    scale = 3 if sums else 1  # executors multiply sums by the number of micro-batches
    found = scale * loss_of(program, model, batch, 3)
    assert torch.allclose(found, model(*batch), rtol=1e-12)


def lowered(
    rows: int,
    *,
    path: str = "div.Tensor",
    args: tuple[Any, ...] = (Ref("x"), 1.0),
    kwargs: dict[str, Any] | None = None,
    made: tuple[int, ...] | None = None,
    literal: tuple[float, ...] = (1.0, 2.0),
    buffer: Tensor | None = None,
) -> Lowered:
    """Return a graph of an input, a literal, and an op with these arguments."""
    held = torch.ones(2) if buffer is None else buffer
    nodes = (
        Node("x", "input", outputs=(TensorSpec((rows, 4), "float32"),)),
        Node(
            "few",
            "constant",
            LITERAL,
            (list(literal),),
            {"dtype": torch.float32},
            (TensorSpec((len(literal),), "float32"),),
        ),
        Node("held", "buffer", outputs=(TensorSpec(tuple(held.shape), "float32"),)),
        Node(
            "op",
            "op",
            f"aten.{path}",
            args,
            kwargs or {},
            (TensorSpec(made or (rows, 4), "float32"),),
        ),
        Node("loss", "op", "aten.mean.default", (Ref("op"),), outputs=(TensorSpec((), "float32"),)),
    )
    return Lowered(Graph(nodes, Ref("loss"), rows), {"held": held}, {})


def test_a_number_is_taken_from_the_graph_with_all_rows() -> None:
    few, many = lowered(2, args=(Ref("x"), 2.0)), lowered(8, args=(Ref("x"), 8.0))
    found = with_numbers(few, many)
    assert found is not None
    changed, dims = found
    assert changed.graph["op"].args == (Ref("x"), 8.0)
    assert changed.graph["op"].spec.shape == (2, 4)
    assert dims == {"x": (frozenset({0}),), "op": (frozenset({0}),)}


TWO = {
    "another number of dimensions": (lowered(2), lowered(8, made=(8, 4, 1))),
    "another size that is not in proportion": (lowered(2), lowered(8, made=(9, 4))),
    "another op": (lowered(2), lowered(8, path="mul.Tensor")),
    "a tensor of the model's code that grows": (lowered(2), lowered(8, buffer=torch.ones(8))),
    "a literal that grows with the rows": (lowered(2), lowered(8, literal=(1.0,) * 8)),
    "one argument more": (lowered(2), lowered(8, args=(Ref("x"), 1.0, 2.0))),
    "another keyword": (
        lowered(2, kwargs={"rounding_mode": "floor"}),
        lowered(8, kwargs={"mode": "floor"}),
    ),
    "a number of another type": (
        lowered(2, args=(Ref("x"), 2)),
        lowered(8, args=(Ref("x"), 2.5)),
    ),
    "a text": (
        lowered(2, kwargs={"rounding_mode": "floor"}),
        lowered(8, kwargs={"rounding_mode": "trunc"}),
    ),
    "another position": (
        lowered(2, path="roll.default", args=(Ref("x"), [1], [0])),
        lowered(8, path="roll.default", args=(Ref("x"), [1], [1])),
    ),
    "more positions": (
        lowered(2, path="roll.default", args=(Ref("x"), [1], [0])),
        lowered(8, path="roll.default", args=(Ref("x"), [1, 1], [0, 1])),
    ),
}


@pytest.mark.parametrize("difference", TWO)
def test_graphs_that_differ_in_more_than_numbers_are_of_two_paths(difference: str) -> None:
    assert with_numbers(*TWO[difference]) is None


def test_a_literal_is_taken_whole_and_a_tensor_of_the_code_too() -> None:
    many = lowered(8, literal=(3.0, 4.0), buffer=torch.full((2,), 5.0))
    found = with_numbers(lowered(2), many)
    assert found is not None
    assert found[0].graph["few"].args == ([3.0, 4.0],)
    assert found[0].literals["held"].tolist() == [5.0, 5.0]
