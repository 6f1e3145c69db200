"""Parts of a plan as tables: rows of plain values, and pandas DataFrames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoparallel.analysis.facts import merged_splits
from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import mesh_text, plan_summary

if TYPE_CHECKING:
    import pandas

Rows = list[dict[str, Any]]


def frame(plan: Plan, what: str) -> pandas.DataFrame:
    """Return a table of ``TABLES`` as a DataFrame. Raises UsageError AP340, UsageError AP341."""
    if what not in TABLES:
        raise UsageError(
            "AP341",
            f"a plan has no table {what!r}",
            fix=did_you_mean(what, tuple(TABLES)) or f"use one of {', '.join(TABLES)}",
        )
    return data_frame(TABLES[what](plan))


def data_frame(rows: Rows) -> pandas.DataFrame:
    """Return rows as a DataFrame. Raises UsageError AP340."""
    try:
        import pandas
    except ImportError as error:
        raise UsageError(
            "AP340",
            "to_frame needs pandas, which is not installed",
            why=str(error),
            fix="pip install pandas",
        ) from error
    return pandas.DataFrame(rows)


def stage_rows(plan: Plan) -> Rows:
    """Return a row per stage: its place, blocks, seconds per micro-batch and bytes."""
    return [
        {
            "stage": index,
            "blocks": [block.name for block in stage.blocks],
            "ranks": list(stage.devices),
            "mesh": mesh_text(stage.mesh),
            "zero": stage.zero,
            "recomputed": sum(block.recompute != "none" for block in stage.blocks),
            "forward_seconds": stage.prediction.seconds.get("forward", 0.0),
            "backward_seconds": stage.prediction.seconds.get("backward", 0.0),
            "memory_bytes": sum(stage.prediction.memory_bytes.values()),
        }
        for index, stage in enumerate(plan.stages)
    ]


def memory_rows(plan: Plan) -> Rows:
    """Return a row per stage, a column of bytes per category."""
    return [
        {"stage": index, **stage.prediction.memory_bytes} for index, stage in enumerate(plan.stages)
    ]


def weight_rows(plan: Plan) -> Rows:
    """Return a row per parameter of each kind of block on each mesh, with its layout in words."""
    rows: Rows = []
    for mesh in dict.fromkeys(stage.mesh for stage in plan.stages):
        members = [stage for stage in plan.stages if stage.mesh == mesh]
        for kind in merged_splits(plan, members):
            rows += [
                {
                    "blocks": list(kind.blocks),
                    "mesh": mesh_text(mesh),
                    "weight": name,
                    "layout": layout,
                }
                for layout, names in kind.groups.items()
                for name in names
            ]
    return rows


def candidate_rows(plan: Plan) -> Rows:
    """Return the plan, then its alternatives, fastest first; unknown figures are None."""
    best = plan.prediction
    rows: Rows = [
        {
            "configuration": plan_summary(plan),
            "step_seconds": best.step_seconds,
            "memory_bytes": best.peak_memory_bytes,
            "reason": "the plan",
            "chosen": True,
        }
    ]
    rows += [
        {
            "configuration": other.summary,
            "step_seconds": other.step_seconds or None,
            "memory_bytes": other.peak_memory_bytes or None,
            "reason": other.reason,
            "chosen": False,
        }
        for other in plan.alternatives
    ]
    return rows


TABLES: dict[str, Callable[[Plan], Rows]] = {
    "stages": stage_rows,
    "memory": memory_rows,
    "weights": weight_rows,
    "candidates": candidate_rows,
}
