"""Whether the code that a plan file names may run: asked before a plan from a file is used.

In: a plan and where its file lies. Out: the name of its target, or a UsageError where the target
lies outside the current folder and nobody has said that it is trusted. A plan file contains no
code, but it says which file or module builds the model, and loading a target runs that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan


def target_name(plan: Plan, plan_path: str | Path) -> str:
    """The target that ``plan`` was made for; a file is also looked for beside the plan."""
    name = plan.model.target
    place = name.partition(":")[0]
    beside = Path(plan_path).parent / Path(place).name
    if place.endswith(".py") and not Path(place).exists() and beside.exists():
        return name.replace(place, str(beside))
    return name


ADD_TRUST = "add --trust (trust=True in Python), or run in its folder"


def check_trusted(plan: Plan, plan_path: str | Path, *, trust: bool, how: str = ADD_TRUST) -> None:
    """Raises UsageError AP155 where the plan's target is code outside of the current folder.

    With ``trust`` any code may run; ``how`` says how it is given. ``hf:`` targets run none but the
    installed library's.
    """
    name = target_name(plan, plan_path)
    if trust or name.startswith("hf:"):
        return
    place = _place_of_code(name)
    if place is None or place.is_relative_to(Path.cwd().resolve()):
        return
    raise UsageError(
        "AP155",
        f"the plan's target {name} is outside of the current folder",
        why="running the plan would execute this code, and a plan file can name any",
        where=str(place),
        fix=f"if you trust this code, {how}",
    )


def _place_of_code(name: str) -> Path | None:
    """The file or folder of a target's code; None where there is none, which loading it reports."""
    place = name.rpartition(":")[0] if name.rpartition(":")[2].isidentifier() else name
    path = Path(place or name)
    if path.exists():
        return path.resolve()
    if path.suffix == ".py" or os.sep in place:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # Of the top package alone: looking for a module in it would already run the package.
        found = importlib.util.find_spec(place.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    folders = list(found.submodule_search_locations or ())
    if not folders and not found.has_location:
        return Path(sys.base_prefix)  # built into the interpreter
    return Path(folders[0] if folders else str(found.origin)).resolve()
