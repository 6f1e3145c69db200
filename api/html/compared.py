"""Comparison of plans and runs as a page, and as a table for notebooks.

In: items of ``compare``. Out: one HTML text in the style of a plan's report: figures, a chart of
time and memory, different choices, parts of a step and of memory, and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoparallel import __version__
from autoparallel.analysis.compare import Item
from autoparallel.analysis.facts import (
    FIGURES,
    MEMORY,
    MEMORY_MEANINGS,
    STEP,
    named_memory,
)
from autoparallel.html.charts import Candidate, candidate_chart
from autoparallel.html.rendering import MEMORY_LOOKS, OTHER_MEMORY, TIME_LOOKS, render
from autoparallel.report.comparison import (
    ComparedItem,
    compare_items,
    different_choices,
    large_parts,
)

SECTIONS = {
    "figures": "Figures",
    "picture": "Time and memory",
    "choices": "What differs",
    "time": "Where the step goes",
    "memory": "Memory",
    "measured": "Measured",
}


def compared_page(items: Sequence[Item]) -> str:
    """Return the comparison of plans and runs as a complete HTML page."""
    found = _context(items)
    sections = [
        (name, title) for name, title in SECTIONS.items() if name != "choices" or len(items) > 1
    ]
    return render(
        "compared.html",
        {**found, "sections": sections, "folder": "compared", "version": __version__},
    )


def compared_notebook(items: Sequence[Item]) -> str:
    """Return the comparison as HTML for a notebook: tables of numbers, and of differing choices."""
    return render("compared_notebook.html", _context(items))


def _context(items: Sequence[Item]) -> dict[str, Any]:
    found = compare_items(items)
    parts = [named_memory(each.held) for each in found]
    most = max((sum(held.values()) for held in parts), default=0.0)
    limits = [each.memory.limit_bytes for each in found if each.memory is not None]
    return {
        "title": "Comparison: " + ", ".join(each.name for each in found),
        "items": found,
        "columns": [
            figure
            for figure in FIGURES
            if any(each.cells[figure.key].value is not None for each in found)
        ],
        "quickest": _name_fastest(found),
        "chart": _chart(found, limits),
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
            for name in large_parts(parts, MEMORY_MEANINGS, most)
        },
        "fullest": max((most, *limits)),
    }


def _name_fastest(found: Sequence[ComparedItem]) -> str:
    """Return a sentence that names the fastest fitting plan; "" if plans have different batches."""
    plans = {each.letter: each.item.plan for each in found if each.item.plan is not None}
    fitting = sorted(
        (plans[each.letter].prediction.step_seconds, each.letter)
        for each in found
        if each.letter in plans and not each.is_over
    )
    batches = {(plan.model.global_batch, plan.model.seq) for plan in plans.values()}
    if len(fitting) < 2 or len(batches) > 1:
        return ""
    (seconds, letter), (second, _) = fitting[:2]
    return f"The fastest that fits is {letter}, {second / seconds:.2f} × as fast as the next."


def _chart(found: Sequence[ComparedItem], limits: Sequence[int]) -> Any:
    """Return the chart of plans and runs by step time and memory; None if none has both."""
    entries = [
        Candidate(
            each.name,
            each.kind,
            each.cells[STEP.key].value or 0.0,
            each.cells[MEMORY.key].value or 0.0,
            each.what,
            each.letter,
        )
        for each in found
    ]
    if not any(each.step_seconds and each.memory_bytes for each in entries):
        return None
    most = max(each.memory_bytes for each in entries)
    return candidate_chart(entries, min(limits) if limits else int(most))
