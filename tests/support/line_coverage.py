"""Line coverage of each package by the default suite, forked ranks and started processes included.

``python tests/support/line_coverage.py [PYTEST ARGUMENTS]`` runs pytest with three workers under
coverage.py and prints a table in Markdown. Lines under ``if TYPE_CHECKING:`` do not count. The
table of the whole suite is kept in ``benchmarks/suite/README.md``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "cost_model", "passes", "planner", "runtime")
SETTINGS = """[run]
parallel = true
data_file = {folder}/data
patch = fork, _exit
sigterm = true
include = {packages}
[report]
exclude_also = if TYPE_CHECKING:
"""


def measure(folder: Path, arguments: Sequence[str]) -> tuple[int, coverage.Coverage]:
    """Run pytest under coverage.py; return its exit code and what was measured."""
    packages = ", ".join(f"{ROOT / package}/*" for package in PACKAGES)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(folder=folder, packages=packages))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings)}
    command = [sys.executable, "-m", "pytest", "-n", "3", "--timeout", "900", *arguments]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    measured = coverage.Coverage(config_file=str(settings))
    files = [str(path) for path in folder.glob("data.*") if _is_complete(path)]
    measured.combine(files, keep=True)
    return code, measured


def _is_complete(path: Path) -> bool:
    """Tell whether a file of data can be read: a killed process may leave a part of one."""
    data = coverage.CoverageData(str(path))
    try:
        data.read()
        data.measured_contexts()
    except coverage.CoverageException:
        return False
    return True


def table(measured: coverage.Coverage) -> str:
    """Return the lines of each package, and how many of them were run."""
    rows = ["| package | lines | run | % |", "|---|---|---|---|"]
    for package in PACKAGES:
        lines = missing = 0
        for path in (ROOT / package).rglob("*.py"):
            _, statements, _, not_run, _ = measured.analysis2(str(path))
            lines, missing = lines + len(statements), missing + len(not_run)
        share = 100 * (lines - missing) / lines
        rows.append(f"| {package} | {lines} | {lines - missing} | {share:.2f} |")
    return "\n".join(rows)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        code, measured = measure(Path(folder), sys.argv[1:])
        print(table(measured))
    return code


if __name__ == "__main__":
    sys.exit(main())
