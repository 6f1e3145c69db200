"""torch's settings for TF32, whichever of its ways they were made in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autoparallel.cost_model.profile.torch_tf32 import torch_computing, torch_families

MATMUL, CONV = "torch.backends.cuda.matmul", "torch.backends.cudnn"
SETTINGS = {
    "": ("conv",),
    f"{MATMUL}.allow_tf32 = True": ("conv", "matmul"),
    "torch.set_float32_matmul_precision('high')": ("conv", "matmul"),
    "torch.set_float32_matmul_precision('medium')": ("conv", "matmul"),
    f"{CONV}.allow_tf32 = False": (),
    f"{MATMUL}.fp32_precision = 'tf32'": ("conv", "matmul"),
    f"{CONV}.conv.fp32_precision = 'ieee'": (),
    "torch.backends.fp32_precision = 'ieee'": (),
    "torch.backends.fp32_precision = 'tf32'": ("conv", "matmul"),
}
CODE = """
import sys, torch
from autoparallel.cost_model.profile.torch_tf32 import set_torch, torch_families
{setting}
print(torch_families())
for families in ((), ("conv",), ("matmul",), ("conv", "matmul")):
    set_torch(families)
    assert torch_families() == families, (families, torch_families())
"""


def of_process(setting: str) -> str:
    """In a process of its own: some of torch's settings cannot be taken back."""
    code = CODE.format(setting=setting)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_both_generations_are_read_and_can_be_changed(setting: str) -> None:
    assert of_process(setting) == str(SETTINGS[setting])


def test_settings_are_as_before_afterwards() -> None:
    before = torch_families()
    with torch_computing(("matmul",)):
        assert torch_families() == ("matmul",)
    assert torch_families() == before
    with pytest.raises(ZeroDivisionError), torch_computing(()):
        _ = 1 // 0
    assert torch_families() == before
