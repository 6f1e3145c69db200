"""Questions to the rows of a schedule."""

from __future__ import annotations

import pytest

from autoparallel.cost_model.simulator.actions import last_before_reduce, parse_table


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("0F0 0F1 0B0 0B1 0REDUCE 0STEP", ["0B1"]),
        ("0F0 0I0 0F1 0I1 0W0 0W1 0REDUCE 0STEP", ["0W1"]),
        ("0F0 1F0 1I0 0B0 1W0 0REDUCE 1REDUCE 0STEP 1STEP", ["0B0", "1W0"]),
    ],
)
def test_the_last_weight_gradients_before_a_reduction_are_those_of_b_or_w(
    text: str, last: list[str]
) -> None:
    (row,) = parse_table(text)
    assert sorted(map(str, last_before_reduce(row))) == last
