"""Starting the processes of a run: the launcher's arguments, and what its result means."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from autoparallel.asked import Init
from autoparallel.cost_model.detect import threads_per_device
from autoparallel.plan_io import load_plan
from autoparallel.planner.arranged.asynchronous import is_asynchronous
from autoparallel.planner.errors import UsageError, VerificationError
from autoparallel.planner.plan import Plan
from autoparallel.report.page import shape_text
from autoparallel.runtime.launch import launch

VERIFY_DTYPES = ("fp64", "fp32")
TIMEOUT_SECONDS = 600.0
"""How long a rank may make no progress."""


def start_training(
    path: Path,
    *,
    steps: int,
    seed: int,
    save: str | None = None,
    save_every: int | None = None,
    resume: str | None = None,
    init: Init = "sharded",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Trains by the plan at ``path`` on this machine, or as a process of torchrun.

    A rank that makes no progress for ``timeout_seconds`` ends the run with a HangError.
    ``save`` and ``resume`` are folders of checkpoints, ``init`` is how weights are drawn (see
    ``worker.train``).
    Returns measured and predicted figures (see ``worker.outcome``).
    """
    folders = {
        name: None if folder is None else str(Path(folder).resolve())
        for name, folder in (("save", save), ("resume", resume))
    }
    return _start(
        "train", path, timeout_seconds=timeout_seconds,
        steps=steps, seed=seed, init=init, save_every=save_every, **folders,
    )  # fmt: skip


def start_verification(path: Path, *, dtype: str, json_output: bool, seed: int = 0) -> None:
    """Verifies the plan at ``path`` and prints the result.

    Raises UsageError AP119 for an unknown dtype and VerificationError AP601 where the plan's
    run differs from one device.
    """
    if dtype not in VERIFY_DTYPES:
        raise UsageError("AP119", f"--dtype {dtype!r} is not one of {', '.join(VERIFY_DTYPES)}")
    found = _start("verify", path, dtype=dtype, seed=seed)
    if os.environ.get("RANK", "0") == "0":
        plan = load_plan(path)
        words = f"{shape_text(plan)}\n{verdict(found, truth_of(plan))}"
        text = json.dumps(found, indent=2) if json_output else words
        sys.stdout.write(f"{text}\n")
    if not found["passed"]:
        first = found["failures"][0]
        raise VerificationError(
            "AP601",
            f"the {first['quantity']} of {first['name']} differs from {truth_of(load_plan(path))}",
            why=f"by {first['relative']:.1e} of its magnitude; {found['tolerance']:.0e} is allowed",
            where=f"block {first['block']}" if first["block"] else "",
            fix=f"{len(found['failures'])} of {found['num_compared']} tensors differ: "
            "please report the model and the plan",
        )


def truth_of(plan: Plan) -> str:
    """What a verification compares a plan's run with.

    An asynchronous schedule is not equal to one device, but it should do what it says.
    """
    if is_asynchronous(plan.schedule):
        return f"one process that makes the updates of {plan.schedule}"
    return "one device"


def verdict(found: dict[str, Any], truth: str = "one device") -> str:
    """A verification in words; ``truth`` is what was compared with."""
    worst = ", ".join(f"{name} {value:.1e}" for name, value in found["worst"].items())
    word = "verified" if found["passed"] else "NOT verified"
    return (
        f"{word}: {found['num_compared']} tensors compared with {truth} in {found['dtype']}\n"
        f"largest difference relative to magnitude: {worst} (allowed {found['tolerance']:.0e})"
    )


def _start(
    name: str, path: Path, *, timeout_seconds: float = TIMEOUT_SECONDS, **arguments: Any
) -> dict[str, Any]:
    plan = load_plan(path)
    num_processes = plan.cluster.num_devices
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    result: dict[str, Any] = launch(
        f"autoparallel.worker:{name}",
        {"plan_path": str(path.resolve()), **arguments},
        num_processes=num_processes,
        timeout_seconds=timeout_seconds,
        num_threads=threads_per_device(num_processes),
    )
    return result
