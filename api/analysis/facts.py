"""What a report says, computed from a Plan: the worst rank, the critical stage, the splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autoparallel.options.words import bytes_text, held_text, seconds_text
from autoparallel.planner.asynchronous import num_updates
from autoparallel.planner.layout import Layout, Mesh, NodeLayout, balanced_axes
from autoparallel.planner.plan import Alternative, Plan, StagePlan
from autoparallel.planner.pricing.stage_cost import TRANSIENT, combine_bytes
from autoparallel.planner.replicas import stages_of_ranks
from autoparallel.planner.summary import SEPARATOR

MEMORY_ORDER = (
    "parameters",
    "master",
    "versions",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "inputs",
    "recomputation",
    "working",
    "transient",
    "communication",
    "buffers",
    "fragmentation",
    "communicators",
    "reserve",
)


def memory_source(plan: Plan) -> str:
    """Describe how the bytes of the stages were found."""
    held = [stage.prediction.memory_bytes for stage in plan.stages]
    if not all("communicators" in own for own in held):
        return "estimated by the rules of the ops"
    if any("working" in own for own in held):
        return "simulated action by action, with the rules of the ops"
    return "simulated action by action, with the ops run on fake tensors"


def fullest_rank(plan: Plan) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the stages of the fullest pipeline rank, and its bytes by category.

    Transient bytes count once. Replicas of Chimera hold fewer activations at once than the
    two stages would alone: as many as are left of the predicted peak.
    """
    ranks = [(stages, bytes_of(plan, stages)) for stages in stages_of_ranks(plan)]
    stages, found = max(ranks, key=lambda rank: sum(rank[1].values()))
    if plan.schedule == "chimera" and plan.has_pipeline:
        others = sum(found.values()) - found.get("activations", 0)
        found["activations"] = plan.prediction.peak_memory_bytes - others
    return stages, found


def bytes_of(plan: Plan, stages: Sequence[int]) -> dict[str, int]:
    """The predicted bytes, by category, of a pipeline rank that runs ``stages``."""
    return combine_bytes(
        (plan.stages[stage].prediction.memory_bytes for stage in stages), TRANSIENT
    )


def ordered_memory(held: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by category in the order of reports, without empty categories."""
    names = [name for name in MEMORY_ORDER if name in held]
    names += [name for name in held if name not in MEMORY_ORDER]
    return {name: held[name] for name in names if held[name]}


def usable_bytes(plan: Plan, stage: StagePlan) -> int:
    """Return the bytes that a process may allocate on the smallest device of ``stage``."""
    return min(plan.cluster.device(rank).usable_memory_bytes for rank in stage.devices)


def rank_seconds(plan: Plan, stages: Sequence[int]) -> dict[str, float]:
    """Return the seconds of a step by purpose, on a rank that runs ``stages``; the rest is waiting.

    ``prediction.seconds`` counts compute, communication and send per micro-batch, and
    exposed_sync and optimizer per update.
    """
    updates, parts = num_updates(plan), dict.fromkeys(SPENT, 0.0)
    for stage in stages:
        seconds = plan.stages[stage].prediction.seconds
        for name, key in SPENT.items():
            times = updates if key in ("exposed_sync", "optimizer") else _num_runs(plan)
            parts[name] += seconds.get(key, 0.0) * times
    waiting = plan.prediction.step_seconds - sum(parts.values())
    other = "waiting for other stages" if plan.has_pipeline else "other"
    parts[other] = waiting if waiting > 1e-3 * plan.prediction.step_seconds else 0.0
    return {name: value for name, value in parts.items() if value > 0}


class Communication(NamedTuple):
    """Collectives of a stage in a step: what they are for, beside what they run, and seconds: of
    the links in all, and of that what adds to the step."""

    what: str
    beside: str
    seconds: float
    exposed_seconds: float

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)


def communication(plan: Plan, stage: StagePlan) -> list[Communication]:
    """The collectives of a stage, without those that take no time."""
    own, count = stage.prediction.seconds, _num_runs(plan)
    states = own.get("states", 0.0)
    exposed = states - own.get("hidden_states", 0.0)
    once = own.get("parameter_gather", 0.0) + own.get("gradient_sync", 0.0)
    on_path = count * (own.get("communication", 0.0) - exposed)
    of_states = "parameters and gradients" if stage.zero == 3 else "gradients"
    per_step = {0: "sum gradients", 1: "sum gradients, gather parameters", 2: "gather parameters"}
    beside = {0: "last backward", 1: "last backward, first forward", 2: "first forward"}
    if plan.gradient_order == "priority":
        beside[0] = "last backward, next forward"
    names = {own.algorithm for own in stage.gradient_sums}
    on_gpus = any(host.device.kind == "cuda" for host in plan.cluster.hosts)
    if not on_gpus and names - {"library"}:
        per_step[0] = f"sum gradients by {' or '.join(sorted(names))}"
    updates, zero = num_updates(plan), stage.zero
    found = [
        Communication("of ops and between layouts", "nothing", on_path, on_path),
        Communication(
            f"{of_states}, every micro-batch", "the next block", states * count, exposed * count
        ),
        Communication(
            per_step.get(zero, "sum gradients") + ", once",
            beside.get(zero, "last backward"),
            once * updates,
            own.get("exposed_sync", once) * updates,
        ),
    ]
    return [each for each in found if each.seconds > 1e-6 * plan.prediction.step_seconds]


SPENT = {
    "compute": "compute",
    "communication within the stage": "communication",
    "sends to the next stage": "send",
    "gradient synchronization": "exposed_sync",
    "optimizer": "optimizer",
}
"""What a rank does, and its name in a prediction."""


def merged_communication(plan: Plan) -> list[tuple[tuple[int, ...], Communication]]:
    """The collectives of the stages, those that read alike once, with the stages that have them."""
    found: dict[tuple[str, ...], tuple[list[int], Communication]] = {}
    for index, stage in enumerate(plan.stages):
        for each in communication(plan, stage):
            key = (
                each.what,
                each.beside,
                seconds_text(each.seconds),
                seconds_text(each.exposed_seconds),
            )
            found.setdefault(key, ([], each))[0].append(index)
    return [(tuple(stages), each) for stages, each in found.values()]


def _num_runs(plan: Plan) -> float:
    """Return the number of micro-batches that a rank runs through each stage; half for Chimera."""
    is_both_ways = plan.schedule == "chimera" and plan.has_pipeline
    return plan.num_microbatches / (2 if is_both_ways else 1)


def busiest_rank(plan: Plan) -> tuple[int, ...]:
    """The stages of the rank that sets the pace: the most seconds per micro-batch."""

    def busy(stages: Sequence[int]) -> float:
        own = [plan.stages[stage].prediction.seconds for stage in stages]
        return sum(each.get("forward", 0.0) + each.get("backward", 0.0) for each in own)

    return max(stages_of_ranks(plan), key=busy)


@dataclass(frozen=True, slots=True)
class KindSplit:
    """How the parameters of one kind of block lie in one stage.

    ``groups`` maps a layout in words to the parameters that have it, named within the block;
    ``layouts`` has these layouts. ``first`` is the block whose parameters stand for the kind's.
    """

    blocks: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    first: str = ""


def kind_splits(plan: Plan, stage: StagePlan) -> tuple[tuple[KindSplit, ...], KindSplit]:
    """Return the layouts of parameters by the kind of block in ``stage``, and those of the rest.

    A kind's layouts are given under the names of its first block in the whole model. The
    rest are the blocks that no parameter is named after, and the parameters of no other block.
    """
    first: dict[str, str] = {}
    for each in plan.stages:
        for block in each.blocks:
            first.setdefault(block.kind, block.name)
    members: dict[str, list[str]] = {}
    for block in stage.blocks:
        members.setdefault(block.kind, []).append(block.name)
    groups: dict[str, dict[str, list[str]]] = {kind: {} for kind in members}
    elsewhere: dict[str, list[str]] = {}
    layouts: dict[str, Layout] = {}
    for name, held in _parameters(stage.layouts):
        kind = _kind_of(name, {first[kind]: kind for kind in members})
        owner = groups[kind] if kind else elsewhere
        inside = name.removeprefix(f"{first[kind]}.") if kind else name
        text = held_text(held, stage.mesh)
        owner.setdefault(text, []).append(inside)
        layouts[text] = held
    kinds = tuple(
        KindSplit(
            tuple(members[kind]),
            {text: tuple(names) for text, names in found.items()},
            layouts,
            first[kind],
        )
        for kind, found in groups.items()
    )
    empty = tuple(name for kind in kinds if not kind.groups for name in kind.blocks)
    rest = KindSplit(empty, {text: tuple(names) for text, names in elsewhere.items()}, layouts)
    return tuple(kind for kind in kinds if kind.groups), rest


def merged_splits(plan: Plan, members: list[StagePlan]) -> tuple[KindSplit, ...]:
    """The splits of several stages, those that are equal merged into one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    splits: dict[tuple[str, ...], KindSplit] = {}
    for stage in members:
        kinds, rest = kind_splits(plan, stage)
        for split in (*kinds, *((rest,) if rest.groups else ())):
            key = (_kind_name(plan, split), *map(repr, split.groups.items()))
            merged.setdefault(key, []).extend(split.blocks)
            splits[key] = split
    return tuple(replace(splits[key], blocks=tuple(blocks)) for key, blocks in merged.items())


def _kind_name(plan: Plan, split: KindSplit) -> str:
    found = {block.name: block.kind for stage in plan.stages for block in stage.blocks}
    return found[split.blocks[0]] if split.blocks else ""


def _parameters(layouts: Mapping[str, NodeLayout]) -> list[tuple[str, Layout]]:
    """Leaves that are held as a parameter is (split or whole, never partial or invariant)."""
    return [
        (name, node.outputs[0])
        for name, node in layouts.items()
        if not node.inputs
        and "." in name
        and len(node.outputs) == 1
        and all(placement.kind in "SR" for placement in node.outputs[0])
    ]


def _kind_of(name: str, kinds: Mapping[str, str]) -> str:
    """The kind of the block with the longest name that ``name`` starts with, or nothing."""
    owners = [block for block in kinds if name.startswith(f"{block}.") or name == block]
    return kinds[max(owners, key=len)] if owners else ""


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What the ops of a stage do on one mesh axis; counts are of ops of distinct blocks.

    ``num_balanced``: causal attentions whose ranks swap halves of their queries there.
    """

    axis: str
    size: int
    num_split: int
    num_ops: int
    num_sums: int
    num_balanced: int


def axis_uses(stage: StagePlan) -> tuple[AxisUse, ...]:
    """Return the numbers of split ops and partial sums on each axis of more than one rank."""
    ops = [node for node in stage.layouts.values() if node.inputs]
    return tuple(
        AxisUse(
            axis=axis,
            size=size,
            num_split=sum(_is_split(node, position) for node in ops),
            num_ops=len(ops),
            num_sums=sum(_makes_sum(node, position) for node in ops),
            num_balanced=sum(position in balanced_axes(node) for node in ops),
        )
        for position, (axis, size) in enumerate(_axes(stage.mesh))
        if size > 1
    )


def _axes(mesh: Mesh) -> list[tuple[str, int]]:
    return list(zip(mesh.axes, mesh.shape, strict=True))


def _is_split(node: NodeLayout, axis: int) -> bool:
    return any(layout[axis].is_shard for layout in (*node.inputs, *node.outputs))


def _makes_sum(node: NodeLayout, axis: int) -> bool:
    partial_in = any(layout[axis].kind == "P" for layout in node.inputs)
    partial_out = any(layout[axis].kind == "P" for layout in node.outputs)
    return partial_out and not partial_in


def folded_names(names: Sequence[str]) -> tuple[str, ...]:
    """Parameter names, ``x.weight`` and ``x.bias`` together as ``x``.

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


def planning_seconds(plan: Plan) -> tuple[float, dict[str, float]]:
    """The whole planning time, and its phases."""
    phases = {name: value for name, value in plan.solver.seconds.items() if name != "total"}
    return plan.solver.seconds.get("total", sum(phases.values())), phases


def merged_alternatives(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """Alternatives with the same figures that differ in one part of the summary, as one.

    >>> first = Alternative("dp=4 pp=2 · ZeRO 0 · ZB-H1 · 1 × 32", 1.0, 10, "bubble +9.0 %")
    >>> second = Alternative("dp=4 pp=2 · ZeRO 0 · ZB-H2 · 1 × 32", 1.0, 10, "bubble +9.0 %")
    >>> [each.summary for each in merged_alternatives([first, second])]
    ['dp=4 pp=2 · ZeRO 0 · ZB-H1/ZB-H2 · 1 × 32']
    """
    groups: dict[tuple[str, str, str], list[list[list[str]]]] = {}
    shown: list[tuple[Alternative, list[list[str]]]] = []
    for each in alternatives:
        step, memory = seconds_text(each.step_seconds), bytes_text(each.peak_memory_bytes)
        group = groups.setdefault((step, memory, each.reason), [])
        parts = each.summary.split(SEPARATOR)
        if not any(_joins(merged, parts) for merged in group):
            group.append([[part] for part in parts])
            shown.append((each, group[-1]))
    return [
        replace(each, summary=SEPARATOR.join("/".join(options) for options in merged))
        for each, merged in shown
    ]


def _joins(merged: list[list[str]], parts: Sequence[str]) -> bool:
    """Merge ``parts`` if they differ in one place at most, whose words become options."""
    if len(merged) != len(parts):
        return False
    new = [at for at, options in enumerate(merged) if parts[at] not in options]
    if len(new) > 1 or (new and len(parts) == 1):
        return False
    for at in new:
        merged[at].append(parts[at])
    return True
