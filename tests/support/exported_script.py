"""A script that ``export --to python`` wrote, on several ranks without this package.

The first argument is the script. This package, which the forked interpreter has imported, is
forgotten, and importing it fails. Its ops stay registered with torch: tests look for their names.
"""

from __future__ import annotations

import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class Refusal(MetaPathFinder):
    """Lets no import of this package succeed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "autoparallel":
            raise ImportError(f"a script imports {fullname}")
        return None


if __name__ == "__main__":
    for name in [each for each in sys.modules if each.partition(".")[0] == "autoparallel"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Refusal())
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
