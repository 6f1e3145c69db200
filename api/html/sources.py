"""The figures at the top of a page, and the sources of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.analysis.baselines import Baseline
from autoparallel.analysis.facts import memory_source
from autoparallel.cost_model.cluster.cluster import Device, Link
from autoparallel.options.words import (
    bytes_text,
    count_text,
    percent_text,
    rate_text,
    seconds_text,
    shares_text,
)
from autoparallel.planner.plan import Plan
from autoparallel.report.confidence import gap_text


@dataclass(frozen=True, slots=True)
class Figure:
    """Number at the top: its name, its value, and a remark."""

    label: str
    value: str
    remark: str = ""


def headline(
    plan: Plan, best: Baseline | None, again_seconds: float, measured_seconds: float | None = None
) -> list[Figure]:
    """Return the plan's own figures; ``best`` is the fastest baseline, ``again_seconds`` the plan's
    step priced together with it, ``measured_seconds`` the step of a run."""
    own, limit = plan.prediction, plan.cluster.usable_memory_bytes
    unit = "tokens" if plan.model.seq else "samples"
    said = f"; measured {seconds_text(measured_seconds)}" if measured_seconds else ""
    found = [
        Figure("step", seconds_text(own.step_seconds), f"predicted{said}"),
        Figure(f"{unit} per second", count_text(own.tokens_per_second)),
        Figure("MFU", percent_text(own.model_flops_utilization), "of the devices' peak"),
        Figure(
            "memory",
            bytes_text(own.peak_memory_bytes),
            f"{percent_text(own.peak_memory_bytes / limit)} of {bytes_text(limit)}",
        ),
    ]
    if plan.has_pipeline:
        found.append(Figure("bubble", percent_text(own.bubble_fraction), "of the step"))
    if plan.solver.bound_seconds > 0:
        gap = f"no step is shorter; gap {percent_text(plan.solver.gap)}"
        found.append(Figure("lower bound", seconds_text(plan.solver.bound_seconds), gap))
    if best is not None:
        gain = best.step_seconds / again_seconds
        found.append(Figure("against baselines", f"{gain:.2f} ×", f"as fast as {best.name}"))
    return found


def baselines_text(found: Sequence[Baseline], best: Baseline | None) -> str:
    """Describe the baselines in a sentence, the fastest that fits first."""
    others = [
        f"{each.name} takes {seconds_text(each.step_seconds)}"
        if each.fits
        else f"{each.name} does not fit"
        for each in found
        if each.configuration and each is not best
    ]
    if best is not None:
        others.insert(
            0,
            f"The best of DDP, FSDP and 3-D parallelism is {best.name}, {best.configuration}, "
            f"with {seconds_text(best.step_seconds)} a step",
        )
    return "; ".join(others) + "." if others else ""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """Number, its value, and its source."""

    figure: str
    value: str
    source: str


def source_rows(plan: Plan, missing: str) -> list[SourceRow]:
    """Return a row for every kind of number. ``missing``: why the model was not loaded, if so."""
    own = plan.prediction
    error = own.profile.interpolation_error if own.profile is not None else 0.0
    rows = [
        SourceRow(
            "times of ops and collectives",
            shares_text(own.sources, error) or "unknown",
            "shares of the step's time, docs/costs.md",
        ),
    ]
    if own.profile is not None:
        where = own.profile.driver or f"{own.profile.threads} thread(s)"
        said = f"{own.profile.device}, {where}, torch {own.profile.torch}"
        rows.append(SourceRow("measurements", said, own.profile.mismatch or "this environment"))
    unit = "tokens" if plan.model.seq else "samples"
    rows += [
        SourceRow(
            "step",
            seconds_text(own.step_seconds),
            "the schedule simulated with each stage's seconds, docs/costs.md",
        ),
        SourceRow(
            f"{unit} per second",
            count_text(own.tokens_per_second),
            f"{unit} of the global batch, divided by the step",
        ),
        SourceRow(
            "MFU",
            percent_text(own.model_flops_utilization),
            "FLOPs of the model without recomputation, at the peak, divided by the step",
        ),
        SourceRow("memory", bytes_text(own.peak_memory_bytes), memory_source(plan)),
        SourceRow("gap", gap_text(plan), "lower bound of the search, docs/planning.md"),
    ]
    model_rows = missing or "the plan's model, loaded and priced again"
    rows.append(SourceRow("baselines, roofline, memory in time", "", model_rows))
    for device in {host.device.name: host.device for host in plan.cluster.hosts}.values():
        rows += _device_rows(device)
    links = [host.link for host in plan.cluster.hosts if host.num_devices > 1]
    links += [plan.cluster.inter_link] if len(plan.cluster.hosts) > 1 else []
    links += [plan.cluster.rack_link] if plan.cluster.rack_link is not None else []
    return rows + [_link_row(link) for link in dict.fromkeys(links)]


def _device_rows(device: Device) -> list[SourceRow]:
    peaks = ", ".join(
        f"{dtype} {rate_text(flops, 'FLOP/s')}" for dtype, flops in device.peak_flops.items()
    )
    values = {
        "memory_bytes": bytes_text(device.memory_bytes),
        "usable_memory_bytes": bytes_text(device.usable_memory_bytes),
        "memory_bytes_per_second": rate_text(device.memory_bytes_per_second, "B/s"),
        "peak_flops": peaks,
        "efficiency": ", ".join(f"{k} {percent_text(v)}" for k, v in device.efficiency.items()),
        "launch_seconds": seconds_text(device.launch_seconds),
    }
    names = {
        "memory_bytes": "memory",
        "usable_memory_bytes": "usable memory",
        "memory_bytes_per_second": "memory bandwidth",
        "peak_flops": "peak",
        "efficiency": "efficiency by family",
        "launch_seconds": "launch of a kernel",
    }
    unknown = device.sources.get("*", device.sources.get("name", "not stated"))
    return [
        SourceRow(f"{device.name}: {names[key]}", value, _source(device, key, unknown))
        for key, value in values.items()
        if value
    ]


def _source(device: Device, key: str, unknown: str) -> str:
    """Name the source of a figure; the entries of a table may have their own sources."""
    parts = {
        name.partition(".")[2]: text
        for name, text in device.sources.items()
        if name.startswith(f"{key}.")
    }
    own = device.sources.get(key)
    found = [own] if own is not None or not parts else []
    found += [f"{name}: {text}" for name, text in parts.items()]
    return "; ".join(text or unknown for text in found)


def _link_row(link: Link) -> SourceRow:
    value = f"{rate_text(link.bytes_per_second, 'B/s')}, latency {seconds_text(link.alpha_seconds)}"
    return SourceRow(f"link {link.name}", value, link.source or "not stated")
