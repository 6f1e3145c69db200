"""The page of a plan, with facts of its model and of a run, put into templates.

In: a plan, and if known the plan priced again and the measurements of a run. Out: one HTML text
that refers to no other file: styles, script, drawings and data are inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from autoparallel.analysis.baselines import fastest
from autoparallel.analysis.facts import (
    fullest_rank,
    merged_communication,
    ordered_memory,
    rank_seconds,
    usable_bytes,
)
from autoparallel.analysis.measurement import Measurement, checksum
from autoparallel.analysis.repriced import PricedAgain
from autoparallel.cost_model.ops.memory import policy
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.cost_model.simulator.trace import NAMES, rank_name
from autoparallel.html.candidates import candidate_chart
from autoparallel.html.looks import MEMORY_LOOKS, MEMORY_MEANINGS, TIME_LOOKS
from autoparallel.html.memory_chart import memory_chart
from autoparallel.html.parts import between_hosts, block_cells, cluster_hosts, weight_groups
from autoparallel.html.rendering import render
from autoparallel.html.roofline import roofline
from autoparallel.html.schedule import STREAM_NAMES, ScheduleView, schedule_view
from autoparallel.html.sources import baselines_text, headline, source_rows
from autoparallel.options.words import ranks_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.replicas import stages_of_ranks
from autoparallel.planner.summary import plan_summary
from autoparallel.report.confidence import gap_text, simplest_text
from autoparallel.report.drawing import SAME, timeline_of
from autoparallel.report.page import axis_lines, configuration_text, device_text, precision_text

SECTIONS = {
    "cluster": "Cluster",
    "model": "Model",
    "schedule": "Schedule",
    "communication": "Communication",
    "memory": "Memory",
    "time": "Time",
    "roofline": "Roofline",
    "candidates": "Candidates",
    "measured": "Measured",
    "sources": "Sources",
}
MISSING = "the model was not loaded (--no-target)"
MOST_STAGE_ROWS = 16
"""Number of stages above which tables are folded."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of a page besides the plan. ``missing`` says why ``priced`` is None."""

    priced: PricedAgain | None = None
    missing: str = MISSING
    measured: Measurement | None = None


NOTHING = Sources()


def page(plan: Plan, sources: Sources = NOTHING) -> str:
    """Return the whole page."""
    return render("report.html", _context(plan, sources))


def plan_notebook(plan: Plan) -> str:
    """Return the notebook's form of a plan: headline, stages and candidates."""
    return render("notebook.html", _context(plan, NOTHING))


def _context(plan: Plan, sources: Sources) -> Mapping[str, Any]:
    priced, measured = sources.priced, sources.measured
    timeline = priced.timeline if priced is not None else timeline_of(plan)
    stages, held = fullest_rank(plan)
    limit = usable_bytes(plan, plan.stages[stages[0]])
    found = priced.baselines if priced is not None else ()
    again = priced.step_seconds if priced is not None else plan.prediction.step_seconds
    ranks = stages_of_ranks(plan)
    is_same_plan = measured is not None and measured.plan == checksum(plan)
    measured_seconds = (
        measured.step_seconds / measured.num_batches if measured and is_same_plan else None
    )
    return {
        "plan": plan,
        "title": f"{plan_summary(plan)} · {plan.model.target or 'a model'}",
        "sections": list(SECTIONS.items()),
        "folder": "sections",
        "version": plan.version,
        "model_name": plan.model.target or "a model",
        "configuration": configuration_text(plan),
        "memory_looks": MEMORY_LOOKS,
        "memory_meanings": MEMORY_MEANINGS,
        "time_looks": TIME_LOOKS,
        "devices": device_text(plan),
        "precision": precision_text(plan),
        "figures": headline(plan, fastest(found), again, measured_seconds),
        "baselines_text": baselines_text(found, fastest(found)),
        "again_seconds": again,
        "is_priced_alike": isclose(again, plan.prediction.step_seconds, rel_tol=SAME),
        "baselines": found,
        "missing": sources.missing,
        "priced": priced,
        "hosts": cluster_hosts(plan),
        "links": between_hosts(plan.cluster),
        "ranks": ranks,
        "cells": block_cells(plan),
        "num_blocks": sum(len(stage.blocks) for stage in plan.stages),
        "weights": weight_groups(plan, priced.shapes if priced is not None else {}),
        "axes": list(dict.fromkeys(axis_lines(list(plan.stages)))),
        "schedule": _schedule(plan, timeline),
        "stream_names": STREAM_NAMES,
        "kind_names": NAMES,
        "stages_folded": len(plan.stages) > MOST_STAGE_ROWS,
        "communication": [
            (ranks_text(stages), each) for stages, each in merged_communication(plan)
        ],
        "memory_chart": _memory_chart(plan, priced, limit),
        "memory_rank": ranks.index(stages),
        "memory_device": plan.stages[stages[0]].devices[0],
        "memory_rows": ordered_memory(held),
        "memory_total": sum(held.values()),
        "memory_limit": limit,
        "spent": [(stages, rank_seconds(plan, stages)) for stages in ranks],
        "roofline": _roofline(plan, priced),
        "chart": candidate_chart(plan, found, limit),
        "gap": gap_text(plan),
        "simplest": simplest_text(plan),
        "source_rows": source_rows(plan, sources.missing if priced is None else ""),
        "measured": measured,
        "is_same_plan": is_same_plan,
    }


def _schedule(plan: Plan, timeline: Timeline | None) -> ScheduleView | None:
    if timeline is None:
        return None
    sizes = [len(plan.stages[stages[0]].devices) for stages in stages_of_ranks(plan)]
    return schedule_view(timeline, [rank_name(rank, size) for rank, size in enumerate(sizes)])


def _memory_chart(plan: Plan, priced: PricedAgain | None, limit: int) -> Any:
    if priced is None or not priced.memory:
        return None
    events = priced.timeline.events[priced.fullest]
    return memory_chart(priced.memory, events, priced.timeline.step_seconds, limit)


def _roofline(plan: Plan, priced: PricedAgain | None) -> Any:
    if priced is None or not priced.ops:
        return None
    dtype = policy(plan.model.precision, plan.model.optimizer).compute_dtype
    return roofline(priced.ops, plan.cluster.slowest_device(plan.stages[0].devices), dtype)
