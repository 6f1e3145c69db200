"""Plan priced again from its model, for details that a plan file does not store.

In: a plan and the path of its file. Out: its simulated step with every event, the memory of the
fullest rank after each action, the ops with their FLOPs and bytes, the shapes of parameters, and
baselines. Loading a target runs its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoparallel.analysis.baselines import Baseline, baselines
from autoparallel.analysis.facts import fullest_rank
from autoparallel.analysis.plan_model import PlanModel, load_plan_model
from autoparallel.cost_model.simulator.actions import Action
from autoparallel.cost_model.simulator.timeline import Timeline
from autoparallel.options.progress import Observe, ignore
from autoparallel.passes.memory.stage_memory import memory_by_action, runs_stages
from autoparallel.planner import ops as rules
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.costs.choices import input_specs
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.evaluate.evaluate import at_microbatch
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.graph.layout import NodeLayout, local_shape
from autoparallel.planner.plan import Plan
from autoparallel.planner.variants.replicas import stages_of_ranks

Bytes = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OpWork:
    """Work of equal ops in all blocks of a kind on one rank, in the forward or the backward.

    ``count`` is their number per micro-batch over all stages; ``flops``, ``num_bytes`` and
    ``seconds`` are of a single op.
    """

    name: str
    module: str
    shapes: str
    family: str
    dtype: str
    is_backward: bool
    count: int
    flops: float
    num_bytes: float
    seconds: float

    @property
    def total_seconds(self) -> float:
        return self.count * self.seconds


@dataclass(frozen=True, slots=True)
class PricedAgain:
    """Prices of a plan on its cluster. ``memory`` has the bytes of pipeline rank ``fullest`` after
    each action of the schedule; ``shapes`` are the global shapes of tensors by name."""

    step_seconds: float
    timeline: Timeline
    fullest: int
    memory: tuple[tuple[Action, Bytes], ...]
    ops: tuple[OpWork, ...]
    shapes: Mapping[str, tuple[int, ...]]
    baselines: tuple[Baseline, ...]


def price_again(
    plan: Plan, plan_path: str, observe: Observe = ignore, *, trust: bool = False
) -> PricedAgain:
    """Load the plan's target, and price the plan, its ops and the baselines.

    Raises the errors of ``load_plan_model``.
    """
    made = load_plan_model(plan, plan_path, trust=trust, observe=observe)
    program, blocks = made.program, made.program.blocks
    observe("pricing", 0, 1)
    timeline = made.evaluator.staged(plan, plan.cluster).timeline()
    fullest = stages_of_ranks(plan).index(fullest_rank(plan).stages)
    runs = runs_stages(plan, blocks)
    held = memory_by_action(
        plan, made.graph if plan.compiled else program.graph, blocks, fullest, runs=runs
    )
    observe("pricing", 1, 1)
    observe("baselines", 0, 1)
    found = baselines(ConfigurationPricer(program.graph, blocks, made.basis), plan)
    observe("baselines", 1, 1)
    return PricedAgain(
        timeline.step_seconds,
        timeline,
        fullest,
        tuple(held),
        tuple(stage_ops(made)),
        {node.name: node.spec.shape for node in made.graph.parameters},
        found,
    )


def stage_ops(model: PlanModel) -> list[OpWork]:
    """Return the work of all ops of a plan's stages for a micro-batch; equal ops are merged.

    Views, which take no time, are left out.
    """
    plan, blocks = model.plan, model.program.blocks
    graph = at_microbatch(model.graph, plan)
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, str], list[OpWork]] = {}
    caches: dict[object, Prices] = {}
    for stage in plan.stages:
        prices = caches.setdefault(
            (stage.mesh, plan.cluster.slowest_device(stage.devices).speed),
            model.prices(stage),
        )
        for block in stage.blocks:
            key = (block.kind, repr((prices.mesh, prices.speed)))
            counts[key] += 1
            if key not in found:
                nodes = blocks.kinds[block.kind].nodes
                found[key] = [
                    each
                    for name in nodes
                    if name in stage.layouts
                    for each in _works(graph, name, stage.layouts[name], prices, block.name)
                ]
    merged: dict[OpWork, OpWork] = {}
    for key, works in found.items():
        for each in works:
            same = replace(each, count=0)
            before = merged[same].count if same in merged else 0
            merged[same] = replace(each, count=before + counts[key])
    return sorted(merged.values(), key=lambda each: -each.total_seconds)


def _works(graph: Graph, name: str, layout: NodeLayout, prices: Prices, block: str) -> list[OpWork]:
    """Return the FLOPs, bytes and seconds of the op ``name`` on one rank, for forward and backward.
    ``block`` is the name of its block, which is left out of its module's name."""
    node = graph[name]
    specs = input_specs(node, graph)
    sizes = prices.mesh.shape
    inputs, outputs = (
        tuple(prices.local(spec, each) for spec, each in zip(side, layouts, strict=True))
        for side, layouts in ((specs, layout.inputs), (node.outputs, layout.outputs))
    )
    work = rules.work(node, inputs, outputs)
    seconds = prices.op(node, specs, layout)
    module = node.module.removeprefix(f"{block}.") or node.module
    shapes = " ".join(
        "×".join(map(str, local_shape(s.shape, each, sizes)))
        for s, each in zip(specs, layout.inputs, strict=True)
        if s.shape
    )
    found = []
    for is_backward, flops, num_bytes, own in (
        (False, work.flops_forward, work.bytes_forward, seconds.forward_compute),
        (True, work.flops_backward, work.bytes_backward, seconds.backward_compute),
    ):
        if own > 0 and (flops or num_bytes):
            found.append(
                OpWork(
                    node.op.removeprefix("aten.").removesuffix(".default"),
                    module or block,
                    shapes,
                    work.family,
                    node.spec.dtype,
                    is_backward,
                    1,
                    float(flops),
                    float(num_bytes),
                    float(own),
                )
            )
    return found
