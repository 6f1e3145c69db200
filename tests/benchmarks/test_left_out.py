"""Sources left out in turn: what is fitted on the others, and what it gives on the one."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from benchmarks.validation.left_out import KNOBS, Line, fitted, publisher, without_source
from benchmarks.validation.published import published
from benchmarks.validation.tables import Run, read


def lines(source: str, error: float, count: int = 3) -> list[Line]:
    """Runs whose time is proportional to the first knob, all priced this much too long."""
    return [Line(source, log(1 + error), {0: 1.0})] * count


def test_a_knob_is_fitted_to_the_least_mean_error() -> None:
    factors = fitted(lines("one", 0.25))
    assert factors[0] == pytest.approx(0.8)
    assert factors[1:] == [1.0] * (len(KNOBS) - 1)
    assert lines("other", 0.5)[0].at(factors) == pytest.approx(0.2)


def test_most_runs_decide_where_sources_disagree() -> None:
    factors = fitted([*lines("one", 0.25, 5), *lines("other", -0.2, 2)])
    assert factors[0] == pytest.approx(0.8)


def test_runs_without_a_knob_keep_their_error() -> None:
    alone = Line("one", log(1.1), {})
    assert alone.at(fitted([alone, *lines("other", 0.25)])) == pytest.approx(0.1)


def test_releases_of_a_project_are_one_source() -> None:
    old, new = (publisher(f"NVIDIA-NeMo/Megatron-Bridge@{at} docs/page.md") for at in ("a", "b"))
    assert old == new == "NVIDIA-NeMo/Megatron-Bridge"


def test_a_source_loses_the_constants_that_it_alone_has() -> None:
    path = Path(__file__).parents[2] / "benchmarks/validation/data/published_runs.csv"
    runs = [row for row in read(path, published) if isinstance(row, Run)]
    own = next(run for run in runs if "llm-foundry" in run.source and "H100" in run.cluster.name)
    left = without_source(own)
    assert own.program.optimizer_passes > left.program.optimizer_passes == 1.0
    shares = [run.cluster.hosts[0].device.efficiency["attention"] for run in (own, left)]
    assert shares[0] < shares[1]
    other = next(run for run in runs if "bigscience" in run.source)
    assert without_source(other) is other
