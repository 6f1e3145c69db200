"""Does the suite notice deliberate faults? ``python benchmarks/faults/run.py [--only NAME,...]``.

Every fault is put into a copy of the source, in which the tests that should notice it run. Before,
all of these tests pass without a fault (not with ``--skip-clean``). The table is Markdown; the exit
code is 1 if a fault went unnoticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.faults.faults import FAULTS, Fault  # noqa: E402

ROOMS = ("planner", "cost_model", "passes", "runtime", "api")
COPIED = (*ROOMS, "tests", "examples", "benchmarks", "docs", ".ci")
LIMIT_SECONDS = 400


def copied(folder: Path) -> Path:
    """A copy of the source, importable from the folder that is returned."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    package = folder / "importable" / "autoparallel"
    package.mkdir(parents=True)
    for path in (*(folder / "api").iterdir(), *(folder / room for room in ROOMS[:-1])):
        (package / path.name).symlink_to(path)
    return package.parent


def pytest(folder: Path, tests: str) -> tuple[int, str]:
    """The exit code and the output of some tests of the copy."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "importable"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    where = subprocess.run(
        [sys.executable, "-c", "import autoparallel.planner as p; print(p.__file__)"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert str(folder) in where, f"tests would import {where}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "no end in time"
    return done.returncode, done.stdout


def noticed(folder: Path, fault: Fault) -> str:
    """The test that fails with the fault in the copy; "" where none does."""
    path = folder / fault.path
    whole = path.read_text()
    if whole.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.old!r} is not once in {fault.path}")
    path.write_text(whole.replace(fault.old, fault.new))
    try:
        code, output = pytest(folder, fault.tests)
    finally:
        path.write_text(whole)
    found = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    return found[0] if code == 1 and found else ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME,...")
    parser.add_argument("--skip-clean", action="store_true")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else [fault.name for fault in FAULTS]
    faults = [fault for fault in FAULTS if fault.name in names]
    survived = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        copied(folder)
        if not asked.skip_clean:
            tests = " ".join(dict.fromkeys(" ".join(fault.tests for fault in faults).split()))
            code, output = pytest(folder, tests)
            if code:
                raise SystemExit(f"without a fault:\n{output[-2000:]}")
        print("| fault | room | noticed by | s |\n|---|---|---|---|")
        for fault in faults:
            began = time.perf_counter()
            by = noticed(folder, fault)
            survived += not by
            seconds = time.perf_counter() - began
            print(
                f"| {fault.name} | {fault.room} | {by or '**nothing**'} | {seconds:.0f} |",
                flush=True,
            )
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
