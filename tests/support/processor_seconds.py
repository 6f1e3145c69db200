"""The processor time of each test: ``pytest --processor-seconds FILE``.

In: a test session. Out: a file with a line for each test, the most expensive first: its seconds,
user and system, of all threads, and its name. The time of processes that the test started counts,
and so does that of servers and of what they forked. What a fixture of a module or session prepares
counts for the first test that asks for it. Unlike wall time, the figure hardly depends on what
else the machine does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

OPTION = "--processor-seconds"
PROPERTY = "processor_seconds"


def processor_seconds() -> float:
    """What this process, its children and all that these waited for have taken so far."""
    here = psutil.Process()
    seconds = 0.0
    for process in [here, *here.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # its parent has waited for it since
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


class Recorder:
    """Measures tests where they run, and writes the file where their reports arrive."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = {}
        file.unlink(missing_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.start = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: pytest.TestReport = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, processor_seconds() - self.start))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.seconds[report.nodeid] = float(str(value))
                with self.file.open("a") as file:  # in case that the session is killed
                    file.write(_line(report.nodeid, self.seconds[report.nodeid]))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            ordered = sorted(self.seconds.items(), key=lambda entry: -entry[1])
            self.file.write_text("".join(_line(*entry) for entry in ordered))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: dict[str, float] = defaultdict(float)
        for test, seconds in self.seconds.items():
            folders[str(Path(test.split("::")[0]).parent)] += seconds
        terminalreporter.section("processor seconds")
        for folder, seconds in sorted(folders.items(), key=lambda entry: -entry[1]):
            terminalreporter.write_line(f"{seconds:8.1f} {folder}")


def _line(test: str, seconds: float) -> str:
    return f"{seconds:8.2f} {test}\n"
