"""What a training run measured, in a small JSON file beside the plan that it ran.

In: a run's steps, the plan. Out: ``plan.measured.json`` beside ``plan.json``: the median step, each
step, the memory of rank 0, the device, the versions and the date. Reports show it beside what was
predicted; the checksum of the plan tells them that the plan is still the one that ran.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autoparallel import __version__
from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps
from autoparallel.training.step_log import outcome

if TYPE_CHECKING:
    from autoparallel.training.step_log import Figures

SCHEMA = 1
MOST_STEPS = 1000
"""Of a longer run the last so many steps are kept one by one."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds and bytes of a run. ``step_seconds`` is the median without the warm-up, of
    ``num_batches`` global batches; ``memory_bytes`` the most that rank 0 held."""

    plan: str
    step_seconds: float
    memory_bytes: int
    each_step_seconds: tuple[float, ...]
    num_steps: int
    num_batches: int
    device: str
    date: str
    version: str
    torch_version: str
    schema: int = SCHEMA


def measured_path(plan_path: str | Path) -> Path:
    """
    >>> measured_path("runs/plan.json").as_posix()
    'runs/plan.measured.json'
    """
    return Path(plan_path).with_suffix(".measured.json")


def checksum(plan: Plan) -> str:
    """What tells a plan from another one."""
    return hashlib.sha256(dumps(plan).encode()).hexdigest()


def keep_measurement(
    plan: Plan, figures: Figures, num_batches: int, plan_paths: Sequence[Path]
) -> None:
    """Writes what the steps of a run took beside the plan at each of ``plan_paths``.

    A run does not fail where a folder cannot be written: that is printed.
    """

    measured = outcome(figures, plan, num_batches)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = Measurement(
        checksum(plan), measured["step_seconds"], int(measured["memory_bytes"]),
        tuple(figures.seconds[-MOST_STEPS:]), len(figures.seconds), num_batches,
        gpu or platform.processor() or platform.machine(),
        datetime.now(UTC).isoformat(timespec="seconds"), __version__, torch.__version__,
    )  # fmt: skip
    text = json.dumps(asdict(found), indent=1) + "\n"
    for path in {measured_path(each).resolve() for each in plan_paths}:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"what was measured is not kept in {path}: {error.strerror}", flush=True)


def load_measurement(plan_path: str | Path) -> Measurement | None:
    """What was measured beside the plan at ``plan_path``; None where nothing was.

    Raises UsageError AP342 where the file is damaged or of a later version.
    """
    path = measured_path(plan_path)
    if not path.is_file():
        return None
    names = {field.name for field in fields(Measurement)}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict) or table.get("schema") != SCHEMA or set(table) != names:
            raise ValueError("its keys are not those of a measurement of this version")
        steps = tuple(float(each) for each in table.pop("each_step_seconds"))
        found = Measurement(each_step_seconds=steps, **table)
        if not (float(found.step_seconds) > 0 and int(found.memory_bytes) >= 0):
            raise ValueError("a step takes more than 0 seconds, and memory is at least 0 bytes")
    except (ValueError, TypeError) as error:
        raise UsageError(
            "AP342",
            f"{path} is not what a run measured",
            why=str(error),
            where=str(path),
            fix="run the plan again, or delete the file",
        ) from error
    return found


def measured_text(found: Measurement, plan: Plan) -> str:
    """What was measured beside what was predicted, in a line."""
    predicted = plan.prediction.step_seconds * found.num_batches
    other = "" if found.plan == checksum(plan) else ", of another plan: the file has changed since"
    return (
        f"measured: step {seconds_text(found.step_seconds)} (predicted {seconds_text(predicted)}), "
        f"memory {bytes_text(found.memory_bytes)} on {found.device}, {found.date[:10]}{other}"
    )
