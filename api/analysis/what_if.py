"""Effect of another choice, or of another cluster, on a plan.

``why_not`` plans again with forced degrees. ``what_if`` changes figures of the cluster
(``link.inter.bytes_per_second=50e9``), prices the plan on it, and plans for it. Both compare the
seconds of the busiest rank by purpose, and the bytes of the fullest device.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autoparallel.analysis.facts import busiest_rank, rank_seconds
from autoparallel.analysis.plan_model import EQUAL, PlanModel
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.cost_model.cluster.cluster import Cluster, Device, Link
from autoparallel.cost_model.cluster.figures import parse_bytes, parse_rate
from autoparallel.options.parse import parse_parallel
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import Evaluator
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan import plan_program, priced, within_limit

Place = Literal["device", "link.intra", "link.inter", "link.rack"]
DEVICE_FIGURES = tuple(
    each.name
    for each in fields(Device)
    if each.name not in ("name", "kind", "sources", "tf32", "peak_flops", "efficiency", "slowdown")
)
LINK_FIGURES = ("bytes_per_second", "alpha_seconds", "base_seconds", "reduction_bytes_per_second")
WHOLE = ("memory_bytes", "usable_memory_bytes", "num_units")
"""Device figures that are integers."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Comparison of a plan (``now``) with the same plan priced on a changed cluster (``same``), and
    with the plan that is found for the changed cluster (``found``)."""

    now: Plan
    same: Plan
    found: Plan

    @property
    def stays(self) -> bool:
        """Return whether the plan is still the best, or as good as the best, after the change."""
        least = self.found.prediction.step_seconds * (1 + EQUAL)
        return self.excess_bytes(self.same) <= 0 and self.same.prediction.step_seconds <= least

    def excess_bytes(self, plan: Plan) -> float:
        """Return the bytes by which a plan's peak exceeds the changed devices' memory."""
        return plan.prediction.peak_memory_bytes - self.same.cluster.usable_memory_bytes


def why_not(model: PlanModel, parallel: str, seconds: float, cache: Cache = NO_CACHE) -> Plan:
    """Return the best plan with the degrees that the text ``parallel`` forces, within ``seconds``.

    Raises UsageError AP112 for bad degrees, and the errors of planning if no plan exists; AP301
    gives the memory that it would need.
    """
    options = replace(model.options, forced=parse_parallel(parallel), time_limit_seconds=seconds)
    return _planned(model, model.plan.cluster, options, cache)


def what_if(
    model: PlanModel, changes: Sequence[str], seconds: float, cache: Cache = NO_CACHE
) -> Changed:
    """Price the plan on its cluster after ``changes`` (``PLACE.FIGURE=VALUE``), and plan again.

    Raises UsageError AP358 and AP359 for a bad change, and the errors of planning.

    If a device changes, prices come from specifications: measured times are of the old device.
    """
    cluster = changed_cluster(model.plan.cluster, changes)
    options = replace(model.options, time_limit_seconds=seconds)
    if any(text.strip().startswith("device") for text in changes):
        options = replace(options, profile="analytic")
    now = _repriced(model, model.plan.cluster, options)
    same = _repriced(model, cluster, options)
    return Changed(now, same, _planned(model, cluster, options, cache))


def _planned(model: PlanModel, cluster: Cluster, options: Any, cache: Cache) -> Plan:
    limit = cluster.usable_memory_bytes

    def search(limit_bytes: int | None) -> Plan:
        own = replace(options, memory_limit_bytes=limit_bytes)
        return plan_program(model.program, model.target, cluster, own, cache=cache)

    found = within_limit(search(None), model.program, limit, search, cache)
    return replace(found, model=model.plan.model)


def _repriced(model: PlanModel, cluster: Cluster, options: Any) -> Plan:
    """Return the plan priced on another cluster; its predicted memory stays as it is."""
    plan = model.plan
    graph, basis = priced(model.program, model.target, cluster, options)
    evaluator = Evaluator(graph, model.program.blocks, basis=basis)
    found = evaluator.evaluation(plan, cluster)
    ratio = plan.prediction.step_seconds / found.step_seconds
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, seconds=own.seconds))
        for stage, own in zip(plan.stages, found.stages, strict=True)
    )
    prediction = replace(
        plan.prediction,
        step_seconds=found.step_seconds,
        bubble_fraction=found.bubble_fraction,
        tokens_per_second=plan.prediction.tokens_per_second * ratio,
        model_flops_utilization=plan.prediction.model_flops_utilization * ratio,
    )
    return replace(plan, cluster=cluster, stages=stages, prediction=prediction)


def terms(plan: Plan) -> Mapping[str, float]:
    """Return the seconds of a step on the rank with most work, by purpose (compute, sends, …)."""
    return rank_seconds(plan, busiest_rank(plan))


# ------------------------------------------------------------ figures of a cluster


def changed_cluster(cluster: Cluster, changes: Sequence[str]) -> Cluster:
    """Return a cluster with changed numbers: ``PLACE.FIGURE=VALUE``, or ``=*2`` for a factor.

    Raises UsageError AP358 for an unknown figure and AP359 for an invalid value.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> found = changed_cluster(parse_cluster("2x8xH100"), ["link.inter.bytes_per_second=50e9"])
    >>> found.inter_link.bytes_per_second
    50000000000.0
    """
    for text in changes:
        path, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise UsageError(
                "AP358",
                f"--what-if {text!r} is not FIGURE=VALUE",
                fix="for example: --what-if link.inter.bytes_per_second=50e9",
            )
        cluster = _changed(cluster, path, value)
    return replace(cluster, name=f"{cluster.name} with {', '.join(map(str.strip, changes))}")


def _changed(cluster: Cluster, path: str, value: str) -> Cluster:
    for place in ("link.intra", "link.inter", "link.rack", "device"):
        if path.startswith(f"{place}."):
            name = path.removeprefix(f"{place}.")
            break
    else:
        raise _unknown(cluster, path)
    if path not in figures(cluster) and _plain(path) not in figures(cluster):
        raise _unknown(cluster, path)
    if place == "device":
        own = [_device(host.device, _plain(name), value) for host in cluster.hosts]
        pairs = zip(cluster.hosts, own, strict=True)
        hosts = tuple(replace(host, device=device) for host, device in pairs)
        return replace(cluster, hosts=hosts)
    if place == "link.intra":
        hosts = tuple(replace(host, link=_link(host.link, name, value)) for host in cluster.hosts)
        return replace(cluster, hosts=hosts)
    if place == "link.rack" and cluster.rack_link is not None:
        return replace(cluster, rack_link=_link(cluster.rack_link, name, value))
    return replace(cluster, inter_link=_link(cluster.inter_link, name, value))


def _plain(path: str) -> str:
    """Expand the abbreviation ``peak.bfloat16`` in a figure's name to ``peak_flops.bfloat16``."""
    return re.sub(r"\bpeak\.", "peak_flops.", path)


def figures(cluster: Cluster) -> tuple[str, ...]:
    """Return the names of all numbers in a cluster's description that ``--what-if`` can change."""
    found: dict[str, None] = {f"device.{name}": None for name in DEVICE_FIGURES}
    for host in cluster.hosts:
        found |= {f"device.peak_flops.{dtype}": None for dtype in host.device.peak_flops}
        found |= {f"device.efficiency.{family}": None for family in host.device.efficiency}
    places = ["intra", "inter"] + (["rack"] if cluster.rack_link is not None else [])
    found |= {f"link.{place}.{name}": None for place in places for name in LINK_FIGURES}
    return tuple(found)


def _unknown(cluster: Cluster, path: str) -> UsageError:
    known = figures(cluster)
    close = difflib.get_close_matches(_plain(path), known, n=3, cutoff=0.5)
    return UsageError(
        "AP358",
        f"--what-if: the cluster has no figure {path!r}",
        fix=f"similar names: {', '.join(close)}" if close else f"one of {', '.join(known)}",
    )


def _device(device: Device, name: str, text: str) -> Device:
    group, _, key = name.partition(".")
    if key:
        own = dict(getattr(device, group))
        if key not in own:
            return device
        own[key] = _value(own[key], text, name)
        return replace(device, **{group: own})  # type: ignore[arg-type]
    before = getattr(device, name) or 0.0
    value: Any = _value(before, text, name)
    if name in WHOLE:
        value = int(value)
    if name == "memory_bytes":
        usable = int(device.usable_memory_bytes * value / device.memory_bytes)
        return replace(device, memory_bytes=value, usable_memory_bytes=usable)
    return replace(device, **{name: value})


def _link(link: Link, name: str, text: str) -> Link:
    value = _value(getattr(link, name), text, name)
    return replace(link, **{name: value}, source="what if")  # type: ignore[arg-type]


def _value(before: float, text: str, name: str) -> float:
    """Parse the new value of a figure: a number, with or without unit, or ``*2`` for a factor."""
    value = -1.0
    for parse in (float, parse_rate, parse_bytes):
        try:
            factor = before if text.startswith(("*", "x")) else 1.0
            value = factor * parse(text.lstrip("*x"))
            break
        except ValueError:
            continue
    is_positive = 0 < value < float("inf") or (value == 0 and "seconds" in name)
    if not is_positive:
        raise UsageError(
            "AP359",
            f"--what-if: {text!r} is not a value for {name}",
            fix="a number (50e9), one with a unit (50GB/s, 80GiB), or a factor (*2)",
        )
    return value
