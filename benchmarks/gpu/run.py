"""What only a machine with GPUs can show: tests, verified plans, training steps, profiles.

``python benchmarks/gpu/run.py [--parts NAME,...] [-o FILE]``, or ``make gpu``. Each part is a
command in a process of its own with a time limit, in the order of its value, so one that fails
or hangs loses nothing else. Writes one JSON file (``build/gpu.json``): the versions, and of each
part whether it passed, its seconds, its last lines and its figures (seconds and bytes of steps,
predicted and measured; every case of ``schedules.py``; measured ops and collectives). Exits with 0
if all passed, 1 if one failed and 5 without a GPU; make turns any failure into its own exit code 2.
``--device cpu --small`` runs the same commands on tiny models and processes of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autoparallel.planner.errors import AutoparallelError

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "gpu-models"
NO_GPU_EXIT_CODE = 5
DATA = ROOT / "build" / "gpu-data"
"""What is measured and planned here, apart from the user's own."""
NUM_LINES = 25
ENDS_SECONDS = 5.0
"""How long a part that is late has for ending its own processes."""
NUM_RANKS = 2
"""Of the pipelines of ``schedules.py``."""

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
"""GPT-2 of 124 million parameters: the defaults of transformers."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""The shape of Llama 3.2 1B."""


@dataclass(frozen=True, slots=True)
class Part:
    """A command, the seconds that it may take, and how many GPUs it sees.

    ``{folder}`` in the command is an empty folder, from which ``read`` takes the figures.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    num_devices: int = 1
    read: Callable[[Path], dict[str, Any]] = lambda folder: {}


def parts(device: str, num_devices: int, *, small: bool) -> Iterator[Part]:
    """All parts, the most valuable first."""
    one, every = ("local", "local") if device == "cuda" else ("cpu:1", f"cpu:{num_devices}")
    yield Part("tests", _tests(device), 150.0)
    yield from (_verified(name, one) for name in (("gpt2",) if small else ("gpt2", "llama", "t5")))
    yield from _steps(one, small=small)
    yield _profile(every, num_devices, small=small)
    if num_devices >= NUM_RANKS:
        models = ("examples/gpt.py", "hf:tests/zoo/t5", "hf:tests/zoo/llama")
        yield _schedules("schedules", models[:1] if small else models, every, small=small)
        if not small:
            known = ROOT.glob("tests/zoo/*/config.json")
            zoo = sorted(f"hf:{path.parent.relative_to(ROOT)}" for path in known)
            yield _schedules("zoo", zoo, every, small=True)


def _tests(device: str) -> tuple[str, ...]:
    """On a CPU the tests that run on both devices; on a GPU all that need one, and no other."""
    folder = "tests/runtime"
    chosen = (
        ("-m", "gpu", "tests/cost_model/test_detect.py", folder)
        if device == "cuda"
        else ("-k", "cpu", f"{folder}/test_devices.py")
    )
    return (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen)


def _verified(model: str, cluster: str) -> Part:
    command = (
        sys.executable,
        "-m",
        "autoparallel",
        "verify",
        f"hf:{ROOT / 'tests/zoo' / model}",
        "--cluster",
        cluster,
        "--parallel",
        "dp=1",
        "--seq",
        "16",
        "--json",
    )
    return Part(f"verify {model}", command, 90.0)


def _profile(cluster: str, num_devices: int, *, small: bool) -> Part:
    target = f"hf:{ROOT / 'tests/zoo/gpt2' if small else MODELS / 'gpt2'}"
    command = (
        sys.executable,
        "-m",
        "autoparallel",
        "profile",
        target,
        "--cluster",
        cluster,
        "--global-batch",
        "4",
        "--seq",
        "16" if small else "512",
        "--budget",
        "2" if small else "30",
        "--export",
        "{folder}/measured.jsonl",
        "--database",
        "{folder}/measured.sqlite",
    )
    return Part("profile", command, 120.0, num_devices, _read_measured)


def _read_measured(folder: Path) -> dict[str, Any]:
    lines = (folder / "measured.jsonl").read_text().splitlines()
    return {"measurements": [json.loads(line) for line in lines]}


def _schedules(name: str, models: Sequence[str], cluster: str, *, small: bool) -> Part:
    command = (
        sys.executable,
        str(Path(__file__).with_name("schedules.py")),
        "{folder}/cases.jsonl",
        *models,
        "--cluster",
        cluster,
        *(("--schedules", "1f1b") if small else ()),
    )
    return Part(name, command, 300.0, NUM_RANKS, _read_cases)


def _read_cases(folder: Path) -> dict[str, Any]:
    lines = (folder / "cases.jsonl").read_text().splitlines()
    return {"cases": [json.loads(line) for line in lines]}


def _steps(cluster: str, *, small: bool) -> Iterator[Part]:
    cases = (("gpt2", 8), ("llama", 4))
    for model, rows in cases[:1] if small else cases:
        folder = ROOT / "tests/zoo" / model if small else MODELS / model
        command = (
            sys.executable,
            "-m",
            "autoparallel",
            "run",
            f"hf:{folder}",
            "--cluster",
            cluster,
            "--precision",
            "fp32" if small else "bf16",
            "--seq",
            "16" if small else "1024",
            "--global-batch",
            str(rows),
            "--steps",
            "4" if small else "10",
            "--measure-seconds",
            "0" if small else "10",
            "--metrics",
            "{folder}/steps.jsonl",
            "--output",
            "{folder}/plan.json",
        )
        yield Part(f"step {model}", command, 120.0, read=_read_steps)
        if has_compile() and not small:  # inductor takes long on a CPU
            compiled = (*command, "--compile")
            yield Part(f"step {model} compiled", compiled, 180.0, read=_read_steps)


def _read_steps(folder: Path) -> dict[str, Any]:
    """Seconds of the median step after the warm-up and the most bytes, and what was predicted."""
    from autoparallel.analysis.measurement import WARMUP_STEPS
    from autoparallel.planning.plan_files import load_plan

    lines = (folder / "steps.jsonl").read_text().splitlines()
    steps, predicted = [json.loads(line) for line in lines], load_plan(folder / "plan.json")
    return {
        "step_seconds": median(step["seconds"] for step in steps[WARMUP_STEPS:]),
        "predicted_step_seconds": predicted.prediction.step_seconds,
        "memory_bytes": max(step["memory_bytes"] for step in steps),
        "predicted_memory_bytes": predicted.prediction.peak_memory_bytes,
        "losses": [step["loss"] for step in steps],
    }


def has_compile() -> bool:
    """Whether ``autoparallel run`` takes ``--compile``."""
    import inspect

    from autoparallel.commands.training import run

    return "compile" in inspect.signature(run).parameters


def run(part: Part, limit_seconds: float) -> dict[str, Any]:
    """What became of a part; its whole process group ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        command = tuple(word.replace("{folder}", folder) for word in part.command)
        began = time.monotonic()
        error, lines = _ended(command, limit_seconds, num_devices=part.num_devices)
        found = {
            "name": part.name,
            "passed": not error,
            "error": error,
            "seconds": round(time.monotonic() - began, 1),
            "command": list(command),
            "last_lines": lines[-NUM_LINES:],
            "figures": {},
        }
        try:
            found["figures"] = part.read(Path(folder))
        except (OSError, ValueError, LookupError, TypeError, AutoparallelError) as lacking:
            if not error:
                found |= {"passed": False, "error": f"no figures: {lacking}"}
        return found


def _ended(
    command: Sequence[str], limit_seconds: float, *, num_devices: int
) -> tuple[str, list[str]]:
    """How a command failed ("" if it did not), and what it printed."""
    own = {"XDG_DATA_HOME": str(DATA), "AUTOPARALLEL_CACHE": str(DATA / "cache")}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_devices)))
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:num_devices])
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # A file, not a pipe: what outlives a process that is killed could keep a pipe open.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"no answer within {limit_seconds:.0f} s"
            os.killpg(process.pid, signal.SIGINT)  # it ends its workers, which have own sessions
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return error, output.read().splitlines()


def versions(device: str) -> dict[str, Any]:
    """Of everything that a figure depends on, and the date."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        # Asked of the driver: a context in this process could keep others from the GPU.
        query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        found_tool = shutil.which(query[0]) is not None
        told = (
            subprocess.run(query, capture_output=True, text=True, check=False).stdout
            if found_tool
            else ""
        )
        lines = [line.split(", ", 1) for line in told.splitlines() if ", " in line]
        found["driver"] = lines[0][0] if lines else None
        found["devices"] = [name for _, name in lines]
    return found


def write_models() -> None:
    """Folders with the configurations of the models whose steps are measured."""
    for name, config in (("gpt2", GPT2), ("llama", LLAMA)):
        folder = MODELS / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))


def told_lines(found: Mapping[str, Any]) -> list[str]:
    """What is printed of a part: where it failed its last lines, else its main figures."""
    figures = found["figures"]
    if not found["passed"]:
        return list(found["last_lines"][-5:])
    if "step_seconds" in figures:
        return [
            f"{name}: measured {figures[name]:.4g}, predicted {figures[f'predicted_{name}']:.4g}"
            for name in ("step_seconds", "memory_bytes")
        ]
    return [f"{name}: {len(values)}" for name, values in figures.items()]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--parts", help="names of parts, or their first words, by commas: step")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--seconds", type=float, help="for all parts together: 530, or 1200 with several GPUs"
    )
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
    ends = time.monotonic() + (given.seconds or (1200.0 if num_devices > 1 else 530.0))
    for part in chosen:
        left_seconds = ends - time.monotonic()
        if left_seconds > 0:
            found = run(part, min(part.limit_seconds, left_seconds))
        else:
            found = {
                "name": part.name,
                "passed": False,
                "error": "not begun: time is up",
                "seconds": 0.0,
                "last_lines": [],
                "figures": {},
            }
        results.append(found)
        told = "passed" if found["passed"] else f"FAILED: {found['error']}"
        print(f"{part.name:24} {found['seconds']:6.1f} s  {told}", flush=True)
        for line in told_lines(found):
            print(f"    {line}", flush=True)
        document = {"versions": versions(given.device), "parts": results}
        given.output.write_text(json.dumps(document, indent=1))
    return 0 if all(found["passed"] for found in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
