"""Wrong command lines, the advice of their errors, and the command lines that follow it.

A table of cases is made by ``case``; ``tests/api/test_command_fixes.py`` runs all tables. Every
case has a folder of its own with the files of ``FILES`` and the plans of ``PLANS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.head = nn.Linear(width, 4)

    def forward(self, x, y):
        return functional.cross_entropy(self.head(self.layers(x)), y)


def build_model(width=8, depth=5):
    return Net(width, depth)


def example_batch(global_batch):
    return {"x": torch.randn(global_batch, 8), "y": torch.arange(global_batch) % 4}
"""

FILES: Mapping[str, str] = {
    "model.py": MODEL,
    "gpt.py": (EXAMPLES / "gpt.py").read_text().replace("SEQ = 256", "SEQ = 8"),
}

SMALL = "--set depth=1 --global-batch 8"
PLANS: Mapping[str, str] = {
    "plan.json": f"model.py --cluster cpu:2 --parallel dp=2 {SMALL}",
    "alone.json": f"model.py --cluster cpu:1 {SMALL}",
    "gpus.json": f"model.py --cluster 1x2xH100 --parallel dp=2 {SMALL}",
    "hosts.json": f"model.py --cluster 2x1xH100 --parallel dp=2 {SMALL}",
    "mixed.json": f"model.py --cluster 1xH100+1xA100 --parallel dp=2 {SMALL}",
    "uneven.json": f"model.py --cluster 2xH100+1xH100 --parallel dp=3 {SMALL} --global-batch 6",
    "served.json": f"model.py --cluster cpu:2 --parallel servers=1 {SMALL}",
    "llama.json": "hf:llama --cluster cpu:1 --global-batch 4 --seq 16",
}
"""What ``plan`` is given for each plan that cases begin with."""

CHECKPOINTS: Mapping[str, str] = {
    "saved": "alone.json --steps 2 --save saved --save-every 1",
    "tuned": "llama.json --steps 1 --save tuned",
    "adapted": "hf:llama --cluster cpu:1 --global-batch 4 --seq 16 --lora r=8,alpha=16 --steps 1 "
    "--save adapted",
}
"""What ``run`` is given for each folder of checkpoints that cases begin with."""


def model(*changes: tuple[str, str]) -> str:
    """The text of ``model.py`` with each old text replaced by the new one."""
    text = MODEL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Case:
    """``wrong`` ends in the error ``code``, whose fix matches ``advice``; ``right`` follows it.

    In ``right``, ``{0}`` and ``{1}`` are replaced by what the groups of ``advice`` have matched.
    ``files`` are written before ``wrong`` runs, ``mended`` before ``right`` runs: a name and its
    text, a path from which the file is moved, or None to remove the file. ``before`` are command
    lines that run first. ``variables`` are environment variables of ``wrong``. ``right`` may be
    several lines, joined by `` && ``.
    """

    code: str
    wrong: str
    advice: str
    right: str
    files: Mapping[str, str | Path | None] = field(default_factory=dict)
    mended: Mapping[str, str | Path | None] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 2

    @property
    def is_quick(self) -> bool:
        """Whether the lines neither capture a model nor start a process."""
        words = {*self.wrong.split()[:2], *self.right.split()[:2]}
        return words - {"schedules", "ops", "cluster"} == {"show"}

    def mentions(self, name: str) -> bool:
        """Whether a line of the case has this file or folder."""
        lines = (self.wrong, self.right, *self.before)
        names = (name, "tuned", "adapted") if name == "llama" else (name,)  # were trained from it
        return any(each in line for each in names for line in lines)
