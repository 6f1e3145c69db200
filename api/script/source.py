"""Source of an export: a plan's model captured again, and the program of each stage.

In: a plan and its file. Out: an ``ExportedPlan``: the model, the programs of its stages, and the
schedule; or a PlanError that names a part of the plan that a script cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoparallel.analysis.plan_model import PlanModel, load_plan_model
from autoparallel.cost_model.simulator.actions import (
    COMPUTE,
    RECEIVES,
    REDUCE,
    SENDS,
    Action,
    Row,
    Schedule,
    matching_receives,
)
from autoparallel.passes.local.simulated import ThreadCommunicator
from autoparallel.passes.local.stage_program import StageProgram
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.graph import Graph, map_refs
from autoparallel.planner.graph.layout import Layout
from autoparallel.planner.plan import Plan, StagePlan
from autoparallel.planner.requests.features import OFFERED_MODES, PLAIN_MODES
from autoparallel.planner.summary import HOST_STATES
from autoparallel.planner.variants.asynchronous import is_asynchronous
from autoparallel.planner.variants.replicas import placed_stages
from autoparallel.runtime.data.variants import Variant, stage_programs, variant_of
from autoparallel.target.lora import parse_lora


@dataclass(frozen=True)
class ExportedPlan:
    """Plan to export as a script. ``stages`` are in the schedule's order, each replica listed.

    ``programs`` has the program of each stage's first rank, ``last_programs`` of its last rank.
    ``rows`` has the schedule's actions of each pipeline rank, without the optimizer's step, and
    with receives in the order of sends.
    """

    made: PlanModel
    variant: Variant
    stages: tuple[StagePlan, ...]
    programs: tuple[StageProgram, ...]
    last_programs: tuple[StageProgram, ...]
    rows: tuple[Row, ...]

    @property
    def plan(self) -> Plan:
        return self.made.plan


def capture_export(plan: Plan, plan_path: str, *, trust: bool) -> ExportedPlan:
    """Capture a plan's model for export.

    Raises PlanError AP366 if a script cannot run the plan, and the errors of ``load_plan_model``.
    """
    check_writable(plan)
    plan = replace(plan, tiles=1)
    made = load_plan_model(plan, plan_path, trust=trust)
    variant = variant_of(made.program, plan)
    if made.program.returned or variant.program.graph.updates.keys() & set(made.program.literals):
        raise _export_error("the model returns no loss", "a script trains models that do")
    stages = placed_stages(plan)
    first, last = (
        tuple(_program(variant, stages[index], index, end) for index in range(len(stages)))
        for end in (0, -1)
    )
    return ExportedPlan(made, variant, stages, first, last, in_order(variant.schedule))


def _program(variant: Variant, stage: StagePlan, index: int, end: int) -> StageProgram:
    """Return the program of stage ``index`` on its first (``end`` 0) or last (-1) device."""
    coordinates = stage.mesh.coordinates(end % stage.mesh.size)
    place = ThreadCommunicator(stage.mesh, coordinates, {})
    (program,) = stage_programs(variant, index, coordinates=coordinates, communicator=place)
    return with_equal_constants(program, variant.program.graph)


def with_equal_constants(program: StageProgram, graph: Graph) -> StageProgram:
    """Merge equal constants of a program, so that equal layers read the same constants."""
    numbers: dict[tuple[str, ...], int] = {}
    forms: dict[str, int] = {}

    def form(name: str) -> int:
        if name not in forms:
            node = graph[name]
            own = repr(map_refs((node.args, dict(node.kwargs)), lambda r: (form(r.name), r.index)))
            key = (node.op, own) if node.kind == "constant" else (node.kind, name)
            forms[name] = numbers.setdefault(key, len(numbers))
        return forms[name]

    first: dict[tuple[int, Layout], str] = {}
    same = {
        name: first.setdefault((form(name), held.layout), name)
        for name, held in program.constants.items()
    }
    blocks = tuple(
        replace(block, inputs=tuple(same.get(key, key) for key in block.inputs))
        for block in program.blocks
    )
    constants = {name: program.constants[name] for name in same.values()}
    return replace(program, blocks=blocks, constants=constants)


def check_writable(plan: Plan) -> None:
    """Raise PlanError AP366 for parts of a plan that scripts do not support."""
    adapters = plan.model.settings.get("lora", "")
    modes = {block.recompute for stage in plan.stages for block in stage.blocks}
    has = (
        (plan.servers is not None, "parameter servers", "plan with --deny servers, or run it"),
        (
            is_asynchronous(plan.schedule) and plan.has_pipeline,
            f"schedule {plan.schedule}, which updates weights in the middle of a step",
            "",
        ),
        (bool(plan.slices), "slices of the sequences", ""),
        (plan.offload != "none", f"{HOST_STATES.get(plan.offload)} in host memory", ""),
        (
            not modes <= {*PLAIN_MODES},
            "blocks that keep attention's results or offload activations",
            f"plan with --deny {','.join(OFFERED_MODES)}",
        ),
        (plan.model.precision == "fp8", "products in fp8", "plan with --precision bf16"),
        (
            bool(adapters) and bool(parse_lora(adapters).base),
            "quantized weights",
            "plan with --lora without base=nf4",
        ),
        (
            any(stage.shares for stage in plan.stages),
            "unequal shares of the batch",
            "plan with --deny uneven-shares",
        ),
    )
    for is_there, what, fix in has:
        if is_there:
            raise _export_error(f"the plan has {what}", "a script on plain PyTorch does not", fix)


def _export_error(what: str, why: str, fix: str = "") -> PlanError:
    return PlanError(
        "AP366",
        f"the plan cannot be exported to Python: {what}",
        why=why,
        fix=fix or "plan without it, or train with autoparallel run",
    )


def in_order(schedule: Schedule) -> tuple[Row, ...]:
    """Return each rank's actions, without optimizer steps, and with receives in order of sends.

    Messages between two ranks arrive in order, so the message sent first is received first, even if
    another message is needed earlier.
    """
    lanes: dict[tuple[int, int], list[Action]] = {}
    for source, row in enumerate(schedule.table):
        for action in (each for each in row if each.kind in SENDS):
            for receive in matching_receives(action, schedule.messages):
                target = schedule.stage_rank[receive.stage]
                lanes.setdefault((target, source), []).append(receive)
    return tuple(
        _reorder(row, [lane for (target, _), lane in lanes.items() if target == rank])
        for rank, row in enumerate(schedule.table)
    )


def _reorder(row: Row, lanes: list[list[Action]]) -> Row:
    """Move each receive of a rank behind the receives of all messages sent earlier. ``lanes`` are
    the messages between pairs of ranks, in the order of sends."""
    made: dict[Action, None] = {}

    def add(action: Action) -> None:
        for lane in lanes if action.kind in RECEIVES and action not in made else ():
            for earlier in lane[: lane.index(action)] if action in lane else ():
                add(earlier)
        made[action] = None

    for action in row:
        if action.kind in {*RECEIVES, *COMPUTE, *SENDS, REDUCE}:
            add(action)
    return tuple(made)
