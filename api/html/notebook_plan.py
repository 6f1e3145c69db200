"""The plan that users get: the planner's, which notebooks can show and pandas can read.

The planner's ``Plan`` is data and knows no report. Where a plan leaves the package (``plan``,
``load_plan``) it becomes a ``ShownPlan``, which has the same fields, equals the same plans, and
shows itself.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from autoparallel.planner.plan import Plan

if TYPE_CHECKING:
    import pandas


class ShownPlan(Plan):
    """A ``Plan`` that renders as HTML in notebooks, and as its short report in IPython."""

    __slots__ = ()
    __hash__ = Plan.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(Plan))

    def _repr_html_(self) -> str:
        from autoparallel.html import notebook

        return notebook(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """What IPython shows where there is no HTML: the report on one screen."""
        from autoparallel.report import describe

        printer.text("ShownPlan(...)" if is_cycle else describe(self, short=True))

    def to_frame(self, what: str = "stages") -> pandas.DataFrame:
        """A part of the plan as a pandas DataFrame, in seconds and bytes.

        ``what`` is "stages" (a row per stage), "memory" (bytes by stage and category),
        "weights" (how each parameter lies) or "candidates" (this plan and its alternatives).

        Raises UsageError: AP340 where pandas is not installed, AP341 for another ``what``.
        """
        from autoparallel.report.tables import frame

        return frame(self, what)


def shown(plan: Plan) -> ShownPlan:
    """The same plan, as users get it."""
    return ShownPlan(**{each.name: getattr(plan, each.name) for each in fields(Plan)})
