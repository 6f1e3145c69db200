"""For every test: a database and a cache of its own; at the end, how many layouts were proved."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent

# A job that a shell starts in the background ignores SIGINT, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


IMPATIENT = ("failures", "launch", "profile")
"""What names of files in ``runtime`` have whose tests wait for processes with little patience."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several workers (``-n``) one has all tests that are impatient with processes, or measure
    them; the others go file by file, as the cases of a file share what they prepare."""
    for item in items:
        place = item.path.relative_to(HERE)
        is_impatient = place.parts[0] == "benchmarks" or (
            place.parts[0] == "runtime" and any(word in place.name for word in IMPATIENT)
        )
        group = "processes" if is_impatient else place
        item.add_marker(pytest.mark.xdist_group(str(group)))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def _own_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees, or adds to, what its user has measured or planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("AUTOPARALLEL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("AUTOPARALLEL_MEASURE_SECONDS", "0")  # plans are the same on every machine
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests that prove layouts by execution record ``proven``, how many, by number format."""
    proven: dict[str, int] = defaultdict(int)
    cases: dict[str, int] = defaultdict(int)
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in getattr(report, "user_properties", ()):
            if name.startswith("proven"):
                dtype = name.removeprefix("proven").strip("-") or "float64"
                proven[dtype] += int(value)
                cases[dtype] += 1
    if proven:
        terminalreporter.section("layouts proven by execution")
        for dtype in proven:
            terminalreporter.write_line(
                f"{proven[dtype]} (op, layout) pairs of {cases[dtype]} cases in {dtype}"
            )
