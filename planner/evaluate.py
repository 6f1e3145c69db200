"""What a plan costs, walked node by node: the check on everything that the solvers say.

In: the graph, its blocks, a plan, the cluster. Out: seconds and bytes of every stage and of
the step. Every block is walked for itself, every value converted once per block and target,
as the runtime does; nothing is taken from the solvers' tables but the unit prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..cost_model.cluster import Cluster
from ..cost_model.memory import reserve_bytes
from . import rules as default_rules
from .arranged.asynchronous import version_bytes
from .errors import PlanError
from .graph import Block, Blocks, Graph, Node, Ref
from .inter_op.branches import Places, WeightedEdges, stage_depths, stage_edges, stage_starts
from .intra_op.assembly import GATHERED_BLOCKS
from .layout import INVARIANT, Layout, conversion_steps
from .plan import Plan, Recompute, StagePlan, StagePrediction
from .precision import with_precision
from .pricing.basis import DEFAULT, Basis
from .pricing.choices import inner_collectives, input_specs
from .pricing.prices import Prices, Rules, Seconds, StateBytes, boundary_layout
from .pricing.recompute import is_kept, kept_parts
from .pricing.saved import Part, saved_parts, working_bytes
from .pricing.slice_costs import carried_bytes, is_attention, slice_shares
from .pricing.stage_cost import StageCost
from .pricing.step import Pipeline, latency_seconds, send_seconds, simulate_stages
from .pricing.structure import Structure
from .pricing.weight_backward import late_parts, late_seconds
from .replicas import with_replica_sums
from .schedules.held import Halves, halves, held_bytes, splits, stage_halves
from .search.report_plan import prediction_of
from .shares import coordinate_ranks, slowest
from .strategy import NodeLayout

BRIEF = ("transient", "reserve")
"""Memory that the stages of a rank take in turn, or once."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The plan's own figures, found again. ``objective_seconds``: per stage, what was minimized."""

    step_seconds: float
    bubble_fraction: float
    peak_memory_bytes: int
    stages: tuple[StagePrediction, ...]
    objective_seconds: tuple[float, ...]


def evaluate(
    graph: Graph,
    blocks: Blocks,
    plan: Plan,
    cluster: Cluster,
    *,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Evaluation:
    """Prices a plan again. Raises ``PlanError`` where it does not fit the graph.

    ``graph`` may be at any batch size: it is brought to the plan's micro-batch.
    """
    graph, plan = at_microbatch(graph, plan), replace(plan, cluster=cluster)
    costs = priced_stages(graph, blocks, plan, rules=rules, basis=basis)
    edges = _edges(graph, blocks, plan)
    slices = slice_shares(
        graph, blocks, plan, costs,
        lambda part, cut, own: priced_stages(part, cut, own, rules=rules, basis=basis),
    )  # fmt: skip
    costs = list(with_replica_sums(costs, plan.schedule, cluster, len(plan.stages)))
    timeline = simulate_stages(
        Pipeline(
            plan.schedule, plan.num_microbatches,
            num_chunks=plan.num_chunks, edges=edges, slices=slices,
        ),
        costs,
        latency_seconds=latency_seconds(cluster),
    )  # fmt: skip
    sends = send_seconds(costs, edges)
    return Evaluation(
        timeline.step_seconds,
        timeline.bubble_fraction,
        round(max(_rank_bytes(plan, costs, timeline.peak_activation_bytes))),
        tuple(prediction_of(cost, send) for cost, send in zip(costs, sends, strict=True)),
        tuple(cost.objective(plan.num_microbatches) for cost in costs),
    )


def at_microbatch(graph: Graph, plan: Plan) -> Graph:
    """The graph at the plan's precision and micro-batch."""
    graph = with_precision(graph, plan.model.precision)
    if graph.batch_size != plan.microbatch_size:
        graph = graph.with_batch_size(plan.microbatch_size)
    return graph


def _edges(graph: Graph, blocks: Blocks, plan: Plan) -> WeightedEdges | None:
    places = Places(plan.cluster, tuple((s.devices[0], s.devices[-1]) for s in plan.stages))
    return stage_edges(Structure(graph, blocks), stage_starts(plan), places)


def priced_stages(
    graph: Graph, blocks: Blocks, plan: Plan, *, rules: Rules, basis: Basis
) -> list[StageCost]:
    """What each stage costs. ``graph`` is ``at_microbatch``, or a slice of that."""
    depths = stage_depths(_edges(graph, blocks, plan), len(plan.stages))
    starts, costs = 0, []
    cache: dict[Any, Any] = {}
    for index, stage in enumerate(plan.stages):
        stop = starts + len(stage.blocks)
        own = []
        for rows, ranks in _groups(stage, graph.batch_size):
            if basis.asked is not None:
                cache = {}  # it must hear of every stage's groups
            prices = _prices(plan, stage, ranks, cache, rules=rules, basis=basis)
            part = graph.with_batch_size(rows)
            own.append(_Walk(part, blocks, plan, index, prices, starts, stop, depths[index]).cost())
        costs.append(slowest(own))
        starts = stop
    if starts != len(blocks.blocks):
        raise PlanError("AP524", f"the plan has {starts} blocks, the model {len(blocks.blocks)}")
    return costs


def _rank_bytes(
    plan: Plan, costs: Sequence[StageCost], activation_bytes: Sequence[int]
) -> Iterable[float]:
    """The bytes on the devices of each rank of the pipeline: of all its stages together.

    What is transient counts once, as one stage computes at a time. Of a rank with replicas of
    stages the activations are ``activation_bytes``, those that it holds at once.
    """
    if plan.schedule == "chimera":
        totals_of = zip(costs, reversed(costs), activation_bytes, strict=True)
        return [_of_both(one, other, held) for one, other, held in totals_of]
    totals: dict[frozenset[int], float] = {}
    transient: dict[frozenset[int], float] = {}
    for stage, cost in zip(plan.stages, costs, strict=True):
        rank, brief = frozenset(stage.devices), sum(cost.memory_bytes[name] for name in BRIEF)
        totals[rank] = totals.get(rank, 0.0) + cost.total_bytes - brief
        transient[rank] = max(transient.get(rank, 0.0), brief)
    return [total + transient[rank] for rank, total in totals.items()]


def _of_both(one: StageCost, other: StageCost, activation_bytes: int) -> float:
    lasting = [
        sum(size for name, size in cost.memory_bytes.items() if name not in (*BRIEF, "activations"))
        for cost in (one, other)
    ]
    brief = max(sum(cost.memory_bytes[name] for name in BRIEF) for cost in (one, other))
    return sum(lasting) + brief + activation_bytes


def _groups(stage: StagePlan, batch_size: int) -> list[tuple[int, tuple[int, ...]]]:
    """The batch that a stage's ranks run at, with the ranks; of unequal shares one per share."""
    if not stage.shares:
        return [(batch_size, ())]
    return [
        (rows * len(stage.shares), coordinate_ranks(stage.devices, len(stage.shares), at))
        for at, rows in enumerate(stage.shares)
    ]


def _prices(
    plan: Plan,
    stage: StagePlan,
    ranks: tuple[int, ...],
    cache: dict[Any, Any],
    *,
    rules: Rules,
    basis: Basis,
) -> Prices:
    model = plan.model
    asked = basis.asked.of(plan.num_microbatches) if basis.asked is not None else None
    return Prices(
        stage.mesh, plan.cluster, stage.devices, model.precision, model.optimizer, rules, cache,
        profile=basis.used, asked=asked, only=basis.only, own=ranks,
    )  # fmt: skip


@dataclass
class _Walk:
    """One stage, block by block."""

    graph: Graph
    blocks: Blocks
    plan: Plan
    index: int
    prices: Prices
    start: int
    stop: int
    depth: int
    made: dict[Ref, Layout] = field(default_factory=dict)
    parameters: dict[str, Layout] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=Seconds)
    receive: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept_bytes: float = 0.0
    late_seconds: float = 0.0
    late_bytes: float = 0.0
    working_bytes: float = 0.0

    @property
    def stage(self) -> StagePlan:
        return self.plan.stages[self.index]

    def layout(self, name: str) -> NodeLayout:
        """A node's layout: under its own name, or its template's."""
        found = self.stage.layouts.get(name)
        if found is None:
            found = self.stage.layouts.get(self.blocks.template.get(name, name))
        if found is None:
            raise PlanError("AP525", f"the plan has no layout for {name}", fix="plan again")
        return found

    def cost(self) -> StageCost:
        gathered = 0.0
        for block, decided in zip(
            self.blocks.blocks[self.start : self.stop], self.stage.blocks, strict=True
        ):
            before = set(self.parameters)
            made_again = self._block(block, decided.recompute)
            own = {name for name in self.parameters if name not in before and self._owned(name)}
            whole = GATHERED_BLOCKS * sum(self._states(name)[1].gathered for name in own)
            gathered = max(gathered, whole + made_again)
            if block.parameters:
                self._add(self.prices.block_sync(self.stage.zero))
        self._ends()
        for name in self.parameters:
            self._add(self._states(name)[0])
        return StageCost(
            self.seconds,
            (self.receive[0], self.receive[1]),
            self._memory(gathered),
            self.kept_bytes,
            self.late_seconds if splits(self.plan.schedule) else None,
        )

    def _owned(self, name: str) -> bool:
        """Whether one block alone uses a parameter."""
        users = self.graph.users[name]
        position = self.blocks.of_node
        return len({position[user] for user in users}) == 1

    def _states(self, name: str) -> tuple[Seconds, StateBytes]:
        return self.prices.parameter(self.graph[name].spec, self.parameters[name], self.stage.zero)

    def _add(self, seconds: Seconds) -> None:
        self.seconds = self.seconds.plus(seconds)

    def _block(self, block: Block, mode: Recompute) -> float:
        """Adds a block; returns the bytes that its backward makes again."""
        wanted: dict[tuple[Ref, Layout], None] = {}
        parts: dict[Part, None] = {}
        selected: dict[Part, None] = {}
        late: dict[Part, None] = {}
        outside: dict[Ref, None] = {}
        before = self.seconds
        for name in block.nodes:
            node, layout = self.graph[name], self.layout(name)
            self._op(node, layout, mode)
            self.kept_bytes += carried_bytes(
                node, self._pair_bytes(node, layout), self.plan.slices, again=mode == "full"
            )
            for ref, target in zip(node.inputs, layout.inputs, strict=True):
                self._receive(ref, target)
                if self.graph[ref.name].kind == "parameter":
                    self.parameters.setdefault(ref.name, self.layout(ref.name).outputs[0])
                wanted[ref, target] = None
                if self.graph[ref.name].kind == "op" and ref.name not in block.nodes:
                    outside[ref] = None
            for index, made in enumerate(layout.outputs):
                self.made[Ref(name, index)] = made
            parts.update(dict.fromkeys(saved_parts(node, layout, self.graph, self.prices)))
            if mode == "selective":
                selected.update(dict.fromkeys(kept_parts(node, layout, self.graph, self.prices)))
            late.update(dict.fromkeys(late_parts(node, layout, self.graph, self.prices)))
            self.late_seconds += late_seconds(node, layout, self.graph, self.prices)
            size = working_bytes(node, layout, self.graph, self.prices)
            self.working_bytes = max(self.working_bytes, size)
        self.late_bytes += _total(late)
        self._meet(before)
        for ref, target in wanted:
            self._convert(ref, target, again=mode != "none")
        if mode == "none":
            self.kept_bytes += _total(parts)
            return 0.0
        inputs = sum(
            self.prices.local_bytes(self.graph.spec(ref), self.made[ref]) for ref in outside
        )
        self.kept_bytes += inputs + _total(selected)
        return _total(part for part in parts if part not in selected)

    def _meet(self, before: Seconds) -> None:
        """Ends a block where both device and host are done with it; see ``StageCost``."""
        own = self.seconds
        forward = max(
            own.forward_compute - before.forward_compute, own.forward_issue - before.forward_issue
        )
        backward = max(
            own.backward_compute - before.backward_compute,
            own.backward_issue - before.backward_issue,
        )
        self.seconds = own._replace(
            forward_issue=before.forward_issue + forward,
            backward_issue=before.backward_issue + backward,
        )

    def _op(self, node: Node, layout: NodeLayout, mode: Recompute) -> None:
        inner = inner_collectives(node, self.graph, self.prices, layout)
        own = self.prices.op(node, input_specs(node, self.graph), layout, inner)
        self._add(own)
        if mode == "none":
            return
        self._add(Seconds(backward_communication=own.forward_communication))
        if mode == "full" or not is_kept(node):
            again = Seconds(backward_compute=own.forward_compute, backward_issue=own.forward_issue)
            self._add(again)

    def _receive(self, ref: Ref, target: Layout) -> None:
        """Takes a value of an earlier stage, as its first use wants it."""
        if ref in self.made or self.graph[ref.name].kind != "op":
            return
        layout = boundary_layout(target)
        self.made[ref] = layout
        before = self.plan.stages[self.index - 1].devices[-1]
        link = self.prices.cluster.link(before, self.stage.devices[0])
        forward, backward = self.prices.transfer(self.graph.spec(ref), layout, link)
        self.receive[0] += forward
        self.receive[1] += backward

    def _convert(self, ref: Ref, target: Layout, *, again: bool) -> None:
        node = self.graph[ref.name]
        if node.kind in ("input", "constant", "buffer"):
            held = self.stage.layouts.get(ref.name)
            source = held.outputs[ref.index] if held else (INVARIANT,) * len(target)
            if not any(step.collectives[0] for step in conversion_steps(source, target)):
                return
        else:
            source = self.parameters[ref.name] if node.kind == "parameter" else self.made[ref]
        forward, backward = self.prices.conversion(self.graph.spec(ref), source, target)
        twice = forward if again else 0.0
        self._add(Seconds(forward_communication=forward, backward_communication=backward + twice))

    def _ends(self) -> None:
        """Adds what brings sent values to the boundary and the loss to every rank."""
        position = self.blocks.of_node
        for ref, layout in list(self.made.items()):
            node = self.graph[ref.name]
            if node.kind == "op" and self.start <= position.get(ref.name, -1) < self.stop:
                readers = (self.graph[user] for user in self.graph.users[ref.name])
                if any(
                    position.get(user.name, -1) >= self.stop and ref in user.inputs
                    for user in readers
                ):
                    self._end(ref, boundary_layout(layout))
        if self.start <= position[self.graph.loss.name] < self.stop:
            self._end(self.graph.loss, (INVARIANT,) * len(self.stage.mesh.shape))

    def _end(self, ref: Ref, target: Layout) -> None:
        forward, backward = self.prices.conversion(self.graph.spec(ref), self.made[ref], target)
        self._add(Seconds(forward_communication=forward, backward_communication=backward))

    def _pair_bytes(self, node: Node, layout: NodeLayout) -> int:
        """The keys and values that an attention reads on a rank."""
        if not self.plan.slices or not is_attention(node):
            return 0
        pair = zip(node.inputs[1:3], layout.inputs[1:3], strict=True)
        return sum(self.prices.local_bytes(self.graph.spec(ref), held) for ref, held in pair)

    def _memory(self, gathered: float) -> Mapping[str, float]:
        states = [self._states(name)[1] for name in self.parameters]
        leaves = {
            ref.name
            for block in self.blocks.blocks[self.start : self.stop]
            for name in block.nodes
            for ref in self.graph[name].inputs
            if self.graph[ref.name].kind in ("input", "constant", "buffer")
        }
        groups = sum(size > 1 for size in self.stage.mesh.shape)
        parameters = sum(each.parameters for each in states)
        versions = version_bytes(self.plan, self.index, parameters)
        return {
            "parameters": parameters,
            **({"versions": versions} if versions else {}),
            "gradients": sum(each.gradients for each in states),
            "optimizer": sum(each.optimizer for each in states),
            "activations": held_bytes(self._held(), self.kept_bytes, self.late_bytes),
            "transient": gathered + self.working_bytes,
            "buffers": float(
                sum(spec.num_bytes for name in leaves for spec in self.graph[name].outputs)
            ),
            "reserve": float(reserve_bytes(self.prices.device.kind, groups)),
        }

    def _held(self) -> Halves:
        """The micro-batches that the stage holds at once, by what of their backward is left."""
        plan, number = self.plan, len(self.plan.stages)
        if plan.num_chunks > 1:
            found = stage_halves(plan.schedule, number, plan.num_microbatches, plan.num_chunks)
            return found[self.index]
        return halves(plan.schedule, self.depth, number, plan.num_microbatches)


def _total(parts: Iterable[Part]) -> float:
    return float(sum(size for _, size in parts))
