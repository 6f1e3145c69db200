"""The cache's file: several processes, damage, limits, versions; and the commands over it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.__main__ import run_command
from autoparallel.cache.captures import cached_program, model_text
from autoparallel.cache.plan_cache import (
    FILE,
    Cache,
    code_digest,
    code_version,
    default_folder,
    plan_cache,
)
from autoparallel.cache.store import SqliteStore
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planning.capture import capture_target, record_target
from autoparallel.target.load import load_target

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()

def build_model(width=16):
    return Net(width)

def example_batch(global_batch, seq=None):
    return {"x": torch.empty(global_batch, 16, device="meta")}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in the folder of a model file."""
    monkeypatch.setenv("AUTOPARALLEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def shelf_at(folder: Path, *, origin: str = "here", most_bytes: int = 10**9) -> SqliteStore:
    return SqliteStore(folder / FILE, origin, most_bytes)


def test_what_is_put_is_there_after_closing_and_not_before(tmp_path: Path) -> None:
    first, second = shelf_at(tmp_path), shelf_at(tmp_path)
    first.put("key", b"value")
    assert first.get("key") == b"value"
    assert second.get("key") is None
    first.close()
    assert shelf_at(tmp_path).get("key") == b"value"
    assert not first.faults


def test_many_processes_may_write_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from autoparallel.cache.store import SqliteStore\n"
        "shelf = SqliteStore(Path(sys.argv[1]), 'here', 10**9)\n"
        "for n in range(50): shelf.put(f'{sys.argv[2]}-{n}', sys.argv[2].encode() * 1000)\n"
        "shelf.put('shared', b'the same'); shelf.close(); assert not shelf.faults, shelf.faults"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / FILE), str(process)])
        for process in range(4)
    ]
    assert [process.wait() for process in started] == [0] * 4
    shelf = shelf_at(tmp_path)
    assert shelf.origins() == {"here": 201}
    assert shelf.get("3-49") == b"3" * 1000


def test_a_damaged_value_is_not_found(tmp_path: Path) -> None:
    shelf = shelf_at(tmp_path)
    shelf.put("key", b"value")
    shelf.close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE entry SET value = ?", (b"other",))
    again = shelf_at(tmp_path)
    assert again.get("key") is None
    assert again.faults["damaged values"] == 1


def test_a_file_that_is_no_database_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not ours at all" * 100)
    shelf = shelf_at(tmp_path)
    assert shelf.get("key") is None
    assert [reason for reason in shelf.faults if "put aside" in reason]
    shelf.put("key", b"value")
    shelf.close()
    assert shelf_at(tmp_path).get("key") == b"value"
    assert (tmp_path / FILE).with_suffix(".damaged").read_bytes().startswith(b"not ours")


def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shelf = SqliteStore(tmp_path / "file" / FILE, "here", 10**9)
    shelf.put("key", b"value")
    shelf.close()
    assert shelf.faults


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    for name in "abcde":
        shelf = shelf_at(tmp_path, most_bytes=10_000)
        if name == "e":
            assert shelf.get("a") is not None  # so it is used after b, c and d
        shelf.put(name, name.encode() * 2_400)
        shelf.close()
    left = shelf_at(tmp_path)
    assert [name for name in "abcde" if left.get(name) is not None] == ["a", "d", "e"]
    assert left.num_bytes() == 7_200


def test_a_cache_of_another_version_is_ignored_and_said(folder: Path) -> None:
    shelf = shelf_at(folder / "cache", origin=code_version().replace("torch ", "torch 0."))
    shelf.put("key", b"value")
    shelf.close()
    with plan_cache() as cache:
        assert cache.report() == "a cache of another version ignored (1 values; unlike torch)"
    assert len(code_digest()) == 16


def forget() -> None:
    """The model's module, as another process has not loaded it."""
    for name in ("net", "net_target"):
        sys.modules.pop(name, None)


def _planned(folder: Path, *options: str) -> dict[str, Any]:
    plan = folder / "plan.json"
    arguments = [
        "plan",
        str(folder / "net.py"),
        "--cluster",
        "2xA100-40GB",
        "-o",
        str(plan),
        "--parallel",
        "microbatches=2,zero=0,recompute=none",
    ]
    forget()
    assert run_command([*arguments, "--time-limit", "600", *options]) == 0
    found: dict[str, Any] = json.loads(plan.read_text())
    del found["solver"]["seconds"], found["solver"]["is_reused"], found["checksums"]["solver"]
    return found


@pytest.mark.slow
def test_the_second_plan_reuses_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _planned(folder)
    assert "reused 1 of 1 capture" not in capsys.readouterr().err
    assert _planned(folder) == first
    assert "reused 1 of 1 capture, 1 of 1 plan, 1 of 1 memory" in capsys.readouterr().err
    assert _planned(folder, "--no-cache") == first
    assert "cache" not in capsys.readouterr().err
    assert _planned(folder, "--num-candidates", "7") == _planned(
        folder, "--num-candidates", "7", "--no-cache"
    )
    assert "reused 1 of 1 capture" in capsys.readouterr().err


@pytest.mark.runs_stages
def test_the_command_shows_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["show", "cache"]) == 0
    assert "no values" in capsys.readouterr().out
    _planned(folder)
    capsys.readouterr()
    assert run_command(["show", "cache", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["result"]
    assert shown["values"][shown["own"]] == 3  # a capture, a plan, its memory
    assert run_command(["show", "cache", "clear"]) == 0
    assert not (default_folder() / FILE).exists()


def test_a_changed_model_is_captured_again(folder: Path) -> None:
    with plan_cache() as cache:
        for text, reused in ((MODEL, 0), (MODEL, 1), (MODEL.replace("relu", "sigmoid"), 1)):
            (folder / "net.py").write_text(text)
            forget()
            target = load_target(str(folder / "net.py"))
            program = capture_target(target, PlanOptions(), cache=cache.values)
            assert cache.values.reused["capture"] == reused
            ops = {node.op for node in program.graph.nodes}
            assert ("aten.relu.default" in ops) == ("torch.relu" in text)


def test_a_kept_capture_equals_a_new_one(folder: Path) -> None:
    target = load_target(str(folder / "net.py"))
    shelf = shelf_at(folder)
    for _ in range(2):
        model = record_target(target).model
        new = capture_target(target, PlanOptions())
        found = cached_program(Cache(shelf), target, model, PlanOptions(), lambda: new)  # noqa: B023
        assert found.graph == new.graph
        assert found.blocks == new.blocks
        assert found.inputs == new.inputs
    assert found.model is model


def test_what_a_model_is_made_of_tells_models_apart() -> None:
    with torch.device("meta"):
        plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
        again = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
        other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
        twice = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        tied = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert model_text(plain) == model_text(again)
    assert len({model_text(each) for each in (plain, other, twice, tied)}) == 4
    again.eval()
    assert model_text(plain) != model_text(again)
