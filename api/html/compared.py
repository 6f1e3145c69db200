"""Plans and runs side by side as a page, and as a table for notebooks.

In: items of ``compare``. Out: one HTML text in the style of a plan's report: figures, a picture by
time and memory, different choices, parts of a step and of the memory, and measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel import __version__
from autoparallel.analysis.compare import Item
from autoparallel.analysis.facts import MEMORY_ORDER, fullest_rank, usable_bytes
from autoparallel.html.candidates import Entry, time_memory_chart
from autoparallel.html.looks import MEMORY_LOOKS, MEMORY_MEANINGS, OTHER_MEMORY, TIME_LOOKS
from autoparallel.html.rendering import render
from autoparallel.options.words import bytes_text, count_text, percent_text, seconds_text
from autoparallel.report.comparison import (
    LEAST_SHARE,
    Figure,
    description,
    difference,
    different_choices,
    excess_bytes,
    held_bytes,
    letter_of,
    measured_memory_bytes,
    measured_step_seconds,
    memory_bytes,
    of_plan,
    short_names,
    spent_seconds,
    step_seconds,
    throughput,
)

SECTIONS = {
    "figures": "Figures",
    "picture": "Time and memory",
    "choices": "What differs",
    "time": "Where the step goes",
    "memory": "Memory",
    "measured": "Measured",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Figure of an item: its value, as text, its change from the first item's, and whether that is
    better. Without a value the text is a dash."""

    value: float | None
    text: str
    change: float | None = None
    is_better: bool = False


@dataclass(frozen=True, slots=True)
class ComparedItem:
    """Item as the page shows it. ``seconds`` and ``held`` are parts of the step and of memory."""

    letter: str
    name: str
    what: str
    kind: str
    excess: float
    cells: tuple[Cell, ...]
    seconds: Mapping[str, float]
    held: Mapping[str, float]
    limit: float
    measured: tuple[tuple[str, Cell, Cell, float | None], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """Figure with a heading: how it is found and written, and whether less is better."""

    title: str
    find: Figure
    write: Callable[[float], str]
    less_is_better: bool


def compared_page(items: Sequence[Item]) -> str:
    """Return the whole page."""
    found = _context(items)
    sections = [
        (name, title)
        for name, title in SECTIONS.items()
        if name != "choices" or len(found["letters"]) > 1
    ]
    return render(
        "compared.html",
        {**found, "sections": sections, "folder": "compared", "version": __version__},
    )


def compared_notebook(items: Sequence[Item]) -> str:
    """Return the notebook's form of a comparison: figures and different choices."""
    return render("compared_notebook.html", _context(items))


def _context(items: Sequence[Item]) -> dict[str, Any]:
    columns = [each for each in COLUMNS if any(each.find(item) is not None for item in items)]
    found = [
        _compare_item(item, letter_of(place), name, columns, items[0])
        for place, (item, name) in enumerate(zip(items, short_names(items), strict=True))
    ]
    names = {name for each in found for name in each.held}
    most = max((sum(each.held.values()) for each in found), default=0.0)
    order = [*MEMORY_ORDER, *sorted(names - set(MEMORY_ORDER))]
    return {
        "title": "Comparison: " + ", ".join(each.name for each in found),
        "items": found,
        "letters": [each.letter for each in found],
        "columns": columns,
        "quickest": _name_fastest(items, found),
        "chart": _chart(items, found),
        "has_runs": any(item.run is not None for item in items),
        "choices": different_choices(items),
        "time_looks": {
            name: look
            for name, look in TIME_LOOKS.items()
            if any(each.seconds.get(name, 0) > 0 for each in found)
        },
        "longest": max((sum(each.seconds.values()) for each in found), default=0.0),
        "memory_looks": {
            name: MEMORY_LOOKS.get(name, OTHER_MEMORY)
            for name in order
            if max((each.held.get(name, 0) for each in found), default=0.0) >= LEAST_SHARE * most
            and most
        },
        "memory_meanings": MEMORY_MEANINGS,
        "fullest": max((max(sum(e.held.values()), e.limit) for e in found), default=0.0),
    }


COLUMNS = (
    Column("step", step_seconds, seconds_text, True),
    Column("per second", throughput, count_text, False),
    Column(
        "MFU", of_plan(lambda plan: plan.prediction.model_flops_utilization), percent_text, False
    ),
    Column("bubble", of_plan(lambda plan: plan.prediction.bubble_fraction), percent_text, True),
    Column("memory", memory_bytes, bytes_text, True),
)


def _compare_item(
    item: Item, letter: str, name: str, columns: Sequence[Column], first: Item
) -> ComparedItem:
    plan = item.plan
    limit = 0.0
    if plan is not None:
        limit = usable_bytes(plan, plan.stages[fullest_rank(plan)[0][0]])
    return ComparedItem(
        letter,
        name,
        description(item).removesuffix("; does not fit"),
        "run" if plan is None else "plan",
        0.0 if plan is None else excess_bytes(plan),
        tuple(_cell(each, item, first) for each in columns),
        {} if plan is None else spent_seconds(plan),
        held_bytes(item),
        limit,
        _measurements(item),
    )


def _cell(column: Column, item: Item, first: Item) -> Cell:
    value = column.find(item)
    if value is None:
        return Cell(None, "—")
    change = difference(value, column.find(first))
    return Cell(
        value,
        column.write(value),
        change,
        change is not None and (change < 0) == column.less_is_better,
    )


def _measurements(item: Item) -> tuple[tuple[str, Cell, Cell, float | None], ...]:
    """Return step and memory, predicted and measured, and the errors of the prediction."""
    rows = []
    for name, predict, measure, write in (
        ("step", step_seconds, measured_step_seconds, seconds_text),
        ("memory", memory_bytes, measured_memory_bytes, bytes_text),
    ):
        value = measure(item)
        if not value:
            continue
        own = predict(item) if item.plan is not None else None
        said = Cell(None, "—") if own is None else Cell(own, write(own))
        rows.append((name, said, Cell(value, write(value)), own / value - 1 if own else None))
    return tuple(rows)


def _name_fastest(items: Sequence[Item], found: Sequence[ComparedItem]) -> str:
    """Name the fastest plan that fits; "" if it is unknown."""
    fitting = [
        (item.plan.prediction.step_seconds, own)
        for item, own in zip(items, found, strict=True)
        if item.plan is not None and own.excess <= 0
    ]
    batches = {(item.plan.model.global_batch, item.plan.model.seq) for item in items if item.plan}
    if len(fitting) < 2 or len(batches) > 1:
        return ""
    seconds, own = min(fitting, key=lambda each: each[0])
    others = [each for each, other in fitting if other is not own]
    gain = min(others) / seconds
    return f"The fastest that fits is {own.letter}, {gain:.2f} × as fast as the next."


def _chart(items: Sequence[Item], found: Sequence[ComparedItem]) -> Any:
    """Return the chart of items with both seconds and bytes; None without such an item."""
    entries = [
        Entry(
            own.name,
            own.kind,
            step_seconds(item) or 0.0,
            memory_bytes(item) or 0.0,
            own.what,
            own.letter,
        )
        for item, own in zip(items, found, strict=True)
    ]
    if not any(each.step_seconds and each.memory_bytes for each in entries):
        return None
    limits = [own.limit for own in found if own.limit]
    most = max(each.memory_bytes for each in entries)
    return time_memory_chart(entries, int(min(limits)) if limits else int(most))
