"""``autoparallel profile`` on a small model and real processes, and plans from what it found."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel import __main__ as cli
from autoparallel import load_plan
from autoparallel.cache.database import default_database

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)

def build_model(depth=2):
    return Net(depth)

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 8), "y": torch.zeros(global_batch, 8)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""

CLUSTER = """
name = "two"

[[hosts]]
num_devices = 2

[hosts.link]
name = "loopback"
alpha_seconds = 2e-5
bytes_per_second = 2e9

[hosts.device]
name = "cpu"
kind = "cpu"
memory_bytes = 4e9
usable_memory_bytes = 4e9
memory_bytes_per_second = 1e10
launch_seconds = 1e-6
peak_flops = { float32 = 5e10 }
"""

FIXED = (
    "--parallel",
    "dp=2,zero=0,recompute=none",
    "--micro-batch",
    "4",
    "--global-batch",
    "8",
)


def run(*arguments: str) -> int:
    return cli.run_command(list(arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a cluster with fixed figures, and a database with what planning asks for."""
    path = tmp_path_factory.mktemp("profile")
    (path / "model.py").write_text(MODEL)
    (path / "cluster.toml").write_text(CLUSTER)
    code = run(
        "profile",
        str(path / "model.py"),
        "--cluster",
        str(path / "cluster.toml"),
        *FIXED,
        "--budget",
        "90",
        "--database",
        str(path / "profile.sqlite"),
    )
    assert code == 0
    return path


def plan(folder: Path, name: str, *options: str, database: str = "profile.sqlite") -> int:
    return run(
        "plan",
        str(folder / "model.py"),
        "--cluster",
        str(folder / "cluster.toml"),
        *FIXED,
        "--database",
        str(folder / database),
        "-o",
        str(folder / name),
        *options,
    )


def test_a_plan_uses_what_was_measured_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, "auto.json") == 0
    prediction = load_plan(folder / "auto.json").prediction
    assert sum(prediction.sources.values()) == pytest.approx(1.0)
    assert prediction.sources_of["compute"].keys() <= {"measured", "interpolated"}
    assert prediction.profile is not None
    assert prediction.profile.threads >= 1
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.strip().startswith("times: ")]
    assert len(lines) == 1
    assert " % measured" in lines[0]


def test_the_measured_times_are_those_of_the_database(folder: Path) -> None:
    assert plan(folder, "auto.json") == 0
    stage = load_plan(folder / "auto.json").stages[0].prediction.seconds
    with sqlite3.connect(folder / "profile.sqlite") as connection:
        rows = connection.execute("SELECT key, forward_seconds, backward_seconds FROM ops")
        times = {key: forward + backward for key, forward, backward in rows}
    linears = {key: seconds for key, seconds in times.items() if key.startswith("aten.linear")}
    # the first layer's input needs no gradient, the second's does; 4 of 8 rows on each rank
    assert len(linears) == 2
    assert all("float32[4,8]" in key for key in linears)
    # the blocks, each of its own kind, were measured in one piece as well: that counts
    blocks = [seconds for key, seconds in times.items() if key.startswith("autoparallel.block")]
    assert len(blocks) == len(load_plan(folder / "auto.json").stages[0].blocks)
    assert stage["compute"] == pytest.approx(sum(blocks))


def test_blocks_are_sorted_by_how_wrong_their_prediction_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured is what the database has of whole blocks, predicted what specifications say."""
    assert plan(folder, "specified.json", "--profile", "analytic") == 0
    (folder / "run.jsonl").write_text('{"step": 1, "seconds": 0.5}\n')
    capsys.readouterr()
    arguments = [
        "explain",
        str(folder / "specified.json"),
        "--measured",
        str(folder / "run.jsonl"),
        "--database",
        str(folder / "profile.sqlite"),
        "--trust",
    ]
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)["result"]
    with sqlite3.connect(folder / "profile.sqlite") as connection:
        rows = connection.execute("SELECT key, forward_seconds, backward_seconds FROM ops")
        times = [own + other for key, own, other in rows if key.startswith("autoparallel.block")]
    assert sorted(b["measured_seconds"] for b in found["blocks"]) == pytest.approx(sorted(times))
    stage = load_plan(folder / "specified.json").stages[0].prediction.seconds
    assert found["stages"][0]["measured_seconds"] == pytest.approx(sum(times))
    assert found["stages"][0]["predicted_seconds"] == pytest.approx(stage["compute"])
    errors = [abs(each["error"]) for each in found["blocks"]]
    assert errors == sorted(errors, reverse=True)
    assert run(*arguments) == 0
    page = capsys.readouterr().out
    assert "Blocks" in page
    assert max(map(len, page.splitlines())) <= 80


def test_analytic_ignores_the_database(folder: Path) -> None:
    assert plan(folder, "analytic.json", "--profile", "analytic") == 0
    found = load_plan(folder / "analytic.json").prediction
    assert found.sources == {"spec": pytest.approx(1.0)}
    assert found.profile is None


def test_measured_plans_what_was_measured_and_names_what_was_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, "measured.json", "--profile", "measured") == 0
    capsys.readouterr()
    assert plan(folder, "none.json", "--profile", "measured", "--set", "depth=3") == 0
    assert plan(folder, "none.json", "--profile", "measured", "--micro-batch", "2") == 2
    text = capsys.readouterr().err
    assert "error[AP170]" in text
    assert "aten.linear.default (2)" in text
    assert "fix: autoparallel profile " in text


def test_measuring_again_finds_nothing_to_measure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        "profile",
        str(folder / "model.py"),
        "--cluster",
        str(folder / "cluster.toml"),
        *FIXED,
        "--budget",
        "90",
        "--database",
        str(folder / "profile.sqlite"),
        "--json",
    )
    assert code == 0
    outcome = json.loads(capsys.readouterr().out)["result"]
    assert (outcome["measured"], outcome["transfers"], outcome["left"]) == (0, 0, 0)
    assert outcome["known"][0] > 0


def test_an_exported_profile_gives_the_same_plan_elsewhere(folder: Path) -> None:
    database, exported = str(folder / "profile.sqlite"), str(folder / "profile.jsonl")
    assert run("profile", "--export", exported, "--database", database) == 0
    other = str(folder / "other.sqlite")
    assert run("profile", "--import", exported, "--database", other) == 0
    assert plan(folder, "here.json") == 0
    assert plan(folder, "there.json", database="other.sqlite") == 0
    here, there = load_plan(folder / "here.json"), load_plan(folder / "there.json")
    assert replace(there, solver=here.solver) == here


def test_what_a_database_holds_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = str(folder / "profile.sqlite")
    assert run("profile", "--list", "--database", database, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["result"]
    assert row["ops"] > 0
    assert row["transfers"] > 0
    assert "2 processes" in row["environment"]
    assert run("profile", "--list", "--database", database) == 0
    assert str(row["ops"]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("profile",), "AP175"),
        (("profile", "--list", "--database", "no-such.sqlite"), "AP171"),
        (("profile", "--export", "x.jsonl", "--database", "no-such.sqlite"), "AP171"),
        (("profile", "--import", "no-such.jsonl"), "AP172"),
        (("plan", "model.py", "--profile", "guessed"), "AP173"),
    ],
)
def test_wrong_options_are_usage_errors(
    arguments: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_a_file_that_is_no_database_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "text.sqlite").write_text("not a database, but long enough to look at" * 30)
    assert plan(folder, "x.json", database="text.sqlite") == 2
    assert "error[AP172]" in capsys.readouterr().err


def test_the_users_own_database_is_where_the_system_keeps_data() -> None:
    assert default_database({"XDG_DATA_HOME": "/d"}, "linux") == Path(
        "/d/autoparallel/profile.sqlite"
    )
    home = Path.home()
    assert default_database({}, "linux").is_relative_to(home / ".local" / "share")
    assert default_database({}, "darwin").is_relative_to(home / "Library")
    windows = default_database({"LOCALAPPDATA": "/local"}, "win32")
    assert windows == Path("/local/autoparallel/profile.sqlite")


def command(folder: Path, database: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "autoparallel",
            "profile",
            str(folder / "model.py"),
            "--cluster",
            str(folder / "cluster.toml"),
            "--global-batch",
            "8",
            "--database",
            str(database),
            *options,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_two_commands_write_to_one_database(folder: Path, tmp_path: Path) -> None:
    database = tmp_path / "shared.sqlite"
    both = [
        command(folder, database, "--parallel", f"dp=2,microbatches={n}", "--budget", "15")
        for n in (1, 2)
    ]
    assert [each.wait(120) for each in both] == [0, 0]
    with sqlite3.connect(database) as connection:
        keys = [key for (key,) in connection.execute("SELECT key FROM ops")]
    assert any("float32[4,8]" in key for key in keys)
    assert any("float32[2,8]" in key for key in keys)


@pytest.mark.slow
def test_an_interrupted_command_keeps_what_it_has_measured(folder: Path, tmp_path: Path) -> None:
    database = tmp_path / "interrupted.sqlite"
    process = command(folder, database, "--budget", "60")
    deadline = time.monotonic() + 60
    while _count(database) == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    assert b"what was measured until now is in" in process.stderr.read()
    assert _count(database) > 0


def _count(database: Path) -> int:
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            (count,) = connection.execute("SELECT count(*) FROM transfers").fetchone()
    except sqlite3.OperationalError:
        return 0
    return int(count)
