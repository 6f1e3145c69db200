"""Estimates as a table for notebooks: the devices that a model needs, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.analysis.estimate import Estimate
from autoparallel.html.rendering import render
from autoparallel.planner.summary import plan_summary
from autoparallel.report.estimates import METHODS, days_text, dollars_text, estimates_title


def estimated_notebook(found: Sequence[Estimate]) -> str:
    """Return the notebook's form of estimates."""
    return render(
        "estimated_notebook.html",
        {
            "title": estimates_title(found),
            "rows": [
                (each, METHODS[each.method], each.plan and plan_summary(each.plan))
                for each in found
            ],
            "has_days": any(each.days is not None for each in found),
            "has_dollars": any(each.dollars is not None for each in found),
            "days": days_text,
            "dollars": dollars_text,
            "has_sequences": all(each.plan.model.seq for each in found if each.plan),
        },
    )
