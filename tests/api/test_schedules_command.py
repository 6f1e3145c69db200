"""``autoparallel show schedules``: the list, the pictures, at 80 columns and as JSON."""

from __future__ import annotations

import json

import pytest

from autoparallel.__main__ import run_command
from autoparallel.planner.requests.request import FORCED_SCHEDULES
from autoparallel.planner.schedules.schedules import SCHEDULES, find_schedule


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(["show", "schedules", *arguments]) == 0
    return capsys.readouterr().out


def test_every_schedule_is_listed_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys).splitlines()
    assert max(map(len, lines)) <= 80
    named = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert named[: len(SCHEDULES)] == list(SCHEDULES)


def test_the_list_says_what_the_runtime_executes(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["name"]: each for each in json.loads(output(capsys, "--json"))["result"]}
    assert found["pipedream"]["synchronous"] is False
    executed = {find_schedule(name).name for name in FORCED_SCHEDULES}
    assert {name for name, each in found.items() if each["runs"]} == {*executed, "inference"}


def test_1f1b_is_drawn_as_in_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    """Backwards of two slots: rank 0 has its first gradient once rank 1 has run F0 and B0."""
    text = output(capsys, "1f1b", "--stages", "2", "--microbatches", "3")
    assert text.splitlines()[1:3] == [
        "rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --",
        "rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .",
    ]
    assert "bubble 25.0%" in text
    assert text.rstrip().endswith("by rank: 2 1")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_picture_fits_80_columns_and_shows_every_forward(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, name, "--stages", "4", "--microbatches", "12")
    assert max(map(len, text.splitlines())) <= 80
    drawn = text.replace("s", " ").split()
    chunks = SCHEDULES[name].chunks[0]
    assert sum(cell in ("F11", "f11") for cell in drawn) == 4 * chunks


def test_slices_are_drawn_by_letter_and_an_unknown_schedule_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = output(capsys, "terapipe", "--stages", "2", "--microbatches", "1", "--slices", "2")
    assert text.splitlines()[1] == "rank 0  F0  F0b .   .   .   B0b --  B0  --"
    assert run_command(["show", "schedules", "zigzag"]) == 2
    assert "AP150" in capsys.readouterr().err
