"""Page of a plan, with facts of its model and of a run, rendered from templates.

In: a plan, and if known the plan priced again and the measurement of a run. Out: one self-contained
HTML text: styles, scripts, drawings and data are inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from autoparallel.analysis.baselines import Baseline, fastest
from autoparallel.analysis.facts import (
    FigureRow,
    candidate_rows,
    configuration_text,
    device_text,
    figure_rows,
    fullest_rank,
    merged_communication,
    precision_text,
    rank_seconds,
    stage_rows,
)
from autoparallel.analysis.measurement import Measurement, checksum
from autoparallel.analysis.repriced import PricedAgain
from autoparallel.analysis.sharding import axis_lines
from autoparallel.cost_model.cluster.cluster import Cluster, Device
from autoparallel.cost_model.ops.memory import policy
from autoparallel.cost_model.simulator.trace import NAMES, rank_name
from autoparallel.html.charts import Candidate, candidate_chart, memory_chart
from autoparallel.html.parts import between_hosts, block_cells, cluster_hosts, weight_groups
from autoparallel.html.rendering import render
from autoparallel.html.roofline import roofline
from autoparallel.html.schedule import STREAM_NAMES, schedule_view
from autoparallel.options.words import (
    bytes_text,
    percent_text,
    ranks_text,
    rate_text,
    seconds_text,
    shares_text,
)
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.planner.variants.replicas import stages_of_ranks
from autoparallel.report.drawing import SAME, timeline_of
from autoparallel.report.page import gap_text, simplest_text

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
"""Number of stages above which tables of stages are folded."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Data for a plan's page besides the plan: its prices and the measurement of a run. If
    ``priced`` is None, ``missing`` says why."""

    priced: PricedAgain | None = None
    missing: str = MISSING
    measured: Measurement | None = None


NOTHING = Sources()


def page(plan: Plan, sources: Sources = NOTHING) -> str:
    """Return the complete HTML page of a plan."""
    return render("report.html", _context(plan, sources))


def plan_notebook(plan: Plan) -> str:
    """Return a plan as HTML for a notebook: main numbers, stages and candidates."""
    return render("notebook.html", _context(plan, NOTHING))


def _context(plan: Plan, sources: Sources) -> Mapping[str, Any]:
    priced, measured, memory = sources.priced, sources.measured, fullest_rank(plan)
    timeline = priced.timeline if priced is not None else timeline_of(plan)
    found = priced.baselines if priced is not None else ()
    again = priced.step_seconds if priced is not None else plan.prediction.step_seconds
    ranks = stages_of_ranks(plan)
    is_same_plan = measured is not None and measured.plan == checksum(plan)
    return {
        "plan": plan,
        "title": f"{plan_summary(plan)} · {plan.model.target or 'a model'}",
        "sections": list(SECTIONS.items()),
        "folder": "sections",
        "version": plan.version,
        "model_name": plan.model.target or "a model",
        "configuration": configuration_text(plan),
        "devices": device_text(plan),
        "precision": precision_text(plan),
        "figures": headline(plan, found, again, measured if is_same_plan else None),
        "baselines_text": baselines_text(found),
        "again_seconds": again,
        "is_priced_alike": isclose(again, plan.prediction.step_seconds, rel_tol=SAME),
        "baselines": found,
        "missing": sources.missing,
        "priced": priced,
        "hosts": cluster_hosts(plan),
        "links": between_hosts(plan.cluster),
        "ranks": ranks,
        "stages": stage_rows(plan),
        "cells": block_cells(plan),
        "num_blocks": sum(len(stage.blocks) for stage in plan.stages),
        "weights": weight_groups(plan, priced.shapes if priced is not None else {}),
        "axes": list(dict.fromkeys(axis_lines(plan.stages))),
        "schedule": timeline and schedule_view(timeline, _rank_names(plan)),
        "stream_names": STREAM_NAMES,
        "kind_names": NAMES,
        "stages_folded": len(plan.stages) > MOST_STAGE_ROWS,
        "communication": [
            (ranks_text(stages), each) for stages, each in merged_communication(plan)
        ],
        "memory_chart": _memory_chart(priced, memory.limit_bytes),
        "memory_rank": ranks.index(memory.stages),
        "memory": memory,
        "spent": [(stages, rank_seconds(plan, stages)) for stages in ranks],
        "roofline": _roofline(plan, priced),
        "chart": candidate_chart(candidates(plan, found), memory.limit_bytes),
        "simplest": simplest_text(plan),
        "source_rows": source_rows(plan, sources.missing if priced is None else ""),
        "measured": measured,
        "is_same_plan": is_same_plan,
    }


def headline(
    plan: Plan, baselines: Sequence[Baseline], again_seconds: float, measured: Measurement | None
) -> list[FigureRow]:
    """Return the rows at the top of the page. ``again_seconds`` is the plan's step time as priced
    together with ``baselines``."""
    found = figure_rows(plan)
    if measured is not None:
        seconds = measured.step_seconds / measured.num_batches
        said = f"predicted; measured {seconds_text(seconds)}"
        found[0] = found[0]._replace(remark=said)
    if plan.solver.bound_seconds > 0:
        gap = f"no step is shorter; gap {percent_text(plan.solver.gap)}"
        found.append(FigureRow("lower bound", seconds_text(plan.solver.bound_seconds), gap))
    best = fastest(baselines)
    if best is not None:
        gain = best.step_seconds / again_seconds
        found.append(FigureRow("against baselines", f"{gain:.2f} ×", f"as fast as {best.name}"))
    return found


def baselines_text(found: Sequence[Baseline]) -> str:
    """Describe the baselines in a sentence, the fastest that fits first."""
    best, texts = fastest(found), []
    if best is not None:
        texts.append(
            f"The best of DDP, FSDP and 3-D parallelism is {best.name}, {best.configuration}, "
            f"with {seconds_text(best.step_seconds)} a step"
        )
    for each in found:
        if each.configuration and each is not best:
            takes = f"takes {seconds_text(each.step_seconds)}" if each.fits else "does not fit"
            texts.append(f"{each.name} {takes}")
    return "; ".join(texts) + "." if texts else ""


def candidates(plan: Plan, baselines: Sequence[Baseline]) -> list[Candidate]:
    """Return the plan, its alternatives and the baselines as candidates of the chart."""
    found = [
        Candidate(
            row["configuration"],
            "plan" if row["chosen"] else "alternative",
            row["step_seconds"] or 0.0,
            row["memory_bytes"] or 0.0,
            row["reason"],
            "plan" if row["chosen"] else "",
        )
        for row in candidate_rows(plan, merged=True)
    ]
    for each in baselines:
        if each.configuration:
            name = f"{each.name}: {each.configuration}"
            why = each.reason or f"best of {each.num_priced} priced"
            seconds, held = each.step_seconds, each.memory_bytes
            found.append(Candidate(name, "baseline", seconds, held, why, each.name))
    return found


def _rank_names(plan: Plan) -> list[str]:
    sizes = [len(plan.stages[stages[0]].devices) for stages in stages_of_ranks(plan)]
    return [rank_name(rank, size) for rank, size in enumerate(sizes)]


def _memory_chart(priced: PricedAgain | None, limit: int) -> Any:
    if priced is None or not priced.memory:
        return None
    events = priced.timeline.events[priced.fullest]
    return memory_chart(priced.memory, events, priced.timeline.step_seconds, limit)


def _roofline(plan: Plan, priced: PricedAgain | None) -> Any:
    if priced is None or not priced.ops:
        return None
    dtype = policy(plan.model.precision, plan.model.optimizer).compute_dtype
    return roofline(priced.ops, plan.cluster.slowest_device(plan.stages[0].devices), dtype)


def source_rows(plan: Plan, missing: str) -> list[FigureRow]:
    """Return table rows with the source of each number on a plan's page; ``missing`` is the reason
    if the model was not loaded."""
    own, profile = plan.prediction, plan.prediction.profile
    error = profile.interpolation_error if profile is not None else 0.0
    shares, where = shares_text(own.sources, error) or "unknown", "docs/costs.md"
    rows = [("times of ops and collectives", shares, f"shares of the step's time, {where}")]
    if profile is not None:
        where = profile.driver or f"{profile.threads} thread(s)"
        said = f"{profile.device}, {where}, torch {profile.torch}"
        rows.append(("measurements", said, profile.mismatch or "this environment"))
    rows += [(row.name, row.text, row.source) for row in figure_rows(plan) if row.source]
    rows.append(("gap", gap_text(plan), "lower bound of the search, docs/planning.md"))
    model_rows = missing or "the plan's model, loaded and priced again"
    rows.append(("baselines, roofline, memory in time", "", model_rows))
    for device in {host.device.name: host.device for host in plan.cluster.hosts}.values():
        rows += _device_rows(device)
    rows += _link_rows(plan.cluster)
    return [FigureRow(name, text, source=source) for name, text, source in rows]


def _device_rows(device: Device) -> list[tuple[str, str, str]]:
    peaks = [f"{dtype} {rate_text(flops, 'FLOP/s')}" for dtype, flops in device.peak_flops.items()]
    parts = [f"{family} {percent_text(part)}" for family, part in device.efficiency.items()]
    values = {
        "memory_bytes": ("memory", bytes_text(device.memory_bytes)),
        "usable_memory_bytes": ("usable memory", bytes_text(device.usable_memory_bytes)),
        "memory_bytes_per_second": (
            "memory bandwidth",
            rate_text(device.memory_bytes_per_second, "B/s"),
        ),
        "peak_flops": ("peak", ", ".join(peaks)),
        "efficiency": ("efficiency by family", ", ".join(parts)),
        "launch_seconds": ("launch of a kernel", seconds_text(device.launch_seconds)),
    }
    unknown = device.sources.get("*", device.sources.get("name", "not stated"))
    return [
        (f"{device.name}: {name}", text, _source(device, key, unknown))
        for key, (name, text) in values.items()
        if text
    ]


def _source(device: Device, key: str, unknown: str) -> str:
    """Return the source of a device's number ``key``; if ``key`` is a table with a source per
    entry, of all entries. ``unknown`` stands for a missing source."""
    parts = {
        name.partition(".")[2]: text
        for name, text in device.sources.items()
        if name.startswith(f"{key}.")
    }
    own = device.sources.get(key)
    found = [own] if own is not None or not parts else []
    found += [f"{name}: {text}" for name, text in parts.items()]
    return "; ".join(text or unknown for text in found)


def _link_rows(cluster: Cluster) -> list[tuple[str, str, str]]:
    links = [host.link for host in cluster.hosts if host.num_devices > 1]
    links += [cluster.inter_link] if len(cluster.hosts) > 1 else []
    links += [cluster.rack_link] if cluster.rack_link is not None else []
    return [
        (
            f"link {link.name}",
            f"{rate_text(link.bytes_per_second, 'B/s')}, "
            f"latency {seconds_text(link.alpha_seconds)}",
            link.source or "not stated",
        )
        for link in dict.fromkeys(links)
    ]
