"""Ops and functions of experts as a script writes them compute what they compute."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autoparallel.passes.ops.activation import activate, describe
from autoparallel.script.calls import _activation
from autoparallel.script.expressions import Expression, assignment, call_of, fold, literal, op_call

NAMES = {
    "x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
    "w": torch.randn(6, generator=torch.Generator().manual_seed(1)),
    "table": torch.randn(5, 6, generator=torch.Generator().manual_seed(2)),
    "y": torch.tensor([1, 0, 3, 2]),
    "at": torch.tensor([2, 0]),
    "heads": torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(3)),
}
X, W, TABLE, Y, AT, HEADS = map(Expression, NAMES)
CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "x + w": ("add.Tensor", [X, W], {}),
    "F.layer_norm(x, (6,), w, w)": ("layer_norm.default", [X, [6], W, W], {}),
    "F.layer_norm(x, (6,), w, None, eps=0.1)": ("layer_norm.default", [X, [6], W, None, 0.1], {}),
    "F.rms_norm(x, (6,), w, eps=0.1)": ("rms_norm.default", [X, [6], W, 0.1], {}),
    "F.embedding(y, table)": ("embedding.default", [TABLE, Y], {}),
    "F.embedding(y, table, padding_idx=1)": ("embedding.default", [TABLE, Y, 1], {}),
    "torch.embedding(table, y, 1, True)": (
        "embedding.default",
        [TABLE, Y, 1, True],
        {},
    ),
    "F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)": (
        "scaled_dot_product_attention.default",
        [HEADS, HEADS, HEADS, None, 0.0, True],
        {},
    ),
    'F.cross_entropy(x, y, weight=w, reduction="sum", ignore_index=3, label_smoothing=0.1)': (
        "cross_entropy_loss.default",
        [X, Y, W, 2, 3, 0.1],
        {},
    ),
    "F.cross_entropy(x, y)": ("cross_entropy_loss.default", [X, Y], {}),
    "F.nll_loss(x, y, ignore_index=0)": ("nll_loss_nd.default", [X, Y, None, 1, 0], {}),
    "x": ("slice.Tensor", [X, 1, 0, sys.maxsize], {}),
    "x[:, 1:5:2]": ("slice.Tensor", [X, 1, 1, 5, 2], {}),
    "x[2:]": ("slice.Tensor", [X, 0, 2, sys.maxsize], {}),
    "torch.ops.aten.slice.Tensor(x, -1, 2, 4)": ("slice.Tensor", [X, -1, 2, 4], {}),
    "x.to(torch.float64)": ("to.dtype", [X, torch.float64], {}),
    "x[:, at]": ("index.Tensor", [X, [None, AT]], {}),
    "x.sum()": ("sum.default", [X], {}),
    "x.sum(1, keepdim=True)": ("sum.dim_IntList", [X, [1], True], {}),
    "x.mean((0, 1))": ("mean.dim", [X, [0, 1]], {}),
    "x.view(2, 12)": ("view.default", [X, [2, 12]], {}),
    "torch.clamp(x, 0.0)": ("clamp.default", [X, 0.0], {}),
}


@pytest.mark.parametrize("text", CASES)
def test_an_op_is_written_as_its_equal(text: str) -> None:
    path, args, kwargs = CASES[text]
    name, _, overload = path.partition(".")
    op = getattr(getattr(torch.ops.aten, name), overload)

    def value(arg: Any) -> Any:
        if isinstance(arg, list):
            return [value(each) for each in arg]
        return NAMES[arg.text] if isinstance(arg, Expression) else arg

    truth = op(*map(value, args), **kwargs)
    written = op_call(path, args, kwargs)
    assert torch.equal(eval(written.text, {"torch": torch, "F": F, **NAMES}), truth)
    assert written.text == text


def test_a_dropout_that_drops_nothing_is_left_out() -> None:
    assert op_call("dropout.default", [X, 0.5, False], {}).text == "x"
    assert op_call("dropout.default", [X, 0.0, True], {}).text == "x"


@pytest.mark.parametrize("value", [[1, 2.5], (3,), (1, "a"), -math.inf, True, None, 'say "a"'])
def test_a_value_is_written_as_python_reads_it(value: Any) -> None:
    assert eval(literal(value), {"float": float}) == value


def test_long_lines_are_cut_at_arguments_and_names() -> None:
    names = [f"a_long_name_of_an_output_{number}" for number in range(6)]
    lines = fold("    " + assignment(names, call_of("function", [X] * 3)) + "  # (6,)")
    assert max(map(len, lines)) <= 100
    given = {"function": lambda *args: tuple(range(6)), "x": 0}
    exec("if True:\n" + "\n".join(lines), given)
    assert [given[name] for name in names] == list(range(6))
    long = call_of("function", [f"argument number {number}" for number in range(12)])
    lines = fold(assignment(["made"], long))
    assert max(map(len, lines)) <= 100
    given = {"function": lambda *args: len(args)}
    exec("\n".join(lines), given)
    assert given["made"] == 12
    short = f"x = {'y' * 90}"
    assert fold(f"{short}  # (2, 3, 4)") == [short]
    table = "TABLE = " + repr({"a [": [[each, (each,)] for each in range(40)]}).replace("'", '"')
    lines = fold(table)
    assert max(map(len, lines)) <= 100
    exec("\n".join(lines), given)
    assert given["TABLE"] == {"a [": [[each, (each,)] for each in range(40)]}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU(approximate="tanh")


ACTIVATIONS = {
    "gated": lambda owner, rows: owner.act(rows[..., :3]) * rows.chunk(2, dim=-1)[1],
    "clamped": lambda owner, rows: (rows.clamp(min=-1.0, max=1.0) + 1) / 2 - rows**2,
    "cast": lambda owner, rows: F.silu(rows.to(torch.float64)).float(),
    "of all rows": lambda owner, rows: torch.relu(rows).mean((0, 1), keepdim=True) + rows,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_function_of_an_expert_is_written_in_plain_python(name: str) -> None:
    owner = Expert()
    text = describe(owner, lambda rows: ACTIVATIONS[name](owner, rows))
    assert text is not None
    writer = SimpleNamespace(lines=[], unique=lambda wanted: wanted)
    written = _activation(cast(Any, writer), text)
    given: dict[str, Any] = {"torch": torch, "F": F, "Tensor": Tensor}
    exec("\n".join(writer.lines), given)
    assert torch.equal(given[written.text](NAMES["x"]), activate(text, NAMES["x"]))
