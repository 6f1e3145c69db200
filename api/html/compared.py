"""Plans and runs side by side as a page, and as a table for notebooks.

In: items of ``compare``. Out: one HTML text in the style of a plan's report: figures, a picture by
time and memory, different choices, parts of a step and of the memory, and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoparallel import __version__
from autoparallel.analysis.compare import Item
from autoparallel.analysis.facts import MEMORY_MEANINGS
from autoparallel.html.charts import Candidate, candidate_chart
from autoparallel.html.rendering import MEMORY_LOOKS, OTHER_MEMORY, TIME_LOOKS, render
from autoparallel.report.comparison import (
    FIGURES,
    MEMORY,
    STEP,
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
    """Return the whole page."""
    found = _context(items)
    sections = [
        (name, title) for name, title in SECTIONS.items() if name != "choices" or len(items) > 1
    ]
    return render(
        "compared.html",
        {**found, "sections": sections, "folder": "compared", "version": __version__},
    )


def compared_notebook(items: Sequence[Item]) -> str:
    """Return the notebook's form of a comparison: figures and different choices."""
    return render("compared_notebook.html", _context(items))


def _context(items: Sequence[Item]) -> dict[str, Any]:
    figures = [each for each in FIGURES if any(each.find(item) is not None for item in items)]
    found = compare_items(items, figures)
    most = max((sum(each.held.values()) for each in found), default=0.0)
    return {
        "title": "Comparison: " + ", ".join(each.name for each in found),
        "items": found,
        "columns": figures,
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
            for name in large_parts([each.held for each in found], MEMORY_MEANINGS, most)
        },
        "fullest": max((max(sum(e.held.values()), e.limit) for e in found), default=0.0),
    }


def _name_fastest(items: Sequence[Item], found: Sequence[ComparedItem]) -> str:
    """Name the fastest plan that fits; "" if it is unknown."""
    fitting = sorted(
        (item.plan.prediction.step_seconds, own.letter)
        for item, own in zip(items, found, strict=True)
        if item.plan is not None and own.excess <= 0
    )
    batches = {(item.plan.model.global_batch, item.plan.model.seq) for item in items if item.plan}
    if len(fitting) < 2 or len(batches) > 1:
        return ""
    (seconds, letter), (second, _) = fitting[:2]
    return f"The fastest that fits is {letter}, {second / seconds:.2f} × as fast as the next."


def _chart(items: Sequence[Item], found: Sequence[ComparedItem]) -> Any:
    """Return the chart of items with both seconds and bytes; None without such an item."""
    entries = [
        Candidate(
            own.name,
            own.kind,
            STEP.find(item) or 0.0,
            MEMORY.find(item) or 0.0,
            own.what,
            own.letter,
        )
        for item, own in zip(items, found, strict=True)
    ]
    if not any(each.step_seconds and each.memory_bytes for each in entries):
        return None
    limits = [own.limit for own in found if own.limit]
    most = max(each.memory_bytes for each in entries)
    return candidate_chart(entries, int(min(limits)) if limits else int(most))
