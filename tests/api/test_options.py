"""Options: text to values, and what is said about text that is wrong."""

from __future__ import annotations

import pytest

from autoparallel.options.parse import parse_parallel, parse_settings, parse_size
from autoparallel.planner.errors import UsageError
from autoparallel.planner.requests.request import Forced


def test_every_choice_of_parallel_is_read() -> None:
    text = "dp=2, tp=4,pp=2,zero=3,recompute=full,schedule=gpipe,microbatches=8"
    assert parse_parallel(text) == Forced(
        dp=2, tp=4, pp=2, zero=3, recompute="full", schedule="gpipe", num_microbatches=8
    )


def test_no_text_forces_nothing() -> None:
    assert parse_parallel(None) == parse_parallel("") == Forced()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp", "'dp' is not name=value"),
        ("dp=", "is not name=value"),
        ("dpp=2", "'dpp' is not one of"),
        ("dp=2,dp=4", "given twice"),
        ("tp=two", "not a whole number"),
        ("tp=0", "less than 1"),
        ("zero=4", "not one of 0, 1, 2 and 3"),
        ("recompute=half", "not one of none, selective, attention"),
    ],
)
def test_a_wrong_choice_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_parallel(text)
    assert caught.value.code == "AP112"
    assert said in caught.value.what
    assert text in caught.value.where


def test_a_mistyped_choice_names_the_closest() -> None:
    with pytest.raises(UsageError, match="did you mean microbatches"):
        parse_parallel("microbatch=4")


@pytest.mark.parametrize("text", ["72 gigs", "GiB", "-1GB", "1e9", ""])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="AP117"):
        parse_size(text)


def test_binary_and_decimal_units_differ() -> None:
    assert parse_size("1GiB") == 2**30
    assert parse_size("1GB") == 10**9


@pytest.mark.parametrize("pair", ["width", "=3", "two words=3"])
def test_a_wrong_setting_is_refused(pair: str) -> None:
    with pytest.raises(UsageError, match="AP111"):
        parse_settings([pair])


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_settings(["a=1", "a=2"])
