"""Good pipelines under schedules that take plans of others: Chimera and TeraPipe.

In: what ``search`` found, and the step to beat. Out: the fastest of its pipelines under one of
them, as ``evaluate`` prices it, if it fits and is faster; and what was tried besides.

The pipelines are those that ``chunk_search`` cuts again: ranks alike in mesh, a chain of stages.
A schedule is simulated with a pipeline's own figures first (TeraPipe in equal slices, whose
shares are by FLOPs), where what it takes at least can beat the best; what comes out faster is
priced, ``MOST_PRICED`` at most. No slice is shorter than ``1 / MOST_UNITS`` of a sequence, so a
pipeline of N micro-batches takes under TeraPipe at least N times its busiest stage, and a slice
of the others. Masked pairs of attention, which slices skip, are left out of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .. import rules
from ..errors import PlanError, UsageError
from ..graph import Node
from ..plan import Alternative, Plan
from ..pricing.choices import input_specs
from ..pricing.slice_costs import MOST_UNITS, SliceShares, even_lengths, shares_by_work
from ..pricing.stage_cost import StageCost
from ..pricing.step import Pipeline, latency_seconds, simulated_step
from ..replicas import check_replicas, with_replica_sums
from ..search.report_plan import Candidate
from ..search.search import Searched
from ..sequence_places import find_places
from ..summary import schedule_text
from .chunk_guesses import MOST_ACTIONS, ROUNDING
from .chunk_search import bases

MOST_PRICED = 2
"""Arranged pipelines that are priced node by node."""

NEAR = 1.15
"""Equal slices that take no more than so much of the best are given their best lengths."""

MOST_NODES = 4096
"""Of a graph whose slices are looked at: each length is priced node by node."""


class Arranging(NamedTuple):
    """How a plan is priced, and how long its slices should be."""

    priced: Callable[[Plan], Plan]
    lengths: Callable[[Plan], tuple[int, ...]]


@dataclass(frozen=True)
class Guess:
    """A pipeline under another schedule, and about what its step would take."""

    seconds: float
    base: Candidate
    schedule: str
    slices: tuple[int, ...] = ()

    @property
    def summary(self) -> str:
        schedule = schedule_text(self.schedule, num_slices=len(self.slices))
        return self.base.summary_under(schedule)


def arranged(
    found: Searched, how: Arranging, *, bar: float, deadline: float
) -> tuple[Plan | None, list[Alternative]]:
    """The fastest arranged plan that fits and takes less than ``bar`` seconds, if there is one,
    and the others that were priced. ``deadline`` is of ``perf_counter``."""
    best: Plan | None = None
    lost: list[Alternative] = []
    limit = found.job.limits.memory_bytes
    with found.job.stoppable():
        for guess in sorted(guesses(found, bar), key=lambda each: each.seconds)[:MOST_PRICED]:
            if guess.seconds >= bar or time.perf_counter() > deadline:
                break
            base = found.plan(guess.base, with_others=False)
            solver = replace(base.solver, layouts_gap=None)  # it was of another schedule
            plan = replace(base, schedule=guess.schedule, slices=guess.slices, solver=solver)
            plan = how.priced(plan)
            if plan.slices and plan.prediction.step_seconds < NEAR * bar:
                plan = how.priced(replace(plan, slices=how.lengths(plan)))
            step, peak = plan.prediction.step_seconds, plan.prediction.peak_memory_bytes
            if peak <= limit and step < bar:
                best, bar = plan, step
            else:
                reason = "does not fit" if peak > limit else "overhead of slices or replicas"
                lost.append(Alternative(guess.summary, step, peak, reason))
    return best, lost


def guesses(found: Searched, bar: float) -> Iterator[Guess]:
    """Every pipeline and schedule that may take less than ``bar``."""
    for base in bases(found):
        if "chimera" in found.request.arranged_schedules:
            yield from _both_ways(found, base, bar)
        if "terapipe" in found.request.arranged_schedules:
            yield from _sliced(found, base, bar)


def _both_ways(found: Searched, base: Candidate, bar: float) -> Iterator[Guess]:
    """Chimera, where its two stages per rank may fit and no forward changes a buffer.

    Two ranks share two stages: one of them has half of the work at least, and both sum and step.
    """
    ranks, count, costs = len(base.stages), base.num_microbatches, _costs(base)
    lasting = [_lasting(cost) for cost in costs]
    if max(map(sum, zip(lasting, reversed(lasting), strict=True))) > found.job.limits.memory_bytes:
        return
    if 2 * ranks * count > MOST_ACTIONS:
        return
    try:
        check_replicas(found.graph)
        summed = with_replica_sums(costs, "chimera", found.cluster, ranks)
        work = [count * (c.forward_seconds + c.backward_seconds) / 2 for c in summed]
        whole = [own + cost.step_seconds for own, cost in zip(work, summed, strict=True)]
        if max(map(sum, zip(whole, reversed(whole), strict=True))) >= bar * (1 + ROUNDING):
            return
        step = simulated_step(
            Pipeline("chimera", count), summed, latency_seconds=latency_seconds(found.cluster)
        )
    except (PlanError, UsageError):
        return
    yield Guess(step.seconds, base, "chimera")


def _sliced(found: Searched, base: Candidate, bar: float) -> Iterator[Guess]:
    """TeraPipe in equal slices, where all micro-batches fit at once and positions allow it."""
    costs, count = _costs(base), base.num_microbatches
    whole = [cost.forward_seconds + cost.backward_seconds for cost in costs]
    least = count * max(whole) + (sum(whole) - max(whole)) / MOST_UNITS
    held = max(_lasting(cost) + count * cost.activation_bytes for cost in costs)
    has_cp = any("cp" in model.prices.mesh.axes for model, _ in base.answers)
    if least >= bar or held > found.job.limits.memory_bytes or has_cp:
        return
    graph = found.graph
    if len(graph.nodes) > MOST_NODES:
        return
    try:
        length = find_places(graph).length
    except PlanError:
        return
    steps = [
        (_step(found, costs, count, _shares(found, lengths, costs)), lengths)
        for lengths in (even_lengths(length, n) for n in (2, 4, 8, MOST_UNITS) if n <= length)
        if len(costs) * count * len(lengths) <= MOST_ACTIONS
    ]
    if steps:
        yield Guess(min(steps)[0], base, "terapipe", min(steps)[1])


def _step(found: Searched, costs: list[StageCost], count: int, shares: SliceShares) -> float:
    """The step in slices of these shares."""
    step = simulated_step(
        Pipeline("terapipe", count, slices=shares), costs,
        latency_seconds=latency_seconds(found.cluster),
    )  # fmt: skip
    return step.seconds


def _shares(found: Searched, lengths: tuple[int, ...], costs: list[StageCost]) -> SliceShares:
    """The parts of a micro-batch that slices take: by FLOPs, but no less than it takes to start
    their ops, however short a slice is."""
    graph = found.graph

    def flops(node: Node) -> float:
        done = rules.work(node, input_specs(node, graph), node.outputs)
        return float(done.flops_forward + done.flops_backward)

    num_ops = sum(node.kind == "op" for node in graph) / len(costs)
    least = num_ops * found.cluster.hosts[0].device.launch_seconds
    by_work = shares_by_work(graph, lengths, flops)
    whole = (max(c.forward_seconds for c in costs), max(c.backward_seconds for c in costs))
    forward, backward = (
        tuple(max(share, least / seconds) for share in shares)
        for shares, seconds in zip((by_work.forward, by_work.backward), whole, strict=True)
    )
    return SliceShares(lengths, forward, backward)


def _costs(base: Candidate) -> list[StageCost]:
    return [answer.cost for _, answer in base.answers]


def _lasting(cost: StageCost) -> float:
    """Bytes of a stage but for its activations."""
    return sum(size for name, size in cost.memory_bytes.items() if name != "activations")
