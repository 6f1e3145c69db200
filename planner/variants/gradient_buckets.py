"""Buckets of a stage: groups of gradients that are summed by one all-reduce.

In: the rank's part of each trained parameter whose gradient is summed over mesh axes. Out: the
buckets, in the order in which a backward completes them. The planner uses the buckets to price
their all-reduces; the runtime makes the same buckets to run them. Their size is a number of
elements, whatever the dtype, so that a float64 run that verifies a plan has the same buckets.

A bucket holds gradients of one block, or of several small blocks, as every sum costs a latency;
with ``by_block`` always of one block, so that a forward waits only for gradients of its own blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from ...cost_model.ops.memory import policy
from ..graph.graph import Blocks, Graph
from ..graph.layout import local_shape
from ..plan import Plan

BUCKET_SIZE = 8_000_000
FULL_SIZE = 5_000_000
"""Number of elements from which a bucket takes no further block. Measured: of 8, 20 and 30 MB of
float32, 20 MB was the fastest on two CPU ranks with 19 M parameters; DistributedDataParallel uses
25 MB."""
BUCKETS, LEAST_SIZE = 8, 250_000
"""Number of buckets to make if each gets at least ``LEAST_SIZE`` elements: the all-reduce of the
last bucket overlaps no compute, so it should be small."""


@dataclass(frozen=True, slots=True)
class HeldGradient:
    """Gradient of a trained parameter on one rank, to be summed over mesh axes (indices ``axes``).

    ``block``: position in the stage of the only block that uses the parameter, None if several do.
    ``fully_sharded``: ZeRO shards the parameter. ``numel``: elements on this rank.
    """

    name: str
    block: int | None
    axes: tuple[int, ...]
    fully_sharded: bool
    numel: int
    is_complex: bool = False

    @property
    def done_with(self) -> int:
        """Position of the block whose backward completes the gradient; -1: end of the stage."""
        return -1 if self.fully_sharded or self.block is None else self.block


@dataclass(frozen=True, slots=True)
class BucketContents:
    """Gradients (parameter ``names``, ``numel`` elements on a rank) that one all-reduce sums over
    the mesh axes ``axes`` after the backward of ``block``; -1: at the end of the stage's
    backward."""

    axes: tuple[int, ...]
    block: int
    names: tuple[str, ...]
    numel: int


def make_buckets(
    gradients: Iterable[HeldGradient], *, by_block: bool = False
) -> tuple[BucketContents, ...]:
    """Group gradients into buckets, each summed by one all-reduce over the same mesh axes, in the
    order in which the backward completes them. ``by_block``: no bucket has gradients of several
    blocks.

    Gradients used by several blocks and gradients sharded by ZeRO have separate buckets, which come
    last. No bucket mixes complex and real gradients.
    """
    groups: dict[tuple[Any, ...], list[HeldGradient]] = {}
    for gradient in sorted(gradients, key=lambda each: each.done_with, reverse=True):
        if gradient.axes:
            key = (
                gradient.done_with >= 0,
                gradient.axes,
                gradient.fully_sharded,
                gradient.is_complex,
            )
            groups.setdefault(key, []).append(gradient)
    buckets: list[list[HeldGradient]] = []
    for _, members in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        size, bucket = 0, list[HeldGradient]()
        share = sum(gradient.numel for gradient in members) // BUCKETS
        full = min(FULL_SIZE, max(LEAST_SIZE, share))
        for gradient in members:
            is_same = bool(bucket) and bucket[-1].done_with == gradient.done_with
            limit = BUCKET_SIZE if is_same else full
            if bucket and (not is_same if by_block else size > limit):
                buckets.append(bucket)
                size, bucket = 0, []
            bucket.append(gradient)
            size += gradient.numel
        buckets.append(bucket)
    return tuple(map(_contents, buckets))


def _contents(members: list[HeldGradient]) -> BucketContents:
    return BucketContents(
        members[0].axes,
        min(gradient.done_with for gradient in members),
        tuple(gradient.name for gradient in members),
        sum(gradient.numel for gradient in members),
    )


def held_gradients(
    graph: Graph, blocks: Blocks, plan: Plan, stage_index: int
) -> tuple[HeldGradient, ...]:
    """Return the gradients of a stage that does not use ZeRO, in the order in which its ops first
    read the parameters."""
    stage = plan.stages[stage_index]
    start = sum(len(each.blocks) for each in plan.stages[:stage_index])
    uses: dict[str, dict[int, None]] = {}
    for position, block in enumerate(blocks.blocks[start : start + len(stage.blocks)]):
        for name in block.nodes:
            for ref in graph[name].inputs:
                if graph[ref.name].kind == "parameter":
                    uses.setdefault(ref.name, {})[position] = None
    found = []
    for name, positions in uses.items():
        spec, layout = graph[name].spec, stage.leaf_layout(name, blocks)
        if spec.requires_grad:
            axes = tuple(
                axis
                for axis, number in enumerate(stage.mesh.shape)
                if number > 1 and not layout[axis].is_shard
            )
            only = next(iter(positions)) if len(positions) == 1 else None
            shape = local_shape(spec.shape, layout, stage.mesh.shape)
            found.append(HeldGradient(name, only, axes, False, prod(shape), spec.is_complex))
    return tuple(found)


def summed_bytes(plan: Plan) -> int:
    """Return the bytes per element of gradients while they are summed."""
    return policy(plan.model.precision, plan.model.optimizer, plan.states).gradient_bytes
