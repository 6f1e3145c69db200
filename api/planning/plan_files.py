"""Plan files: loading and saving, for commands and users."""

from __future__ import annotations

from pathlib import Path

from autoparallel.cost_model.cluster.given_text import read_text, shortened
from autoparallel.options.outputs import writing
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.schedules.schedules import find_schedule
from autoparallel.target.load import load_target
from autoparallel.target.target import Target
from autoparallel.target.trust import target_name

PLAN = "plan.json"
"""File name of the plan that ``run --save`` writes beside its checkpoints."""


def load_plan(path: str | Path) -> Plan:
    """Return the plan in the file ``path``.

    Raises UsageError AP101 if there is no such file, and PlanError if it is damaged or of another
    version.
    """
    path = Path(path)
    try:
        text = read_text(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        folder = path.parent if path.parent.is_dir() else Path()
        known = sorted(file.name for file in folder.glob("*.json"))
        raise UsageError(
            "AP101",
            f"there is no plan {path}",
            where=str(path.resolve()),
            fix=did_you_mean(path.name, known) or "autoparallel plan TARGET -o plan.json makes one",
        ) from error
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PlanError(
            "AP501", f"{shortened(str(path))} is not a plan", why=why, where=shortened(str(path))
        ) from error
    return loads(text, str(path))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write ``plan`` to the file ``path``; equal plans give equal files.

    Raises UsageError AP101 if the file cannot be written.
    """
    with writing(path):
        Path(path).write_text(dumps(plan), encoding="utf-8")


def load_job(plan_path: str) -> tuple[Plan, Target]:
    """Load a plan and the target that it was made for."""
    plan = load_plan(plan_path)
    return plan, load_plan_target(plan, plan_path)


def load_plan_target(plan: Plan, plan_path: str) -> Target:
    """Load the target that ``plan`` was made for by running its code; check that the plan's
    schedule is known, which the code may have registered."""
    target = load_target(target_name(plan, plan_path), plan.model.settings)
    find_schedule(plan.schedule)
    return target


def batch_seq(plan: Plan, target: Target) -> int | None:
    """Return the sequence length for the target's ``example_batch``, None if it takes none."""
    return plan.model.seq if target.takes_seq else None
