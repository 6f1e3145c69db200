"""Trust in the code that a plan file names, checked before the code is run.

In: a plan and the path of its file. Out: the name of its target, or a UsageError if the target is
outside the current folder and not trusted. A plan file contains no code, but it names the file or
module that builds the model, and loading a target runs it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan


def target_name(plan: Plan, plan_path: str | Path) -> str:
    """Return the path or name of a plan's target. A path missing in the current folder is looked up
    relative to the plan's folder, and a file also beside the plan."""
    name, folder = plan.model.target, Path(plan_path).parent
    is_library_s = name.startswith("hf:")
    place = name.removeprefix("hf:") if is_library_s else name.partition(":")[0]
    if not (is_library_s or place.endswith(".py")) or Path(place).exists():
        return name
    for found in (folder / place, *([folder / Path(place).name] if place.endswith(".py") else [])):
        if found.exists():
            return name.replace(place, str(found), 1)
    return name


ADD_TRUST = "add --trust (trust=True in Python), or run in its folder"


def check_trusted(plan: Plan, plan_path: str | Path, *, trust: bool, how: str = ADD_TRUST) -> None:
    """Raise UsageError AP155 if the plan's target is code outside the current folder.

    With ``trust`` any code is accepted; ``how`` tells the user how to set ``trust``. ``hf:``
    targets run only code of the installed library.
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
    """Return the file or folder of the code that the target ``name`` runs; None if missing."""
    place = name.rpartition(":")[0] if name.rpartition(":")[2].isidentifier() else name
    path = Path(place or name)
    if path.exists():
        return path.resolve()
    if path.suffix == ".py" or os.sep in place:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # Only of the top package: a search for a module in it would already run the package.
        found = importlib.util.find_spec(place.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    folders = list(found.submodule_search_locations or ())
    if not folders and not found.has_location:
        return Path(sys.base_prefix)  # part of the interpreter
    return Path(folders[0] if folders else str(found.origin)).resolve()
