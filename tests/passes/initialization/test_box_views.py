"""Views of tensors as boxes: which views are, and where a box of the base lies in a view."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoparallel.passes.initialization.box_views import box_view

BASE = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base,
        lambda base: base[1:3],
        lambda base: base[2],
        lambda base: base[:, ::2],
        lambda base: base[1:, 1::3].t(),
        lambda base: base[1:3].unsqueeze(0),
        lambda base: base[:, 4].unsqueeze(-1),
    ],
)
def test_a_view_of_a_box_is_that_box_of_a_copy(make: Callable[[Tensor], Tensor]) -> None:
    """The whole base has all of the view; its rows from the second on have the elements in them."""
    view = make(BASE)
    found = box_view(view, BASE)
    assert found is not None
    whole = ((0, 4), (0, 6))
    box = found.in_view(whole)
    assert box == tuple((0, size) for size in view.shape)
    assert torch.equal(found.of_buffer(BASE.clone(), whole, box), view)
    held = ((1, 4), (0, 6))
    box = found.in_view(held)
    assert box is not None
    part = found.of_buffer(BASE[1:].clone(), held, box)
    seen = {float(each) for each in view.flatten() if each >= 6}
    assert {float(each) for each in part.flatten()} == seen


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.view(torch.int32),
        lambda base: base[:0],
        lambda base: base.flatten(),
        lambda base: base.view(4, 3, 2),
        lambda base: base.flatten()[3:9],
        lambda base: base.flatten()[5:].view(19, 1),
        lambda base: base.as_strided((2, 6), (0, 1)),
        lambda base: base.as_strided((2,), (7,)),
        lambda base: base.diagonal(),
    ],
)
def test_a_view_that_joins_splits_or_repeats_is_no_box(make: Callable[[Tensor], Tensor]) -> None:
    assert box_view(make(BASE), BASE) is None


def test_no_box_lies_in_a_base_that_is_a_part_of_its_memory() -> None:
    """The rest of the memory, around the elements of the base and between them, is not its own."""
    storage = torch.arange(12.0)
    whole, part = storage.view(3, 4), storage[4:8].view(2, 2)
    assert box_view(part, part) is None
    assert box_view(whole, part) is None
    gaps = storage.as_strided((3, 2), (4, 1))
    assert box_view(gaps[:1], gaps) is None
    assert box_view(whole[1:2], whole) is not None


def test_a_box_without_the_row_of_a_view_has_nothing_of_it() -> None:
    row = box_view(BASE[2], BASE)
    assert row is not None
    assert row.in_view(((0, 2), (0, 6))) is None
    assert row.in_view(((2, 3), (1, 5))) == ((1, 5),)
    every_third = box_view(BASE[:, ::3], BASE)
    assert every_third is not None
    assert every_third.in_view(((0, 4), (1, 3))) is None
