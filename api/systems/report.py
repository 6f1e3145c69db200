"""The report of a plan that was written for another system, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoparallel.analysis.configurations import configuration_summary
from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.report.comparison import change_text
from autoparallel.systems.degrees import layers_of

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Deviation:
    """Property of a plan, and its replacement in the written configuration."""

    plan: str
    here: str


@dataclass(frozen=True, slots=True)
class PricedConfig:
    """Configuration with its price. ``reason`` says why there is none, "" otherwise."""

    configuration: Configuration
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    fits: bool | None = None
    reason: str = ""


def report_text(
    system: str,
    plan: Plan,
    cost: PricedConfig,
    lost: Sequence[Deviation],
    notes: Sequence[str],
) -> str:
    """Write both configurations with their prices, the losses, and notes for the user."""
    num_layers = sum(len(layers_of(plan, stage)) for stage in plan.stages)
    lines = [f"{system}: {configuration_summary(cost.configuration, num_layers)}"]
    lines += [f"the plan: {plan_summary(plan)}", *price_lines(plan, cost), ""]
    if lost:
        lines.append("What it cannot express")
        for each in lost:
            lines += [f"- plan: {each.plan}", f"  here: {each.here}"]
    else:
        lines.append("It expresses the plan.")
    if notes:
        lines += ["", "To know", *(f"- {note}" for note in notes)]
    return "\n".join(_wrap(lines))


def price_lines(plan: Plan, cost: PricedConfig) -> Iterator[str]:
    """Yield the configuration's price beside the plan's, or the reason why it is unknown."""
    limit, step = plan.cluster.usable_memory_bytes, plan.prediction.step_seconds
    own = f"{seconds_text(step)} a step, {bytes_text(plan.prediction.peak_memory_bytes)}"
    if cost.step_seconds is None or cost.peak_memory_bytes is None:
        yield f"predicted: the plan {own}; this configuration is not priced: {cost.reason}"
        return
    yield (
        f"predicted: this configuration {seconds_text(cost.step_seconds)} a step "
        f"({change_text(cost.step_seconds / step - 1)}), {bytes_text(cost.peak_memory_bytes)} of "
        f"{bytes_text(limit)}; the plan {own}"
    )
    if not cost.fits:
        yield "DOES NOT FIT: no configuration that this system has was found to fit"


def _wrap(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        lead = "  " if line.startswith(("- ", "  ")) else "    "
        indent = lead + ("      " if line.startswith(("- plan:", "  here:")) else "")
        yield from textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
