"""``autoparallel show ops``: what it lists, at 80 columns and as JSON."""

from __future__ import annotations

import json

import pytest

from autoparallel.__main__ import run_command
from autoparallel.planner.ops.catalog import list_rules


def test_every_op_with_a_rule_is_listed_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "ops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    listed = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert "linear" in listed
    count = len(list_rules())
    assert lines[-1].startswith(f"{count} of {count} ops")


def test_a_name_filters_and_json_says_what_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "ops", "linear", "--json"]) == 0
    found = {each["op"]: each for each in json.loads(capsys.readouterr().out)["result"]}
    assert found["linear"]["annotation"] == "*b i, o i + o -> *b o"
    assert found["linear"]["splits"] == "*b, o; i gives partial sums; passes partial sums"


def test_an_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "ops", "no_such_op"]) == 2
    assert "AP167" in capsys.readouterr().err
