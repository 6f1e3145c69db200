"""The layouts that a tensor could have in a plan, each priced.

In: the variants of a plan, the path of a parameter, an op or a module. Out: its layouts on its
stage's mesh, those that no rule offers with the reason. For each the other layouts of the stage are
solved anew, as the neighbours of a layout follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoparallel.analysis.plan_model import Alternative, Explanation, PlanModel
from autoparallel.options.words import held_text
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph import Node
from autoparallel.planner.layout import (
    REPLICATE,
    Layout,
    Mesh,
    NodeLayout,
    Placement,
    divides,
    shard,
)
from autoparallel.planner.pricing.choices import Restriction, held_layouts, node_strategies
from autoparallel.planner.requests.pins import Pin, paths, suggest
from autoparallel.planner.summary import mesh_text


def explained_tensor(model: PlanModel, path: str, name: str) -> Explanation:
    """The alternatives of the node ``name``, which was called ``path``.

    Raises UsageError AP357 for one without a layout in the plan.
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
    """Each layout of a node that is offered, the others of its stage solved for it."""
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
    """A layout as pins see it: whole is whole, whatever its gradient."""
    return tuple("R" if each.kind == "I" else str(each) for each in layout)


def layout_text(layout: Layout, mesh: Mesh) -> str:
    """A layout in words, with its partial sums.

    >>> from autoparallel.planner.layout import PARTIAL, REPLICATE, shard
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
    """Splits on one axis that no offered layout has, with the reason."""
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
