"""Description of a plan's sharding in words: parameters by kind of block, ops by mesh axis.

In: a plan, or some of its stages. Out: for each kind of block the parameters by layout, and for
each axis the number of ops split over it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoparallel.options.words import bytes_text, held_text, seconds_text
from autoparallel.planner.graph.layout import (
    BALANCED,
    HALO,
    OF_GROUPS,
    RING,
    Layout,
    Mesh,
    NodeLayout,
    is_halved,
    sent_axes,
    split_axes,
)
from autoparallel.planner.graph.state_sharding import state_sharding
from autoparallel.planner.plan import ExpertPlacement, Plan, StagePlan, rows_text
from autoparallel.planner.summary import mesh_text


@dataclass(frozen=True, slots=True)
class KindSplit:
    """Layouts of the parameters in all blocks of one kind (equal layers) of one or more stages.

    ``groups`` maps a layout in words to the names of its parameters within the block; ``layouts``
    maps the words to the layout. ``first`` is the model's first block of the kind. For parameters
    outside of blocks ``kind`` and ``first`` are "".
    """

    kind: str
    blocks: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, Layout]
    first: str


def mesh_splits(plan: Plan) -> Iterator[tuple[Mesh, dict[int, StagePlan], tuple[KindSplit, ...]]]:
    """Yield each distinct mesh, its stages by number, and the layouts of their parameters."""
    for mesh in dict.fromkeys(stage.mesh for stage in plan.stages):
        members = {at: stage for at, stage in enumerate(plan.stages) if stage.mesh == mesh}
        yield mesh, members, merged_splits(plan, list(members.values()))


def stored_text(members: Iterable[StagePlan]) -> str:
    """Describe the share of a weight that a rank stores under ZeRO 3; "" without ZeRO 3."""
    sharding = [stage for stage in members if stage.zero == 3]
    sizes = {
        state_sharding(stage.mesh, axes, stage.shard_degree).num_shards
        for stage in sharding
        for axes in stage.state_axes
    }
    if not sizes:
        return ""
    shares = " or ".join(f"1/{size}" for size in sorted(sizes))
    return f"ZeRO 3: a rank stores {shares} of each part below, and gathers the part to compute"


def merged_splits(plan: Plan, members: Sequence[StagePlan]) -> tuple[KindSplit, ...]:
    """Return the parameter layouts of several stages by kind of block; equal entries are merged."""
    merged: dict[tuple[str, ...], KindSplit] = {}
    for stage in members:
        for split in _kind_splits(plan, stage):
            key = (split.kind, *map(repr, split.groups.items()))
            before = merged[key].blocks if key in merged else ()
            merged[key] = replace(split, blocks=(*before, *split.blocks))
    return tuple(merged.values())


def _kind_splits(plan: Plan, stage: StagePlan) -> list[KindSplit]:
    """Return the parameter layouts of ``stage``: an entry per kind of block, then all others.

    Parameters of a kind are named after its first block in the whole model. The last entry lists
    parameters outside of blocks, and names the blocks that have no parameters.
    """
    first: dict[str, str] = {}
    for each in plan.stages:
        for block in each.blocks:
            first.setdefault(block.kind, block.name)
    members: dict[str, list[str]] = {}
    for block in stage.blocks:
        members.setdefault(block.kind, []).append(block.name)
    kind_of = {first[kind]: kind for kind in members}
    groups: dict[str, dict[str, list[str]]] = {kind: {} for kind in (*members, "")}
    layouts: dict[str, Layout] = {}
    for name, layout in _parameters(stage.layouts):
        owners = [block for block in kind_of if name.startswith(f"{block}.") or name == block]
        owner = max(owners, key=len, default="")
        text = held_text(layout, stage.mesh)
        names = groups[kind_of.get(owner, "")].setdefault(text, [])
        names.append(name.removeprefix(f"{owner}.") if owner else name)
        layouts[text] = layout
    nameless = [kind for kind in members if not groups[kind]]
    members[""] = [name for kind in nameless for name in members[kind]]
    return [
        KindSplit(
            kind,
            tuple(members[kind]),
            {text: tuple(names) for text, names in found.items()},
            layouts,
            first.get(kind, ""),
        )
        for kind, found in groups.items()
        if found
    ]


def _parameters(layouts: Mapping[str, NodeLayout]) -> list[tuple[str, Layout]]:
    """Return the names and layouts of parameters: values without inputs, sharded or replicated."""
    return [
        (name, node.outputs[0])
        for name, node in layouts.items()
        if not node.inputs
        and "." in name
        and len(node.outputs) == 1
        and all(placement.kind in "SR" for placement in node.outputs[0])
    ]


def weight_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a table row per parameter of each kind of block and mesh, with its layout in words."""
    return [
        {"blocks": list(kind.blocks), "mesh": mesh_text(mesh), "weight": name, "layout": layout}
        for mesh, _, kinds in mesh_splits(plan)
        for kind in kinds
        for layout, names in kind.groups.items()
        for name in names
    ]


def folded_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return parameter names, with ``x.weight`` and ``x.bias`` folded into ``x``.

    >>> folded_names(("up.bias", "norm.weight", "up.weight"))
    ('up', 'norm.weight')
    """
    found = set(names)
    folded: dict[str, None] = {}
    for name in names:
        module = name.rpartition(".")[0]
        both = module and {f"{module}.weight", f"{module}.bias"} <= found
        folded[module if both and name.rpartition(".")[2] in ("weight", "bias") else name] = None
    return tuple(folded)


def axis_lines(members: Sequence[StagePlan]) -> list[str]:
    """Return a line of text per mesh axis of stages on one mesh: the number of ops that it shards,
    and its purpose, both of the stage with the most ops.

    Further lines say the samples per rank of stages with unequal shares, the activations in host
    memory, and the balance of experts by measured loads.
    """
    counted: dict[str, StagePlan] = {}
    for stage in members:
        for axis, size in zip(stage.mesh.axes, stage.mesh.shape, strict=True):
            is_first = axis not in counted
            if size > 1 and (is_first or len(_ops(stage)) > len(_ops(counted[axis]))):
                counted[axis] = stage
    lines = [_axis_line(stage, axis) for axis, stage in counted.items()]
    for stage in members:
        if stage.shares:
            lines.append(
                f"samples of a micro-batch by rank of {stage.mesh.axes[0]}, in proportion to "
                f"speed: {rows_text(stage.shares)}"
            )
    most = max(members, key=lambda stage: stage.prediction.host_bytes)
    if most.prediction.host_bytes:
        lines.append(_offload_line(most))
    copies = max(stage.prediction.seconds.get("state_copies", 0.0) for stage in members)
    if copies:
        lines.append(
            f"copies of states to and from host memory take {seconds_text(copies)} of a "
            "micro-batch, beside compute where it is long enough"
        )
    placements = [each for stage in members for each in stage.placements if each.busiest > 1]
    return [*lines, placement_line(placements)] if placements else lines


def _offload_line(stage: StagePlan) -> str:
    """Describe the activations of a stage that wait in host memory, and the copies of them."""
    size, seconds = bytes_text(stage.prediction.host_bytes), stage.prediction.seconds
    copies = seconds_text(seconds.get("host_copies", 0.0))
    exposed = seconds.get("exposed_copies", 0.0)
    waits = f"waits of {seconds_text(exposed)}" if exposed else "all beside compute"
    return (
        f"each device keeps {size} of activations of a micro-batch in host memory; copies take "
        f"{copies} in each direction, {waits}"
    )


def placement_line(placements: Sequence[ExpertPlacement]) -> str:
    """Describe the busiest rank of layers of experts by measured loads, and the placement of hot
    experts."""
    before, after = (
        sum(getattr(each, name) for each in placements) / len(placements)
        for name in ("busiest", "placed")
    )
    text = f"experts by measured loads: the busiest rank gets {after:.2f} times the mean"
    num_experts = sum(len(each.experts) for each in placements)
    if not num_experts:
        return text
    others = "expert is" if num_experts == 1 else "experts are"
    return f"{text}, not {before:.2f}: {num_experts} {others} computed by other ranks (too)"


def _ops(stage: StagePlan) -> list[NodeLayout]:
    return [node for node in stage.layouts.values() if node.inputs]


def _axis_line(stage: StagePlan, axis: str) -> str:
    """Describe a mesh axis: the number of ops split or summed over it, and its purpose."""
    place, ops = stage.mesh.axes.index(axis), _ops(stage)
    num_split = sum(place in split_axes(node) for node in ops)
    num_sums = sum(_makes_sum(node, place) for node in ops)
    reason = f": {AXIS_REASONS[axis]}" if axis in AXIS_REASONS and num_split else ""
    sums = f"; {num_sums} op{'' if num_sums == 1 else 's'} with partial sums" if num_sums else ""
    ways = "".join(f"; {WAYS[way]}" for way in attention_ways(stage, place) if way in WAYS)
    sends = _hidden_text(stage) if any(place in sent_axes(node) for node in ops) else ""
    states = f"; {ZERO_WORDS[stage.zero]}" if axis != "tp" and stage.zero else ""
    if states and stage.shard_degree:
        states += f", within groups of {stage.shard_degree} ranks"
    split = f"{axis}={stage.mesh.shape[place]} shards {num_split} of {len(ops)} ops"
    return f"{split}{reason}{sums}{ways}{sends}{states}"


WAYS = {
    BALANCED: "causal attention balanced by swapping queries",
    HALO: "attention receives the keys and values of its window from the ranks before",
    RING: "attention passes keys and values from rank to rank",
    "heads": "attention splits heads after an all-to-all",
    OF_GROUPS: "attention splits heads of queries after an all-to-all",
}
"""Ways of attention on an axis of positions that reports name."""


def attention_ways(stage: StagePlan, axis: int) -> tuple[str, ...]:
    """Return the ways in which a stage's attention is split over a mesh axis, the most frequent
    first: the labels of ``WAYS`` that its strategies have; "q" if it gathers keys and values
    without balancing; "heads" if "cp", whose other ops have positions, splits heads."""
    is_cp = stage.mesh.axes[axis] == "cp"
    labels = Counter(
        label
        for name, node in stage.layouts.items()
        if "scaled_dot_product_attention" in name and node.inputs and node.labels
        if (label := node.labels[axis]) in (BALANCED, RING, "q") or is_cp
    )
    known = (*WAYS, "q")
    return tuple(label if label in known else "heads" for label, _ in labels.most_common())


def _hidden_text(stage: StagePlan) -> str:
    """Describe how long the stage's exchanges with experts run beside compute."""
    hidden = stage.prediction.seconds.get("hidden_exchanges", 0.0)
    halves = " in halves" if any(is_halved(node) for node in _ops(stage)) else ""
    beside = f", {seconds_text(hidden)} of a micro-batch beside compute" if hidden else ""
    return f"; tokens sent to experts{halves}{beside}" if halves or beside else ""


def _makes_sum(node: NodeLayout, axis: int) -> bool:
    partial_in = any(layout[axis].kind == "P" for layout in node.inputs)
    partial_out = any(layout[axis].kind == "P" for layout in node.outputs)
    return partial_out and not partial_in


AXIS_REASONS = {
    "dp": "each rank has its own samples of the batch",
    "ep": "each rank has its own experts and its own samples of the batch",
    "cp": "each rank has its own positions of the sequences",
    "tp": "each rank has its own part of the weights",
}

ZERO_WORDS = (
    "",
    "optimizer states sharded over it",
    "optimizer states and gradients sharded over it",
    "optimizer states, gradients and parameters sharded over it",
)
