"""Real architectures from small configurations: each plan's run equals one device in float64.

``benchmarks/zoo/one.py`` captures, plans and runs; here a sample by default, all in ``slow``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_python

ROOT = Path(__file__).resolve().parents[1]
ONE = ROOT / "benchmarks" / "zoo" / "one.py"
NUM_PLANS = 4
ALL = sorted(path.parent.name for path in (ROOT / "tests" / "zoo").glob("*/config.json"))


def run(names: tuple[str, ...]) -> dict[str, Any]:
    """The result of each name, from one process."""
    found = run_python(str(ONE), *names, folder=ROOT, timeout_seconds=300.0 * len(names))
    assert found.returncode == 0, found.stderr[-2000:]
    results = [json.loads(line) for line in found.stdout.splitlines()]
    return {result["name"]: result for result in results}


def check(result: dict[str, Any]) -> None:
    assert not result["error"]
    assert len(result["plans"]) >= NUM_PLANS
    for plan, outcome in result["plans"].items():
        assert outcome.get("passed"), (plan, outcome)
        assert outcome["num_compared"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_plans_of_every_architecture_equal_one_device(name: str) -> None:
    check(run((name,))[name])
