"""Gradient sums of a plan: the algorithm of each all-reduce, and the order in which they start.

In: a finished plan. Out: the plan with ``gradient_sums`` in each stage that shards no states, and
``gradient_order``; and their effect on the predicted step, which ``evaluate`` computes from the
plan alone. The search itself assumes sums by the library, block by block, in backward order; it
prices plans with only such sums correctly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil

import numpy as np

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.collectives.all_reduce import (
    LIBRARY,
    algorithms_of,
    all_reduce_seconds,
    best_all_reduce,
    hosts_of,
)
from ...cost_model.collectives.collectives import Group, group_of
from ...cost_model.collectives.gradient_order import (
    BlockSeconds,
    SumSeconds,
    priority_order,
    step_seconds,
)
from ..costs.seconds import Resource, Seconds
from ..errors import UsageError
from ..graph.graph import Blocks, Graph
from ..plan import GradientSum, Plan, StagePlan
from ..stage.stage_cost import StageCost
from .gradient_buckets import BucketContents, held_gradients, make_buckets, summed_bytes

Place = tuple[Group, tuple[int, ...]]
"""A group of ranks, and how many of its ranks are on each host."""

PART_BYTES = (32_000_000, 8_000_000, 2_000_000, 500_000)
"""Maximum bytes per gradient sum to try under the gradient order "priority"."""

MOST_PARTS = 256
"""Maximum gradient sums per step under "priority", besides one per block."""

LEAST_GAIN = 0.02
"""Fraction of a step that the order "priority" must save, as splitting sums costs host time."""


@dataclass
class SumPrices:
    """Seconds of a stage's gradient sums by algorithm."""

    cluster: Cluster
    stage: StagePlan
    _places: dict[tuple[int, ...], dict[Place, None]] = field(default_factory=dict)
    _known: dict[tuple[str, int, tuple[str, ...]], float] = field(default_factory=dict)
    _best: dict[tuple[int, tuple[str, ...]], str] = field(default_factory=dict)

    def places(self, names: tuple[str, ...]) -> Iterator[tuple[Place, ...]]:
        """Yield for each all-reduce of a sum over the axes ``names`` the groups of ranks that run
        it, without groups that cost the same."""
        mesh, devices = self.stage.mesh, self.stage.devices
        for axes in mesh.joined([mesh.axes.index(name) for name in names]):
            found = self._places.setdefault(axes, {})
            for members in () if found else mesh.groups(*axes):
                ranks = [devices[index] for index in members]
                found[group_of(self.cluster, ranks), hosts_of(self.cluster, ranks)] = None
            yield tuple(found)

    def seconds(self, algorithm: str, own: GradientSum) -> float:
        """Return the seconds of the sum ``own`` by ``algorithm``, all-reduce after all-reduce."""
        key = algorithm, own.num_bytes, own.axes
        if key not in self._known:
            self._known[key] = sum(
                max(all_reduce_seconds(algorithm, own.num_bytes, *place) for place in places)
                for places in self.places(own.axes)
            )
        return self._known[key]

    def best(self, num_bytes: int, axes: tuple[str, ...]) -> str:
        """Return the cheapest algorithm to all-reduce ``num_bytes`` over ``axes`` if it is the same
        for all groups of ranks, else the library's."""
        key = num_bytes, axes
        if key not in self._best:
            names = {best_all_reduce(num_bytes, *place) for place in chain(*self.places(axes))}
            self._best[key] = names.pop() if len(names) == 1 else LIBRARY
        return self._best[key]

    def check(self, algorithm: str, axes: tuple[str, ...]) -> None:
        """Raise UsageError AP196 if ``algorithm`` cannot run an all-reduce over ``axes``."""
        for group, hosts in chain(*self.places(axes)):
            known = algorithms_of(group, hosts)
            if algorithm in known:
                continue
            on = "+".join(map(str, hosts))
            why = (
                "NCCL chooses the algorithm of each of its all-reduces itself"
                if group.library == "nccl"
                else f"it does not exist for ranks on hosts of {on}"
            )
            raise UsageError(
                "AP196",
                f"allreduce={algorithm} cannot sum the gradients of {sum(hosts)} ranks",
                why=why,
                where="--parallel",
                fix=f"allreduce= one of {', '.join(known)}",
            )


def with_algorithms(plan: Plan, graph: Graph, blocks: Blocks, algorithm: str | None = None) -> Plan:
    """Return the plan with gradient sums in backward order, all by ``algorithm``; None chooses the
    cheapest for each. Raises UsageError AP196 if ``algorithm`` cannot run one of them."""
    stages = []
    for index, stage in enumerate(plan.stages):
        sums: tuple[GradientSum, ...] = ()
        if stage.zero == 0:
            prices = SumPrices(plan.cluster, stage)
            buckets = make_buckets(held_gradients(graph, blocks, plan, index))
            sums = tuple(
                _sum(plan, stage, prices, number, bucket, algorithm)
                for number, bucket in enumerate(buckets)
            )
        stages.append(replace(stage, gradient_sums=sums))
    return replace(plan, stages=tuple(stages), gradient_order="backward")


def _sum(
    plan: Plan,
    stage: StagePlan,
    prices: SumPrices,
    number: int,
    bucket: BucketContents,
    algorithm: str | None,
    part: tuple[int, int] = (0, 1),
) -> GradientSum:
    axes = tuple(stage.mesh.axes[axis] for axis in bucket.axes)
    num_bytes = -(-bucket.numel // part[1]) * summed_bytes(plan)
    if algorithm is None:
        algorithm = prices.best(num_bytes, axes)
    else:
        prices.check(algorithm, axes)
    return GradientSum(number, bucket.block, num_bytes, axes, algorithm, *part)


def with_sum_seconds(cost: StageCost, stage: StagePlan, cluster: Cluster) -> StageCost:
    """Return a stage's cost, priced for the library's all-reduces, with all seconds of gradient
    sums multiplied by the relative cost of the plan's algorithms."""
    sums = stage.gradient_sums
    if all(own.algorithm == LIBRARY for own in sums):
        return cost
    prices = SumPrices(cluster, stage)
    library = sum(prices.seconds(LIBRARY, own) for own in sums)
    named = sum(prices.seconds(own.algorithm, own) for own in sums)
    if named == library:
        return cost
    factor = np.ones(len(Resource))
    factor[[Resource.GRADIENT_SYNC, Resource.SYNC_SLOWED]] = named / library
    seconds = Seconds(*(np.array(cost.seconds) * factor).tolist())
    groups = cost.groups
    if groups is not None:
        groups = groups._replace(seconds=groups.seconds * factor)
    return replace(cost, seconds=seconds, groups=groups)


def only_library(plan: Plan) -> bool:
    """Return whether the library chooses every all-reduce's algorithm, as the prices of the search
    assume. This is always true with NCCL."""
    on_gpus = any(host.device.kind == "cuda" for host in plan.cluster.hosts)
    sums = (own for stage in plan.stages for own in stage.gradient_sums)
    return on_gpus or all(own.algorithm == LIBRARY for own in sums)


def why_not_priority(plan: Plan, graph: Graph, blocks: Blocks) -> str:
    """Return why the plan cannot sum gradients during the next step's forward; "" if it can."""
    if plan.has_pipeline:
        return "the plan is a pipeline, whose stages begin a step at different times"
    (stage,) = plan.stages
    if stage.zero:
        return f"ZeRO {stage.zero} sums gradients by reduce-scatters"
    if any(host.device.kind == "cuda" for host in plan.cluster.hosts):
        return "only sums over gloo are put in order"
    if stage.mesh.size == 1:
        return "no gradient is summed"
    if plan.offload != "none" or plan.model.gradient_dtype != "master":
        return "the optimizer gets copies of gradients, part by part"
    if plan.model.precision == "fp16":
        return "fp16 scales the loss, so that an update may be skipped"
    every = tuple(axis for axis, size in enumerate(stage.mesh.shape) if size > 1)
    if any(own.axes != every for own in held_gradients(graph, blocks, plan, 0)):
        return "the plan splits parameters"
    return ""


def with_priority(
    plan: Plan, graph: Graph, blocks: Blocks, cost: StageCost, algorithm: str | None
) -> Plan:
    """Return the plan with its gradient sums in the order in which the next forward needs them,
    split into parts of the best size. ``cost`` is the cost of the plan's only stage;
    ``why_not_priority`` must return ""."""
    (stage,) = plan.stages
    prices, size = SumPrices(plan.cluster, stage), summed_bytes(plan)
    contents = make_buckets(held_gradients(graph, blocks, plan, 0), by_block=True)
    least = sum(bucket.numel for bucket in contents) * size / MOST_PARTS
    found = []
    for limit in PART_BYTES:
        sums = [
            _sum(plan, stage, prices, number, bucket, algorithm, (part, num_parts))
            for number, bucket in enumerate(contents)
            for num_parts in [ceil(bucket.numel * size / max(limit, least))]
            for part in range(num_parts)
        ]
        order = priority_order(_blocks(plan, cost), _priced(plan, cost, sums))
        ordered = tuple(sums[number] for number in order)
        own = replace(stage, gradient_sums=ordered)
        found.append(replace(plan, stages=(own,), gradient_order="priority"))
    return min(found, key=lambda each: overlapped_seconds(each, cost))


def overlapped_seconds(plan: Plan, cost: StageCost) -> float:
    """Return the seconds of a step whose last gradient sums overlap the next step's forward.
    ``cost`` is the cost of the plan's only stage, priced for the library's all-reduces."""
    sums = _priced(plan, cost, plan.stages[0].gradient_sums)
    return step_seconds(_blocks(plan, cost), sums, overlaps_steps=True)


def order_gain(plan: Plan, cost: StageCost) -> float:
    """Return the seconds per step that the gradient order "priority" saves over the backward order.
    ``cost`` is the cost of the plan's only stage, priced for the library's all-reduces.

    Both orders are simulated; in backward order the gradients of a block are one sum.
    """
    groups = cost.issued_groups
    own = np.repeat(groups.seconds[:, Resource.GRADIENT_SYNC], groups.counts)
    sums = [SumSeconds(block, float(own[block])) for block in reversed(range(len(own)))]
    before = step_seconds(_blocks(plan, cost), sums, overlaps_steps=False)
    return before - overlapped_seconds(plan, cost)


def _priced(plan: Plan, cost: StageCost, sums: Sequence[GradientSum]) -> list[SumSeconds]:
    """Return the seconds of each of ``sums``, multiplied by a factor with which the library's
    all-reduces of whole buckets take as long as in ``cost``, whose times may be measured."""
    prices = SumPrices(plan.cluster, plan.stages[0])
    whole = {own.bucket: replace(own, num_bytes=own.num_bytes * own.num_parts) for own in sums}
    library = sum(prices.seconds(LIBRARY, own) for own in whole.values())
    factor = cost.seconds.gradient_sync / library
    return [SumSeconds(own.block, factor * prices.seconds(own.algorithm, own)) for own in sums]


def _blocks(plan: Plan, cost: StageCost) -> BlockSeconds:
    groups, shares = cost.issued_groups, cost.buckets
    update = np.repeat(groups.seconds[:, Resource.OPTIMIZER], groups.counts)
    return BlockSeconds(
        tuple(cost.forward_seconds * share for share in shares.forward),
        tuple(cost.backward_seconds * share for share in shares.backward),
        tuple(update.tolist()),
        plan.num_microbatches,
        cost.slowed_share,
    )
