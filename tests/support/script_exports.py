"""Scripts that plans are exported as, written and run for tests."""

from __future__ import annotations

import compileall
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from commands import run_torchrun
from small_gpt import save_gpt
from torch import Tensor

from autoparallel.exporting.plans import export_plan
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

SEQ, GLOBAL_BATCH = 16, 8
STEPS = 3


GPT = {"n_layer": 4, "d_model": 32, "n_head": 4, "seq": SEQ}


RUNNER = Path(__file__).parent / "exported_script.py"


def target_of(model: str, folder: Path) -> Target:
    if model in ("gpt", "gpt-short", "gpt-tied"):
        layers = GPT["n_layer"] if model == "gpt" else 2
        settings = {**GPT, "n_layer": layers, "tied": model == "gpt-tied"}
        return load_target(str(save_gpt(folder)), settings)
    if model.endswith(".py"):
        return load_target(model, {})
    if model == "window":
        return load_target("hf:tests/zoo/mistral", {"sliding_window": 5})
    name, _, lora = model.partition("+")
    return load_target(f"hf:{name}", {"lora": lora} if lora else {})


def num_devices(parallel: str) -> int:
    forced = parse_parallel(parallel)
    return (forced.dp or 1) * (forced.cp or 1) * (forced.tp or 1) * (forced.pp or 1)


def exported(folder: Path, model: str, parallel: str, **options: Any) -> tuple[Path, Target]:
    """The folder of a plan's script, and the target."""
    target = target_of(model, folder)
    asked = PlanOptions(
        global_batch=GLOBAL_BATCH,
        forced=parse_parallel(parallel),
        seq=SEQ if target.takes_seq else None,
        **{"precision": "fp64", **options},
    )
    plan = make_plan(target, f"cpu:{num_devices(parallel)}", asked)
    save_plan(plan, folder / "plan.json")
    export_plan(folder / "plan.json", folder / "out", to="python", trust=True)
    return folder / "out", target


def check_text(folder: Path) -> str:
    """A script is clean Python that mentions this package in its first comment alone."""
    text = (folder / "train.py").read_text()
    assert compileall.compile_file(folder / "train.py", quiet=1)
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert linted.returncode == 0, linted.stdout
    _, _, code = text.split('"""', 2)
    assert "autoparallel" not in code
    return text


def run(folder: Path, parallel: str, *arguments: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of a script's steps."""
    saved = folder / "saved.pt"
    done = run_torchrun(
        RUNNER,
        str(folder / "train.py"),
        "--steps",
        str(STEPS),
        "--save",
        str(saved),
        *arguments,
        num_processes=num_devices(parallel),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    return losses, torch.load(saved, weights_only=True)


def script_of(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported_train"] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
