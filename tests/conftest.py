"""What every run of the suite says at its end: how many layouts of ops it proved."""

from __future__ import annotations

from collections import defaultdict

import pytest


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
