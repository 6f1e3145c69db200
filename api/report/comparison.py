"""Plans and runs side by side: a column each, differences from the first marked.

Different figures show their change; different choices have ``*`` before them. Unmeasured figures of
a run are ``—``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoparallel.analysis.compare import Item
from autoparallel.analysis.facts import (
    MEMORY_ORDER,
    busiest_rank,
    fullest_rank,
    ordered_memory,
    rank_seconds,
    usable_bytes,
)
from autoparallel.options.words import bytes_text, count_text, percent_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary, rank_summaries, schedule_text, strategy_parts
from autoparallel.report.page import device_text, section
from autoparallel.report.printing import plain_table, print_to_text

MOST_COLUMNS = 4
"""Items side by side; the first is repeated beside the next items."""

SAME = 5e-4
"""Figures with a smaller relative difference are equal."""

LEAST_SHARE = 1e-3
"""Seconds and bytes that are below this share of the whole in every item have no row."""

SECONDS_ORDER = ("compute", "communication", "sends", "gradients", "optimizer", "waiting")

Value = float | None
Figure = Callable[[Item], Value]


def print_comparison(items: Sequence[Item], console: Console) -> None:
    """Print the page: the items' letters, then figures, choices, seconds and bytes."""
    letters = [letter_of(index) for index in range(len(items))]
    console.print(_legend(items, letters))
    for start in range(1, len(items), MOST_COLUMNS - 1):
        chosen = [0, *range(start, min(start + MOST_COLUMNS - 1, len(items)))]
        own = [(letters[index], items[index]) for index in chosen]
        _print_columns(own, console)


def comparison_text(items: Sequence[Item]) -> str:
    """Return the page as plain text, 80 columns wide."""
    return print_to_text(lambda console: print_comparison(items, console))


def letter_of(index: int) -> str:
    """Return the letter of an item in the tables.

    >>> letter_of(0), letter_of(25), letter_of(26)
    ('A', 'Z', 'A1')
    """
    return chr(ord("A") + index) if index < 26 else f"{chr(ord('A') + index % 26)}{index // 26}"


def _legend(items: Sequence[Item], letters: Sequence[str]) -> Any:
    table = plain_table(("", "left"), ("", "left"), ("", "left"))
    table.show_header = False
    names = short_names(items)
    for letter, name, item in zip(letters, names, items, strict=True):
        table.add_row(Text(letter, style="bold"), Text(name), description(item))
    return table


def short_names(items: Sequence[Item]) -> list[str]:
    """Return the items' names, without their folders if they differ without."""
    names = {item.name: Path(item.name).name for item in items}
    is_short = len(set(names.values())) == len(names)
    return [names[item.name] if is_short else item.name for item in items]


def description(item: Item) -> str:
    """Describe a plan's configuration, or the extent of measurements."""
    if item.plan is None:
        return f"measured over {item.run.num_steps} steps" if item.run is not None else ""
    what = plan_summary(item.plan)
    return what if excess_bytes(item.plan) <= 0 else f"{what}; does not fit"


def excess_bytes(plan: Plan) -> float:
    """Return the fullest rank's excess over its devices' memory in bytes; negative if it fits."""
    used = usable_bytes(plan, plan.stages[fullest_rank(plan)[0][0]])
    return plan.prediction.peak_memory_bytes - used


def _print_columns(columns: Sequence[tuple[str, Item]], console: Console) -> None:
    items = [item for _, item in columns]
    letters = [letter for letter, _ in columns]
    console.print(section("Figures", _figures(items, letters, _main_rows(items))))
    choices = _choices(items, letters)
    if choices is not None:
        console.print(section("What differs in the plans (* from the first)", choices))
    if sum(item.plan is not None for item in items) > 1:
        rows = _part_rows([_seconds(item) for item in items], _whole_seconds(items), seconds_text)
        title = "Seconds of the busiest rank"
        console.print(section(title, _figures(items, letters, rows)))
        rows = _part_rows([held_bytes(item) for item in items], _whole_bytes(items), bytes_text)
        title = "Memory of the fullest rank"
        console.print(section(title, _figures(items, letters, rows)))


Row = tuple[str, Sequence[Value] | Figure, Callable[[float], str], bool]
"""Row: name; values of the items, or a function; the format of a value; whether less is better."""


def _main_rows(items: Sequence[Item]) -> list[Row]:
    utilization = of_plan(lambda plan: plan.prediction.model_flops_utilization)
    bubble = of_plan(lambda plan: plan.prediction.bubble_fraction)
    return [
        ("step", step_seconds, seconds_text, True),
        ("throughput /s", throughput, count_text, False),
        ("MFU", utilization, percent_text, False),
        ("bubble", bubble, percent_text, True),
        ("memory", memory_bytes, bytes_text, True),
        *(
            [
                ("step measured", measured_step_seconds, seconds_text, True),
                ("memory measured", measured_memory_bytes, bytes_text, True),
            ]
            if any(item.measured is not None for item in items)
            else []
        ),
    ]


def step_seconds(item: Item) -> Value:
    """Return the step time of an item: predicted, or the measured median of a run."""
    if item.run is not None:
        return item.run.step_seconds
    return None if item.plan is None else item.plan.prediction.step_seconds


def throughput(item: Item) -> Value:
    """Return tokens (samples without sequences) per second."""
    if item.run is not None:
        return item.run.throughput
    return None if item.plan is None else item.plan.prediction.tokens_per_second


def memory_bytes(item: Item) -> Value:
    """Return the peak memory of an item: predicted, of the fullest device; of a run, of rank 0."""
    if item.run is not None:
        return None if item.run.memory_bytes is None else float(item.run.memory_bytes)
    return None if item.plan is None else float(item.plan.prediction.peak_memory_bytes)


def measured_step_seconds(item: Item) -> Value:
    """Return the measured seconds per global batch of an item's run."""
    if item.measured is not None:
        return item.measured.step_seconds / item.measured.num_batches
    return None if item.run is None else item.run.step_seconds


def measured_memory_bytes(item: Item) -> Value:
    """Return the measured peak memory of rank 0 in an item's run."""
    if item.measured is not None:
        return float(item.measured.memory_bytes)
    return memory_bytes(item) if item.run is not None else None


def of_plan(value: Callable[[Plan], float]) -> Figure:
    """Make a figure that is defined for plans only."""
    return lambda item: None if item.plan is None else value(item.plan)


def _figures(items: Sequence[Item], letters: Sequence[str], rows: Sequence[Row]) -> Any:
    table = plain_table(("", "left"), *((letter, "right") for letter in letters))
    for name, values, write, less_is_better in rows:
        found = [values(item) for item in items] if callable(values) else list(values)
        if any(value for value in found):
            cells = [_cell(value, found[0], write, less_is_better) for value in found]
            table.add_row(name, *cells)
    return table


def _cell(value: Value, first: Value, write: Callable[[float], str], less_is_better: bool) -> Text:
    """Format a value with its change from the first item's.

    >>> _cell(1.1, 1.0, seconds_text, True).plain, _cell(None, 1.0, seconds_text, True).plain
    ('1.10 s +10.0 %', '—')
    """
    if value is None:
        return Text("—", style="dim")
    text = Text(write(value))
    change = difference(value, first)
    if change is None:
        return text
    style = "green" if (change < 0) == less_is_better else "red"
    return Text.assemble(text, (f" {change_text(change)}", style))


def change_text(change: float) -> str:
    """Format a relative change.

    >>> change_text(0.0456), change_text(-1.0), change_text(7.0)
    ('+4.6 %', '-100 %', '+700 %')
    """
    digits = 1 if abs(change) < 0.995 else 0
    return f"{100 * change:+.{digits}f} %"


def difference(value: Value, first: Value) -> float | None:
    """Return the relative difference of a value from the first; None if equal or unknown."""
    if value is None or not first:
        return None
    change = value / first - 1
    return change if abs(change) >= SAME else None


def _part_rows(
    parts: Sequence[Mapping[str, float]], whole: float, write: Callable[[float], str]
) -> list[Row]:
    order = (*SECONDS_ORDER, *MEMORY_ORDER)
    names = list(dict.fromkeys(name for own in parts for name in own))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    shown = [
        name for name in names if max(own.get(name, 0.0) for own in parts) >= LEAST_SHARE * whole
    ]
    return [
        (name, [own.get(name, 0.0) if own else None for own in parts], write, True)
        for name in shown
    ]


def _seconds(item: Item) -> Mapping[str, float]:
    if item.plan is None:
        return {}
    return {_short(name): value for name, value in spent_seconds(item.plan).items()}


def spent_seconds(plan: Plan) -> Mapping[str, float]:
    """Return the busiest rank's seconds in a step, by kind."""
    return rank_seconds(plan, busiest_rank(plan))


def _short(name: str) -> str:
    return {
        "communication within the stage": "communication",
        "sends to the next stage": "sends",
        "gradient synchronization": "gradients",
        "waiting for other stages": "waiting",
    }.get(name, name)


def _whole_seconds(items: Sequence[Item]) -> float:
    return max((item.plan.prediction.step_seconds for item in items if item.plan), default=0.0)


def held_bytes(item: Item) -> Mapping[str, float]:
    """Return the bytes of the fullest rank by category; empty for a run."""
    if item.plan is None:
        return {}
    return {name: float(size) for name, size in ordered_memory(fullest_rank(item.plan)[1]).items()}


def _whole_bytes(items: Sequence[Item]) -> float:
    return max((float(memory_bytes(item) or 0) for item in items), default=0.0)


def choices(plan: Plan) -> Mapping[str, str]:
    """Return a plan's choices and targets by name."""
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
        "ZeRO": "/".join(dict.fromkeys(str(stage.zero) for stage in plan.stages)),
        "recompute": ", ".join(recompute).replace(" recompute", "") or "none",
        "schedule": schedule if plan.has_pipeline else "one stage",
        "micro-batches": f"{plan.num_microbatches} × {plan.microbatch_size}",
        "blocks": " | ".join(str(len(stage.blocks)) for stage in plan.stages),
    }


def different_choices(items: Sequence[Item]) -> list[tuple[str, list[tuple[str, bool]]]]:
    """Return the choices that differ between plans: a name, and for each item its choice and
    whether that differs from the first plan's."""
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


def _choices(items: Sequence[Item], letters: Sequence[str]) -> Any:
    """Return a table of the choices that differ between plans; None if there are none."""
    rows = different_choices(items)
    if not rows:
        return None
    table = plain_table(("", "left"), *((letter, "left") for letter in letters))
    for name, cells in rows:
        table.add_row(
            name,
            *(
                Text(f"*{text}" if is_other else text, style="yellow" if is_other else "")
                for text, is_other in cells
            ),
        )
    return table


def comparison_json(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return an entry per item; ``difference`` has relative differences from the first."""
    figures: dict[str, Figure] = {
        "step_seconds": step_seconds,
        "throughput": throughput,
        "memory_bytes": memory_bytes,
    }
    entries = []
    for item in items:
        entry: dict[str, Any] = {"name": item.name, "kind": "plan" if item.plan else "run"}
        entry |= {name: value(item) for name, value in figures.items()}
        entry["difference"] = {
            name: difference(value(item), value(items[0])) or 0.0
            for name, value in figures.items()
            if value(item) is not None
        }
        if item.plan is not None:
            entry["choices"] = dict(choices(item.plan))
            entry["model_flops_utilization"] = item.plan.prediction.model_flops_utilization
            entry["bubble_fraction"] = item.plan.prediction.bubble_fraction
            entry["rank_seconds"] = dict(_seconds(item))
            entry["rank_memory_bytes"] = dict(held_bytes(item))
        if item.measured is not None:
            entry["measured_step_seconds"] = measured_step_seconds(item)
            entry["measured_memory_bytes"] = measured_memory_bytes(item)
        if item.run is not None:
            entry["num_steps"], entry["loss"] = item.run.num_steps, item.run.loss
        entries.append(entry)
    return entries


def comparison_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return a flat row per item: figures, their differences from the first's, and choices."""
    rows = []
    for entry in comparison_json(items):
        row = {
            name: value
            for name, value in entry.items()
            if name not in ("difference", "choices", "rank_seconds", "rank_memory_bytes")
        }
        row |= {f"{name}_difference": value for name, value in entry["difference"].items()}
        rows.append(row | entry.get("choices", {}))
    return rows
