"""Explanation of a plan: the alternatives to one of its choices, each priced.

In: a plan with its model, and a name: of a tensor, op or module, of a block, of a stage (``stage
0``), or ``zero``, ``recompute``, ``schedule``, ``microbatches``. Out: for each alternative the step
seconds and peak bytes of the plan changed to it, and its standing. The rest of the plan stays as it
is, unless a note says otherwise. For a tensor the alternatives are its layouts on the stage's mesh,
with the stage's other layouts solved anew, and the layouts that no rule offers, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoparallel.analysis.plan_model import Alternative, Explanation, PlanModel
from autoparallel.analysis.sharding import WAYS
from autoparallel.options.words import held_text
from autoparallel.planner.costs.choices import Restriction, held_layouts, node_strategies
from autoparallel.planner.costs.mesh_prices import ONE_HOST, Sharding
from autoparallel.planner.dims.batch import meeting, meeting_text
from autoparallel.planner.errors import AutoparallelError, UsageError
from autoparallel.planner.graph.graph import Node
from autoparallel.planner.graph.layout import (
    REPLICATE,
    Layout,
    Mesh,
    NodeLayout,
    Placement,
    divides,
    shard,
)
from autoparallel.planner.inter_op.submesh import meshes, restriction
from autoparallel.planner.plan import Plan, Recompute, StagePlan
from autoparallel.planner.requests.features import MODES
from autoparallel.planner.requests.pins import Pin, paths, suggest
from autoparallel.planner.requests.request import LEAST_ZERO, SCHEDULES, Forced, divisors
from autoparallel.planner.summary import mesh_text, schedule_text, zero_text

WORDS = ("zero", "offload", "recompute", "schedule", "microbatches")

_STAGE = re.compile(r"stage[ .]?(\d+)")
_AS_PLANNED = "layouts, cuts and all else as in the plan"
_CHUNKED = "several stages per rank cut the model otherwise: see inspect's alternatives"


def explain(model: PlanModel, name: str) -> Explanation:
    """Price the alternatives to a choice of the plan: a parameter, op or block (its layout), a
    stage (its blocks), or "zero", "offload", "recompute", "schedule", "microbatches".

    Raises UsageError AP357 if nothing in the plan is called ``name``.
    """
    return _Explainer(model).explained(name)


@dataclass
class _Explainer:
    model: PlanModel

    def __post_init__(self) -> None:
        self.plan, self.priced = self.model.plan, self.model.variant

    def explained(self, name: str) -> Explanation:
        """Return the priced alternatives to the choice ``name``, as in the function ``explain``."""
        word = name.strip()
        of_word: dict[str, Callable[[], Explanation]] = {
            "zero": self._zero,
            "offload": self._offload,
            "recompute": self._recompute,
            "schedule": self._schedule,
            "microbatches": self._microbatches,
        }
        if word in of_word:
            return of_word[word]()
        match = _STAGE.fullmatch(word)
        if match and int(match.group(1)) < len(self.plan.stages):
            return self._stage(int(match.group(1)))
        blocks = [block.name for stage in self.plan.stages for block in stage.blocks]
        if word in blocks:
            return self._block(word)
        known = paths(self.model.structure.graph)
        if word in known:
            return explained_tensor(self.model, word, known[word])
        raise UsageError(
            "AP357",
            f"the plan has no tensor, op, block or stage named {name!r}",
            fix=self._stages_text()
            if word.startswith("stage")
            else ""
            or suggest(word, [*known, *blocks, *WORDS], is_pattern=False)
            or f"a parameter, an op, a module, a block ({blocks[0]}), stage 0, or "
            + ", ".join(WORDS),
        )

    def _stages_text(self) -> str:
        last = len(self.plan.stages) - 1
        return (
            f"the plan's stages are stage 0 to stage {last}" if last else "the one stage is stage 0"
        )

    def _shardings(self, stages: Sequence[StagePlan]) -> list[Sharding]:
        """Return the choices of ZeRO that all of ``stages`` have in the search, or in the plan."""
        found = []
        for stage in stages:
            prices = self.model.prices(stage)
            free = replace(prices.assumptions, shard_degree=ONE_HOST)
            offered = replace(prices, assumptions=free).shardings
            kept = {own for own in offered if own.zero >= LEAST_ZERO[self.plan.offload]}
            found.append({*kept, Sharding(stage.zero, stage.shard_degree)})
        return sorted(set.intersection(*found))

    def _zero(self) -> Explanation:
        stages = self.plan.stages
        own = {Sharding(stage.zero, stage.shard_degree) for stage in stages}
        found = []
        for sharding in self._shardings(stages):
            each = tuple(_sharded(stage, sharding) for stage in stages)
            variant, is_chosen = replace(self.plan, stages=each), own == {sharding}
            found.append(self.priced(zero_text(*sharding), variant, is_chosen=is_chosen))
        if len(own) > 1:
            words = "/".join(zero_text(stage.zero, stage.shard_degree) for stage in stages)
            found.insert(0, self.priced(words, self.plan, is_chosen=True))
        return Explanation("ZeRO stage", "all stages", tuple(found), (_AS_PLANNED,))

    def _offload(self) -> Explanation:
        shared = [stage for stage in self.plan.stages if stage.mesh.joint_axes]
        least = min((stage.zero for stage in shared), default=LEAST_ZERO["gradients"])
        found = [
            self.priced(
                states, replace(self.plan, offload=states), is_chosen=self.plan.offload == states
            )
            for states, zero in LEAST_ZERO.items()
            if zero <= least
        ]
        return Explanation("states in host memory", "all stages", tuple(found), (_AS_PLANNED,))

    def _recompute(self) -> Explanation:
        blocks = [block for stage in self.plan.stages for block in stage.blocks]
        own = {block.recompute for block in blocks}
        found = [
            self.priced(mode, self._recomputed(mode, None), is_chosen=own == {mode})
            for mode in MODES
        ]
        if len(own) > 1:
            counts = [(mode, sum(block.recompute == mode for block in blocks)) for mode in MODES]
            words = ", ".join(f"{mode} {count}" for mode, count in counts if count)
            found.insert(0, self.priced(f"{words} blocks", self.plan, is_chosen=True))
        return Explanation("recomputation", "all blocks", tuple(found), (_AS_PLANNED,))

    def _recomputed(self, mode: Recompute, names: set[str] | None) -> Plan:
        def change(stage: StagePlan) -> StagePlan:
            blocks = tuple(
                replace(block, recompute=mode) if names is None or block.name in names else block
                for block in stage.blocks
            )
            return replace(stage, blocks=blocks)

        return self.model.tiled(
            replace(self.plan, stages=tuple(change(stage) for stage in self.plan.stages))
        )

    def _schedule(self) -> Explanation:
        plan = self.plan
        own = schedule_text(plan.schedule, plan.num_chunks, len(plan.slices))
        chosen = self.priced(own, plan, is_chosen=True)
        if not plan.has_pipeline:
            note = "the plan has one stage, so there is nothing to schedule"
            return Explanation("schedule", "all stages", (chosen,), (note,))
        found = [chosen]
        for name in SCHEDULES:
            if name == plan.schedule:
                continue
            if plan.num_chunks > 1 or plan.slices:
                why = "it runs one stage per rank: see inspect's alternatives"
                found.append(Alternative(schedule_text(name), "NOT OFFERED", why=why))
            else:
                found.append(self.priced(schedule_text(name), replace(plan, schedule=name)))
        return Explanation("schedule", "all stages", tuple(found), (_AS_PLANNED, _CHUNKED))

    def _microbatches(self) -> Explanation:
        plan, batch = self.plan, self.plan.model.global_batch
        found = []
        for count in divisors(batch):
            name = f"{count} × {batch // count}"
            variant = replace(plan, num_microbatches=count)
            mesh = undivided(plan, batch // count)
            if mesh is not None:
                why = f"micro-batches of {batch // count} cannot be split over {mesh_text(mesh)}"
                found.append(Alternative(name, "NOT OFFERED", why=why))
            elif not self.model.graph.batch_dims and count != plan.num_microbatches:
                node = meeting(self.model.graph)
                why = "the model takes another path for fewer samples"
                why = why if node is None else f"{meeting_text(node)}, so a step is one micro-batch"
                found.append(Alternative(name, "NOT OFFERED", why=why))
            else:
                found.append(self.priced(name, variant, is_chosen=count == plan.num_microbatches))
        return Explanation("micro-batches", "all stages", tuple(found), (_AS_PLANNED,))

    def _block(self, name: str) -> Explanation:
        index, stage = next(
            (index, stage)
            for index, stage in enumerate(self.plan.stages)
            if any(block.name == name for block in stage.blocks)
        )
        place = [block.name for block in stage.blocks].index(name)
        own = stage.blocks[place].recompute
        found = [
            self.priced(f"recompute {mode}", self._recomputed(mode, {name}), is_chosen=own == mode)
            for mode in MODES
        ]
        if place == 0 and index:
            found.append(self._moved(index, index - 1))
        if place == len(stage.blocks) - 1 and index + 1 < len(self.plan.stages):
            found.append(self._moved(index, index + 1))
        return Explanation(f"block {name}", f"stage {index}", tuple(found), (_AS_PLANNED,))

    def _moved(self, index: int, other: int) -> Alternative:
        """Price the plan after moving a block from stage ``index`` to the adjacent stage ``other``:
        the first block if ``other`` is the earlier stage, else the last."""
        stages = list(self.plan.stages)
        one, two, name = stages[index], stages[other], f"in stage {other}"
        at = 0 if other < index else -1
        block = one.blocks[at]
        if len(one.blocks) == 1 or self.plan.num_chunks > 1:
            return Alternative(name, "NOT OFFERED", why=f"stage {index} would have no block")
        if all(each.kind != block.kind for each in two.blocks):
            why = f"stage {other} has no block of its kind, so no layouts for it: see --why-not"
            return Alternative(name, "NOT OFFERED", why=why)
        if other < index:
            stages[index] = replace(one, blocks=one.blocks[1:])
            stages[other] = replace(two, blocks=(*two.blocks, block))
        else:
            stages[index] = replace(one, blocks=one.blocks[:-1])
            stages[other] = replace(two, blocks=(block, *two.blocks))
        return self.priced(name, replace(self.plan, stages=tuple(stages)))

    def _stage(self, index: int) -> Explanation:
        stage = self.plan.stages[index]
        found = []
        for sharding in self._shardings([stage]):
            variant = self.model.at(index, _sharded(stage, sharding))
            is_chosen = sharding == (stage.zero, stage.shard_degree)
            found.append(self.priced(zero_text(*sharding), variant, is_chosen=is_chosen))
        names = {block.name for block in stage.blocks}
        for mode in MODES:
            is_own = {block.recompute for block in stage.blocks} == {mode}
            variant = self._recomputed(mode, names)
            found.append(self.priced(f"recompute {mode}", variant, is_chosen=is_own))
        for mesh in meshes(len(stage.devices), self.plan.cluster.host_size or 1, Forced()):
            name = mesh_text(mesh)
            if mesh_text(stage.mesh) == name:
                found.append(self.priced(name, self.plan, is_chosen=True))
            elif self.plan.microbatch_size % mesh.row_parts:
                why = f"micro-batches of {self.plan.microbatch_size} samples do not divide"
                found.append(Alternative(name, "NOT OFFERED", why=why))
            else:
                found.append(self._on_mesh(name, index, mesh))
        note = "of another mesh all layouts of the stage are solved anew"
        return Explanation(f"stage {index}", _blocks_text(stage), tuple(found), (note,))

    def _on_mesh(self, name: str, index: int, mesh: Mesh) -> Alternative:
        limited = restriction(mesh, Forced())
        stage = replace(
            self.plan.stages[index], mesh=mesh, shares=(), gradient_sums=(), placements=()
        )
        try:
            layouts = self.model.solved(index, stage, limited)
        except AutoparallelError as error:
            return Alternative(name, "NOT OFFERED", why=error.what)
        if layouts is None:
            return Alternative(name, "NOT OFFERED", why="no layouts agree on this mesh")
        return self.priced(name, self.model.at(index, replace(stage, layouts=layouts)))


def undivided(plan: Plan, rows: int) -> Mesh | None:
    """Return a plan's first mesh that cannot split ``rows`` samples evenly over ranks, or None."""
    meshes = (stage.mesh for stage in plan.stages)
    return next((mesh for mesh in meshes if rows % mesh.row_parts), None)


def _blocks_text(stage: StagePlan) -> str:
    return f"{stage.blocks[0].name} to {stage.blocks[-1].name}, {mesh_text(stage.mesh)}"


def explained_tensor(model: PlanModel, path: str, name: str) -> Explanation:
    """Return the alternative layouts of the graph node ``name``, which the user called ``path``.

    Raises UsageError AP357 if the node has no layout in the plan.
    """
    graph, blocks = model.structure.graph, model.structure.blocks
    template = blocks.template.get(name, name)
    index = _stage_of(model, name)
    stage, node = model.plan.stages[index], graph[name]
    own = stage.layout_of(name, blocks)
    if own is None:
        raise UsageError(
            "AP357",
            f"{path} has no layout of its own in the plan",
            where=f"stage {index}",
            fix=suggest(path, paths(graph), is_pattern=False),
        )
    limited, prices = model.restriction(index), model.prices(stage)
    if node.kind == "parameter":
        offered = held_layouts(graph[template], graph, prices, limited)
    else:
        found = node_strategies(graph[template], graph, prices, limited)
        offered = tuple(way.layout.outputs[0] for way in found)
    alternatives = list(_layouts(model, index, template, own, (offered, limited)))
    known = [*offered, own.outputs[0]]
    alternatives += _not_offered(node, stage.mesh, known, limited)
    kinds = [blocks.kinds[block.kind] for block in stage.blocks]
    alike = sum(template in (*kind.nodes, *kind.parameters) for kind in kinds)
    where = f"stage {index}, {mesh_text(stage.mesh)}"
    where += f", in {alike} blocks alike" if alike > 1 else ""
    where += "".join(f"; {WAYS[label]}" for label in own.labels if label in WAYS)
    kind = "parameter" if node.kind == "parameter" else node.op.removeprefix("aten.")
    shape = " × ".join(map(str, node.spec.shape))
    subject = f"{path} ({kind}, {shape} {node.spec.dtype})"
    note = "the other layouts of the stage are solved anew for each"
    return Explanation(subject, where, tuple(alternatives), (note,))


def _stage_of(model: PlanModel, name: str) -> int:
    blocks = {block.name: block for block in model.structure.blocks.blocks}
    for index, stage in enumerate(model.plan.stages):
        for block in stage.blocks:
            own = blocks[block.name]
            if name in own.nodes or name in own.parameters:
                return index
    raise UsageError(
        "AP357",
        f"{name} is in no block of the plan",
        fix="name an op or a parameter that the model's forward uses",
    )


def _layouts(
    model: PlanModel,
    index: int,
    template: str,
    own: NodeLayout,
    choice: tuple[Sequence[Layout], Restriction],
) -> Iterator[Alternative]:
    """Yield each layout offered to the node ``template`` of stage ``index``, priced with the
    fastest layouts of all other nodes; first ``own``, its layout in the plan.

    ``choice`` has the offered layouts, and the stage's limits on all layouts.
    """
    offered, limited = choice
    stage = model.plan.stages[index]
    seen: set[tuple[str, ...]] = set()
    for layout in (own.outputs[0], *offered):
        key = _plain(layout)
        if key in seen:
            continue
        seen.add(key)
        name = layout_text(layout, stage.mesh)
        if layout == own.outputs[0]:
            yield model.variant(name, model.plan, is_chosen=True)
            continue
        axes = zip(stage.mesh.axes, layout, stage.mesh.shape, strict=True)
        pins = tuple(Pin(template, each, axis) for axis, each, size in axes if size > 1)
        layouts = model.solved(index, stage, replace(limited, pins={template: pins}))
        if layouts is None or _plain(layouts[template].outputs[0]) != key:
            yield Alternative(name, "NOT OFFERED", why="no layouts of its neighbours agree with it")
        else:
            yield model.variant(name, model.at(index, replace(stage, layouts=layouts)))


def _plain(layout: Layout) -> tuple[str, ...]:
    """Return a layout's placements as texts. Invariant ("I", replicated with equal gradients)
    counts as replicated ("R"), as in layouts that a user forces."""
    return tuple("R" if each.kind == "I" else str(each) for each in layout)


def layout_text(layout: Layout, mesh: Mesh) -> str:
    """Describe a layout in words, including partial sums.

    >>> from autoparallel.planner.graph.layout import PARTIAL, REPLICATE, shard
    >>> layout_text((REPLICATE, shard(0)), Mesh(("dp", "tp"), (2, 2)))
    'dim 0 sharded over tp'
    >>> layout_text((PARTIAL,), Mesh(("tp",), (2,)))
    'partial sums over tp'
    """
    axes = zip(layout, mesh.axes, mesh.shape, strict=True)
    partial = [axis for each, axis, size in axes if each.kind == "P" and size > 1]
    if not partial:
        return held_text(layout, mesh)
    sums = f"partial sums over {' and '.join(partial)}"
    is_split = any(each.is_shard for each in layout)
    return f"{held_text(layout, mesh)}, {sums}" if is_split else sums


def _not_offered(
    node: Node, mesh: Mesh, offered: Sequence[Layout], limited: Restriction
) -> list[Alternative]:
    """Return an alternative, with the reason why it is not offered, for each dimension of ``node``
    and mesh axis for which no layout in ``offered`` shards the dimension over the axis."""
    found = []
    shape = node.spec.shape
    for axis, (name, size) in enumerate(zip(mesh.axes, mesh.shape, strict=True)):
        have = {layout[axis] for layout in offered}
        for dim, length in enumerate(shape):
            if size > 1 and shard(dim) not in have:
                words = f"dim {dim} sharded over {name}"
                why = _reason(node, axis, shard(dim), (mesh, limited), length)
                found.append(Alternative(words, "NOT OFFERED", why=why))
    return found


def _sharded(stage: StagePlan, sharding: Sharding) -> StagePlan:
    return replace(stage, zero=sharding.zero, shard_degree=sharding.degree)


def _reason(
    node: Node, axis: int, placement: Placement, on: tuple[Mesh, Restriction], length: int
) -> str:
    mesh, limited = on
    size = mesh.shape[axis]
    layout = tuple(placement if place == axis else REPLICATE for place in range(len(mesh.axes)))
    if not divides(node.spec.shape, layout, mesh.shape):
        return f"{length} is not divisible by {mesh.axes[axis]}={size}"
    if axis in limited.split_batch and node.kind == "parameter":
        return f"{mesh.axes[axis]} splits samples; ZeRO shards parameters' states over it"
    if axis in limited.split_batch:
        return f"{mesh.axes[axis]} splits samples alone"
    if node.kind == "parameter":
        return "no op that uses it can run on such a part"
    return f"the rule of {node.op.removeprefix('aten.')} has no such strategy"
