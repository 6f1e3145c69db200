"""Measurement of a training run, stored in a small JSON file beside the plan that it ran.

In: the steps of a run, and its plan. Out: ``plan.measured.json`` beside ``plan.json``: median step,
each step, memory of rank 0, device, versions and date. Reports show it beside the prediction; a
checksum tells whether the plan file is still the plan that ran.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path

from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps

SCHEMA = 1
MOST_STEPS = 1000
"""Number of a run's last steps whose seconds are stored one by one."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured step time and memory of a run of a plan. ``step_seconds`` is the median without
    warm-up steps, ``num_batches`` the global batches per step, ``memory_bytes`` rank 0's peak."""

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
    """Return the path of the measurement file that belongs to a plan file.

    >>> measured_path("runs/plan.json").as_posix()
    'runs/plan.measured.json'
    """
    return Path(plan_path).with_suffix(".measured.json")


def checksum(plan: Plan) -> str:
    """Return the SHA-256 hash of a plan's JSON."""
    return hashlib.sha256(dumps(plan).encode()).hexdigest()


def load_measurement(plan_path: str | Path) -> Measurement | None:
    """Load the measurement beside the plan at ``plan_path``; None if there is none.

    Raises UsageError AP342 if the file is damaged or of another version.
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
    """Describe a measurement and the plan's prediction in one line."""
    predicted = plan.prediction.step_seconds * found.num_batches
    other = "" if found.plan == checksum(plan) else ", of another plan: the file has changed since"
    return (
        f"measured: step {seconds_text(found.step_seconds)} (predicted {seconds_text(predicted)}), "
        f"memory {bytes_text(found.memory_bytes)} on {found.device}, {found.date[:10]}{other}"
    )


WARMUP_STEPS = 2
"""Number of a run's first steps that the median leaves out, as caches and allocators warm up."""
