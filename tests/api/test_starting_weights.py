"""A ``build_model`` that reads weights from files: planned, trained and verified from them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import run_python
from forced_plans import settled
from torch import nn

ROOT = Path(__file__).parents[2]
COMMON = ("model.py", "--cluster", "cpu:2", "--global-batch", "8", "--profile", "analytic")

NET = """
import os
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 1)
        self.register_buffer("pos", torch.arange(width).float(), persistent=False)
    def forward(self, x, y):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.mse_loss(self.head(x + self.pos), y)

def build_model(width: int = 16):
    with open(HERE / "builds.txt", "a") as file:
        file.write(os.environ.get("RANK", "planner") + "\\n")
    model = Net(width)
    LOAD
    return model

def example_batch(global_batch):
    return {"x": torch.empty(global_batch, 16), "y": torch.empty(global_batch, 1)}
"""

LOADS = {
    "copied": 'model.load_state_dict(torch.load(HERE / "weights.pt"))',
    "assigned": 'model.load_state_dict(torch.load(HERE / "weights.pt", mmap=True), assign=True)',
}

LLAMA = """
import os
from pathlib import Path
import torch
from transformers import LlamaForCausalLM

HERE = Path(__file__).parent

def build_model():
    with open(HERE / "builds.txt", "a") as file:
        file.write(os.environ.get("RANK", "planner") + "\\n")
    return LlamaForCausalLM.from_pretrained(HERE / "llama").train()

def example_batch(global_batch, seq=None):
    tokens = torch.zeros(global_batch, seq or 16, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
"""


def command(*arguments: str, folder: Path) -> str:
    done = run_python("-m", "autoparallel", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def builds(folder: Path) -> Counter[str]:
    """How often each process called ``build_model`` since this was last asked."""
    path = folder / "builds.txt"
    found = Counter(path.read_text().split())
    path.unlink()
    return found


def write_model(folder: Path, load: str) -> None:
    (folder / "model.py").write_text(NET.replace("LOAD", LOADS[load]))
    width, model = 16, nn.Module()
    model.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
    model.head = nn.Linear(width, 1)
    torch.save(model.state_dict(), folder / "weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize("load", ["copied", pytest.param("assigned", marks=pytest.mark.slow)])
def test_a_model_that_loads_its_weights_is_trained_from_them(load: str, tmp_path: Path) -> None:
    """Verification compares with the plain build, so it proves the starting values too."""
    write_model(tmp_path, load)
    plans = [("--parallel", settled(text)) for text in ("dp=2,zero=3", "pp=2")]
    command("run", *COMMON, *plans[0], "--steps", "1", folder=tmp_path)
    assert builds(tmp_path) == {"planner": 1, "0": 1, "1": 1}
    out = command("verify", *COMMON, *plans[1], folder=tmp_path)
    assert "verified: " in out
    assert builds(tmp_path) == {"planner": 1, "0": 2, "1": 1}  # Rank 0 is the one device too.


def write_llama(folder: Path) -> None:
    from capture_models import small_llama

    (folder / "model.py").write_text(LLAMA)
    small_llama().save_pretrained(folder / "llama")


@pytest.mark.slow
def test_from_pretrained_is_called_once_by_each_process_of_a_run(tmp_path: Path) -> None:
    write_llama(tmp_path)
    command("run", *COMMON, "--parallel", settled("tp=2"), "--steps", "1", folder=tmp_path)
    assert builds(tmp_path) == {"planner": 1, "0": 1, "1": 1}


@pytest.mark.slow
def test_from_pretrained_is_called_once_by_each_process_and_verified(tmp_path: Path) -> None:
    write_llama(tmp_path)
    out = command("verify", *COMMON, "--parallel", settled("pp=2"), folder=tmp_path)
    assert "verified: " in out
    assert builds(tmp_path) == {"planner": 1, "0": 2, "1": 1}  # Rank 0 is the one device too.


def test_an_unknown_initialization_is_refused(tmp_path: Path) -> None:
    done = run_python(
        "-m",
        "autoparallel",
        "run",
        str(ROOT / "examples/gpt.py"),
        "--cluster",
        "cpu:1",
        "--init",
        "zero",
        "--parallel",
        "dp=1",
        "--global-batch",
        "2",
        "--seq",
        "16",
        "--set",
        "n_layer=1",
        "--set",
        "seq=16",
        folder=tmp_path,
    )
    assert done.returncode == 2
    assert "error[AP850]" in done.stderr
    assert re.search(r"sharded.*exact", done.stderr, re.DOTALL)
