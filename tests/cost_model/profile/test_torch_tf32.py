"""torch's settings for TF32, whichever of its ways they were made in."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest
import torch

from autoparallel.cost_model.cluster.tf32 import torch_computing, torch_families

MATMUL, CONV = "torch.backends.cuda.matmul", "torch.backends.cudnn"
SETTINGS = {
    "": ("conv",),
    f"{MATMUL}.allow_tf32 = True": ("conv", "matmul"),
    "torch.set_float32_matmul_precision('high')": ("conv", "matmul"),
    "torch.set_float32_matmul_precision('medium')": ("conv", "matmul"),
    f"{CONV}.allow_tf32 = False": (),
    f"{MATMUL}.fp32_precision = 'tf32'": ("conv", "matmul"),
    f"{CONV}.conv.fp32_precision = 'ieee'": (),
    # torch 2.11 leaves convolutions as they are
    "torch.backends.fp32_precision = 'ieee'": ("conv",) if torch.__version__ < "2.12" else (),
    "torch.backends.fp32_precision = 'tf32'": ("conv", "matmul"),
}
CODE = """
import os
import sys
import traceback
import torch
from autoparallel.cost_model.cluster.tf32 import set_torch, torch_families

def child(setting):
    exec(setting)
    print(torch_families(), flush=True)
    for families in ((), ("conv",), ("matmul",), ("conv", "matmul")):
        set_torch(families)
        assert torch_families() == families, (setting, families, torch_families())

for setting in sys.argv[1:]:
    forked = os.fork()
    if not forked:
        try:
            child(setting)
            os._exit(0)  # torch takes half a second to go
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(forked, 0)
    if status:
        print("failed", flush=True)
"""


@cache
def of_processes() -> dict[str, str]:
    """Each in a process of its own, as some of torch's settings cannot be taken back: forked
    where torch was imported and nothing else was done."""
    command = [sys.executable, "-c", CODE, *SETTINGS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return dict(zip(SETTINGS, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_both_generations_are_read_and_can_be_changed(setting: str) -> None:
    assert of_processes()[setting] == str(SETTINGS[setting])


def test_settings_are_as_before_afterwards() -> None:
    before = torch_families()
    with torch_computing(("matmul",)):
        assert torch_families() == ("matmul",)
    assert torch_families() == before
    with pytest.raises(ZeroDivisionError), torch_computing(()):
        _ = 1 // 0
    assert torch_families() == before
