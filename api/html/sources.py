"""The figures at the top of a page, and where each number of it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.baselines import Baseline
from autoparallel.cost_model.cluster import Device, Link
from autoparallel.planner.plan import Plan
from autoparallel.report.confidence import gap_text
from autoparallel.report.facts import memory_source
from autoparallel.report.words import (
    bytes_text,
    count_text,
    percent_text,
    rate_text,
    seconds_text,
    shares_text,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number at the top: its name, its value, and a remark."""

    label: str
    value: str
    remark: str = ""


def headline(plan: Plan, best: Baseline | None, again_seconds: float) -> list[Figure]:
    """The plan's own figures; ``best`` is the fastest baseline, ``again_seconds`` the plan's step
    priced together with it."""
    own, limit = plan.prediction, plan.cluster.usable_memory_bytes
    unit = "tokens" if plan.model.seq else "samples"
    found = [
        Figure("step", seconds_text(own.step_seconds), "predicted"),
        Figure(f"{unit} per second", count_text(own.tokens_per_second)),
        Figure("MFU", percent_text(own.model_flops_utilization), "of the devices' peak"),
        Figure(
            "memory", bytes_text(own.peak_memory_bytes),
            f"{percent_text(own.peak_memory_bytes / limit)} of {bytes_text(limit)}",
        ),
    ]  # fmt: skip
    if plan.has_pipeline:
        found.append(Figure("bubble", percent_text(own.bubble_fraction), "of the step"))
    if plan.solver.bound_seconds > 0:
        bound = f"no plan is below {seconds_text(plan.solver.bound_seconds)}"
        found.append(Figure("gap", percent_text(plan.solver.gap), bound))
    if best is not None:
        gain = best.step_seconds / again_seconds
        found.append(Figure("against baselines", f"{gain:.2f} ×", f"as fast as {best.name}"))
    return found


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A number, its value, and where it comes from."""

    figure: str
    value: str
    source: str


def source_rows(plan: Plan, missing: str) -> list[SourceRow]:
    """Every kind of number on the page. ``missing``: why the model was not loaded, if so."""
    own = plan.prediction
    error = own.profile.interpolation_error if own.profile is not None else 0.0
    rows = [
        SourceRow("times of ops and collectives", shares_text(own.sources, error) or "unknown",
                  "shares of the step's time, docs/profiling.md"),
    ]  # fmt: skip
    if own.profile is not None:
        where = own.profile.driver or f"{own.profile.threads} thread(s)"
        said = f"{own.profile.device}, {where}, torch {own.profile.torch}"
        rows.append(SourceRow("measurements", said, own.profile.mismatch or "this environment"))
    unit = "tokens" if plan.model.seq else "samples"
    rows += [
        SourceRow("step", seconds_text(own.step_seconds),
                  "the schedule simulated with each stage's seconds, docs/cost_model.md"),
        SourceRow(f"{unit} per second", count_text(own.tokens_per_second),
                  f"{unit} of the global batch, divided by the step"),
        SourceRow("MFU", percent_text(own.model_flops_utilization),
                  "FLOPs of the model without recomputation, at the peak, divided by the step"),
        SourceRow("memory", bytes_text(own.peak_memory_bytes), memory_source(plan)),
        SourceRow("gap", gap_text(plan), "lower bound of the search, docs/planning.md"),
    ]  # fmt: skip
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
        "memory_bytes": "memory", "usable_memory_bytes": "usable memory",
        "memory_bytes_per_second": "memory bandwidth", "peak_flops": "peak",
        "efficiency": "efficiency by family", "launch_seconds": "launch of a kernel",
    }  # fmt: skip
    unknown = device.sources.get("name", "not stated")
    return [
        SourceRow(f"{device.name}: {names[key]}", value, device.sources.get(key, unknown))
        for key, value in values.items()
        if value
    ]


def _link_row(link: Link) -> SourceRow:
    value = f"{rate_text(link.bytes_per_second, 'B/s')}, latency {seconds_text(link.alpha_seconds)}"
    return SourceRow(f"link {link.name}", value, link.source or "not stated")
