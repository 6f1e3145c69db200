"""Independent price of a plan, computed node by node: the check on the results of the solvers.

In: the graph, its blocks, a plan, the cluster. Out: seconds and bytes of every stage and of the
step. Every block is walked with the layouts of its own stage (``stage_walk``), equivalent blocks
once; only the unit prices are shared with the solvers. ``with_sources`` adds the shares of the
step by source of its prices: measured, interpolated, from specifications.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...cost_model.cluster.cluster import Cluster, Source
from ...cost_model.simulator.timeline import Timeline
from .. import ops as default_rules
from ..costs.basis import DEFAULT, Basis, CostQueries
from ..costs.kept_bytes import last_ops
from ..costs.precision import with_precision
from ..costs.price_cache import PriceCache
from ..costs.prices import Prices, Rules
from ..errors import PlanError
from ..graph.graph import Blocks, Graph
from ..kernels.recompute import has_tiles
from ..plan import Plan, Precision, ProfileUse, StagePlan, StagePrediction
from ..schedules.held import HalfPairs, half_pairs, splits, stage_half_pairs
from ..stage.branches import StagePlacement, WeightedEdges, stage_depths, stage_edges, stage_starts
from ..stage.stage_cost import TRANSIENT, StageCost
from ..variants.gradient_sums import order_gain, with_sum_seconds
from ..variants.parameter_servers import served_peak_bytes, served_step_seconds
from ..variants.replicas import with_replica_sums
from ..variants.shares import coordinate_ranks, slowest_cost
from ..variants.slice_costs import SliceShares, slice_shares
from .stage_walk import StageWalk, Walked, walked_none
from .step import Pipeline, message_seconds, prediction_of, send_seconds, simulate_stages


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Predicted figures of a plan. ``bubble_fraction``: part of the step in which ranks wait.
    ``peak_memory_bytes``: of the fullest device. ``objective_seconds``: for each stage the seconds
    that its integer program minimizes."""

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
    """Predict a plan's step time and memory independently of the solvers. Raises PlanError if the
    plan does not fit the graph.

    ``graph`` may be at any batch size; it is scaled to the plan's micro-batch.
    """
    return Evaluator(graph, blocks, rules, basis).evaluation(plan, cluster)


def at_microbatch(graph: Graph, plan: Plan) -> Graph:
    """Return the graph at the plan's precision and micro-batch size."""
    graph = with_precision(graph, plan.model.precision)
    if graph.batch_size != plan.microbatch_size:
        graph = graph.with_batch_size(plan.microbatch_size)
    return graph


@dataclass(frozen=True)
class Staged:
    """A plan with the costs of its stages, before its schedule is simulated. ``edges``: dependences
    of stages, None for a chain; ``slices``: sequence slices with their shares of time, if any."""

    plan: Plan
    costs: Sequence[StageCost]
    edges: WeightedEdges | None
    slices: SliceShares | None

    @property
    def least_seconds(self) -> float:
        """Return a lower bound on the step's seconds: the compute of all micro-batches on the
        busiest rank.

        It does not hold for schedules with replicas of stages.
        """
        totals: dict[frozenset[int], float] = {}
        for stage, cost in zip(self.plan.stages, self.costs, strict=True):
            work = self.plan.num_microbatches * (cost.forward_seconds + cost.backward_seconds)
            rank = frozenset(stage.devices)
            end = cost.end_seconds if self.plan.num_chunks == 1 else cost.seconds.optimizer
            totals[rank] = totals.get(rank, 0.0) + work + end
        return max(totals.values())

    def peak_bytes(self, activation_bytes: Sequence[int] = ()) -> int:
        """Return the peak bytes of the fullest device. ``activation_bytes``, by rank, replace the
        activations in the stages' costs if the schedule has replicas of stages (Chimera)."""
        return round(max(_rank_bytes(self.plan, self.costs, activation_bytes)))

    @property
    def pipeline(self) -> Pipeline:
        """Schedule and number of micro-batches, as input of the simulation."""
        plan = self.plan
        return Pipeline(
            plan.schedule,
            plan.num_microbatches,
            num_chunks=plan.num_chunks,
            edges=self.edges,
            slices=self.slices,
        )

    def timeline(self) -> Timeline:
        """Simulate the step and return the timeline with all its events."""
        message = message_seconds(self.plan.cluster)
        return simulate_stages(self.pipeline, self.costs, message=message)

    def evaluation(self) -> Evaluation:
        """Simulate the step and return all figures of the plan."""
        timeline = self.timeline()
        peak = self.peak_bytes(timeline.peak_activation_bytes)
        figures = self.figures(timeline.step_seconds, timeline.bubble_fraction, peak)
        return figures if self.plan.gradient_order == "backward" else self._overlapped(figures)

    def _overlapped(self, figures: Evaluation) -> Evaluation:
        """Return the figures of a plan of one stage, changed so that the last gradient all-reduces
        overlap the next step's forward."""
        gain = order_gain(self.plan, self.costs[0])
        (stage,) = figures.stages
        exposed = max(0.0, stage.seconds["exposed_sync"] - gain)
        return replace(
            figures,
            step_seconds=figures.step_seconds - gain,
            stages=(replace(stage, seconds={**stage.seconds, "exposed_sync": exposed}),),
        )

    def figures(self, step_seconds: float, bubble_fraction: float, peak_bytes: int) -> Evaluation:
        """Return the plan's predicted figures, given step time, bubble fraction and peak memory."""
        sends = send_seconds(self.costs, self.edges)
        return Evaluation(
            step_seconds,
            bubble_fraction,
            peak_bytes,
            tuple(prediction_of(cost, send) for cost, send in zip(self.costs, sends, strict=True)),
            tuple(cost.objective(self.plan.num_microbatches) for cost in self.costs),
        )


@dataclass(frozen=True)
class Evaluator:
    """Predictor of step time and memory for any number of plans of one graph.

    The graph may be captured at any batch size. Costs of blocks are cached, by precision and
    micro-batch size, for later plans.
    """

    graph: Graph
    blocks: Blocks
    rules: Rules = default_rules
    basis: Basis = DEFAULT
    _walked: dict[tuple[Precision, int], Walked] = field(default_factory=dict, repr=False)

    def evaluation(self, plan: Plan, cluster: Cluster) -> Evaluation:
        """Return the predicted step time and memory of a plan on a cluster."""
        if plan.servers is not None:
            return self._served(replace(plan, cluster=cluster))
        return self.staged(plan, cluster).evaluation()

    def _served(self, plan: Plan) -> Evaluation:
        """Predict a plan with parameter servers; every worker runs the plan's only stage."""
        assert plan.servers is not None
        (stage,) = plan.stages
        known: dict[str, Staged] = {}
        each = []
        for worker in plan.servers.workers:
            speed = plan.cluster.device(worker).speed
            if speed not in known:
                own = replace(plan, servers=None, stages=(replace(stage, devices=(worker,)),))
                known[speed] = self.staged(own, plan.cluster)
            each.append(known[speed])
        costs = [staged.costs[0] for staged in each]
        seconds = served_step_seconds(plan, costs, self._at(plan).graph, self.blocks)
        busy = max(
            share * (cost.forward_seconds + cost.backward_seconds)
            for share, cost in zip(plan.servers.shares, costs, strict=True)
        )
        waits = max(0.0, 1 - busy / seconds)
        return each[0].figures(seconds, waits, served_peak_bytes(plan, costs))

    def staged(self, plan: Plan, cluster: Cluster) -> Staged:
        """Return a plan with its stages' costs on ``cluster``, before the step is simulated."""
        plan, walked = replace(plan, cluster=cluster), self._at(plan)
        edges = _edges(walked, plan)
        costs = _stages(walked, plan, edges, rules=self.rules, basis=self.basis)
        slices = slice_shares(
            walked.graph,
            self.blocks,
            plan,
            costs,
            lambda part, cut, own: priced_stages(
                part, cut, own, rules=self.rules, basis=self.basis
            ),
        )
        if plan.gradient_order == "backward":
            costs = [
                with_sum_seconds(cost, stage, cluster)
                for cost, stage in zip(costs, plan.stages, strict=True)
            ]
        costs = list(with_replica_sums(costs, plan.schedule, cluster, len(plan.stages)))
        return Staged(plan, costs, edges, slices)

    def _at(self, plan: Plan) -> Walked:
        """Return the cache of block costs for the plan's precision and micro-batch size."""
        key = plan.model.precision, plan.microbatch_size
        if key not in self._walked:
            graph = at_microbatch(self.graph, plan)
            self._walked[key] = walked_none(graph, self.blocks, self.rules)
        return self._walked[key]


def priced_stages(
    graph: Graph, blocks: Blocks, plan: Plan, *, rules: Rules, basis: Basis
) -> list[StageCost]:
    """Return the cost of each stage. ``graph`` is at the plan's micro-batch size and precision
    (``at_microbatch``), or is such a graph of one sequence slice."""
    walked = walked_none(graph, blocks, rules)
    return _stages(walked, plan, _edges(walked, plan), rules=rules, basis=basis)


def walked_stages(
    graph: Graph, blocks: Blocks, plan: Plan, basis: Basis = DEFAULT
) -> list[StageWalk]:
    """Return, for each stage, the block-by-block computation of its cost; with unequal batch
    shares, for the ranks with the most activation bytes.

    ``graph`` is at the plan's micro-batch size and precision (``at_microbatch``).
    """
    walked = walked_none(graph, blocks, default_rules)
    walks = _walks(walked, plan, _edges(walked, plan), rules=default_rules, basis=basis)
    return [max(own, key=lambda walk: walk.cost().activation_bytes) for own in walks]


def held_micro_batches(
    graph: Graph, blocks: Blocks, plan: Plan, *, rules: Rules = default_rules
) -> Sequence[HalfPairs]:
    """Return, for each stage, the largest pairs (micro-batches held before their backward,
    micro-batches held for deferred weight gradients only) that it holds at one time."""
    walked = walked_none(at_microbatch(graph, plan), blocks, rules)
    return _held(plan, _edges(walked, plan))


def _edges(walked: Walked, plan: Plan) -> WeightedEdges | None:
    places = StagePlacement(plan.cluster, tuple((s.devices[0], s.devices[-1]) for s in plan.stages))
    return stage_edges(walked.forms.structure, stage_starts(plan), places)


def _stages(
    walked: Walked, plan: Plan, edges: WeightedEdges | None, *, rules: Rules, basis: Basis
) -> list[StageCost]:
    walks = _walks(walked, plan, edges, rules=rules, basis=basis)
    return [slowest_cost([walk.cost() for walk in own]) for own in walks]


def _walks(
    walked: Walked, plan: Plan, edges: WeightedEdges | None, *, rules: Rules, basis: Basis
) -> Iterator[list[StageWalk]]:
    """Yield, for each stage, the block-by-block computations of its cost, one for each different
    share of the batch among its ranks."""
    held = _held(plan, edges)
    start = 0
    for index, stage in enumerate(plan.stages):
        own = []
        for rows, ranks in _groups(stage, walked.graph.batch_size):
            # a basis that records queries must see every stage's groups
            cache = PriceCache() if basis.asked is not None else walked.cache(plan.cluster)
            prices = stage_prices(plan, stage, ranks, cache, rules=rules, basis=basis)
            part = walked.graph.with_batch_size(rows)
            own.append(StageWalk(walked, part, plan, index, prices, start, held[index]))
        yield own
        start += len(stage.blocks)
    num_blocks = len(walked.forms.blocks.blocks)
    if start != num_blocks:
        raise PlanError("AP524", f"the plan has {start} blocks, but the model has {num_blocks}")


def _held(plan: Plan, edges: WeightedEdges | None) -> Sequence[HalfPairs]:
    """Return ``held_micro_batches`` of a plan whose stages depend on each other by ``edges``."""
    number = len(plan.stages)
    if plan.num_chunks > 1:
        return stage_half_pairs(plan.schedule, number, plan.num_microbatches, plan.num_chunks)
    depths = stage_depths(edges, number)
    return [half_pairs(plan.schedule, depth, number, plan.num_microbatches) for depth in depths]


def _rank_bytes(
    plan: Plan, costs: Sequence[StageCost], activation_bytes: Sequence[int]
) -> Iterable[float]:
    """Return the peak bytes per device of each pipeline rank, over all stages of the rank.

    Transient bytes count once, as one stage computes at a time. ``activation_bytes``: peak
    activations by rank, used for ranks that hold replicas of stages (Chimera).
    """
    if plan.schedule == "chimera":
        totals_of = zip(costs, reversed(costs), activation_bytes, strict=True)
        return [_of_both(one, other, held) for one, other, held in totals_of]
    totals: dict[frozenset[int], float] = {}
    transient: dict[frozenset[int], float] = {}
    for stage, cost in zip(plan.stages, costs, strict=True):
        rank, brief = frozenset(stage.devices), _brief_bytes(cost)
        totals[rank] = totals.get(rank, 0.0) + cost.total_bytes - brief
        transient[rank] = max(transient.get(rank, 0.0), brief)
    return [total + transient[rank] for rank, total in totals.items()]


def _of_both(one: StageCost, other: StageCost, activation_bytes: int) -> float:
    lasting = [
        sum(
            size
            for name, size in cost.memory_bytes.items()
            if name not in (*TRANSIENT, "activations")
        )
        for cost in (one, other)
    ]
    return sum(lasting) + max(map(_brief_bytes, (one, other))) + activation_bytes


def _brief_bytes(cost: StageCost) -> float:
    return sum(size for name, size in cost.memory_bytes.items() if name in TRANSIENT)


def _groups(stage: StagePlan, batch_size: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (batch size at which to price the stage, ranks) for each different share of the batch;
    a single entry without ranks if all shares are equal."""
    if not stage.shares:
        return [(batch_size, ())]
    return [
        (rows * len(stage.shares), coordinate_ranks(stage.devices, len(stage.shares), at))
        for at, rows in enumerate(stage.shares)
    ]


def stage_prices(
    plan: Plan,
    stage: StagePlan,
    ranks: tuple[int, ...],
    cache: PriceCache,
    *,
    rules: Rules = default_rules,
    basis: Basis = DEFAULT,
) -> Prices:
    """Return the prices of ops, conversions and states on a stage's devices; on ``ranks``, the
    devices with one share of the batch, if any are given."""
    model = plan.model
    asked = basis.asked.of(plan.num_microbatches) if basis.asked is not None else None
    return Prices(
        stage.mesh,
        plan.cluster,
        stage.devices,
        model.precision,
        model.optimizer,
        rules,
        cache,
        profile=basis.used,
        asked=asked,
        only=basis.only,
        own=ranks,
        assumptions=basis.assumptions_in(plan, stage),
        states=plan.states,
    )


def with_tiles(
    plan: Plan, graph: Graph, blocks: Blocks, *, rules: Rules = default_rules, basis: Basis
) -> Plan:
    """Return ``plan`` with the most tiles in which its recomputed blocks can run their last
    ops: 1 if it recomputes no block that runs tiles, or cannot run tiles."""
    plan, counts = replace(plan, tiles=basis.assumptions.tiles), [1]
    if plan.most_tiles > 1 and not splits(plan.schedule):
        graph, cache = at_microbatch(graph, plan), PriceCache()
        for stage in plan.stages:
            own = stage.devices if stage.shares else ()
            prices = stage_prices(plan, stage, own, cache, rules=rules, basis=basis)
            kinds = {block.kind for block in stage.blocks if has_tiles(block.recompute)}
            counts += [last_ops(blocks.kinds[kind], graph, prices).count for kind in kinds]
    return replace(plan, tiles=max(counts))


PARTS = ("compute", "communication")


def with_sources(plan: Plan, graph: Graph, blocks: Blocks, *, basis: Basis, rules: Rules) -> Plan:
    """Return ``plan`` with the fractions of its predicted step whose prices are measured,
    interpolated or from specifications."""
    profile = basis.used
    whole = _seconds([stage.prediction for stage in plan.stages], plan.num_microbatches)
    total = sum(whole.values())
    parts: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    asked = CostQueries()
    kinds: tuple[Source, ...] = ("measured", "interpolated") if profile is not None else ()
    for source in kinds:
        only = replace(basis, only=source, asked=asked)
        found = evaluate(graph, blocks, plan, plan.cluster, rules=rules, basis=only)
        for part, seconds in _seconds(found.stages, plan.num_microbatches).items():
            if seconds > 0:
                parts[part][source] = seconds
    for part in PARTS:
        rest = whole[part] - sum(parts[part].values())
        if rest > 1e-9 * total or (not parts[part] and whole[part] > 0):
            parts[part]["spec"] = rest
    summed = sum(sum(shares.values()) for shares in parts.values())
    shares = {
        part: {source: seconds / summed for source, seconds in own.items()}
        for part, own in parts.items()
    }
    use = None
    if profile is not None:
        where = profile.environment
        use = ProfileUse(
            where.device,
            where.driver,
            where.torch,
            where.threads,
            profile.mismatch,
            _interpolation_error(asked),
        )
    prediction = replace(plan.prediction, sources=_joined(shares), sources_of=shares, profile=use)
    return replace(plan, prediction=prediction)


def _seconds(
    stages: list[StagePrediction] | tuple[StagePrediction, ...], count: int
) -> dict[str, float]:
    """Return the seconds of a step of ``count`` micro-batches, over all stages, by ``PARTS``."""
    compute = communication = 0.0
    for stage in stages:
        own = stage.seconds
        compute += own["compute"] * count + own["optimizer"]
        per_microbatch = own["communication"] + own["hidden_states"] + own["receive"]
        communication += per_microbatch * count + own["parameter_gather"] + own["gradient_sync"]
    return dict(zip(PARTS, (compute, communication), strict=True))


def _joined(shares: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    order: tuple[Source, ...] = ("measured", "interpolated", "spec")
    totals = {source: sum(own.get(source, 0.0) for own in shares.values()) for source in order}
    return {source: share for source, share in totals.items() if share > 0}


def _interpolation_error(asked: CostQueries) -> float:
    """Return the mean relative error of interpolated prices of ops, weighted by their seconds."""
    found = [op for op in asked.ops.values() if op.source == "interpolated"]
    total = sum(op.seconds for op in found)
    return sum(op.error * op.seconds for op in found) / total if total else 0.0
