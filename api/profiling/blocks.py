"""The last part of ``autoparallel profile``: blocks measured in one piece, beside their ops.

Rank 0 plans with what is known by then and so finds how many rows a rank has of each kind of
block. All ranks measure each such block that the database lacks. Collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autoparallel.cost_model.cluster.tf32 import torch_computing
from autoparallel.cost_model.profile.case import OpCase
from autoparallel.cost_model.profile.records import Measurement
from autoparallel.planner.graph import Block, Blocks, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.pricing.whole_block import block_case
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import share_value
from autoparallel.runtime.profile.blocks import measure_everywhere

MOST_SECONDS = 2.0
"""Of measuring one block."""


@dataclass(frozen=True, slots=True)
class BlockTodo:
    """Blocks to measure, each with the graph at a rank's rows; ``seconds`` for each."""

    blocks: tuple[tuple[Graph, Block], ...] = ()
    accumulates: bool = False
    seconds: float = 0.0
    tf32: tuple[str, ...] = ()


def blocks_of(plan: Plan, graph: Graph, blocks: Blocks) -> tuple[tuple[Graph, Block], ...]:
    """Each kind of block of a plan, with the graph at the rows that one rank has of it."""
    found: dict[tuple[str, int], tuple[Graph, Block]] = {}
    position = 0
    for stage in plan.stages:
        shards = stage.mesh.shape[0] if stage.mesh.axes[0] == "dp" else 1
        rows = max(1, plan.microbatch_size // shards)
        can = bool(graph.batch_dims) or rows == graph.batch_size
        for _ in stage.blocks:
            kind = blocks.blocks[position].kind
            if can and (kind, rows) not in found:
                found[kind, rows] = (graph.with_batch_size(rows), blocks.kinds[kind])
            position += 1
    return tuple(found.values())


def todo_of(
    plan: Plan, graph: Graph, blocks: Blocks, *, known: Callable[[OpCase], bool], seconds: float
) -> BlockTodo:
    """The blocks of a plan that are not known; ``seconds`` are for all."""
    tf32 = plan.cluster.device(0).tf32 or ()
    new = tuple(
        (at, block)
        for at, block in blocks_of(plan, graph, blocks)
        if not known(block_case(at, block, tf32))
    )
    each = min(MOST_SECONDS, seconds / max(len(new), 1))
    return BlockTodo(new, plan.num_microbatches > 1, each, tf32)


def measure_blocks(
    worker: Worker, todo: BlockTodo | None, *, device: torch.device
) -> Iterator[tuple[OpCase, Measurement | str]]:
    """Each block of rank 0's ``todo`` and its time, or why there is none. Collective."""
    shared = share_value(todo)
    assert shared is not None
    for graph, block in shared.blocks:
        worker.watchdog.progress(f"measuring {block.name} in one piece")
        with torch_computing(shared.tf32):
            found = measure_everywhere(
                graph, block, device=device, accumulates=shared.accumulates, seconds=shared.seconds
            )
        yield block_case(graph, block, shared.tf32), found
