"""Comparison of plans and runs side by side: figures and choices, as text and as JSON.

In: items of ``compare``. Out: a column per item, with differences from the first item marked: a
different figure shows its change, a different choice has ``*`` before it. Figures that a run does
not measure are ``—``. ``html.compared`` renders the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoparallel.analysis.compare import Item, MeasuredRun
from autoparallel.analysis.facts import (
    BUBBLE,
    FIGURES,
    MEMORY,
    MEMORY_MEANINGS,
    STEP,
    THROUGHPUT,
    UTILIZATION,
    Figure,
    RankMemory,
    busiest_rank,
    device_text,
    fullest_rank,
    in_order,
    named_memory,
    rank_seconds,
)
from autoparallel.analysis.measurement import Measurement
from autoparallel.options.words import bytes_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import (
    plan_summary,
    rank_summaries,
    schedule_text,
    sharding_text,
    strategy_parts,
)
from autoparallel.report.printing import list_table, plain_table, section

MOST_COLUMNS = 4
"""Number of plans and runs side by side; others are shown below, again beside the first."""

SAME = 5e-4
"""Relative difference below which two values of a table row count as equal."""

LEAST_SHARE = 1e-3
"""Share of all seconds or bytes that a part must reach in some plan to have a table row."""

SHORT_NAMES = {
    "compute": "compute",
    "communication within the stage": "communication",
    "sends to the next stage": "sends",
    "gradient synchronization": "gradients",
    "optimizer": "optimizer",
    "waiting for other stages": "waiting",
}
"""Purposes of a step's seconds in the order of the table, with their short names there."""

Value = float | None


OF_RUNS: Mapping[Figure, Callable[[MeasuredRun], Value]] = {
    STEP: lambda run: run.step_seconds,
    THROUGHPUT: lambda run: run.throughput,
    MEMORY: lambda run: run.memory_bytes,
}
"""Figures that a run's metrics contain, with functions that read them; memory is of rank 0."""

MEASURED: Mapping[Figure, Callable[[Measurement], float]] = {
    STEP: lambda measured: measured.step_seconds / measured.num_batches,
    MEMORY: lambda measured: measured.memory_bytes,
}
"""Figures in the measurement stored beside a plan's file, with functions that read them."""

OF_PLANS = (UTILIZATION, BUBBLE)


def value_of(figure: Figure, item: Item) -> Value:
    """Return a number (``figure``: step time, …) of an item: of a plan its prediction, of a run its
    measurement; None if unknown."""
    value: Value = None
    if item.run is not None and figure in OF_RUNS:
        value = OF_RUNS[figure](item.run)
    elif item.plan is not None:
        value = figure.of_plan(item.plan)
    return None if value is None else float(value)


def measured_value(figure: Figure, item: Item) -> Value:
    """Return the measured ``figure`` of a run, or of a plan that a run trained by, or None."""
    if item.measured is not None:
        return float(MEASURED[figure](item.measured))
    return None if item.run is None else value_of(figure, item)


def measured_key(figure: Figure) -> str:
    """Return the JSON key under which the measured value of a figure stands."""
    return f"measured_{figure.key}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Table cell for a plan or run: value (of step time, …), text, relative change from the first
    plan or run, and whether it is an improvement. Without a value the text is a dash."""

    value: Value
    text: str
    change: float | None = None
    is_better: bool = False


def cells(
    values: Sequence[Value], write: Callable[[float], str], less_is_better: bool = True
) -> tuple[Cell, ...]:
    """Return a row of table cells with ``values`` and their relative changes from the first value.

    >>> [(cell.text, cell.change) for cell in cells([1.0, 1.5, None], seconds_text)]
    [('1.00 s', None), ('1.50 s', 0.5), ('—', None)]
    """
    found = []
    for value in values:
        change = difference(value, values[0])
        is_better = change is not None and (change < 0) == less_is_better
        found.append(Cell(value, "—" if value is None else write(value), change, is_better))
    return tuple(found)


def difference(value: Value, first: Value) -> float | None:
    """Return the relative difference of ``value`` from ``first``; None if equal or unknown."""
    if value is None or not first:
        return None
    change = value / first - 1
    return change if abs(change) >= SAME else None


def change_text(change: float) -> str:
    """Format a relative change.

    >>> change_text(0.0456), change_text(-1.0), change_text(7.0)
    ('+4.6 %', '-100 %', '+700 %')
    """
    digits = 1 if abs(change) < 0.995 else 0
    return f"{100 * change:+.{digits}f} %"


@dataclass(frozen=True, slots=True)
class ComparedItem:
    """Column of a comparison: a plan, or a run. ``cells`` maps JSON keys such as ``step_seconds``
    to table cells. ``seconds`` (of the busiest rank, by purpose) and ``memory`` are a plan's."""

    item: Item
    letter: str
    name: str
    what: str
    cells: Mapping[str, Cell]
    seconds: Mapping[str, float]
    memory: RankMemory | None

    @property
    def kind(self) -> str:
        return "run" if self.item.plan is None else "plan"

    @property
    def is_over(self) -> bool:
        """True for a plan that needs more memory than its devices have."""
        return self.memory is not None and self.memory.excess_bytes > 0

    @property
    def short_seconds(self) -> dict[str, float]:
        """Seconds of the busiest rank in a step, by the short name of their purpose."""
        return {SHORT_NAMES.get(name, name): value for name, value in self.seconds.items()}

    @property
    def held(self) -> dict[str, float]:
        """Bytes of the fullest rank by category; empty for a run."""
        parts = {} if self.memory is None else self.memory.parts
        return {name: float(size) for name, size in parts.items()}

    @property
    def measured(self) -> list[tuple[str, Cell, Cell, float | None]]:
        """Rows for step time and memory: name, prediction, measurement, and relative error."""
        rows = []
        for figure in MEASURED:
            measured = self.cells[measured_key(figure)]
            said = Cell(None, "—") if self.item.plan is None else self.cells[figure.key]
            if measured.value:
                error = said.value / measured.value - 1 if said.value else None
                rows.append((figure.name, said, measured, error))
        return rows


def compare_items(items: Sequence[Item]) -> list[ComparedItem]:
    """Return the column of each plan or run, with changes from the first."""
    columns = {
        figure.key: cells(
            [value_of(figure, item) for item in items], figure.write, figure.less_is_better
        )
        for figure in FIGURES
    }
    for figure in MEASURED:
        values = [measured_value(figure, item) for item in items]
        columns[measured_key(figure)] = cells(values, figure.write)
    names = {item.name: Path(item.name).name for item in items}
    is_short = len(set(names.values())) == len(names)
    found = []
    for place, item in enumerate(items):
        own = {key: column[place] for key, column in columns.items()}
        name = names[item.name] if is_short else item.name
        what, seconds, memory = "", {}, None
        if item.plan is not None:
            what, memory = plan_summary(item.plan), fullest_rank(item.plan)
            seconds = rank_seconds(item.plan, busiest_rank(item.plan))
        elif item.run is not None:
            what = f"measured over {item.run.num_steps} steps"
        found.append(ComparedItem(item, letter_of(place), name, what, own, seconds, memory))
    return found


def letter_of(index: int) -> str:
    """Return the letter that stands for the plan or run at ``index`` in the tables.

    >>> letter_of(0), letter_of(25), letter_of(26)
    ('A', 'Z', 'A1')
    """
    return chr(ord("A") + index) if index < 26 else f"{chr(ord('A') + index % 26)}{index // 26}"


def choices(plan: Plan) -> Mapping[str, str]:
    """Return a plan's choices, and its model's settings, as texts by name."""
    schedule = schedule_text(plan.schedule, plan.num_chunks, len(plan.slices))
    parts = strategy_parts(rank_summaries(plan), schedule)
    recompute = [part for part in parts if "recompute" in part]
    return {
        "model": f"{plan.model.target} {dict(plan.model.settings) or ''}".strip(),
        "global batch": str(plan.model.global_batch),
        "length": str(plan.model.seq or "—"),
        "precision": plan.model.precision,
        "optimizer": plan.model.optimizer,
        "compiled": "yes" if plan.compiled else "no",
        "cluster": f"{plan.cluster.name} ({device_text(plan)})",
        "parallel": parts[0],
        "ZeRO": "/".join(dict.fromkeys(sharding_text(s.zero, s.shard_degree) for s in plan.stages)),
        "recompute": ", ".join(recompute).replace(" recompute", "") or "none",
        "schedule": schedule if plan.has_pipeline else "one stage",
        "micro-batches": f"{plan.num_microbatches} × {plan.microbatch_size}",
        "blocks": " | ".join(str(len(stage.blocks)) for stage in plan.stages),
    }


def different_choices(items: Sequence[Item]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return the choices that differ between plans: for each its name, and for each plan or run its
    text and whether it differs from the first plan's."""
    found = [None if item.plan is None else choices(item.plan) for item in items]
    plans = [own for own in found if own is not None]
    names = [name for name in (plans[0] if plans else {}) if len({own[name] for own in plans}) > 1]
    return [
        (
            name,
            [
                ("—", False) if own is None else (own[name], own[name] != plans[0][name])
                for own in found
            ],
        )
        for name in names
    ]


def print_comparison(items: Sequence[Item], console: Console) -> None:
    """Print a comparison: names of plans and runs, then figures, choices, seconds and bytes."""
    found = compare_items(items)
    legend = list_table("left", "left", "left")
    for each in found:
        what = f"{each.what}; does not fit" if each.is_over else each.what
        legend.add_row(Text(each.letter, style="bold"), Text(each.name), what)
    console.print(legend)
    for start in range(1, len(items), MOST_COLUMNS - 1):
        _print_columns([found[0], *found[start : start + MOST_COLUMNS - 1]], console)


Row = tuple[str, Sequence[Cell]]


def _print_columns(found: Sequence[ComparedItem], console: Console) -> None:
    letters, items = [each.letter for each in found], [each.item for each in found]

    def print_figures(title: str, rows: Sequence[Row]) -> None:
        table = plain_table(("", "left"), *((letter, "right") for letter in letters))
        for name, row in rows:
            if any(cell.value for cell in row):
                table.add_row(name, *map(_cell_text, row))
        console.print(section(title, table))

    shown = [(figure.name, figure.key) for figure in FIGURES]
    if any(item.measured is not None for item in items):
        shown += [(f"{figure.name} measured", measured_key(figure)) for figure in MEASURED]
    print_figures("Figures", [(name, [each.cells[key] for each in found]) for name, key in shown])
    if different := different_choices(items):
        table = plain_table(("", "left"), *((letter, "left") for letter in letters))
        for name, own in different:
            marked = (Text(f"*{text}", "yellow") if other else Text(text) for text, other in own)
            table.add_row(name, *marked)
        console.print(section("What differs in the plans (* from the first)", table))
    plans = [item.plan for item in items if item.plan is not None]
    if len(plans) > 1:
        step = max(plan.prediction.step_seconds for plan in plans)
        seconds = [each.short_seconds for each in found]
        rows = _part_rows(seconds, SHORT_NAMES.values(), step, seconds_text)
        print_figures("Seconds of the busiest rank", rows)
        peak = max(each.cells[MEMORY.key].value or 0.0 for each in found)
        rows = _part_rows(
            [named_memory(each.held) for each in found], MEMORY_MEANINGS, peak, bytes_text
        )
        print_figures("Memory of the fullest rank", rows)


def _part_rows(
    parts: Sequence[Mapping[str, float]],
    order: Collection[str],
    whole: float,
    write: Callable[[float], str],
) -> list[Row]:
    """Return a table row for each of the large parts of seconds or bytes, a cell per plan or run.

    ``parts`` has the parts of each plan by name, empty for a run, which gets dashes.
    """
    return [
        (name, cells([own.get(name, 0.0) if own else None for own in parts], write))
        for name in large_parts(parts, order, whole)
    ]


def large_parts(
    parts: Sequence[Mapping[str, float]], order: Collection[str], whole: float
) -> list[str]:
    """Return the names of the parts of seconds or bytes that exceed ``LEAST_SHARE`` of ``whole`` in
    any plan, sorted as in ``order``. ``parts`` has the parts of each plan by name."""
    names = in_order((name for own in parts for name in own), order)
    least = LEAST_SHARE * whole
    return [name for name in names if max(own.get(name, 0.0) for own in parts) >= least]


def _cell_text(cell: Cell) -> Text:
    if cell.value is None:
        return Text(cell.text, style="dim")
    if cell.change is None:
        return Text(cell.text)
    style = "green" if cell.is_better else "red"
    return Text.assemble(cell.text, (f" {change_text(cell.change)}", style))


def comparison_json(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return a JSON entry per plan or run; ``difference`` has relative changes from the first."""
    entries, of_all = [], [figure.key for figure in OF_RUNS]
    for each in compare_items(items):
        item, values = each.item, {key: cell.value for key, cell in each.cells.items()}
        entry: dict[str, Any] = {"name": item.name, "kind": each.kind}
        entry |= {key: values[key] for key in of_all}
        entry["difference"] = {
            key: each.cells[key].change or 0.0 for key in of_all if values[key] is not None
        }
        if item.plan is not None:
            entry["choices"] = dict(choices(item.plan))
            entry |= {figure.key: values[figure.key] for figure in OF_PLANS}
            entry["rank_seconds"], entry["rank_memory_bytes"] = each.short_seconds, each.held
        if item.measured is not None:
            entry |= {measured_key(figure): values[measured_key(figure)] for figure in MEASURED}
        if item.run is not None:
            entry["num_steps"], entry["loss"] = item.run.num_steps, item.run.loss
        entries.append(entry)
    return entries


def comparison_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return a flat row per plan or run: figures, their changes from the first, and choices."""
    rows = []
    for entry in comparison_json(items):
        differences = entry.pop("difference")
        chosen = entry.pop("choices", {})
        for name in ("rank_seconds", "rank_memory_bytes"):
            entry.pop(name, None)
        changes = {f"{name}_difference": value for name, value in differences.items()}
        rows.append(entry | changes | chosen)
    return rows
