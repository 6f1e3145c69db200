"""The table: one row for each case, and what all rows come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

MOST_SLOWER = 1.01
"""A plan may take so much of the baseline's step."""

SAME = 1e-6
"""Seconds that differ by no more than this part are equal."""


@dataclass(frozen=True)
class Row:
    """A case. Seconds of steps are as ``evaluate`` prices both plans, 0 where there is none.

    ``predicted_seconds`` are the new plan's own. ``cpu_seconds`` and ``planner_bytes`` are of
    planning without the capture, their ratios those to the other checkout's, 0 without one.
    ``failure`` says what went wrong; ``code`` is the error of a case that is rightly refused.
    """

    name: str
    baseline_seconds: float = 0.0
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0
    baseline_bytes: float = 0.0
    peak_bytes: float = 0.0
    cpu_seconds: float = 0.0
    cpu_ratio: float = 0.0
    planner_bytes: float = 0.0
    planner_bytes_ratio: float = 0.0
    code: str = ""
    failure: str = ""

    @property
    def ratio(self) -> float:
        """The new step over the baseline's; 1 where both are refused."""
        return self.step_seconds / self.baseline_seconds if self.baseline_seconds else 1.0

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes / self.baseline_bytes if self.baseline_bytes else 1.0

    @property
    def is_as_predicted(self) -> bool:
        """Whether ``evaluate`` finds the seconds that the plan says."""
        return abs(self.step_seconds - self.predicted_seconds) <= SAME * self.predicted_seconds


def row_of(
    name: str,
    reference: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]] = (),
) -> Row:
    """A row from what this checkout answered, and the ``others`` where there is another.

    ``reference`` has the baseline's ``plan``, or the ``code`` of its error. The last answer has the
    prices of the new plan and of the reference's, as far as there are such.
    """
    failure = next((each["failure"] for each in (*answers, *others) if "failure" in each), "")
    if failure:
        return Row(name, failure=failure)
    found, priced = answers[-1]["found"], answers[-1]["priced"]
    spent = _spent(answers, others)
    if "code" in reference or "code" in found:
        return replace(
            spent, name=name, code=found.get("code", ""), failure=_unlike(reference, found)
        )
    failure = next((each["failure"] for each in priced if "failure" in each), "")
    if failure:
        return replace(spent, name=name, failure=failure)
    new, old = priced
    return replace(
        spent,
        name=name,
        step_seconds=new["step_seconds"],
        baseline_seconds=old["step_seconds"],
        predicted_seconds=new["predicted_seconds"],
        peak_bytes=new["peak_bytes"],
        baseline_bytes=old["peak_bytes"],
    )


def _spent(answers: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Row:
    """A row with what planning took."""
    (cpu, held), (other_cpu, other_held) = (
        [
            min((each["found"][name] for each in every), default=0.0)
            for name in ("cpu_seconds", "peak_bytes")
        ]
        for every in (answers, others)
    )
    return Row(
        "",
        cpu_seconds=cpu,
        planner_bytes=held,
        cpu_ratio=cpu / other_cpu if other_cpu else 0.0,
        planner_bytes_ratio=held / other_held if other_held else 0.0,
    )


def _unlike(reference: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """How an outcome differs from that of the baseline where one of them is an error."""
    before, now = reference.get("code", ""), found.get("code", "")
    if before == now:
        return ""
    return f"{now or 'a plan'}, but the baseline has {before or 'a plan'}. {found.get('what', '')}"


def is_worse(rows: Sequence[Row]) -> bool:
    """Whether a plan is too slow, plans are slower in the mean, or a case failed."""
    return (
        any(row.failure for row in rows)
        or any(row.ratio > MOST_SLOWER for row in rows)
        or mean_ratio(rows) > 1 + SAME
    )


def mean_ratio(rows: Sequence[Row]) -> float:
    """The mean of the new steps over the baseline's."""
    compared = _compared(rows)
    return fmean(row.ratio for row in compared) if compared else 1.0


def _compared(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.baseline_seconds]


def heading(has_other: bool) -> str:
    """The columns' names."""
    text = f"{'case':<24}{'baseline s':>11}{'step s':>11}{'ratio':>8}{'memory':>8}{'CPU s':>8}"
    return text + (f"{'CPU':>5}{'RSS':>5}" if has_other else "")


def line(row: Row) -> str:
    """A row of the table, in 80 columns but for the text of a failure.

    >>> line(Row("small", 2.0, 1.0, cpu_seconds=3.0))
    'small                            2          1  0.5000   1.000     3.0'
    """
    start = f"{row.name:<24}"
    if row.failure:
        return f"{start}FAILED: {row.failure.strip().splitlines()[-1]}"
    if row.code:
        return f"{start}{'refused with ' + row.code:>38}{row.cpu_seconds:>8.1f}"
    text = f"{start}{row.baseline_seconds:>11.5g}{row.step_seconds:>11.5g}{row.ratio:>8.4f}"
    text += f"{row.memory_ratio:>8.3f}{row.cpu_seconds:>8.1f}"
    return text + (f"{row.cpu_ratio:>5.2f}{row.planner_bytes_ratio:>5.2f}" if row.cpu_ratio else "")


def summary(rows: Sequence[Row]) -> str:
    """What all rows come to, and the cases to look at."""
    lines = [f"{len(rows)} cases, {sum(row.cpu_seconds for row in rows):.0f} s of processor time"]
    compared = _compared(rows)
    if compared:
        worst = max(compared, key=lambda row: row.ratio)
        lines.append(
            f"step over the baseline's: mean {mean_ratio(rows):.5f}, worst {worst.ratio:.5f} "
            f"({worst.name})"
        )
    named = {
        "more than 1 % slower": [row for row in compared if row.ratio > MOST_SLOWER],
        "failed": [row for row in rows if row.failure],
        "not priced by evaluate as predicted": [row for row in compared if not row.is_as_predicted],
    }
    lines += [f"{what}: {', '.join(row.name for row in own)}" for what, own in named.items() if own]
    return "\n".join(lines)
