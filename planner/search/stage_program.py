"""Integer program of one stage of a finished plan, for export.

In: a graph, its blocks, a plan, the index of a stage. Out: the program over all layouts on the
stage's mesh, for its ZeRO stage, recomputation and micro-batches in flight; and the objective of
the plan's own layouts in it. Plans do not record forced choices, so the program leaves them open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from .. import ops as default_rules
from ..costs.basis import DEFAULT, Basis
from ..costs.mesh_prices import Sharding
from ..costs.price_cache import PriceCache
from ..costs.prices import Rules
from ..errors import UsageError
from ..evaluate.evaluate import at_microbatch, held_micro_batches, stage_prices
from ..graph.graph import Blocks, Graph
from ..graph.layout import NodeLayout
from ..integer_programs.ilp import UNIT_BYTES, Problem, cost, memory_bytes
from ..inter_op.submesh import restriction
from ..intra_op.pulp_solver import MICROSECONDS, NamedProgram, named_program
from ..plan import Plan, StagePlan
from ..requests.request import Forced
from ..schedules.held import most_held
from ..stage.branches import stage_starts
from ..stage.recompute_policy import NO_RECOMPUTE, POLICY_MODES, RecomputePolicy
from ..stage.stage_cost import TRANSIENT
from ..stage.stage_model import StageModel
from ..stage.stage_problem import StageOptions, StageProblem
from ..stage.structure import Run, Structure

Minimized = Literal["time", "unlimited", "memory"]
"""Objective: time under the memory limit, time without a limit, or memory."""


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Integer program of a stage, with names of its columns.

    ``planned`` is the objective of the plan's own layouts, in microseconds or megabytes; None if
    some of them are not among the choices, for example forced layouts.
    """

    named: NamedProgram
    unit: str
    planned: float | None


def stage_program(
    graph: Graph,
    blocks: Blocks,
    plan: Plan,
    index: int,
    *,
    minimized: Minimized = "time",
    memory_limit_bytes: float | None = None,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> StageProgram:
    """Build the program of stage ``index``; the memory limit defaults to its devices' memory.

    Raises UsageError AP332 for a missing stage, a stage with unequal shares of the batch (whose
    ranks have a program each), or an unknown objective.
    """
    stage = _checked(plan, index, minimized)
    held = most_held(held_micro_batches(graph, blocks, plan, rules=rules)[index])
    structure = Structure(at_microbatch(graph, plan), blocks)
    start = stage_starts(plan)[index]
    run = structure.run(start, start + len(stage.blocks))
    limit = memory_limit_bytes
    if limit is None:
        limit = float(plan.cluster.slowest_device(stage.devices).usable_memory_bytes)
    stage_problem, planned = stage_problem_of(structure, run, stage, plan, rules, basis)
    sharding = Sharding(stage.zero, stage.shard_degree)
    setting = StageOptions(
        plan.num_microbatches,
        stage_problem.model.prices.sharding_number(sharding),
        _policy(run, stage),
        held,
        None if minimized == "unlimited" else limit - _beside(plan, index),
    )
    problem = stage_problem.linearized(setting)
    if minimized == "memory":
        problem = _of_memory(problem)
    title = f"stage_{index}_{minimized}"
    unit = "MB" if minimized == "memory" else "us"
    return StageProgram(
        named_program(title, problem, stage_problem.decisions),
        unit,
        None if planned is None else _objective(problem, planned),
    )


def _checked(plan: Plan, index: int, minimized: str) -> StagePlan:
    known = get_args(Minimized)
    if minimized not in known:
        raise UsageError("AP332", f"--objective {minimized} is not one of {', '.join(known)}")
    if not 0 <= index < len(plan.stages):
        raise UsageError(
            "AP332",
            f"the plan has no stage {index}",
            fix=f"--stage 0 to {len(plan.stages) - 1}",
        )
    if plan.stages[index].shares:
        raise UsageError(
            "AP332",
            f"stage {index} has no program of its own",
            why="its ranks take unequal shares of the batch, so each has another one",
            fix="a plan made with --deny uneven-shares",
        )
    return plan.stages[index]


def _beside(plan: Plan, index: int) -> float:
    """Return the bytes of other stages on the stage's devices, transient bytes excluded."""
    own = frozenset(plan.stages[index].devices)
    return float(
        sum(
            size
            for number, stage in enumerate(plan.stages)
            if number != index and own.intersection(stage.devices)
            for name, size in stage.prediction.memory_bytes.items()
            if name not in TRANSIENT
        )
    )


def _policy(run: Run, stage: StagePlan) -> RecomputePolicy:
    """Return the recomputation policy of a stage: counts of recomputed blocks by class."""
    modes = Counter(zip(run.classes[1], (block.recompute for block in stage.blocks), strict=True))
    numbers = range(len(run.block_classes))
    counts = (tuple(modes[number, mode] for number in numbers) for mode in POLICY_MODES)
    policy = RecomputePolicy(*counts)
    return policy if policy.num_blocks else NO_RECOMPUTE


def stage_problem_of(
    structure: Structure,
    run: Run,
    stage: StagePlan,
    plan: Plan,
    rules: Rules,
    basis: Basis,
) -> tuple[StageProblem, tuple[int, ...] | None]:
    """Return the problem of a stage, and the plan's choices in it.

    Axes are used as in the search; if the plan uses them in other ways, any use is allowed.
    """
    prices = stage_prices(plan, stage, (), PriceCache(), rules=rules, basis=basis)
    link = plan.cluster.entry_link(stage.devices[0], stage.mesh.size)
    limited = restriction(stage.mesh, Forced())
    problem = StageProblem(StageModel(structure, prices, limited, link), run)
    return problem, _planned_choices(problem, stage.layouts)


def _planned_choices(
    stage_problem: StageProblem, layouts: Mapping[str, NodeLayout]
) -> tuple[int, ...] | None:
    """Return the choices that have the plan's layouts; None if a decision lacks such a choice."""
    found = []
    for decision in stage_problem.decisions:
        own = (
            number
            for number, choice in enumerate(decision.choices)
            if all(layouts.get(name) == layout for name, layout in choice.layouts.items())
        )
        number = next(own, None)
        if number is None:
            return None
        found.append(number)
    return tuple(found)


def _of_memory(problem: Problem) -> Problem:
    """Return the same problem with bytes as the objective and no memory limit."""
    assert problem.memory is not None
    return Problem(
        tuple(np.zeros(len(own)) for own in problem.costs),
        memory=replace(problem.memory, limit=float("inf")),
        memory_weight=1 / MICROSECONDS / UNIT_BYTES,
    )


def _objective(problem: Problem, choices: Sequence[int]) -> float:
    """Return the objective of ``choices`` in the unit of the named program."""
    seconds = cost(problem, choices)
    if problem.memory is not None:
        seconds += problem.memory_weight * memory_bytes(problem.memory, choices)
    return seconds * MICROSECONDS
