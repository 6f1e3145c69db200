"""Construction of the plan from the winning candidate.

In: the candidate's stages with their layouts and costs, and the losers. Out: a ``Plan``: every
node's layout under its template's name, the layouts of batch inputs and constants, predictions
(``with_sources`` adds their sources), and the reasons why other candidates lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.ops.compute import least_seconds
from ..costs.choices import input_specs
from ..costs.kept_bytes import last_ops
from ..costs.prices import Rules
from ..costs.unsharded import unsharded_ops
from ..dims.batch import meeting, meeting_text
from ..evaluate.step import prediction_of, send_seconds
from ..graph.expert_dims import FIRST_WEIGHT, is_expert_layer
from ..graph.graph import Blocks, Graph, Node
from ..graph.layout import (
    INVARIANT,
    REPLICATE,
    Layout,
    NodeLayout,
    boundary_layout,
    conversion_steps,
    shard,
)
from ..intra_op.intra_op import StageAnswer
from ..kernels.recompute import has_tiles
from ..plan import (
    Alternative,
    BlockPlan,
    ExpertPlacement,
    ModelInfo,
    Plan,
    Prediction,
    SolverInfo,
    StagePlan,
)
from ..requests.request import Request
from ..schedules.held import splits
from ..stage.branches import StagePlacement, stage_edges
from ..stage.stage_model import StageModel
from ..stage.structure import Structure
from .candidates import Candidate, op_layouts

LESS_SIMPLE = "about as fast, but more complex"
"""Reason why a faster candidate within the tolerance lost."""


def make_plan(
    structure: Structure,
    cluster: Cluster,
    request: Request,
    best: Candidate,
    losers: Iterable[Candidate],
    spent: tuple[int, Mapping[str, float]],
) -> Plan:
    """Build the plan of the winner. ``spent`` has the number of programs and the seconds by phase.

    The plan's gap is not known here.
    """
    graph = structure.graph
    num_problems, seconds = spent
    stages = tuple(_stage(structure, best, index, send) for index, send in enumerate(_sends(best)))
    rules = best.answers[0][0].prices.rules
    has_rule = getattr(rules, "has_rule", lambda op: True)
    without = [n for n in graph if n.kind == "op" and n.rule is None and not has_rule(n.op)]
    replicated = _replicated_seconds(without, structure, best, request)
    return Plan(
        model=ModelInfo(
            target=request.target,
            settings=dict(request.settings),
            fingerprint=graph.fingerprint,
            num_parameters=sum(node.spec.numel for node in graph.parameters),
            global_batch=request.global_batch,
            seq=request.seq,
            precision=request.precision,
            optimizer=request.optimizer,
            float32_ops=request.float32_ops,
            gradient_dtype=request.gradient_dtype,
        ),
        cluster=cluster,
        num_microbatches=best.num_microbatches,
        schedule=best.schedule,
        stages=stages,
        offload=request.offload,
        slices=best.slices.lengths if best.slices is not None else (),
        prediction=_prediction(best, cluster, request),
        alternatives=alternatives(best, losers),
        solver=SolverInfo(
            1.0, num_problems, dict(seconds), layouts_gap=best.layouts_gap, solver=request.solver
        ),
        replicated_ops=tuple(replicated),
        replicated_seconds=replicated,
        unsharded_ops=_unsharded_ops(structure, best),
        undivided_batch=_undivided_batch(graph, request) if best.num_microbatches == 1 else None,
        tiles=_most_tiles(structure, best),
    )


def _most_tiles(structure: Structure, best: Candidate) -> int:
    """Return the most tiles in which a recomputed block runs its last ops."""
    counts = [1]
    if best.slices is None and not splits(best.schedule):
        for (model, answer), choice in zip(best.answers, best.stages, strict=True):
            run = structure.run(choice.start, choice.stop)
            modes = zip(run.kinds, run.modes(answer.setting.policy), strict=True)
            kinds = {kind for kind, mode in modes if has_tiles(mode)}
            own = (structure.blocks.kinds[kind] for kind in kinds)
            counts += [last_ops(each, model.structure.graph, model.prices).count for each in own]
    return max(counts)


def _undivided_batch(graph: Graph, request: Request) -> str | None:
    """Describe why the search had only the whole batch as a micro-batch; None if it had others."""
    is_free = request.forced.num_microbatches is None and request.global_batch > 1
    node = meeting(graph) if is_free else None
    if node is None:
        return None
    text = f"{meeting_text(node)}, so a step is one micro-batch"
    own = "; with --parallel microbatches=N only those of a micro-batch meet"
    return text + own if graph.batch_dims else text


def _unsharded_ops(structure: Structure, best: Candidate) -> tuple[str, ...]:
    """Describe the ops whose dimensions the stages' axes do not divide, once per kind of block."""
    found: dict[str, None] = {}
    for (model, answer), choice in zip(best.answers, best.stages, strict=True):
        run = structure.blocks.blocks[choice.start : choice.stop]
        kinds = {block.kind: structure.blocks.kinds[block.kind] for block in run}
        names = [name for block in kinds.values() for name in block.nodes]
        lines = unsharded_ops(model.structure.graph, names, op_layouts(model, answer), model.prices)
        found.update(dict.fromkeys(lines))
    return tuple(found)


def _replicated_seconds(
    nodes: Iterable[Node], structure: Structure, best: Candidate, request: Request
) -> dict[str, float]:
    """Map each op without a rule to its seconds per step, whole on every rank."""
    graph = structure.graph.with_batch_size(request.global_batch // best.num_microbatches)
    prices = best.answers[0][0].prices
    whole = (INVARIANT,) * len(prices.mesh.shape)
    found: dict[str, float] = {}
    for name in (node.name for node in nodes):
        node = graph[name]
        specs = input_specs(node, graph)
        layout = NodeLayout((whole,) * len(specs), (whole,) * len(node.outputs))
        seconds = sum(prices.compute(node, specs, layout)) * best.num_microbatches
        found[node.op] = found.get(node.op, 0.0) + seconds
    return dict(sorted(found.items()))


def alternatives(best: Candidate, losers: Iterable[Candidate]) -> tuple[Alternative, ...]:
    """Return the distinct losers, the fastest first, with the reason why each lost."""
    found: dict[str, Alternative] = {}
    for loser in sorted(losers, key=lambda candidate: candidate.step_seconds):
        found.setdefault(
            loser.summary,
            Alternative(
                loser.summary, loser.step_seconds, int(loser.peak_bytes), reason(best, loser)
            ),
        )
    found.pop(best.summary, None)
    return tuple(found.values())


def reason(best: Candidate, loser: Candidate) -> str:
    """Describe why ``loser`` lost: its largest additional costs, relative to the winner's step.

    Each candidate's costs are counted on its busiest stage. A faster loser lost to a simpler plan.
    """
    if not loser.fits:
        return "does not fit"
    if loser.step_seconds < best.step_seconds:
        return LESS_SIMPLE
    ours, theirs = best.spent_seconds, loser.spent_seconds
    more = sorted(((theirs[name] - ours[name], name) for name in ours), reverse=True)
    named = [
        f"{name} +{100 * excess / best.step_seconds:.1f} %"
        for excess, name in more
        if excess > 0.3 * more[0][0] and excess > 1e-3 * best.step_seconds
    ]
    return ", ".join(named[:2]) or "small differences in several parts"


def _sends(best: Candidate) -> list[float]:
    """Return, for each stage, the seconds of sending a micro-batch's messages to later stages."""
    model = best.answers[0][0]
    ends = tuple((stage.devices[0], stage.devices[-1]) for stage in best.stages)
    places = StagePlacement(model.prices.cluster, ends)
    edges = stage_edges(model.structure, [stage.start for stage in best.stages], places)
    return send_seconds(best.costs, edges)


def _stage(structure: Structure, best: Candidate, index: int, send: float) -> StagePlan:
    model, answer = best.answers[index]
    choice = best.stages[index]
    run = structure.run(choice.start, choice.stop)
    own = structure.blocks.blocks[choice.start : choice.stop]
    modes = run.modes(answer.setting.policy)
    layouts = stage_layouts(structure, model, answer, (choice.start, choice.stop))
    return StagePlan(
        blocks=tuple(
            BlockPlan(block.name, block.kind, mode) for block, mode in zip(own, modes, strict=True)
        ),
        devices=tuple(choice.devices),
        mesh=model.prices.mesh,
        zero=model.prices.shardings[answer.setting.zero].zero,
        layouts=dict(sorted(layouts.items())),
        prediction=prediction_of(best.costs[index], send),
        shares=answer.shares,
        placements=stage_placements(structure, model, layouts, (choice.start, choice.stop)),
        shard_degree=model.prices.shardings[answer.setting.zero].degree,
    )


def stage_layouts(
    structure: Structure, model: StageModel, answer: StageAnswer, blocks: tuple[int, int]
) -> dict[str, NodeLayout]:
    """Return the layouts of a stage by node name, including inputs and constants."""
    layouts = op_layouts(model, answer)
    _add_leaves(layouts, model, structure, blocks)
    return layouts


def stage_placements(
    structure: Structure,
    model: StageModel,
    layouts: Mapping[str, NodeLayout],
    blocks: tuple[int, int],
) -> tuple[ExpertPlacement, ...]:
    """Return the placements of a stage's experts for which its layouts are priced; none without
    measured loads."""
    graph, prices, template = model.structure.graph, model.prices, structure.blocks.template
    found, loads = [], prices.assumptions.loads
    if loads is None:
        return ()
    for block in structure.blocks.blocks[slice(*blocks)]:
        for name in filter(lambda each: is_expert_layer(graph[each]), block.nodes):
            node, layout = graph[template[name]], layouts[template[name]]
            copies = prices.spread(node, input_specs(node, graph), layout).copies
            split = tuple(
                held if held == shard(0) else REPLICATE for held in layout.inputs[FIRST_WEIGHT]
            )
            found.append(loads.placement(name, prices.num_parts(split), copies))
    return tuple(found)


def _add_leaves(
    layouts: dict[str, NodeLayout],
    model: StageModel,
    structure: Structure,
    blocks: tuple[int, int],
) -> None:
    """Add the layouts of batch inputs, constants and buffers to ``layouts``."""
    graph, template = structure.graph, structure.blocks.template
    wants: dict[str, dict[Layout, None]] = {}
    for block in structure.blocks.blocks[slice(*blocks)]:
        for name in block.nodes:
            wanted = layouts[template[name]].inputs
            for ref, layout in zip(graph[name].inputs, wanted, strict=True):
                if graph[ref.name].kind in ("input", "constant", "buffer"):
                    wants.setdefault(ref.name, {})[boundary_layout(layout)] = None
    for name, found in wants.items():
        whole = model.restriction.split_parameters if graph[name].kind == "input" else ()
        layout = leaf_layout(tuple(found), graph[name].kind == "buffer", whole)
        layouts[name] = NodeLayout((), (layout,) * len(graph[name].outputs))


def leaf_layout(wanted: Sequence[Layout], is_state: bool, whole: Sequence[int] = ()) -> Layout:
    """Return a layout of a leaf from which every use can take its part without a gather.

    It is the layout that all uses want, else their common placement on the first axis, else whole.
    A state is whole. ``whole`` are axes on which the leaf must not be split.
    """
    num_axes = len(wanted[0])
    held = wanted[0] if len(set(wanted)) == 1 else (INVARIANT,) * num_axes
    if len(set(wanted)) > 1 and len({layout[0] for layout in wanted}) == 1:
        held = (wanted[0][0], *(INVARIANT,) * (num_axes - 1))
    held = tuple(INVARIANT if axis in whole else each for axis, each in enumerate(held))
    if is_state or any(_gathers(held, layout) for layout in wanted):
        return (INVARIANT,) * num_axes
    return held


def _gathers(held: Layout, wanted: Layout) -> bool:
    return any(step.collectives[0] is not None for step in conversion_steps(held, wanted))


def _prediction(best: Candidate, cluster: Cluster, request: Request) -> Prediction:
    structure, prices = best.answers[0][0].structure, best.answers[0][0].prices
    rows = best.rows / structure.graph.batch_size  # unequal shares run the graph at other rows
    flops = model_flops(structure.graph, structure.blocks, prices.rules)
    least = least_seconds(cluster, flops, prices.policy.compute_dtype)
    tokens = request.global_batch * (request.seq or 1)
    return Prediction(
        step_seconds=best.step_seconds,
        bubble_fraction=best.bubble_fraction,
        tokens_per_second=tokens / best.step_seconds,
        model_flops_utilization=least * best.num_microbatches * rows / best.step_seconds,
        peak_memory_bytes=round(best.peak_bytes),
        sources={},
    )


def model_flops(graph: Graph, blocks: Blocks, rules: Rules) -> Mapping[str, float]:
    """Return the FLOPs of forward and backward of a batch by op family, without recomputation."""
    total = Counter[str]()
    counts = Counter(block.kind for block in blocks.blocks)
    for kind, block in blocks.kinds.items():
        for node in map(graph.__getitem__, block.nodes):
            work = rules.work(node, input_specs(node, graph), node.outputs)
            total[work.family] += counts[kind] * (work.flops_forward + work.flops_backward)
    return total
