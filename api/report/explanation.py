"""Explanations as pages of 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoparallel.analysis.compare import Item, MeasuredRun
from autoparallel.analysis.facts import bytes_of
from autoparallel.analysis.lengths import Bucketed, LengthPrices, best_of
from autoparallel.analysis.measured_blocks import ComputeError
from autoparallel.analysis.plan_model import Explanation
from autoparallel.analysis.what_if import Changed, terms
from autoparallel.options.words import bytes_text, count_text, percent_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.planner.variants.replicas import stages_of_ranks
from autoparallel.report.comparison import change_text, comparison_json, print_comparison
from autoparallel.report.printing import plain_table, section

STYLES = {
    "CHOSEN": "bold green",
    "TIE": "cyan",
    "CHEAPER": "yellow",
    "CHEAPER BUT DOES NOT FIT": "yellow",
    "NOT OFFERED": "dim",
    "DOES NOT FIT": "dim",
}

LEAST_TERM = 2e-3
"""Share of the step below which a difference in seconds is not named."""


def print_explanation(found: Explanation, console: Console) -> None:
    """Print the alternatives to a plan's choice as a table, the choice first."""
    console.print(Text(found.subject, style="bold"))
    console.print(Text(found.where, style="dim"))
    console.print()
    table = plain_table(
        ("alternative", "left"),
        ("step", "right"),
        ("", "right"),
        ("memory", "right"),
        ("", "left"),
    )
    chosen = next((each for each in found.alternatives if each.standing == "CHOSEN"), None)
    for each in sorted(found.alternatives, key=lambda one: one.standing != "CHOSEN"):
        step = "—" if each.step_seconds is None else seconds_text(each.step_seconds)
        held = "—" if each.memory_bytes is None else bytes_text(each.memory_bytes)
        change = ""
        if each is not chosen and chosen is not None and each.step_seconds is not None:
            assert chosen.step_seconds is not None
            change = change_text(each.step_seconds / chosen.step_seconds - 1)
        standing = Text(each.standing, style=STYLES.get(each.standing, ""))
        if each.why:
            standing.append(f": {each.why}", style="dim")
        table.add_row(each.name, step, change, held, standing)
    console.print(table)
    for note in found.notes:
        console.print(Text(f"\n{note}", style="dim"))


def print_lengths(found: LengthPrices, plan: Plan, console: Console) -> None:
    """Print the steps of sequences of several lengths as a table, by number of buckets."""
    each = f"{plan.model.global_batch} a step"
    console.print(Text("Sequences of several lengths", style="bold"))
    console.print(
        Text(
            f"{found.number:,} sequences, mean {found.mean:,.0f} positions, longest "
            f"{found.largest:,}, {each} drawn at random",
            style="dim",
        )
    )
    console.print()
    _print_buckets(found.options, console)
    best, grouped = best_of(found.options), best_of(found.grouped)
    if best.buckets[:-1]:
        console.print(Text(f"\nin a script: Step(model, buckets={best.buckets[:-1]})"))
    else:
        console.print(Text("\nbuckets gain less than 1 %"))
    if grouped.tokens_per_second > 1.01 * best.tokens_per_second:
        console.print(Text("\nwith sequences of one bucket, and more of them, in each batch\n"))
        _print_buckets(found.grouped, console)
        pairs = dict(zip(grouped.buckets[:-1], grouped.rows, strict=False))
        console.print(Text(f"\nin a script: Step(model, buckets={pairs})"))


def _print_buckets(options: Sequence[Bucketed], console: Console) -> None:
    table = plain_table(
        ("buckets", "left"),
        ("mean step", "right"),
        ("tokens/s", "right"),
        ("", "right"),
        ("padding", "right"),
    )
    whole = options[0]
    for one in options:
        *shorter, planned = one.buckets
        pairs = zip(one.buckets, one.rows, strict=True)
        more = (f"{each:,}" + f" × {n}" * (n != whole.rows[0]) for each, n in pairs)
        ratio = one.tokens_per_second / whole.tokens_per_second - 1
        table.add_row(
            " · ".join(more) if shorter else f"{planned:,}, as planned",
            seconds_text(one.step_seconds),
            count_text(one.tokens_per_second),
            change_text(ratio) if shorter else "",
            percent_text(one.padding),
        )
    console.print(table)


def print_why_not(plan: Plan, forced: Plan, parallel: str, console: Console) -> None:
    """Print the plan beside the plan with forced degrees, and the seconds that differ."""
    print_comparison((Item("plan", plan), Item(parallel, forced)), console)
    console.print()
    console.print(Text(loss_text(plan, forced), style="bold"))


def loss_text(plan: Plan, other: Plan) -> str:
    """Describe by how many seconds and bytes ``other`` differs from ``plan``, by purpose."""
    own, step = terms(plan), plan.prediction.step_seconds
    theirs = terms(other)
    change = other.prediction.step_seconds / step - 1
    names = dict.fromkeys((*own, *theirs))
    deltas = {name: theirs.get(name, 0.0) - own.get(name, 0.0) for name in names}
    named = sorted(
        (each for each in deltas.items() if abs(each[1]) >= LEAST_TERM * step),
        key=lambda each: -each[1],
    )
    parts = [
        f"{name} {'+' if delta > 0 else '−'}{seconds_text(abs(delta))}" for name, delta in named
    ]
    held = other.prediction.peak_memory_bytes - plan.prediction.peak_memory_bytes
    if abs(held) > 0.01 * plan.prediction.peak_memory_bytes:
        parts.append(f"memory {'+' if held > 0 else '−'}{bytes_text(abs(held))}")
    if abs(change) < 5e-4:
        head = "it takes as long"
    else:
        head = f"it takes {percent_text(abs(change))} {'longer' if change > 0 else 'less'}"
    return f"{head}: {', '.join(parts)}" if parts else head


def why_not_json(plan: Plan, forced: Plan, parallel: str) -> dict[str, Any]:
    """Return both plans' figures as JSON values, and their differences in seconds by purpose."""
    own, theirs = terms(plan), terms(forced)
    names = dict.fromkeys((*own, *theirs))
    return {
        "plans": comparison_json((Item("plan", plan), Item(parallel, forced))),
        "difference_seconds": {name: theirs.get(name, 0.0) - own.get(name, 0.0) for name in names},
        "step_seconds": forced.prediction.step_seconds - plan.prediction.step_seconds,
        "memory_bytes": forced.prediction.peak_memory_bytes - plan.prediction.peak_memory_bytes,
    }


def print_what_if(found: Changed, console: Console) -> None:
    """Print the plan before and after the cluster's change, and the best plan after it."""
    items = changed_items(found)
    print_comparison(items, console)
    console.print()
    console.print(Text(changed_text(found), style="bold"))


def changed_items(found: Changed) -> tuple[Item, ...]:
    items = (Item("the plan", found.now), Item("the plan, changed cluster", found.same))
    return items if found.stays else (*items, Item("planned for it", found.found))


def changed_text(found: Changed) -> str:
    """Describe in a sentence how a changed cluster affects the plan's step time and memory, and
    whether another plan is better there."""
    change = found.same.prediction.step_seconds / found.now.prediction.step_seconds - 1
    text = f"the plan's step changes by {change_text(change)}"
    over, least = found.excess_bytes(found.same), found.excess_bytes(found.found)
    if found.stays:
        return f"the plan stays the best that was found; {text}"
    if least > 0:
        return (
            f"no plan was found that fits: this one needs {bytes_text(over)} too much, and the one "
            f"that needs the least {bytes_text(least)}"
        )
    fits = f"; it no longer fits ({bytes_text(over)} too much)" if over > 0 else f"; {text}"
    more = found.found.prediction.step_seconds / found.same.prediction.step_seconds - 1
    return (
        f"the plan changes to {plan_summary(found.found)}{fits}; the new plan's step differs from "
        f"the old one's there by {change_text(more)}"
    )


def what_if_json(found: Changed) -> dict[str, Any]:
    """Return, as JSON values, whether the plan is still the best on the changed cluster, and
    figures of the plan there, before, and of the best plan."""
    return {"stays": found.stays, "plans": comparison_json(changed_items(found))}


Errors = tuple[Sequence[ComputeError], Sequence[ComputeError]] | None
"""Prediction errors of blocks and of stages; None without measurements."""

UNMEASURED = (
    "blocks and stages: nothing was measured for this cluster's devices, and a run records whole "
    "steps; autoparallel profile TARGET measures blocks"
)
OF_BLOCKS = (
    "compute of a micro-batch, from specifications and as autoparallel profile measured blocks and "
    "ops; communication is measured by no run"
)


def print_measured(plan: Plan, run: MeasuredRun, errors: Errors, console: Console) -> None:
    """Print predictions beside a run's metrics and, unless ``errors`` is None, beside the measured
    compute times of blocks and stages; the largest errors first."""
    console.print(Text(f"{plan_summary(plan)}, {run.num_steps} steps measured", style="bold"))
    console.print()
    console.print(_error_table(measured_rows(plan, run)))
    if errors is None:
        console.print(Text(f"\n{UNMEASURED}", style="dim"))
        return
    for title, found in zip(("Blocks", "Stages"), errors, strict=True):
        rows = [(each.name, each.predicted_seconds, each.measured_seconds) for each in found]
        console.print(section(title, _error_table(rows)))
    console.print(Text(f"\n{OF_BLOCKS}", style="dim"))


def _error_table(rows: Sequence[tuple[str, float, float]]) -> Table:
    table = plain_table(
        ("figure", "left"), ("predicted", "right"), ("measured", "right"), ("error", "right")
    )
    for name, predicted, measured in rows:
        write = bytes_text if name.startswith("memory") else seconds_text
        error = change_text(predicted / measured - 1)
        table.add_row(name, write(predicted), write(measured), error)
    return table


def measured_rows(plan: Plan, run: MeasuredRun) -> list[tuple[str, float, float]]:
    """Return a run's metrics as rows of name, prediction, measurement; the largest error first."""
    rows = [("step", plan.prediction.step_seconds, run.step_seconds)]
    if run.memory_bytes:
        held = sum(bytes_of(plan, stages_of_ranks(plan)[0]).values())
        rows.append(("memory of rank 0", float(held), float(run.memory_bytes)))
    return sorted(rows, key=lambda row: -abs(row[1] / row[2] - 1))


def measured_json(plan: Plan, run: MeasuredRun, errors: Errors) -> Mapping[str, Any]:
    """Return predictions, measurements and errors as JSON values: of a run's metrics and, unless
    ``errors`` is None, of blocks and stages."""
    found: dict[str, Any] = {
        "figures": [
            {"name": name, "predicted": own, "measured": other, "error": own / other - 1}
            for name, own, other in measured_rows(plan, run)
        ]
    }
    for number, name in enumerate(("blocks", "stages")):
        found[name] = errors and [{**asdict(each), "error": each.error} for each in errors[number]]
    return found
