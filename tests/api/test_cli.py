"""The command line: what is printed where, and the exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import pipeline_plan

from autoparallel import __main__ as cli
from autoparallel import load_plan, save_plan
from autoparallel.planner import errors


def run(*arguments: str) -> int:
    """The exit code of a command line, run in this process."""
    return cli.run_command(list(arguments))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(pipeline_plan(), path)
    return path


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from autoparallel.__main__ import run_command\n"
        "assert run_command(['--help']) == 0\n"
        "assert not {'torch', 'numpy', 'networkx', 'highspy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("autoparallel ")


@pytest.mark.parametrize(
    "arguments", [("plan",), ("no-such-command",), ("plan", "x.py", "--no-such-option")]
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2


def test_errors_go_to_stderr_with_their_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "no_such_file.py") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error[AP101]: there is no file no_such_file.py\n  --> ")
    assert "Traceback" not in captured.err


def test_a_traceback_is_shown_on_request_anywhere_on_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("plan", "no_such_file.py", "--traceback") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError, 2),
        (errors.CaptureError, 3),
        (errors.InfeasibleError, 4),
        (errors.MachineError, 5),
        (errors.PlanError, 6),
        (errors.VerificationError, 7),
        (errors.TimeLimitError, 8),
        (errors.WorkerError, 20),
        (errors.HangError, 21),
        (errors.DeviceMemoryError, 22),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: type[errors.AutoparallelError], code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("AP999", "something happened")

    monkeypatch.setattr(cli, "app", fail)
    assert run("plan", "model.py") == code


def test_an_unexpected_exception_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(cli, "app", fail)
    assert run("plan", "model.py") == 1
    text = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: by zero" in text
    assert "--traceback" in text
    assert "Traceback (most" not in text


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    assert run("plan", "model.py") == 130


def test_inspect_prints_the_report(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(plan_file)) == 0
    text = capsys.readouterr().out
    assert "dp=2 tp=2 pp=2" in text
    assert "How sure" in text
    assert "Next" in text
    assert max(map(len, text.splitlines())) <= 80


def test_inspect_as_json_is_the_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(plan_file), "--json") == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert found == json.loads(plan_file.read_text())
    assert found["num_microbatches"] == 16


def test_a_missing_plan_names_the_closest(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", str(plan_file.with_name("plam.json"))) == 2
    assert "did you mean plan.json?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_damaged_plan_exits_with_6(
    plan_file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file.write_text(text)
    assert run("inspect", str(plan_file)) == 6
    assert "error[AP5" in capsys.readouterr().err


def test_a_plan_survives_its_file(plan_file: Path) -> None:
    assert load_plan(plan_file) == pipeline_plan()


def test_check_says_what_was_found(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", str(model_file), "--check", "--set", "depth=3", "--global-batch", "16") == 0
    text = capsys.readouterr().out
    assert "Net, 216 parameters in 6 tensors, 0 B allocated" in text
    assert "x (16, 8) float32" in text
    assert run("plan", str(model_file), "--check", "--set", "depth=3", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "autoparallel.plan/1"
    found = {name: document["result"][name] for name in ("settings", "num_parameters", "model")}
    assert found == {"settings": {"depth": "3"}, "num_parameters": 216, "model": "Net"}


def test_a_cluster_is_shown_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "cluster", "2x8xH100") == 0
    text = capsys.readouterr().out
    assert "16 devices on 2 hosts" in text
    assert "peak bfloat16" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_cluster_without_a_switch_is_shown_with_its_wires(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("show", "cluster", "4xV100-16GB") == 0
    out = capsys.readouterr().out
    assert "pcie3 where links form no ring" in out
    assert "links between two devices of a host of 4" in out
    assert [line.split() for line in out.splitlines()[-6:-2]] == [
        ["0", "-", "1", "1", "2"],
        ["1", "1", "-", "2", "1"],
        ["2", "1", "2", "-", "2"],
        ["3", "2", "1", "2", "-"],
    ]


def test_a_cluster_as_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "cluster", "8xH100", "--json") == 0
    cluster = json.loads(capsys.readouterr().out)["result"]
    assert cluster["hosts"][0]["num_devices"] == 8


def test_the_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "cluster") == 0
    assert "H100" in capsys.readouterr().out


def test_an_unknown_device_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "cluster", "8xH1000") == 2
    assert "error[AP115]" in capsys.readouterr().err


def test_a_target_is_not_planned_under_torchrun(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("run", str(model_file)) == 2
    assert "error[AP116]" in capsys.readouterr().err


BRANCHING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()

def build_model():
    return Net()

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 8)}
"""


def test_a_model_that_cannot_be_captured_is_named_by_its_line_and_nothing_else_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "branching.py"
    path.write_text(BRANCHING)
    assert run("plan", str(path), "--cluster", "8xH100") == 3
    errors = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith("autoparallel: ")
    ]
    assert errors[0].startswith("error[AP202]")
    assert errors[1] == f"  --> {path}:12"
    assert all(line.startswith(("error", "  ")) for line in errors)


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_told_by_how_much_and_what_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(
        "plan",
        "examples/gpt.py",
        "--cluster",
        "1xH100",
        "--memory-limit",
        "100MB",
        "--global-batch",
        "1",
        "--seq",
        "16",
        "--set",
        "n_layer=1",
        "--set",
        "seq=16",
        "--set",
        "d_model=1024",
    )
    text = capsys.readouterr().err
    assert code == 4
    assert re.search(
        r"error\[AP301\]: the model does not fit: .* the limit is 95\.4 MiB",
        text.replace("\n", " "),
    )
    assert "fix: " in text


def test_a_batch_that_does_not_divide_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(
        "plan",
        "examples/gpt.py",
        "--cluster",
        "2xH100",
        "--global-batch",
        "7",
        "--parallel",
        "dp=2",
    )
    text = capsys.readouterr().err
    assert code == 2
    assert "error[AP124]" in text
    assert "multiple of dp=2" in text
