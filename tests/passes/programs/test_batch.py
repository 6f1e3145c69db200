"""Batches of a model's arguments: their leaves, their rows, batches of the same form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from autoparallel.passes.programs.batch import (
    Example,
    InputPlace,
    dims_of_size,
    is_same,
    leaf_at,
    leaves,
    path_text,
    row_dims,
)
from autoparallel.planner.errors import UsageError

BATCH = {"x": torch.ones(2, 3), "more": (torch.zeros(3, 2), 5), "whole": torch.ones(3)}


def test_rows_are_counted_where_two_batches_differ() -> None:
    more = {"x": torch.ones(4, 3), "more": (torch.zeros(3, 4), 5), "whole": torch.ones(3)}
    assert row_dims(BATCH, more) == {("x",): 0, ("more", 0): 1}
    assert dims_of_size(BATCH, 2) == {("x",): 0, ("more", 0): 1}
    other = {"x": torch.ones(4), "more": (torch.zeros(3, 4), 5)}
    assert row_dims(BATCH, other) == {("more", 0): 1}


def test_a_sparse_input_and_rows_in_another_dimension_are_given_as_a_program_takes_them() -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(InputPlace(("x",)).read({"x": sparse}), torch.eye(3))
    place = InputPlace(("x",), dim=1)
    rows_last = torch.arange(6.0).view(2, 3)
    assert torch.equal(place.read({"x": rows_last}), rows_last.t())
    assert torch.equal(place.given(rows_last.t()), rows_last)
    assert InputPlace(("x",)).read({"x": 4}) == 4
    assert InputPlace((0, "x")).name == "input_0_x"


def test_a_batch_of_inputs_has_zeros_of_as_many_rows_where_a_program_reads_nothing() -> None:
    example = Example(BATCH, row_dims(BATCH, {**BATCH, "x": torch.ones(4, 3)}))
    other = {**BATCH, "y": torch.ones(2)}
    example = Example(other, {("x",): 0, ("y",): 0})
    made = example.with_inputs({"x": torch.full((5, 3), 2.0)})
    assert made["y"].tolist() == [0.0] * 5
    assert made["x"].tolist() == [[2.0] * 3] * 5
    assert made["whole"] is BATCH["whole"]


def test_names_of_inputs_are_told_apart() -> None:
    batch = {"a_b": torch.ones(2), "a": {"b": torch.ones(2)}}
    names = Example(batch, {}).inputs
    assert {name: place.path for name, place in names.items()} == {
        "a_b": ("a_b",),
        "a_b_": ("a", "b"),
    }


def test_a_batch_of_other_tensors_keeps_its_form() -> None:
    example = Example(BATCH, {})
    given = [tensor + 1 for tensor in example.tensors()]
    made = example.with_tensors(given)
    assert made["more"][1] == 5
    assert torch.equal(made["more"][0], torch.ones(3, 2))


@dataclass
class Pair:
    first: int


def test_a_leaf_is_found_by_key_position_and_attribute() -> None:
    batch = {"pair": [Pair(7)], 3: "three"}
    assert leaf_at(batch, ("pair", 0, "first")) == 7
    assert leaf_at(batch, (3,)) == "three"
    assert {path for path, _ in leaves(batch)} == {("pair", 0), (3,)}
    assert path_text(("hidden", 0, "x")) == "hidden[0]['x']"
    assert path_text((0,)) == "[0]"


@pytest.mark.parametrize("batch", ["text", 5, torch.ones(2)])
def test_an_example_that_holds_no_arguments_is_refused(batch: object) -> None:
    with pytest.raises(UsageError, match=type(batch).__name__) as raised:
        leaves(batch)
    assert raised.value.code == "AP110"


def test_leaves_that_cannot_be_compared_are_not_the_same() -> None:
    array = np.array([1, 2])
    assert is_same(array, array)
    assert not is_same(array, np.array([1, 2]))
    assert is_same(1, 1.0)
    assert not is_same("a", "b")
