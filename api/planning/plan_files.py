"""Plan files: reading and writing them, for commands and users."""

from __future__ import annotations

from pathlib import Path

from autoparallel.html.notebook_plan import ShownPlan, shown
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads

PLAN = "plan.json"
"""What ``run --save`` calls the plan beside its checkpoints."""


def load_plan(path: str | Path) -> ShownPlan:
    """The plan in the file ``path``.

    Raises UsageError AP101 where there is no such file, PlanError where it is damaged or of
    another version.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        folder = path.parent if path.parent.is_dir() else Path()
        known = sorted(file.name for file in folder.glob("*.json"))
        raise UsageError(
            "AP101",
            f"there is no plan {path}",
            where=str(path.resolve()),
            fix=did_you_mean(path.name, known) or "autoparallel plan TARGET -o plan.json makes one",
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            "AP501", f"{path} is not a plan", why="it is not UTF-8 text", where=str(path)
        ) from error
    return shown(loads(text, str(path)))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes ``plan`` to ``path``; the same plan always gives the same file."""
    Path(path).write_text(dumps(plan), encoding="utf-8")
