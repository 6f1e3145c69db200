"""Asynchronous pipeline schedules (PipeDream, PipeDream-2BW, AMPNet): checks and descriptions. They
are only used when forced, as their steps differ from one device's.

In: a request that forces such a schedule, or a plan with it. Out: the limits it sets on a plan, a
description of its updates, and errors for plans it cannot run. The search treats them as it does
other schedules: they order forwards and backwards as 1F1B does, and stages hold older versions of
their weights: ``num_versions``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from ...cost_model.ops.memory import PrecisionPolicy, policy
from ...cost_model.simulator.actions import versions_held
from ..errors import UsageError
from ..graph.graph import Blocks, Graph
from ..graph.layout import Layout
from ..ops.saved import saved_inputs
from ..plan import Plan, StagePlan
from ..requests.request import ASYNCHRONOUS, Forced, Request
from ..schedules.schedules import build_schedule
from ..stage.stage_cost import StageCost

RULES = {
    "pipedream": "at the weights that a stage had in the forward, up to "
    "as many updates old as stages follow",
    "pipedream-2bw": "at weights that are one update old",
    "ampnet": "backwards with newer weights than their forwards",
}
"""Description, by schedule, of the weights at which gradients are computed."""


def is_asynchronous(schedule: str | None) -> bool:
    """Return whether a schedule updates weights in the middle of a step's micro-batches.

    >>> is_asynchronous("pipedream"), is_asynchronous("1f1b")
    (True, False)
    """
    return schedule in ASYNCHRONOUS


def num_versions(name: str, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the maximum number of weight versions on each stage; 1 in synchronous schedules.

    >>> num_versions("pipedream", 3, 6), num_versions("1f1b", 3, 6)
    ((3, 2, 1), (1, 1, 1))
    """
    if not is_asynchronous(name):
        return (1,) * num_stages
    schedule = build_schedule(name, num_stages, num_microbatches)
    return tuple(versions_held(schedule, stage) for stage in range(num_stages))


def version_bytes(plan: Plan, stage: int, parameters: float) -> float:
    """Return the bytes per device of a stage's older weight versions. ``parameters``: bytes of its
    parameters in all copies (master and compute format)."""
    rules = policy(plan.model.precision, plan.model.optimizer, plan.states)
    held = num_versions(plan.schedule, len(plan.stages), plan.num_microbatches)
    return (held[stage] - 1) * parameters * _version_share(rules)


def with_versions(cost: StageCost, versions: int, rules: PrecisionPolicy) -> StageCost:
    """Return the cost of a stage, changed by the memory of ``versions`` versions of its weights."""
    if versions == 1:
        return cost
    older = (versions - 1) * cost.memory_bytes["parameters"] * _version_share(rules)
    return replace(cost, memory_bytes={**cost.memory_bytes, "versions": older})


def _version_share(rules: PrecisionPolicy) -> float:
    """Return the bytes of one version of the weights, divided by the bytes of all their copies.

    Versions are in the compute format: in mixed precision they have no master copy.
    """
    copies = rules.gathered_bytes + (rules.parameter_bytes if rules.is_mixed else 0)
    return rules.gathered_bytes / copies


def describe_updates(plan: Plan) -> str:
    """Describe the updates of an asynchronous plan in words; return "" for other plans."""
    if not is_asynchronous(plan.schedule):
        return ""
    count = num_updates(plan)
    return (
        f"not equal to one device: {count} updates per step, each of "
        f"{plan.model.global_batch // count} rows, {RULES[plan.schedule]}"
    )


def num_updates(plan: Plan) -> int:
    """Return a plan's weight updates per step: 1 unless its schedule is asynchronous."""
    if not is_asynchronous(plan.schedule):
        return 1
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_microbatches)
    return plan.num_microbatches // schedule.per_update


def check_forced(forced: Forced) -> None:
    """Raise UsageError AP158 if a forced asynchronous schedule excludes other forced options."""
    name = forced.schedule
    if not is_asynchronous(name):
        return
    if forced.pp is None or forced.pp < 2:
        raise _refused(f"schedule={name} needs a pipeline of several ranks", fix="pp=2 or more")
    if forced.zero or forced.shard:
        asked = f"zero={forced.zero}" if forced.zero else f"shard={forced.shard}"
        raise _refused(
            f"schedule={name} with {asked}",
            why="each stage keeps unsharded versions of its weights",
            fix="zero=0",
        )
    if name == "ampnet" and forced.recompute not in (None, "none"):
        raise _refused_recomputation(str(forced.recompute))


def with_limits_of_schedule(request: Request) -> Request:
    """Return the request limited to plans that its forced asynchronous schedule can run: no ZeRO,
    and for AMPNet no recomputation and no tensor parallelism unless it is forced."""
    forced = request.forced
    if not is_asynchronous(forced.schedule):
        return request
    is_latest = forced.schedule == "ampnet"
    recompute = "none" if is_latest else forced.recompute
    return replace(
        request,
        forced=replace(forced, zero=0, recompute=recompute),
        max_tp=1 if is_latest and forced.tp is None else request.max_tp,
    )


def check_asynchronous(plan: Plan, graph: Graph, blocks: Blocks) -> None:
    """Raise UsageError AP158 if the plan's schedule is asynchronous and cannot run the plan: ZeRO,
    parameters tied across stages, or, for AMPNet, recomputation or gathered copies of weights."""
    if not is_asynchronous(plan.schedule):
        return
    for index, stage in enumerate(plan.stages):
        if stage.zero:
            raise _refused(
                f"schedule {plan.schedule} with ZeRO {stage.zero} in stage {index}",
                why="each stage keeps unsharded versions of its weights",
                fix="zero=0",
            )
        modes = {block.recompute for block in stage.blocks} - {"none"}
        if modes and plan.schedule == "ampnet":
            raise _refused_recomputation(min(modes))
        copied = _copied_weight(stage, graph) if plan.schedule == "ampnet" else ""
        if copied:
            raise _refused_copy(f"the weight {copied} gathered in stage {index}")
    tied = tied_across_stages(plan, graph, blocks)
    if tied:
        name, first, second = tied
        raise _refused(
            f"schedule {plan.schedule} with the parameter {name} in stages {first} and {second}",
            why="the stages update their copies at different times, so the copies would differ",
            fix="a model without tied parameters, or a synchronous schedule",
        )


def _copied_weight(stage: StagePlan, graph: Graph) -> str:
    """Return the name of a trained parameter of which the backward reads a copy; "" if there is
    none.

    A change of layout makes a copy, except between the replicated layouts R and I. Values computed
    from split parameters alone, such as the parts of a fused projection, are copies too. Biases are
    ignored, as no backward reads them.
    """
    weights: dict[str, str] = {}
    copies: set[str] = set()
    for node in graph:
        if node.kind == "parameter" and node.spec.requires_grad:
            weights[node.name] = node.name
        layout = stage.layouts.get(node.name)
        if node.kind != "op" or layout is None:
            continue
        refs = node.inputs
        for at in saved_inputs(node, [graph.spec(ref) for ref in refs], count=len(refs)):
            held = stage.layouts.get(refs[at].name)
            if (
                refs[at].name in weights
                and held is not None
                and (
                    refs[at].name in copies
                    or _copies(held.outputs[refs[at].index], layout.inputs[at], stage.mesh.shape)
                )
            ):
                return weights[refs[at].name]
        if refs and all(ref.name in weights for ref in refs):
            weights[node.name] = weights[refs[0].name]
            if any(p.is_shard for held in layout.inputs for p in held):
                copies.add(node.name)
    return ""


def _copies(held: Layout, wanted: Layout, sizes: tuple[int, ...]) -> bool:
    """Return whether converting a value from layout ``held`` to ``wanted`` makes a copy."""
    return any(
        size > 1 and own != used and {own.kind, used.kind} != {"R", "I"}
        for own, used, size in zip(held, wanted, sizes, strict=True)
    )


def tied_across_stages(plan: Plan, graph: Graph, blocks: Blocks) -> tuple[str, int, int] | None:
    """Return (trained parameter, stage, other stage) if two stages use one parameter; else None."""
    ends = tuple(accumulate((len(stage.blocks) for stage in plan.stages), initial=0))
    first: dict[str, int] = {}
    for index, (start, stop) in enumerate(pairwise(ends)):
        for block in blocks.blocks[start:stop]:
            for name in (ref.name for node in block.nodes for ref in graph[node].inputs):
                is_trained = graph[name].kind == "parameter" and graph[name].spec.requires_grad
                if is_trained and first.setdefault(name, index) != index:
                    return name, first[name], index
    return None


def _refused_recomputation(mode: str) -> UsageError:
    return _refused(
        f"schedule ampnet with recompute={mode}",
        why="recomputation would use newer weights than the forward did",
        fix="recompute=none",
    )


def _refused_copy(what: str) -> UsageError:
    return _refused(
        f"schedule ampnet with {what}",
        why="a backward that reads a copy of the weights would not see the newest ones",
        fix="tp=1, or a plan whose ops read the stored weights directly",
    )


def _refused(what: str, *, why: str = "", fix: str = "") -> UsageError:
    return UsageError("AP158", what, why=why, where="--parallel", fix=fix)
