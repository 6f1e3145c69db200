"""Pricing of a hand-written configuration.

In: a graph, its blocks, a cluster, a configuration. Out: the ``Plan`` that the configuration
describes, the costs of its stages, and its step. The layers of each stage are given. The layouts
inside a stage are chosen by the search's integer program on the mesh of the given degrees. Prices
come from ``evaluate``, which also re-prices every plan of the search.

Stage ``s`` of a chain has the ranks from ``(s mod pp)·dp·ep·cp·tp`` on, "tp" innermost and pipeline
stages outermost, as Megatron-LM numbers them (Narayanan et al. 2021, arXiv:2104.04473, section 3).

Besides its stages a pipeline rank holds messages in memory, and communicators: for all devices, for
each mesh axis of several, and for each direction between a device and its peer in another rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.ops.memory import communicator_bytes, reserve_bytes
from ...cost_model.simulator.actions import Schedule
from ...cost_model.simulator.timeline import Timeline
from .. import ops as default_rules
from ..costs.basis import DEFAULT, Basis
from ..costs.choices import Restriction
from ..costs.mesh_prices import NO_GROUPS
from ..costs.precision import with_precision
from ..costs.price_cache import PriceCache
from ..costs.prices import Prices
from ..dims.sequence_places import find_places
from ..errors import UsageError
from ..evaluate.evaluate import Evaluator, Staged, with_tiles
from ..evaluate.step import pipeline_table
from ..graph.expert_dims import experts_of_layers
from ..graph.graph import Block, Blocks, Graph, Ref
from ..graph.layout import Mesh, NodeLayout
from ..inter_op.submesh import restriction
from ..intra_op.intra_op import IntraOp, Limits
from ..kernels.fusion import with_fusion
from ..kernels.product_kernels import by_masks, with_product_kernels
from ..plan import (
    BlockPlan,
    ExpertPlacement,
    ModelInfo,
    Plan,
    Prediction,
    Recompute,
    SolverInfo,
    StagePlan,
    StagePrediction,
)
from ..requests.goal import Budget
from ..requests.options import check_experts, check_shard
from ..requests.pins import Pin, by_template, check_priced, pinned_blocks
from ..requests.request import Forced
from ..schedules.held import MessageBytes, messages_held, sends_kept
from ..schedules.schedules import parts_of_ranks
from ..search.report_plan import stage_layouts, stage_placements
from ..stage.stage_cost import StageCost, combine_bytes
from ..stage.stage_model import StageModel
from ..stage.structure import Run, Structure
from ..variants.slice_costs import even_lengths
from .configuration import Configuration, find_layers, stage_bounds

ONCE = ("transient", "buffers", "reserve")
"""Memory categories that a rank's stages share: the largest stage counts, not the sum."""


@dataclass(frozen=True, slots=True)
class PricedStep:
    """Predicted step of a configuration: its plan with stage costs, timeline, and memory.

    ``memory_bytes``: for each pipeline rank, bytes per device by category.
    """

    configuration: Configuration
    staged: Staged
    timeline: Timeline
    memory_bytes: tuple[Mapping[str, float], ...]

    @property
    def plan(self) -> Plan:
        return self.staged.plan

    @property
    def stages(self) -> Sequence[StageCost]:
        return self.staged.costs

    @property
    def usable_bytes(self) -> int:
        return self.plan.cluster.usable_memory_bytes

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_bytes(self) -> float:
        return max(sum(rank.values()) for rank in self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


@dataclass
class ConfigurationPricer:
    """Predictor of steps of hand-written configurations of one model, with caches for common
    results.

    ``basis`` holds measured times; ``pins`` are the layouts that the user requires.
    """

    graph: Graph
    blocks: Blocks
    basis: Basis = DEFAULT
    pins: tuple[Pin, ...] = ()
    _structures: dict[object, Structure] = field(default_factory=dict, repr=False)
    solvers: dict[object, IntraOp] = field(default_factory=dict, repr=False)
    _evaluators: dict[object, Evaluator] = field(default_factory=dict, repr=False)
    _prices: dict[object, tuple[Cluster, PriceCache]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.blocks = pinned_blocks(self.graph, self.blocks, self.pins)

    def price(self, cluster: Cluster, configuration: Configuration) -> PricedStep:
        """Return the predicted step. Raises UsageError if model or cluster do not allow it."""
        return self.step(configuration, self.staged(cluster, configuration))

    def staged(self, cluster: Cluster, configuration: Configuration) -> Staged:
        """Return the plan of a configuration with the costs of its stages."""
        plan = self.plan(cluster, configuration)
        own = configuration.form
        if own not in self._evaluators:
            whole = self._structure(configuration, self.graph.batch_size)
            self._evaluators[own] = Evaluator(whole.graph, whole.blocks, basis=self.basis)
        return self._evaluators[own].staged(plan, cluster)

    def step(self, configuration: Configuration, staged: Staged) -> PricedStep:
        """Simulate the step of a configuration, given its plan with stage costs."""
        own, plan, cluster = configuration, staged.plan, staged.plan.cluster
        timeline, costs = staged.timeline(), staged.costs
        structure = self._structure(own, own.microbatch_size)
        parts = own.mesh.size // (1 if own.sequence_parallel else own.tp)
        sent = [
            sent_bytes(structure.graph, structure.run(*bounds), parts) for bounds in _bounds(plan)
        ]
        table = pipeline_table(staged.pipeline, len(costs))
        beside = beside_stages(table, sent, own.mesh, cluster.hosts[0].device.kind)
        memory = tuple(
            {**rank, **more}
            for rank, more in zip(
                stage_bytes(own.schedule, own.pp, own.num_chunks, costs, timeline),
                beside,
                strict=True,
            )
        )
        return PricedStep(own, staged, timeline, memory)

    def plan(self, cluster: Cluster, configuration: Configuration) -> Plan:
        """Return the plan of a configuration, with the best layouts but without predictions."""
        own = configuration
        _check(own, cluster, self.graph, sends_tokens=self.basis.assumptions.sends_tokens)
        structure = self._structure(own, own.microbatch_size)
        bounds = stage_bounds(self.blocks, own.layers, own.num_stages)
        stages = tuple(
            self._stage(cluster, own, structure, index, run) for index, run in enumerate(bounds)
        )
        slices: tuple[int, ...] = ()
        if own.schedule == "terapipe" and own.num_slices > 1:
            slices = even_lengths(find_places(structure.graph).length, own.num_slices)
        rows = own.microbatch_size * own.num_microbatches
        num_parameters = sum(node.spec.numel for node in self.graph.parameters)
        model = ModelInfo(
            "",
            {},
            "",
            num_parameters,
            rows,
            None,
            own.precision,
            own.optimizer,
            gradient_dtype=own.gradient_dtype,
        )
        nothing = Prediction(0.0, 0.0, 0.0, 0.0, 0, {})
        found = Plan(
            model,
            cluster,
            own.num_microbatches,
            own.schedule,
            stages,
            nothing,
            (),
            SolverInfo(1.0, 0, {}),
            slices=slices,
            compiled=own.compiled,
            offload=own.offload,
        )
        return with_tiles(found, structure.graph, structure.blocks, basis=self.basis)

    def _stage(
        self,
        cluster: Cluster,
        own: Configuration,
        structure: Structure,
        index: int,
        bounds: tuple[int, int],
    ) -> StagePlan:
        ranks, size = _rank_of_stage(own), own.mesh.size
        here, before = ranks[index] * size, ranks[index - 1] * size
        devices = tuple(range(here, here + size))
        blocks = structure.blocks.blocks[slice(*bounds)]
        layouts, placements = self._layouts(cluster, own, structure, (before, here), bounds)
        return StagePlan(
            tuple(
                BlockPlan(block.name, block.kind, mode)
                for block, mode in zip(blocks, self._modes(own, blocks), strict=True)
            ),
            devices,
            own.mesh,
            own.zero,
            layouts,
            StagePrediction({}, {}),
            placements=placements,
            shard_degree=own.shard_degree,
        )

    @property
    def _layers(self) -> Blocks:
        return Blocks(tuple(self.blocks.blocks[at] for at in find_layers(self.blocks)))

    def _modes(self, own: Configuration, blocks: Sequence[Block]) -> list[Recompute]:
        """Return the recomputation mode of each block of a stage."""
        layers = {block.name for block in self._layers.blocks}
        again = [own.recomputes_ends or block.name in layers for block in blocks]
        share = own.selective_share if own.recompute == "selective" else 1.0
        num_full = round((1 - share) * sum(again))
        num_again = round(own.recompute_share * sum(again))
        return [
            "none"
            if not is_again or place > num_again
            else "full"
            if place <= num_full
            else own.recompute
            for is_again, place in zip(again, accumulate(again), strict=True)
        ]

    def _layouts(
        self,
        cluster: Cluster,
        own: Configuration,
        structure: Structure,
        firsts: tuple[int, int],
        bounds: tuple[int, int],
    ) -> tuple[Mapping[str, NodeLayout], tuple[ExpertPlacement, ...]]:
        """Return the best layouts of a stage, by node, and the placements of its experts.
        ``firsts``: first ranks of the previous stage and of this stage; ``bounds``: the stage's
        blocks."""
        solver, run = self._solver(cluster, own, structure, firsts), structure.run(*bounds)
        answer = solver.best(run, own.num_microbatches, 1)
        assert answer is not None, "no limit of memory or time can be exceeded"
        check_priced([answer.cost.seconds.forward_compute], self.pins)
        layouts = stage_layouts(structure, solver.model, answer, bounds)
        return layouts, stage_placements(structure, solver.model, layouts, bounds)

    def _solver(
        self, cluster: Cluster, own: Configuration, structure: Structure, firsts: tuple[int, int]
    ) -> IntraOp:
        before, here = (range(first, first + own.mesh.size) for first in firsts)
        link = cluster.send_link(before, here)
        # the cluster lives as long as its id is used
        basis = self.basis.without_tiles if own.compiled else self.basis
        known = self._prices.setdefault((id(cluster), *own.form), (cluster, PriceCache()))
        prices = Prices(
            own.mesh,
            cluster,
            tuple(here),
            own.precision,
            own.optimizer,
            default_rules,
            known[1],
            profile=self.basis.used,
            assumptions=basis.with_shard_degree(own.shard_degree or NO_GROUPS).assumptions,
            states=own.states,
        )
        key = (
            prices.key,
            id(structure),
            link,
            cluster.joins_hosts(link),
            own.sequence_parallel,
            own.zero,
            own.ep,
            own.etp,
        )
        if key not in self.solvers:
            forced = Forced(
                dp=own.dp,
                tp=own.tp,
                cp=own.cp,
                ep=own.data_ep,
                sequence_parallel=own.sequence_parallel,
            )
            given = replace(
                self._around_experts(own, restriction(own.mesh, forced)),
                pins=by_template(self.graph, structure.blocks, self.pins),
            )
            model = StageModel(structure, prices, given, link)
            limits = Limits(float("inf"), (own.zero,), "none")
            self.solvers[key] = IntraOp(model, limits, Budget.of(float("inf")))
        return self.solvers[key]

    def _around_experts(self, own: Configuration, given: Restriction) -> Restriction:
        """Return ``given`` with the mesh axes over which tokens are sent to experts, if the priced
        program sends them."""
        if not self.basis.assumptions.sends_tokens or not experts_of_layers(self.graph):
            return given
        axes = {name: axis for axis, name in enumerate(own.mesh.axes)}

        def numbers(*chosen: str) -> tuple[int, ...]:
            return tuple(axes[name] for name in chosen if name in axes)

        tp = ("tp",) if own.sequence_parallel else ()
        sliced = () if "tp" in own.folded or own.etp == 1 else tp
        return replace(
            given, tokens=numbers(*tp), folded=numbers(*own.folded), sliced=numbers(*sliced)
        )

    def _structure(self, own: Configuration, rows: int) -> Structure:
        """Return the graph and blocks, in the configuration's precision and fused as it compiles,
        at a micro-batch of ``rows`` rows."""
        key = own.form
        if key not in self._structures:
            graph = with_precision(self.graph, own.precision)
            if own.compiled:
                compiled = self.blocks if own.compiles_ends else self._layers
                if own.fuses_products:
                    graph = with_product_kernels(graph, compiled)
                graph = with_fusion(graph, compiled)
            blocks = by_masks(graph, self.blocks) if own.fuses_products else self.blocks
            self._structures[key] = Structure(graph, blocks)
        whole = self._structures[key]
        if rows == whole.graph.batch_size:
            return whole
        if (*key, rows) not in self._structures:
            self._structures[*key, rows] = whole.at_batch(rows)
        return self._structures[*key, rows]


def _bounds(plan: Plan) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((len(stage.blocks) for stage in plan.stages), initial=0)))


def _rank_of_stage(own: Configuration) -> tuple[int, ...]:
    """Return the pipeline rank of each stage; in Chimera the rank of the stage's first replica."""
    found: dict[int, int] = {}
    for chunk in zip(*parts_of_ranks(own.schedule, own.pp, own.num_chunks), strict=True):
        for rank, part in enumerate(chunk):
            found.setdefault(part, rank)
    return tuple(found[stage] for stage in range(own.num_stages))


def _check(
    configuration: Configuration, cluster: Cluster, graph: Graph, *, sends_tokens: bool
) -> None:
    own, total = configuration, cluster.num_devices
    degrees = Forced(dp=own.dp, tp=own.tp, cp=own.cp, ep=own.ep, etp=own.etp)
    check_experts(degrees, experts_of_layers(graph))
    if own.shard is not None and own.num_devices == total:
        check_shard(replace(degrees, pp=own.pp, shard=own.shard), total, own.mesh)
    if own.num_devices != total:
        raise UsageError(
            "AP127",
            f"dp={own.dp} × tp={own.tp} × pp={own.pp} × cp={own.cp} is "
            f"{own.num_devices} devices, the cluster has {total}",
            fix=f"degrees whose product is {total}",
        )
    if own.microbatch_size % own.dp:
        raise UsageError(
            "AP124",
            f"micro-batches of {own.microbatch_size} samples cannot be split over dp={own.dp}",
            fix=f"a multiple of {own.dp} samples",
        )
    if not graph.batch_dims and own.microbatch_size != graph.batch_size:
        raise UsageError(
            "AP125",
            f"this model can only be simulated with {graph.batch_size} samples, as captured",
            fix=f"micro-batches of {graph.batch_size} samples",
        )
    if "cp" in own.folded and not sends_tokens:
        raise UsageError(
            "AP127",
            f"ep={own.ep} spreads experts over cp={own.cp} ranks too",
            why="with --dispatcher gather, experts are spread over data- and tensor-parallel ranks",
            fix=f"ep= a divisor of dp={own.dp}, or --dispatcher alltoall",
        )


def stage_bytes(
    schedule: str, num_ranks: int, num_chunks: int, costs: Sequence[StageCost], timeline: Timeline
) -> list[dict[str, float]]:
    """Return the bytes per device of each pipeline rank's stages, by memory category.

    With several stages per rank, the peak of their activations is taken from ``timeline``.
    """
    found = []
    for rank, parts in enumerate(parts_of_ranks(schedule, num_ranks, num_chunks)):
        memory = combine_bytes((costs[part].memory_bytes for part in parts), ONCE)
        if len(parts) > 1:
            memory["activations"] = float(timeline.peak_activation_bytes[rank])
        found.append(dict(memory))
    return found


def sent_bytes(graph: Graph, run: Run, parts: int) -> float:
    """Return the bytes per micro-batch that each device of a stage sends to later stages; the
    stage's blocks are ``run``, its values are split among ``parts`` devices."""
    specs = ((graph.spec(Ref(name, index)), count) for (name, index), count in run.sent.items())
    return sum(spec.num_bytes * count for spec, count in specs) / parts


def beside_stages(
    schedule: Schedule, sent: Sequence[float], mesh: Mesh, kind: Literal["cuda", "cpu"]
) -> tuple[Mapping[str, float], ...]:
    """Return, for each pipeline rank, the bytes per device by category that belong to no stage:
    messages, communicators, CUDA context. ``sent``: bytes that each stage sends per micro-batch.

    >>> from ..schedules.schedules import build_schedule
    >>> mesh = Mesh(("dp", "tp"), (4, 2))
    >>> beside_stages(build_schedule("1f1b", 2, 8), [1e6], mesh, "cuda")[0]["communicators"]
    1250000000.0
    """
    pairs: dict[tuple[int, int], float] = {}
    for source, targets in enumerate(schedule.wiring.consumers):
        for target in targets:
            size = sent[schedule.part(source)]
            pairs |= {(source, target): size, (target, source): size}
    messages = MessageBytes(pairs, pairs)
    most = sends_kept(schedule, is_gpu=kind != "cpu")
    ranks = schedule.stage_rank
    lanes = {(ranks[s], ranks[t]) for s, t in pairs if ranks[s] != ranks[t]}
    found = []
    for rank in range(schedule.num_ranks):
        held = max((size for _, size in messages_held(schedule, rank, messages, most)), default=0.0)
        is_world = schedule.num_ranks == 1 and len(mesh.shape) == 1
        count = sum(size > 1 for size in mesh.shape) + sum(rank in lane for lane in lanes)
        count += schedule.num_ranks * mesh.size > 1 and not is_world
        found.append(
            {
                "communication": held,
                "communicators": float(communicator_bytes(kind, count)),
                "reserve": float(reserve_bytes(kind, 0)),
            }
        )
    return tuple(found)
