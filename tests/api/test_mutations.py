"""Damaged and hostile input ends every command with its own error: never an internal one, no hang,
no escape that reaches the terminal."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from brief_search import searches_are_brief
from mutations import WORDS, mutated_bytes, mutated_json, mutated_text
from random_suites import seeds

from autoparallel import __main__ as cli
from autoparallel.options.option import parameters
from autoparallel.options.plan_options import PlanOptions

SEEDS = seeds(5)
LIMIT_SECONDS = 60
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()

def build_model(d: int = 8):
    return Net(d)

def example_batch(rows):
    return (torch.randn(rows, 8),)
"""
CLUSTER = """
name = "ours"
inter_link = "ethernet-100g"
[[hosts]]
count = 2
num_devices = 4
device = { preset = "H100", usable_memory_bytes = "60GiB", dollars_per_hour = 2.5 }
link = { preset = "nvlink4", alpha_seconds = 3e-6 }
rack = "a"
"""
ENDS = {0, 2, 3, 4, 5, 6, 8}
"""Exit codes of errors that name their cause, and of success."""


class HangError(Exception):
    """A command takes longer than the limit."""


@contextmanager
def limited() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a plan for it."""
    folder = tmp_path_factory.mktemp("mutations")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch, searches_are_brief():
        patch.chdir(folder)
        options = "--cluster 8xH100 --global-batch 16 --parallel dp=2,tp=2,pp=2 -o plan.json"
        assert cli.run_command(["plan", "model.py", *options.split()]) == 0
    return folder


def check(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Run a command and check how it ends."""
    with searches_are_brief(), limited():
        code = cli.run_command(arguments)
    out, err = capfd.readouterr()
    assert "internal error" not in err, (arguments, err)
    assert code in ENDS, (arguments, code, err)
    assert "\x1b[31m" not in out + err, arguments


COMMANDS = (
    "inspect wrong.json --all",
    "inspect wrong.json --html page.html --no-target",
    "explain wrong.json",
    "compare plan.json wrong.json",
    "launch wrong.json --slurm -o files",
    "export wrong.json --to deepspeed -o out --force",
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan(
    seed: int, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    random = Random(seed)
    plan: Any = json.loads((place / "plan.json").read_text())
    text = mutated_json(plan, random, checksums=random.choice(("checksums", "checksums", "")))
    (place / "wrong.json").write_text(text, errors="surrogatepass")
    check(random.choice(COMMANDS).split(), capfd)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster(
    seed: int, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    random = Random(seed)
    (place / "cluster.toml").write_text(mutated_text(CLUSTER, random), errors="surrogatepass")
    word = "cluster.toml" if seed % 3 else mutated_text("2x8xH100@ethernet-100g+cpu:4", random)
    check(["show", "cluster", "--", word], capfd)


@pytest.mark.parametrize("seed", SEEDS)
def test_options(
    seed: int, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    random = Random(seed)
    options = [f"--{name.replace('_', '-')}" for name in parameters(PlanOptions)]
    options = [*(each for each in options if each != "--compile"), "--set", "--output"]
    given = {"--cluster": "4xH100", "--global-batch": "8", "--time-limit": "5"}
    for option in random.sample(options, random.choice((1, 1, 2))):
        given[option] = random.choice(WORDS)
    words = [word for pair in given.items() for word in pair]
    check([random.choice(("plan", "plan", "simulate")), "model.py", *words], capfd)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_index_of_weights_and_a_database(
    seed: int, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    random = Random(seed)
    if seed % 2:
        index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
        folder = place / "weights"
        folder.mkdir(exist_ok=True)
        text = mutated_json(index, random)
        name = "model.safetensors.index.json"
        (folder / name).write_text(text, errors="surrogatepass")
        check(["export", "weights", "--to", "pt", "-o", "exported", "--force"], capfd)
        return
    good = place / "good.db"
    if not good.exists():
        from autoparallel.cost_model.profile.database import Database

        Database(good).close()
    (place / "wrong.db").write_bytes(mutated_bytes(good.read_bytes(), random))
    line = "plan model.py --cluster 2xH100 --global-batch 8 --database wrong.db --profile auto"
    check(line.split(), capfd)
