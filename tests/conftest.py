"""A session's own database, cache and captures; at the end, how many layouts were proved."""

from __future__ import annotations

import os

# Before torch is imported: on two busy cores the threads of its ops wait for each other longer
# than they compute.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests compare runs with plain PyTorch themselves; those of this comparison ask for it.
os.environ["AUTOPARALLEL_CHECK_FIRST_STEP"] = "0"

import gc
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import processor_seconds
import pytest
import random_suites
import torch
from durations import FILE, FILE_OF_ALL, read_durations
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

HERE = Path(__file__).resolve().parent

SLOW = frozenset((HERE / "slow_tests.txt").read_text().splitlines())
"""Names of test functions and of single cases that are slow without being marked in the code."""

gc.disable()  # until all tests are collected: what is imported lives until the end

# A job that a shell starts in the background ignores SIGINT, and so would what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Interpreters that tests start read this package's bytecode, which saves each a second.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

IMPATIENT = ("failures", "launch", "profile", "stragglers")
"""What names of files in ``runtime`` have whose tests wait for processes with little patience."""


settings.load_profile(random_suites.DEFAULT)


def scope_of(nodeid: str) -> str:
    """Name the group of tests that one worker runs together: a file, or all impatient files."""
    file = nodeid.partition("::")[0]
    folder, name = Path(file).parts[-2:]
    is_impatient = folder == "runtime" and any(word in name for word in IMPATIENT)
    if folder == "systems":  # whose tests share what takes long to make
        return folder
    return "processes" if is_impatient else file


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Gives a worker whole files, as the cases of a file share what they prepare.

    One worker has all files whose tests are impatient with processes, or measure them. A scheduler
    of our own, as the groups of pytest-xdist 3.8 have no effect under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


ONE_IN = "--one-in"
MANY_CASES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(processor_seconds.OPTION, metavar="FILE", help=processor_seconds.__doc__)
    parser.addoption(
        ONE_IN,
        type=int,
        default=1,
        metavar="N",
        help=f"run one in N cases of each test that has more than {MANY_CASES}",
    )


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption(processor_seconds.OPTION):
        config.pluginmanager.register(processor_seconds.Recorder(Path(file)))
    starts_workers = config.getoption("dist", "no") != "no" and not config.option.collectonly
    # Of a shared server no worker could tell the processor time of its tests.
    if starts_workers and not hasattr(config, "workerinput") and not file:
        from processes import share_fork_server

        share_fork_server()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


def pytest_collection_finish() -> None:
    """What is imported now lives until the end: no collection of garbage looks at it again.

    With fewer collections too, tests of the planner take a sixth less processor time.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark listed tests as slow, skip tests of absent GPUs, and put the longest files first."""
    scopes: dict[str, float] = defaultdict(float)
    is_default = config.getoption("markexpr") == "not slow"
    durations = {} if is_default else read_durations(FILE_OF_ALL)
    for name, seconds in (durations or read_durations(FILE)).items():
        if "::" not in name:
            scopes[scope_of(name)] += seconds
    items.sort(key=lambda item: -scopes[scope_of(item.nodeid)])
    for item in items:
        if not SLOW.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if (step := config.getoption(ONE_IN)) > 1:
        leave_out(config, items, step)


def leave_out(config: pytest.Config, items: list[pytest.Item], step: int) -> None:
    """Deselect all but every ``step``-th case of each test that has many cases."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    many = [cases for cases in tests.values() if len(cases) > MANY_CASES]
    left = {item for cases in many for at, item in enumerate(cases) if at % step}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True, scope="session")
def _own_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees, or adds to, what its user has measured or planned; workers are forked."""
    from forked_interpreters import interpreters_are_forked
    from kept_captures import FOLDER
    from processes import measure_briefly

    with pytest.MonkeyPatch.context() as patch, interpreters_are_forked():
        measure_briefly()
        patch.setenv(FOLDER, str(_session_folder(tmp_path_factory, "captures")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("AUTOPARALLEL_CACHE", str(_session_folder(tmp_path_factory, "cache")))
        patch.setenv("AUTOPARALLEL_MEASURE_SECONDS", "0")  # plans are the same on every machine
        yield


FULL_SEARCH = (HERE / "planner", HERE / "api", HERE / "benchmarks")
"""Folders whose tests search for plans in full."""


@pytest.fixture(autouse=True)
def _brief_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make searches brief where a test runs a plan and does not ask how it was found.

    Tests of ``api`` search in full, but run the stages of a plan for its memory only where they
    are slow, or marked with ``runs_stages``.
    """
    from brief_search import memory_follows_rules, searches_are_brief

    is_full = any(request.path.is_relative_to(folder) for folder in FULL_SEARCH)
    needs_runs = any(map(request.node.get_closest_marker, ("runs_stages", "slow")))
    if not is_full:
        context = searches_are_brief()
    elif request.path.is_relative_to(HERE / "api") and not needs_runs:
        context = memory_follows_rules()
    else:
        context = nullcontext()
    with context:
        yield


def _session_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all workers of pytest-xdist share."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = factory.getbasetemp()
    folder = (base.parent if is_worker else base) / name
    folder.mkdir(exist_ok=True)
    return folder


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
