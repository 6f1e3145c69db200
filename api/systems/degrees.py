"""Nearest configuration to a plan with one mesh for all stages, for other systems.

In: a plan. Out: a ``Configuration``: one mesh and one ZeRO stage for all pipeline stages, and one
share of recomputed layers. If the stages of a plan differ, one value stands for all of them, and
``features`` reports the difference.

The layouts on the mesh axis "tp" decide its role: the planner gives each op its fastest layout on
it, which may shard samples or positions and no weight. ``axis_roles`` finds the roles.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import gcd

from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.graph.layout import NodeLayout
from autoparallel.planner.plan import BlockPlan, Plan, Recompute, StagePlan
from autoparallel.planner.variants.replicas import stages_of_ranks

LAYER = re.compile(r"^(?P<list>.*?)\.?(?P<index>\d+)$")
"""Pattern of the name of a block in a numbered list of layers, such as ``model.layers.3``."""

NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "mean", "rsqrt", "pow")
"""Name prefixes of the ops that norm layers consist of, a fact of layers and not of each op: they
need no communication if positions are sharded."""


EXPERTS = ".experts."
"""Part of the names of experts' weights."""

STACKED = re.compile(r"\.experts\.\D")
"""Pattern of the names of weights that have all experts of a layer in their first dimension."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Parallel degrees: numbers of ranks that shard samples (``dp``), weights (``tp``), positions
    (``cp``) and experts (``ep``, ranks that are counted by the others). ``folds``: ranks of ``tp``
    hold different experts, whether or not tokens are sent over them. ``splits_norms``: sequence
    parallelism beside ``tp``."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    folds: bool = False
    splits_norms: bool = False

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.cp


def configuration_of(plan: Plan) -> Configuration:
    """Return the configuration (equal degrees and choices for all stages) nearest to a plan; it is
    exact if the plan's stages are equal."""
    num_ranks = 1 if plan.servers is not None else len(stages_of_ranks(plan))
    pp = _divisor(plan.cluster.num_devices, num_ranks)
    is_cut = pp == num_ranks > 1
    roles = common_roles(plan, pp)
    modes = [block.recompute for stage in plan.stages for block in layers_of(plan, stage)]
    recompute = _most_frugal(modes)
    counts = tuple(len(layers_of(plan, stage)) for stage in plan.stages)
    size, count = _microbatches(plan, roles)
    return Configuration(
        dp=roles.dp,
        tp=roles.tp,
        pp=pp,
        cp=roles.cp,
        ep=roles.ep,
        etp=1 if roles.folds else None,
        zero=0 if plan.servers is not None else max(stage.zero for stage in plan.stages),
        shard=_shard(plan, roles),
        recompute=recompute,
        recompute_share=_recomputed_share(plan),
        recomputes_ends=_recomputes_ends(plan, recompute),
        microbatch_size=size,
        num_microbatches=count,
        schedule=plan.schedule if is_cut else "1f1b",
        num_chunks=len(plan.stages) // pp if is_cut else 1,
        layers=counts if is_cut else None,
        sequence_parallel=roles.splits_norms if roles.tp > 1 else None,
        precision=plan.model.precision,
        optimizer=plan.model.optimizer,
        compiled=plan.compiled,
        gradient_dtype=plan.model.gradient_dtype,
        offload=plan.offload,
    )


def _shard(plan: Plan, roles: Roles) -> int | None:
    """Return the number of ranks that shard states together if all stages have this number, smaller
    than that of their data-parallel ranks; None otherwise."""
    found = {stage.shard_degree for stage in plan.stages}
    degree = found.pop() if len(found) == 1 else 0
    return degree if degree and (roles.dp * roles.cp) % degree == 0 else None


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``.

    >>> _divisor(8, 3), _divisor(8, 4)
    (2, 4)
    """
    return max(each for each in range(1, most + 1) if number % each == 0)


def common_roles(plan: Plan, pp: int) -> Roles:
    """Return the parallel degrees to use for all stages of a plan with ``pp`` pipeline ranks.

    If stages differ, those with experts count, and the most frequent degrees whose product is the
    number of devices of a rank are taken. If there are none, data parallelism is as large as a
    micro-batch allows, and tensor parallelism takes the other devices.
    """
    size = plan.cluster.num_devices // pp
    if plan.servers is not None:
        return Roles(dp=size)
    with_experts = [stage for stage in plan.stages if _has_experts(stage)]
    found = Counter(axis_roles(plan, stage) for stage in with_experts or plan.stages)
    fitting = [roles for roles, _ in found.most_common() if roles.size == size]
    dp = gcd(size, plan.microbatch_size)
    return fitting[0] if fitting else Roles(dp=dp, tp=size // dp)


def axis_roles(plan: Plan, stage: StagePlan) -> Roles:
    """Return the parallel degrees of a stage, from the sizes and uses of its mesh axes."""
    degrees = {"dp": 1, "tp": 1, "cp": 1}
    splits_norms = folds = False
    ep = stage.expert_degree
    for axis, (name, size) in enumerate(zip(stage.mesh.axes, stage.mesh.shape, strict=True)):
        role = {"ep": "dp"}.get(name, name)
        if name == "tp":
            role = _role_of_free_axis(plan, stage, axis)
            splits_norms = role == "tp" and _splits_norms(stage, axis)
            folds = role == "tp" and axis in stage.expert_axes
            if role == "tp" and not folds and ep > 1 and _splits_experts(plan, stage, axis):
                folds, ep = True, ep * size
        degrees[role] *= size
    return Roles(**degrees, ep=ep, folds=folds, splits_norms=splits_norms)


def _splits_experts(plan: Plan, stage: StagePlan, axis: int) -> bool:
    """Return whether ranks of a mesh axis hold different experts, each one whole."""
    held = [
        layout.outputs[0][axis]
        for name, layout in parameters(plan, stage).items()
        if STACKED.search(name)
    ]
    return bool(held) and all(each.is_shard and each.dim == 0 for each in held)


def whole_experts(plan: Plan) -> bool:
    """Return whether ranks of tensor parallelism hold different whole experts in all stages."""
    found = [
        _splits_experts(plan, stage, stage.mesh.axes.index("tp"))
        for stage in plan.stages
        if "tp" in stage.mesh.axes and _has_experts(stage)
    ]
    return bool(found) and all(found)


def _has_experts(stage: StagePlan) -> bool:
    return any(STACKED.search(name) for name in stage.layouts)


def expert_axes(own: Configuration) -> tuple[str, ...]:
    """Return the degrees whose ranks hold different experts in a system that spreads experts over
    neighbouring ranks: tensor-parallel ones (unless they share each expert), then
    context-parallel, then data-parallel ones.

    >>> expert_axes(Configuration(dp=2, cp=2, ep=2, etp=1))
    ('cp',)
    """
    found, left = [], own.ep
    for name, size in (("tp", own.tp if own.etp == 1 else 1), ("cp", own.cp), ("dp", own.dp)):
        if size > 1 and left > 1:
            found.append(name)
            left //= min(size, left)
    return tuple(found)


def layers_of(plan: Plan, stage: StagePlan) -> tuple[BlockPlan, ...]:
    """Return the repeated layers in a stage: its blocks of the model's longest numbered list."""
    prefix = layer_list(plan)
    return tuple(
        block
        for block in stage.blocks
        if prefix is None or ((m := LAYER.match(block.name)) and m["list"] == prefix)
    )


def layer_list(plan: Plan) -> str | None:
    """Return the path of the longest numbered list of blocks; None if no block has a number."""
    names = [block.name for stage in plan.stages for block in stage.blocks]
    lists = Counter(match["list"] for name in names if (match := LAYER.match(name)))
    return lists.most_common(1)[0][0] if lists else None


def parameters(plan: Plan, stage: StagePlan) -> dict[str, NodeLayout]:
    """Return the layouts of a stage's parameters by name."""
    return {
        name: layout for name, layout in stage.layouts.items() if "." in name and not layout.inputs
    }


def _role_of_free_axis(plan: Plan, stage: StagePlan, axis: int) -> str:
    held = [
        each.outputs[0][axis]
        for name, each in parameters(plan, stage).items()
        if axis not in stage.expert_axes or EXPERTS not in name
    ]
    if any(placement.is_shard for placement in held) or not held:
        return "tp"
    splits = Counter(
        layout.outputs[0][axis].dim
        for layout in stage.layouts.values()
        if layout.inputs and layout.outputs[0][axis].is_shard
    )
    if not splits:
        return "tp"
    return {0: "dp", 1: "cp"}.get(splits.most_common(1)[0][0], "tp")


def _splits_norms(stage: StagePlan, axis: int) -> bool:
    """Return whether a mesh axis shards norms by positions: sequence parallelism."""
    norms = [
        layout.outputs[0][axis]
        for name, layout in stage.layouts.items()
        if name.startswith(NORMS) and layout.inputs
    ]
    return any(placement.is_shard and placement.dim == 1 for placement in norms)


def _most_frugal(modes: list[Recompute]) -> Recompute:
    if set(modes) <= {"none", "selective"}:
        return "selective" if "selective" in modes else "none"
    return "full"


def _recomputed_share(plan: Plan) -> float:
    """Return the largest fraction of its layers that a pipeline rank recomputes; 1 if none does."""
    shares = []
    for own in stages_of_ranks(plan):
        layers = [block for stage in own for block in layers_of(plan, plan.stages[stage])]
        again = sum(block.recompute != "none" for block in layers)
        shares.append(again / max(1, len(layers)))
    return max(shares) or 1.0


def _recomputes_ends(plan: Plan, recompute: Recompute) -> bool:
    """Return whether blocks besides the repeated layers (embedding, head) are recomputed too."""
    inside = {id(block) for stage in plan.stages for block in layers_of(plan, stage)}
    rest = [block for stage in plan.stages for block in stage.blocks if id(block) not in inside]
    return bool(rest) and recompute != "none" and all(block.recompute != "none" for block in rest)


def _microbatches(plan: Plan, roles: Roles) -> tuple[int, int]:
    """Return micro-batch size and count: the plan's, or the next lower that ``roles`` allow."""
    batch, parts = plan.model.global_batch, roles.dp
    count = plan.num_microbatches
    while count > 1 and (batch % count or batch // count % parts):
        count -= 1
    return batch // count, count
