"""What only a machine with GPUs can show: tests, verified plans, profiles, training steps.

``python benchmarks/gpu/run.py [--parts NAME,...] [-o FILE]``, or ``make gpu``. Each part is a
command in a process of its own with a time limit, in the order of its value, so one that fails
or hangs loses nothing else. Writes one JSON file (``build/gpu.json``): the versions, and of each
part whether it passed, its seconds, its last lines and its figures. Exits with 0 if all passed, 1
if one failed and 5 without a GPU. ``--device cpu --small`` is for who works on this script: the
same commands on tiny models and processes of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "gpu-models"
NO_GPU_EXIT_CODE = 5
DATA = ROOT / "build" / "gpu-data"
"""What is measured and planned here, apart from the user's own."""
NUM_LINES = 25
NUM_STEPS = 10

GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
"""GPT-2 of 124 million parameters: the defaults of transformers."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of Llama 3.2 1B."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command, the seconds that it may take, and whether it sees the first GPU alone."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    is_alone: bool = True


def parts(device: str, num_devices: int, *, small: bool) -> Iterator[Part]:
    """All parts, the most valuable first."""
    python, cluster = sys.executable, "local" if device == "cuda" else f"cpu:{num_devices}"
    tests = (
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "tests/cost_model/test_detect.py",
        "tests/runtime",
    )
    yield Part("tests", (*tests, *(("--collect-only",) if small else ())), 150.0)
    one = "local" if device == "cuda" else "cpu:1"
    for name in ("gpt2",) if small else ("gpt2", "llama", "t5"):
        yield _verified(name, one, "dp=1")
    yield from _steps(one, small=small)
    budget = "5" if small else "30"
    target = f"hf:{ROOT / 'tests/zoo/gpt2' if small else MODELS / 'gpt2'}"
    shape = ("--global-batch", "4", "--seq", "16" if small else "512")
    profile = (python, "-m", "autoparallel", "profile", target, "--cluster", cluster)
    yield Part("profile", (*profile, *shape, "--budget", budget), 120.0, False)
    if num_devices >= 2:
        for schedule in ("gpipe", "1f1b"):
            yield _verified("gpt2", cluster, f"pp=2,schedule={schedule}", is_alone=False)


def _verified(model: str, cluster: str, parallel: str, *, is_alone: bool = True) -> Part:
    command = (
        sys.executable, "-m", "autoparallel", "verify", f"hf:{ROOT / 'tests/zoo' / model}",
        "--cluster", cluster, "--parallel", parallel, "--seq", "16", "--json",
    )  # fmt: skip
    return Part(f"verify {model} {parallel}", command, 90.0, is_alone)


def _steps(cluster: str, *, small: bool) -> Iterator[Part]:
    cases = (("gpt2", 8), ("llama", 4))
    for model, rows in cases:
        folder = ROOT / "tests/zoo" / model if small else MODELS / model
        command = (
            sys.executable, "-m", "autoparallel", "run", f"hf:{folder}", "--cluster", cluster,
            "--precision", "fp32" if small else "bf16", "--seq", "16" if small else "1024",
            "--global-batch", str(rows), "--steps", str(NUM_STEPS),
        )  # fmt: skip
        yield Part(f"step {model}", command, 120.0)
        if has_compile():
            yield Part(f"step {model} compiled", (*command, "--compile"), 180.0)


def has_compile() -> bool:
    """Whether ``autoparallel run`` takes ``--compile``."""
    import inspect

    from autoparallel.commands.run import run

    return "compile" in inspect.signature(run).parameters


def run(part: Part, limit_seconds: float) -> dict[str, Any]:
    """What became of a part; its whole process group ends with it."""
    began = time.monotonic()
    own = {"XDG_DATA_HOME": str(DATA), "AUTOPARALLEL_CACHE": str(DATA / "cache")}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
    if part.is_alone:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(
            ","
        )[0]
    process = subprocess.Popen(
        part.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    error = ""
    try:
        text, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        error = f"no answer within {limit_seconds:.0f} s"
    lines = text.splitlines()
    if process.returncode != 0 and not error:
        error = f"exit code {process.returncode}"
    return {
        "name": part.name, "passed": not error, "error": error,
        "seconds": round(time.monotonic() - began, 1), "command": list(part.command),
        "figures": [line for line in lines if line.startswith(("step time", "memory  "))],
        "last_lines": lines[-NUM_LINES:],
    }  # fmt: skip


def versions(device: str) -> dict[str, Any]:
    """Of everything that a figure depends on, and the date."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    if device == "cuda":
        nvidia = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        ) if _has_nvidia_smi() else None  # fmt: skip
        found["driver"] = nvidia.stdout.split()[0] if nvidia and nvidia.stdout else None
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["devices"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
    return found


def _has_nvidia_smi() -> bool:
    import shutil

    return shutil.which("nvidia-smi") is not None


def write_models() -> None:
    """Folders with the configurations of the models whose steps are measured."""
    for name, config in (("gpt2", GPT2), ("llama", LLAMA)):
        folder = MODELS / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--parts", help="names of parts, or their first words, by commas: step")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all parts together")
    parser.add_argument("--small", action="store_true", help="tiny models")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs the parts, writes what is known after each; the exit code."""
    given = options(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: `make gpu` needs a machine with at least one")
        return NO_GPU_EXIT_CODE
    num_devices = torch.cuda.device_count() if given.device == "cuda" else 2
    write_models()
    wanted = None if given.parts is None else tuple(given.parts.split(","))
    chosen = [
        part
        for part in parts(given.device, num_devices, small=given.small)
        if wanted is None or part.name.startswith(wanted)
    ]
    if not chosen:
        print(f"no part is called {given.parts}")
        return 2
    results: list[Mapping[str, Any]] = []
    given.output.parent.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + given.seconds
    for part in chosen:
        left_seconds = max(1.0, ends - time.monotonic())
        found = run(part, min(part.limit_seconds, left_seconds))
        results.append(found)
        told = "passed" if found["passed"] else f"FAILED: {found['error']}"
        print(f"{part.name:32} {found['seconds']:6.1f} s  {told}", *found["figures"], sep="\n    ")
        document = {"versions": versions(given.device), "parts": results}
        given.output.write_text(json.dumps(document, indent=1))
    return 0 if all(found["passed"] for found in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
