"""Batches of fewer rows than planned: what a step of them runs.

In: the program, the plan, a number of rows. Out: the plan of that batch, with micro-batches that
are no larger than the planned ones. Their layouts are the plan's. Rows that the data axis does
not divide are shared out unevenly (``planner.shares``), where the plan has one stage; a rank
without rows then computes on a row that weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor

from ...passes.local.input_rows import StageRows, rows_of_stages
from ...passes.local.stage_cut import node_layout
from ...passes.programs.program import Program
from ...planner.errors import AutoparallelError, UsageError
from ...planner.graph import Graph
from ...planner.layout import divides
from ...planner.plan import Plan, StagePlan
from ...planner.plan_schedule import schedule_of
from ...planner.shares import share_of, why_not
from .variants import crossing_pairs


@dataclass(frozen=True, slots=True)
class SmallerBatch:
    """The plan of a batch, and which rows of it each stage's ranks read."""

    plan: Plan
    rows: tuple[StageRows | None, ...]


def smaller_batch(program: Program, plan: Plan, rows: int) -> SmallerBatch:
    """What a batch of ``rows`` runs.

    Raises UsageError AP836 where the plan cannot run such a batch.
    """
    why = _why_none(program.graph, plan)
    uneven = why or _why_not_uneven(program, plan)
    crossing = crossing_pairs(program, plan)
    for size in range(min(rows, plan.microbatch_size), 0, -1):
        if why or rows % size:
            continue
        found = _even(program, plan, rows // size, size) if not plan.stages[0].shares else None
        if found is None and not uneven:
            found = _uneven(program, plan, rows // size, size)
        if found is not None and _can_be_scheduled(found, crossing):
            graph = program.graph.with_batch_size(size)
            return SmallerBatch(found, rows_of_stages(graph, program.blocks, found, counts=True))
    raise refused_batch(
        plan, rows, why or f"the plan's layouts do not divide the samples, and {uneven}"
    )


def refused_batch(plan: Plan, rows: int, why: str) -> UsageError:
    """Make the error of a batch of ``rows`` that a plan cannot run."""
    return UsageError(
        "AP836",
        f"a batch of {rows} samples cannot be run by a plan for {plan.model.global_batch}",
        why=why,
        fix="drop such batches (drop_last=True of the DataLoader), or pad them",
    )


def _why_none(graph: Graph, plan: Plan) -> str:
    if not graph.batch_dims:
        return "rows of the batch meet before the loss"
    if plan.slices:
        return f"schedule {plan.schedule} runs slices of the sequences"
    return ""


def _with_batch(plan: Plan, count: int, size: int, stages: Sequence[StagePlan]) -> Plan:
    model = replace(plan.model, global_batch=count * size)
    return replace(plan, num_microbatches=count, model=model, stages=tuple(stages))


def _even(program: Program, plan: Plan, count: int, size: int) -> Plan | None:
    graph = program.graph.with_batch_size(size)
    if not all(_divides(program, graph, stage) for stage in plan.stages):
        return None
    return _with_batch(plan, count, size, plan.stages)


def _divides(program: Program, graph: Graph, stage: StagePlan) -> bool:
    """Whether a stage's mesh divides all values at the graph's batch size as the plan asks."""
    for node in graph:
        layout = node_layout(stage, program.blocks, node.name)
        if layout is None or node.kind not in ("op", "input"):
            continue
        specs = (*map(graph.spec, node.inputs), *node.outputs)
        held = (*layout.inputs, *layout.outputs)
        pairs = zip(specs, held, strict=True)
        if not all(divides(spec.shape, each, stage.mesh.shape) for spec, each in pairs):
            return False
    return True


def _why_not_uneven(program: Program, plan: Plan) -> str:
    if len(plan.stages) > 1:
        return "a pipeline cannot have unequal shares of the batch"
    stage, graph = plan.stages[0], program.graph
    leaves = {node.name for node in graph if node.kind not in ("op", "input")}
    return why_not(
        graph,
        [*graph.by_name],
        lambda name: None if name in leaves else node_layout(stage, program.blocks, name),
    )


def _uneven(program: Program, plan: Plan, count: int, size: int) -> Plan | None:
    stage = plan.stages[0]
    shares = spread(size, stage.shares or (1,) * stage.mesh.shape[0])
    for coordinate in range(len(shares)):
        share = share_of(shares, coordinate)
        assert share is not None
        if not _divides(program, program.graph.with_batch_size(share.batch_size), stage):
            return None
    return _with_batch(plan, count, size, (replace(stage, shares=shares),))


def spread(rows: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers in proportion to ``weights`` that add up to ``rows``, by largest remainder.

    >>> spread(3, (1, 1)), spread(1, (1, 1, 1)), spread(4, (3, 5))
    ((2, 1), (1, 0, 0), (2, 2))
    """
    exact = [rows * weight / sum(weights) for weight in weights]
    found = [floor(each) for each in exact]
    order = sorted(range(len(weights)), key=lambda part: found[part] - exact[part])
    for part in order[: rows - sum(found)]:
        found[part] += 1
    return tuple(found)


def _can_be_scheduled(plan: Plan, crossing: frozenset[tuple[int, int]]) -> bool:
    try:
        schedule = schedule_of(plan, crossing)
    except AutoparallelError:
        return False
    return not schedule.is_asynchronous
