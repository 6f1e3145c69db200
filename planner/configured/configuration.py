"""Price of one hand-written configuration: degrees, layers per stage, schedule and options.

In: a graph, its blocks, a cluster, a configuration. Out: the ``Plan`` that the configuration
describes, the costs of its stages, and its step. The cut is given: the layers of each stage; blocks
before the layers join the first stage, blocks after them the last. The layouts inside a stage are
found by the search's integer program on the mesh of the degrees. ``evaluate``, which prices every
plan again before it is returned, prices this one too.

Stage ``s`` of a chain has the ranks from ``(s mod pp)·dp·ep·cp·tp`` on, "tp" innermost and pipeline
stages outermost, as Megatron-LM numbers them (Narayanan et al. 2021, arXiv:2104.04473, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.ops.memory import GradientDtype, StateOptions
from ...cost_model.simulator.timeline import Timeline
from .. import rules as default_rules
from ..budget import Budget
from ..errors import UsageError
from ..evaluate import Evaluator, Staged
from ..expert_dims import experts_of_layers
from ..graph import Block, Blocks, Graph
from ..inter_op.submesh import mesh_of, restriction
from ..intra_op.intra_op import IntraOp, Limits
from ..kernels.fusion import with_fusion
from ..kernels.product_kernels import by_masks, with_product_kernels
from ..layout import Mesh, NodeLayout
from ..plan import (
    BlockPlan,
    ModelInfo,
    Offload,
    Plan,
    Precision,
    Prediction,
    Recompute,
    SolverInfo,
    StagePlan,
    StagePrediction,
)
from ..precision import with_precision
from ..pricing.basis import DEFAULT, Basis
from ..pricing.choices import Restriction
from ..pricing.price_cache import PriceCache
from ..pricing.prices import Prices
from ..pricing.slice_costs import even_lengths
from ..pricing.stage_cost import StageCost
from ..pricing.stage_model import StageModel
from ..pricing.step import message_seconds, pipeline_table, simulate_stages
from ..pricing.structure import Structure
from ..requests.options import check_experts
from ..requests.pins import Pin, by_template, check_priced, pinned_blocks
from ..requests.request import Forced
from ..schedules.schedules import parts_of_ranks
from ..search.report_plan import stage_layouts
from ..sequence_places import find_places
from .beside_stages import beside_stages, sent_bytes, stage_bytes
from .layers import find_layers, stage_bounds


@dataclass(frozen=True, slots=True)
class Configuration:
    """Parallel degrees and options of a training run.

    ``dp`` ranks split the batch. ``ep`` ranks hold different experts: data-parallel ranks where
    ``dp`` is a multiple of ``ep``, else tensor- and context-parallel ones too (``folded``). ``etp``
    says instead how many tensor-parallel ranks share each expert: 1, or all ``tp``.
    ``microbatch_size`` rows make a micro-batch over all data-parallel ranks. ``num_chunks`` stages
    share a pipeline rank. ``num_slices`` of sequences, for TeraPipe. ``layers`` of each stage
    (default: even). ``recompute`` applies to every block, as in a plan, or to layers alone unless
    ``recomputes_ends``. ``selective_share`` below 1: this share of a stage's layers is recomputed
    selectively, the others fully. ``recompute_share`` below 1: this share of a stage's layers is
    recomputed, the others keep their activations. ``compiled``: blocks run compiled, or layers
    alone unless ``compiles_ends``; ``fuses_products``: with kernels over products, as of attention
    that is written out. ``gradient_dtype`` and ``offload`` are a plan's.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    zero: int = 0
    recompute: Recompute = "none"
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    num_slices: int = 1
    layers: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    recomputes_ends: bool = True
    selective_share: float = 1.0
    recompute_share: float = 1.0
    compiled: bool = False
    compiles_ends: bool = True
    fuses_products: bool = False
    gradient_dtype: GradientDtype = "master"
    offload: Offload = "none"

    @classmethod
    def like(cls, plan: Plan, **degrees: Any) -> Configuration:
        """Return the configuration of these degrees, with the plan's precision, sums of gradients,
        optimizer and compilation."""
        model = plan.model
        return cls(
            precision=model.precision,
            gradient_dtype=model.gradient_dtype,
            optimizer=model.optimizer,
            compiled=plan.compiled,
            **degrees,
        )

    @property
    def form(self) -> tuple[str, bool, bool, bool]:
        """Return the options on which the priced graph depends."""
        return self.precision, self.compiled, self.compiles_ends, self.fuses_products

    @property
    def states(self) -> StateOptions:
        """Return the format and place of gradients and optimizer states."""
        return StateOptions(self.gradient_dtype, self.offload == "optimizer")

    @property
    def rank_rows(self) -> int:
        """Return the rows of a micro-batch on one data-parallel rank."""
        return self.microbatch_size // self.dp

    @property
    def num_devices(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    @property
    def folded(self) -> tuple[str, ...]:
        """Return the axes besides "ep" on which ranks hold different experts.

        Ranks are taken in Megatron-LM's order: tensor-parallel neighbours, context-parallel,
        data-parallel.
        """
        left, found = self.ep, []
        for name, size in self._foldable:
            if size > 1 and left % size == 0:
                found.append(name)
                left //= size
        return tuple(found)

    @property
    def _foldable(self) -> tuple[tuple[str, int], ...]:
        """Return the axes that experts may be folded over, with their sizes."""
        if self.etp is None and self.dp % self.ep == 0:
            return ()
        others = (("cp", self.cp),)
        return others if self.etp not in (None, 1) else (("tp", self.tp), *others)

    @property
    def data_ep(self) -> int:
        """Return the number of data-parallel ranks among the ranks that split experts."""
        return self.ep // prod(size for name, size in self._foldable if name in self.folded)

    @property
    def mesh(self) -> Mesh:
        """The mesh of a stage, whose axis "ep" has the data-parallel ranks that split experts."""
        return mesh_of(self.dp // self.data_ep, self.tp, self.cp, self.data_ep)


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A step: its seconds, its timeline, the cost of each stage, the bytes of each pipeline rank.

    ``memory_bytes`` has the categories of ``StagePrediction``, one mapping per pipeline rank.
    """

    configuration: Configuration
    plan: Plan
    timeline: Timeline
    stages: tuple[StageCost, ...]
    memory_bytes: tuple[Mapping[str, float], ...]
    usable_bytes: int

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
    """Pricer of configurations of one model, which keeps the work they share.

    ``basis`` holds measured times; ``pins`` are given layouts.
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
        """Price the step of a configuration. Raises ``UsageError`` where it does not fit the model
        or the cluster."""
        staged = self.staged(cluster, configuration)
        return self.step(configuration, staged, staged.costs)

    def staged(self, cluster: Cluster, configuration: Configuration) -> Staged:
        """Return the configuration's plan with the costs of its stages."""
        plan = self.plan(cluster, configuration)
        own = configuration.form
        if own not in self._evaluators:
            whole = self._structure(configuration, self.graph.batch_size)
            self._evaluators[own] = Evaluator(whole.graph, whole.blocks, basis=self.basis)
        return self._evaluators[own].staged(plan, cluster)

    def step(
        self, configuration: Configuration, staged: Staged, costs: Sequence[StageCost]
    ) -> PricedStep:
        """Simulate the step of a plan with these stage costs."""
        own, plan, cluster = configuration, staged.plan, staged.plan.cluster
        pipeline = staged.pipeline
        timeline = simulate_stages(pipeline, costs, message=message_seconds(cluster))
        structure = self._structure(own, own.microbatch_size)
        parts = own.mesh.size // (1 if own.sequence_parallel else own.tp)
        sent = [
            sent_bytes(structure.graph, structure.run(*bounds), parts) for bounds in _bounds(plan)
        ]
        table = pipeline_table(pipeline, len(costs))
        beside = beside_stages(table, sent, own.mesh, cluster.hosts[0].device.kind)
        memory = tuple(
            {**rank, **more}
            for rank, more in zip(
                stage_bytes(own.schedule, own.pp, own.num_chunks, costs, timeline),
                beside,
                strict=True,
            )
        )
        return PricedStep(own, plan, timeline, tuple(costs), memory, cluster.usable_memory_bytes)

    def plan(self, cluster: Cluster, configuration: Configuration) -> Plan:
        """Return the plan that a configuration describes, without predictions."""
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
        return Plan(
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
        return StagePlan(
            tuple(
                BlockPlan(block.name, block.kind, mode)
                for block, mode in zip(blocks, self._modes(own, blocks), strict=True)
            ),
            devices,
            own.mesh,
            own.zero,
            self._layouts(cluster, own, structure, (before, here), bounds),
            StagePrediction({}, {}),
        )

    @property
    def _layers(self) -> Blocks:
        return Blocks(tuple(self.blocks.blocks[at] for at in find_layers(self.blocks)))

    def _modes(self, own: Configuration, blocks: Sequence[Block]) -> list[Recompute]:
        """Return the recomputation mode of each of a stage's blocks."""
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
    ) -> Mapping[str, NodeLayout]:
        """Find the best layouts of a stage, which starts at the second of two ranks."""
        solver, run = self._solver(cluster, own, structure, firsts), structure.run(*bounds)
        answer = solver.best(run, own.num_microbatches, 1)
        assert answer is not None, "no limit of memory or time can be exceeded"
        check_priced([answer.cost.seconds.forward_compute], self.pins)
        return stage_layouts(structure, solver.model, answer, bounds)

    def _solver(
        self, cluster: Cluster, own: Configuration, structure: Structure, firsts: tuple[int, int]
    ) -> IntraOp:
        before, here = (range(first, first + own.mesh.size) for first in firsts)
        link = cluster.send_link(before, here)
        # the cluster lives as long as its id is used
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
            assumptions=self.basis.assumptions,
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
                gathers=(),
                pins=by_template(self.graph, structure.blocks, self.pins),
            )
            model = StageModel(structure, prices, given, link)
            limits = Limits(float("inf"), (own.zero,), "none")
            self.solvers[key] = IntraOp(model, limits, Budget.of(float("inf")))
        return self.solvers[key]

    def _around_experts(self, own: Configuration, given: Restriction) -> Restriction:
        """Return the restriction for a program that sends tokens to experts."""
        if not self.basis.assumptions.sends_tokens or not experts_of_layers(self.graph):
            return given
        axes = {name: axis for axis, name in enumerate(own.mesh.axes)}
        names = ("cp", "tp") if own.sequence_parallel else ("cp",)

        def numbers(chosen: Sequence[str]) -> tuple[int, ...]:
            return tuple(axes[name] for name in chosen if name in axes and name in names)

        sliced = () if "tp" in own.folded or own.etp == 1 else ("tp",)
        return replace(
            given, tokens=numbers(names), folded=numbers(own.folded), sliced=numbers(sliced)
        )

    def _structure(self, own: Configuration, rows: int) -> Structure:
        """The graph in the configuration's precision, at a number of rows."""
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
    """The pipeline rank of each stage; for schedules with replicas, the first replica's."""
    found: dict[int, int] = {}
    for chunk in zip(*parts_of_ranks(own.schedule, own.pp, own.num_chunks), strict=True):
        for rank, part in enumerate(chunk):
            found.setdefault(part, rank)
    return tuple(found[stage] for stage in range(own.num_stages))


def _check(
    configuration: Configuration, cluster: Cluster, graph: Graph, *, sends_tokens: bool
) -> None:
    own, total = configuration, cluster.num_devices
    sharing = own.dp * own.ep // own.data_ep
    check_experts(sharing, own.ep, experts_of_layers(graph))
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
            why="this package spreads them over data- and tensor-parallel ranks alone",
            fix=f"ep= a divisor of dp={own.dp}; --dispatcher alltoall prices other programs",
        )
