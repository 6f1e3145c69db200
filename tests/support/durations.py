"""Processor seconds of the test files, as measured before: ``tests/durations.txt``.

``python tests/support/durations.py MEASURED [FILE]`` writes that file, or another, from the file
that ``pytest --processor-seconds MEASURED`` has written: a line for each test file, and one for
each test that takes a second or more, the most expensive first. The test session reads it to begin
with the longest files, so that no worker is left with one at the end. A session that takes slow
tests too reads ``tests/durations_of_all.txt``, if there is one.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "durations.txt"
FILE_OF_ALL = FILE.with_name("durations_of_all.txt")
LEAST_SECONDS = 1.0
"""Tests that take less are not listed on their own."""


def read_durations(path: Path) -> dict[str, float]:
    """Return the seconds of each test, or test file, that a file of durations lists."""
    if not path.exists():
        return {}
    lines = (line.strip().partition(" ") for line in path.read_text().splitlines())
    return {name: float(seconds) for seconds, _, name in lines if seconds[:1] not in ("", "#")}


def summarize(seconds: dict[str, float]) -> str:
    """Return the text of ``tests/durations.txt`` for the seconds of all tests."""
    files: Counter[str] = Counter()
    for test, value in seconds.items():
        files[test.partition("::")[0]] += value
    total = sum(files.values())
    lines = [f"# Processor seconds of {len(seconds)} tests, {total:.0f} in all (make durations)."]
    lines += [f"{value:8.2f} {name}" for name, value in files.most_common()]
    slowest = sorted(seconds.items(), key=lambda entry: -entry[1])
    lines += ["", f"# Tests of {LEAST_SECONDS:.0f} s or more."]
    lines += [f"{value:8.2f} {name}" for name, value in slowest if value >= LEAST_SECONDS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measured, *files = map(Path, sys.argv[1:])
    (files or [FILE])[0].write_text(summarize(read_durations(measured)))
