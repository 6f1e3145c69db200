"""Estimates as a page of 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoparallel.analysis.estimate import Estimate
from autoparallel.analysis.facts import (
    MEMORY,
    THROUGHPUT,
    batch_text,
    fullest_rank,
    grouped_bytes,
    model_name,
    unit_of,
)
from autoparallel.options.parse import Sorting
from autoparallel.options.words import count_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.report.printing import plain_table, section

METHODS = {"full": "train", "lora": "LoRA"}

GROUPS = {
    "parameters": ("parameters",),
    "master": ("master",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "recomputation"),
}
"""Columns of the memory table, with the memory categories summed in each."""

SHORT_NAMES = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
}


def print_estimates(found: Sequence[Estimate], console: Console) -> None:
    """Print a table of devices, and the memory of the fullest device by category."""
    console.print(_title(found))
    console.print()
    console.print(_table(found))
    missing = [each for each in found if each.plan is None]
    for each in missing:
        console.print(f"{each.device} {METHODS[each.method]}: {each.why}", style="yellow")
    if any(each.plan is not None for each in found):
        console.print(section("Configurations", _configurations(found)))
        unit = memory_unit(found)
        console.print(section(f"Memory of the fullest device, {unit}", _memory(found, unit)))
    if any(each.tokens is not None and each.dollars_per_hour is None for each in found):
        console.print("\ndollars: give the price of a device and hour by --price", style="dim")
    console.print(
        "\na first answer: autoparallel plan searches longer for a cluster that you name",
        style="dim",
    )


def sort_estimates(found: Sequence[Estimate], key: Sorting | None) -> list[Estimate]:
    """Return estimates sorted by the column ``key``, estimates without a value last; without
    ``key`` in the given order."""

    def order(each: Estimate) -> tuple[bool, float]:
        figures = {"devices": each.num_devices, "days": each.days, "dollars": each.dollars}
        figure = figures[key or "devices"]
        return figure is None, figure or 0.0

    return list(found) if key is None else sorted(found, key=order)


def estimates_title(found: Sequence[Estimate]) -> tuple[str, str]:
    """Return two lines of title: the model, and the settings of the estimates."""
    plans = [each.plan for each in found if each.plan is not None]
    if not plans:
        return "no plan was found", ""
    first, tokens = plans[0], found[0].tokens
    precisions = "/".join(dict.fromkeys(plan.model.precision for plan in plans))
    goal = f", {count_text(tokens)} {unit_of(first)}" if tokens is not None else ""
    return (
        f"{model_name(first)}  {count_text(first.model.num_parameters)} parameters",
        f"{batch_text(first)}, {precisions}, {first.model.optimizer}{goal}",
    )


def _title(found: Sequence[Estimate]) -> Text:
    first, second = estimates_title(found)
    name, space, rest = first.partition("  ")
    return Text.assemble((name, "bold"), f"{space}{rest}", f"\n{second}" if second else "")


def estimate_table(found: Sequence[Estimate]) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and a row of figures per estimate; a row without a plan is empty."""
    plans = [each.plan for each in found if each.plan is not None]
    rate = "tokens/s" if all(plan.model.seq for plan in plans) else "samples/s"
    has_days = any(each.days is not None for each in found)
    has_dollars = any(each.dollars is not None for each in found)
    titles = ["needs", "memory", rate]
    titles += ["days"] if has_days else []
    titles += ["dollars"] if has_dollars else []
    rows = []
    for each in found:
        row: list[str] = []
        if each.plan is not None:
            row += [str(each.num_devices), MEMORY.text(each.plan), THROUGHPUT.text(each.plan)]
            row += [days_text(each.days)] if has_days else []
            row += [dollars_text(each.dollars)] if has_dollars else []
            row += [plan_summary(each.plan)]
        rows.append(row)
    return [*titles, "configuration"], rows


def _table(found: Sequence[Estimate]) -> Table:
    titles, rows = estimate_table(found)
    figures = [(title, "right") for title in titles[:-1]]
    table = plain_table(("device", "left"), ("", "left"), *figures)
    for each, row in zip(found, rows, strict=True):
        table.add_row(each.device, METHODS[each.method], *(row[:-1] or ["—" for _ in figures]))
    return table


def _configurations(found: Sequence[Estimate]) -> Table:
    """Return a table with the parallel configuration of each estimate."""
    table = plain_table(("", "left"), ("", "left"))
    table.show_header = False
    for each in found:
        if each.plan is not None:
            table.add_row(_label(each), plan_summary(each.plan))
    return table


def _label(each: Estimate) -> str:
    """Return the devices and the training method of an estimate."""
    number = "" if each.device[0].isdigit() else f"{each.num_devices} × "
    return f"{number}{each.device} {METHODS[each.method]}"


def days_text(days: float | None) -> str:
    """Format a number of days.

    >>> days_text(1234.5), days_text(3.456), days_text(0.01), days_text(None)
    ('1,234', '3.46', '0.01', '—')
    """
    if days is None:
        return "—"
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"


def dollars_text(dollars: float | None) -> str:
    """Format a price in dollars.

    >>> dollars_text(12345.6), dollars_text(3.456), dollars_text(4.2e9), dollars_text(None)
    ('12,346', '3.46', '4.20 B', '—')
    """
    if dollars is None:
        return "—"
    if dollars >= 1e7:
        return count_text(dollars)
    return f"{dollars:,.0f}" if dollars >= 100 else f"{dollars:.3g}"


UNITS = {"GiB": 2**30, "MiB": 2**20}


def memory_unit(found: Sequence[Estimate]) -> str:
    """Return the unit for all estimates: GiB if each has a peak of at least 10 GiB, else MiB."""
    peaks = [each.plan.prediction.peak_memory_bytes for each in found if each.plan is not None]
    return "GiB" if min(peaks, default=0) >= 10 * UNITS["GiB"] else "MiB"


def _memory(found: Sequence[Estimate], unit: str) -> Table:
    plans = [(each, each.plan) for each in found if each.plan is not None]
    titles = [(SHORT_NAMES.get(name, name), "right") for name in (*GROUPS, "other")]
    table = plain_table(("", "left"), *titles, ("total", "right"), ("usable", "right"))
    for each, plan in plans:
        memory = fullest_rank(plan)
        values = list(grouped_bytes(memory.held, GROUPS, "other").values())
        values += [memory.total_bytes, plan.cluster.usable_memory_bytes]
        digits = 1 if unit == "GiB" else 0
        table.add_row(_label(each), *(f"{value / UNITS[unit]:.{digits}f}" for value in values))
    return table


def estimates_json(found: Sequence[Estimate]) -> list[dict[str, Any]]:
    """Return a JSON entry per device and training method."""
    return [
        {
            "device": each.device,
            "method": each.method,
            "fits": each.plan is not None,
            **({"why": each.why} if each.plan is None else _plan_entry(each, each.plan)),
        }
        for each in found
    ]


def _plan_entry(each: Estimate, plan: Plan) -> dict[str, Any]:
    model, prediction = plan.model, plan.prediction
    return {
        "num_devices": each.num_devices,
        "cluster": plan.cluster.name,
        "configuration": plan_summary(plan),
        "precision": model.precision,
        "num_parameters": model.num_parameters,
        "global_batch": model.global_batch,
        "seq": model.seq,
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "model_flops_utilization": prediction.model_flops_utilization,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "usable_memory_bytes": plan.cluster.usable_memory_bytes,
        "memory_bytes": dict(fullest_rank(plan).held),
        "days": each.days,
        "dollars_per_hour": each.dollars_per_hour,
        "dollars": each.dollars,
    }
