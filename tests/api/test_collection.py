"""The collector is as the program has it before and after."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autoparallel.options.collection import THRESHOLDS, rare_collections


@pytest.fixture(autouse=True)
def given() -> Iterator[tuple[int, int, int]]:
    """Thresholds of a program of its own."""
    before = gc.get_threshold()
    gc.set_threshold(10_000_000, 5, 5)
    yield (10_000_000, 5, 5)
    gc.set_threshold(*before)


def test_thresholds_are_raised_never_lowered(given: tuple[int, int, int]) -> None:
    with rare_collections():
        assert gc.get_threshold() == (given[0], *THRESHOLDS[1:])
    assert gc.get_threshold() == given


def test_thresholds_come_back_after_an_error(given: tuple[int, int, int]) -> None:
    @rare_collections()
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert gc.get_threshold() == given
