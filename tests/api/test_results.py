"""The result of a command is all that stands on stdout; as JSON it keeps its stated schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import run_python
from jsonschema import Draft202012Validator

from autoparallel.__main__ import app, run_command
from autoparallel.agents.documents import RESULTS, document_schema
from autoparallel.commands.help import leaf_commands
from autoparallel.planning.plan_files import load_plan

MODEL = """
import os
import torch
from torch import nn

print("printed by the file")
os.write(1, b"written by the file\\n")

class Net(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.layer = nn.Linear(8, d)

    def forward(self, x):
        print("printed by the forward")
        return self.layer(x).square().mean()

def build_model(d: int = 8):
    return Net(d)

def example_batch(rows):
    return (torch.randn(rows, 8),)
"""
PLAN = "model.py --cluster cpu:1 --global-batch 8"
LINES = (
    f"plan {PLAN} --json --no-cache",
    f"plan {PLAN} --check --set d=4 --json",
    "estimate model.py --devices 1xT4,2xH100 --global-batch 8 --seconds 5 --json",
    "estimate model.py --devices T4 --global-batch 8 --set d=9000000000 --max-devices 1 --json",
    "inspect plan.json --json",
    "explain plan.json zero --json",
    "explain plan.json --why-not microbatches=2 --json",
    "explain plan.json --what-if device.memory_bytes=40GiB --json",
    "explain plan.json --measured run.jsonl --json",
    "explain plan.json --measured run.jsonl --database times.sqlite --json",
    "compare plan.json run.jsonl ddp saved --json",
    "verify plan.json --json",
    "export saved -o weights --json",
    "export plan.json --to python -o script --json",
    "export gpus.json --to accelerate -o folder --json",
    f"profile {PLAN} --budget 1 --database new.sqlite --json",
    "profile --list --database times.sqlite --json",
    "simulate model.py --cluster cpu:2 --global-batch 8 --json --parallel dp=2",
    "show schedules --json",
    "show schedules zbv --json",
    "show cluster --json",
    "show cluster 2x8xV100 --json",
    "show cluster cpu:2 --json",
    "doctor --json",
    "show ops --json",
    "show cache --json",
    "show cache clear --json",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its plan, and what a run and a profile of it write."""
    place = tmp_path_factory.mktemp("results")
    (place / "model.py").write_text(MODEL)
    for line in (
        f"plan {PLAN} -o plan.json",
        "plan model.py --cluster 2xH100 --parallel dp=2 --global-batch 8 -o gpus.json",
        "run plan.json --steps 4 --metrics run.jsonl --save saved",
        f"profile {PLAN} --budget 1 --database times.sqlite",
    ):
        made = run_python("-m", "autoparallel", *line.split(), folder=place)
        assert made.returncode == 0, made.stderr
    return place


def strict(schema: Any) -> Any:
    """The schema without the permission of fields that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(each) for name, each in schema.items()}
    return found | {"additionalProperties": False} if "required" in schema else found


def refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


@pytest.mark.parametrize("line", LINES)
def test_json_is_all_of_stdout_and_keeps_its_schema(line: str, folder: Path) -> None:
    done = run_python("-m", "autoparallel", *line.split(), folder=folder)
    command = line.removeprefix("show ").split()[0]
    assert done.returncode in ((0, 5) if command == "doctor" else (0,)), done.stderr
    document = json.loads(done.stdout, parse_constant=refuse)
    assert document["schema"] == f"autoparallel.{command}/1"
    schema = document_schema(command)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(strict(schema)).validate(document)
    if "model.py" in line and command not in ("profile", "estimate"):
        assert "printed by the file" in done.stderr
        assert "written by the file" in done.stderr


def test_every_json_of_a_command_has_a_schema() -> None:
    with_json = {
        name.removeprefix("show ")
        for name, command in leaf_commands(typer.main.get_command(app)).items()
        if any(each.name == "json" for each in command.params)
    }
    named = {line.removeprefix("show ").split()[0] for line in LINES}
    assert with_json == named == set(RESULTS)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == document_schema("plan")


def test_the_json_of_a_plan_is_taken_as_its_file(folder: Path, tmp_path: Path) -> None:
    printed = run_python("-m", "autoparallel", "inspect", "plan.json", "--json", folder=folder)
    (tmp_path / "printed.json").write_text(printed.stdout)
    assert load_plan(tmp_path / "printed.json") == load_plan(folder / "plan.json")
