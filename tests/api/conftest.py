"""A small model file, and plans made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)

def build_model(width=8, depth=2):
    return Net(width, depth)

def wide(width=64):
    return Net(width, 1)

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 8), "y": torch.zeros(global_batch, 8)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""


@pytest.fixture(autouse=True)
def _database_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what another one has measured."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A model file that keeps the contract."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path
