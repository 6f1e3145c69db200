"""Calls of layers: which are alike, which results can be repeated, and other effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from autoparallel.passes.capture.call_effects import call_key, call_result, state_of, watch_counts

X = torch.ones(2, 3)


def key_of(*args: Any) -> Any:
    return call_key(*tree_flatten(args))


@pytest.mark.parametrize(
    ("args", "is_same"),
    [
        ((X + 1,), True),
        ((torch.ones(2, 4),), False),
        ((X.double(),), False),
        ((X.clone().requires_grad_(),), False),
        ((nn.Parameter(X.clone(), requires_grad=False),), False),
        ((X.t().contiguous().t(),), False),
        ((X, X), False),
    ],
)
def test_calls_are_alike_by_the_form_of_their_tensors(args: tuple[Any, ...], is_same: bool) -> None:
    assert (key_of(*args) == key_of(X)) == is_same


def test_calls_are_alike_by_their_literals_and_by_which_tensors_share_memory() -> None:
    assert key_of(X, 2) == key_of(X + 1, 2)
    assert key_of(X, 2) != key_of(X, 3)
    assert key_of(X, 1) != key_of(X, True)
    assert key_of(X, X) != key_of(X, X.clone())
    assert key_of(X, X[:]) != key_of(X, X.clone())
    with torch.no_grad():
        without = key_of(X)
    assert without != key_of(X)


def test_a_call_with_another_object_or_without_a_tensor_has_no_key() -> None:
    assert key_of(X, object()) is None
    assert key_of(2) is None


LAYER = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.view(3, 2),
        lambda x: LAYER.weight.detach(),
        lambda x: x.detach() * 2,
        lambda x: (x * 2, object()),
        lambda x: x,
        lambda x: 3,
    ],
)
def test_a_result_that_is_not_made_anew_cannot_be_repeated(make: Callable[[Tensor], Any]) -> None:
    """Views, weights, tensors cut from the gradient, objects, and arguments alone."""
    x = X.clone().requires_grad_()
    assert call_result(make(x), [x], LAYER) == ([], None)


def test_a_result_says_which_tensors_are_made_which_are_given_and_what_is_no_tensor() -> None:
    x = X.clone().requires_grad_()
    made, numbers = x * 2, torch.arange(2)
    tensors, result = call_result((made, {"given": x, "again": made}, numbers, "a"), [x], LAYER)
    assert [id(each) for each in tensors] == [id(made), id(numbers)]
    assert result is not None
    assert result.leaves == (
        ("made", 0),
        ("given", 0),
        ("made", 0),
        ("made", 1),
        ("literal", "a"),
    )
    assert result.forms == '[[[2, 3], [3, 1], "float32"], [[2], [1], "int64"]]'


class Counting(nn.Module):
    """Counts its calls, and reads its number by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.number, self.kept = 0, 5, []

    def forward(self, x: Tensor, change: str = "") -> Tensor:
        if change == "setting":
            self.calls += 1
        elif change == "entry":
            self.kept.append(x)
        elif change == "values":
            x.add_(1)
        elif change == "number":
            self.number += 1
        return x * 2


@pytest.mark.parametrize("change", ["", "setting", "entry", "values"])
def test_a_layer_that_changes_a_setting_or_its_argument_has_another_state(change: str) -> None:
    layer, x = Counting(), X.clone()
    before = state_of(layer, (x,), {})
    layer(x, change)
    assert (state_of(layer, (x,), {}) == before) == (not change)


def test_reads_and_writes_of_a_number_are_noted_only_while_it_is_watched() -> None:
    layer = Counting()
    with watch_counts(layer, [("", "number")]) as reads:
        layer(X)
        assert reads == []
        assert isinstance(layer, Counting)
        layer(X, "number")
        assert reads == [("", "number"), ("", "number")]
    assert type(layer) is Counting
    assert layer.number == 6
    assert reads == [("", "number")] * 2
