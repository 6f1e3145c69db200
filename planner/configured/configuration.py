"""The price of one hand-written configuration: degrees, layers per stage, schedule and all.

In: a graph, its blocks, a cluster, a configuration. Out: seconds of a step with its
timeline, seconds and bytes of every stage. Nothing is searched but what the configuration
leaves open, the layouts inside a stage; they come from the same integer program, tables and
simulator as in the search.

Stage ``s`` has the ranks from ``(s mod pp)·dp·ep·cp·tp`` on, "tp" innermost and pipeline stages
outermost, as Megatron-LM numbers them (Narayanan et al. 2021, arXiv:2104.04473, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...cost_model.cluster import Cluster, Device, Link
from ...cost_model.compute import op_seconds
from ...cost_model.memory import PrecisionPolicy, policy, state_bytes
from ...cost_model.stage_costs import Overlap
from ...cost_model.timeline import Timeline
from .. import rules as default_rules
from ..errors import UsageError
from ..fusion import with_fusion
from ..graph import Blocks, Graph, Node, TensorSpec
from ..inter_op.submesh import mesh_of, restriction
from ..intra_op.intra_op import Effort, IntraOp, Limits
from ..layout import INVARIANT, Layout, Mesh
from ..plan import Precision, Recompute
from ..positions import Dims, position_dims
from ..precision import with_precision
from ..pricing.basis import DEFAULT, Basis
from ..pricing.choices import input_specs
from ..pricing.ladder import Rung
from ..pricing.prices import Prices, Seconds, StateBytes
from ..pricing.seconds import Priced
from ..pricing.slice_costs import SliceShares, carried_by_layers, even_lengths, shares_by_work
from ..pricing.stage_cost import StageCost, together
from ..pricing.stage_model import StageModel
from ..pricing.step import Pipeline, latency_seconds, pipeline_table, simulate_stages
from ..pricing.structure import Structure
from ..pricing.weight_versions import with_versions
from ..replicas import with_replica_sums
from ..requests.pins import Pin, by_template, check_priced, pinned_blocks
from ..requests.request import Forced
from ..rules.case import argument
from ..schedules.schedules import parts_of_ranks
from ..sequence_places import find_places
from .beside_stages import beside_stages, sent_bytes
from .configured_stage import beside_compute, selective
from .stage_runs import LayersFirst, even_layers, find_layers, stage_runs

OVERLAP = Overlap()
"""How much collectives beside compute slow it down."""

SMALLEST_AXIS = 2
"""Ranks of the axis that dimensions of positions are found with."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a training program takes besides its kernels and bytes.

    ``message_seconds``: to start a transfer between stages, besides the link's own.
    ``loss_seconds``: of the host on the last stage per micro-batch, half in each direction,
    for a loss in more kernels than one. ``second_gradients``: bytes of gradients held besides
    those that are reduced, over the latter's (half-precision ones that are added to float32).
    ``accumulation``: bytes that adding a micro-batch's gradients to those before moves, over
    the gradients' own (two read, one written: 3), where no product does so as it ends.
    """

    message_seconds: float = 0.0
    loss_seconds: float = 0.0
    second_gradients: float = 0.0
    accumulation: float = 0.0

    def around(
        self, cost: StageCost, device: Device, *, is_first: bool, is_last: bool
    ) -> StageCost:
        """A stage's cost with them."""
        seconds, (forward, backward) = cost.seconds, cost.receive_seconds
        if self.accumulation:
            moved = self.accumulation * cost.memory_bytes["gradients"]
            added = op_seconds(device, "elementwise", 0.0, moved, "bfloat16")
            seconds = seconds._replace(backward_compute=seconds.backward_compute + added)
        if is_last and self.loss_seconds:
            half = self.loss_seconds / 2
            seconds = seconds._replace(
                forward_compute=seconds.forward_compute + half,
                backward_compute=seconds.backward_compute + half,
                forward_issue=seconds.forward_issue + half,
                backward_issue=seconds.backward_issue + half,
            )
        if not is_first:
            forward, backward = forward + self.message_seconds, backward + self.message_seconds
        gradients = cost.memory_bytes["gradients"] * (1 + self.second_gradients)
        memory = {**cost.memory_bytes, "gradients": gradients}
        received = (forward, backward)
        return replace(cost, seconds=seconds, receive_seconds=received, memory_bytes=memory)


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a model is trained.

    ``microbatch_size`` rows make a micro-batch over all data-parallel ranks. ``num_chunks``
    stages share a pipeline rank. ``num_slices`` of sequences, for TeraPipe. ``layers`` of each
    stage (default: even); ``depth`` layers in all where the graph stands for a deeper model.
    ``overlap``: gradients are reduced while the last micro-batch runs backward, and ZeRO 2 and 3
    gather and scatter beside compute. ``policy`` overrides the bytes per parameter that
    ``precision`` and ``optimizer`` give. ``program``: what else the training program takes.
    ``recompute="selective"`` runs the core of attention again; with ``products_kept`` everything
    but attention and that share of matrix products instead, here of so many layers all products
    and of the others none. ``compiled``: blocks run compiled.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    recompute: Recompute = "none"
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    num_slices: int = 1
    layers: tuple[int, ...] | None = None
    depth: int | None = None
    overlap: bool = False
    sequence_parallel: bool | None = None
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    policy: PrecisionPolicy | None = None
    program: Program = field(default_factory=Program)
    products_kept: float | None = None
    compiled: bool = False

    @property
    def num_devices(self) -> int:
        return self.dp * self.ep * self.cp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A step: its seconds, its timeline, what each stage costs, bytes of each pipeline rank.

    ``memory_bytes`` has the categories of ``StagePrediction``, one mapping per pipeline rank.
    """

    configuration: Configuration
    step_seconds: float
    timeline: Timeline
    stages: tuple[StageCost, ...]
    memory_bytes: tuple[Mapping[str, float], ...]
    usable_bytes: int
    slices: SliceShares | None = None

    @property
    def peak_bytes(self) -> float:
        return max(sum(rank.values()) for rank in self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


@dataclass(frozen=True)
class _Given(Prices):
    """Prices with a policy of their own, and two things as Megatron-LM does them.

    Gradients are summed together over other axes than dp: those of norms and biases are
    flattened into one all-reduce per step; a gradient that is the same on all ranks (``I``)
    is not summed. Of causal attention whose queries are split each rank has two pieces, one
    from the front and one from the back, so that all have half of the pairs.
    """

    given: PrecisionPolicy | None = None

    def __post_init__(self) -> None:
        Prices.__post_init__(self)
        if self.given is not None:
            object.__setattr__(self, "policy", self.given)

    def _compute(
        self, node: Node, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Priced:
        found = Prices._compute(self, node, inputs, outputs)
        is_attention = node.op.startswith("aten.scaled_dot_product_attention")
        if not is_attention or not argument(node, 5, "is_causal", False):
            return found
        share = min(1.0, inputs[0].shape[-2] / inputs[1].shape[-2])  # of the positions
        last = 2 - share  # the work of the rank with the last positions, in equal parts
        return found._replace(forward=found.forward / last, backward=found.backward / last)

    def parameter(self, spec: TensorSpec, held: Layout, zero: int) -> tuple[Seconds, StateBytes]:
        """As ``Prices`` has it, but for what is said above and sharding over "cp" too."""
        seconds, states = Prices.parameter(self, spec, held, zero)
        if not spec.requires_grad:
            return seconds, states
        numel = spec.numel // self.num_parts(held)
        shards = 1 if held[0].is_shard else self.shards
        sharded = shards if zero else 1
        num_bytes = numel * self.policy.gradient_bytes // sharded
        less = 0.0
        for axis, placement in enumerate(held):
            if self.mesh.axes[axis] == "dp" or placement.is_shard or self.mesh.shape[axis] == 1:
                continue
            whole = self.collective("all_reduce", num_bytes, axis)
            latency = self.collective("all_reduce", 1, axis)
            less += whole if placement == INVARIANT else min(whole, latency)
        seconds = seconds._replace(gradient_sync=max(0.0, seconds.gradient_sync - less))
        if zero and self._context > 1:
            found = state_bytes(numel, self.policy, zero, shards * self._context, wrapped=True)
            states = states._replace(
                parameters=found.parameters, gradients=found.gradients, optimizer=found.optimizer
            )
        return seconds, states

    @property
    def _context(self) -> int:
        return self.mesh.shape[self.mesh.axes.index("cp")] if "cp" in self.mesh.axes else 1


@dataclass(frozen=True)
class Cache:
    """What prices of several configurations share. Keep one for as many as you like."""

    structures: dict[object, tuple[Graph, Structure]] = field(default_factory=dict)
    prices: dict[object, tuple[Cluster, dict[Any, Any]]] = field(default_factory=dict)
    solvers: dict[object, IntraOp] = field(default_factory=dict)
    dims: dict[object, Dims] = field(default_factory=dict)


def price(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    configuration: Configuration,
    *,
    cache: Cache | None = None,
    basis: Basis = DEFAULT,
    pins: tuple[Pin, ...] = (),
) -> PricedStep:
    """The step of a configuration. Raises ``UsageError`` where it does not fit model or cluster.

    ``basis`` has what was measured; ``pins`` are layouts that are given.
    """
    _check(configuration, cluster, graph)
    told_apart = pinned_blocks(graph, blocks, pins)
    work = _Work(
        graph, told_apart, cluster, configuration, cache or Cache(), basis=basis, pins=pins
    )
    layers = _layers(configuration, work.structure)
    runs = stage_runs(work.structure, layers)
    costs = tuple(
        configuration.program.around(
            work.stage(stage, run),
            cluster.hosts[0].device,
            is_first=stage == 0,
            is_last=stage == len(runs) - 1,
        )
        for stage, run in enumerate(runs)
    )
    check_priced([cost.seconds.forward_compute for cost in costs], pins)
    costs = with_replica_sums(costs, configuration.schedule, cluster, configuration.pp)
    costs = with_versions(
        costs, configuration.schedule, configuration.num_microbatches, work.policy
    )  # fmt: skip
    slices = work.slices()
    buckets = [max(1, run.num_blocks) for run in runs]
    pipeline = Pipeline(
        configuration.schedule, configuration.num_microbatches,
        num_chunks=configuration.num_chunks, slices=slices,
    )  # fmt: skip
    timeline = simulate_stages(
        pipeline,
        costs,
        overlap=replace(OVERLAP, gradient_buckets=buckets) if configuration.overlap else None,
        latency_seconds=latency_seconds(cluster),
    )  # fmt: skip
    table = pipeline_table(pipeline, len(costs))
    beside = beside_stages(table, work.sent(runs), work.mesh, cluster.hosts[0].device.kind)
    ranks = _ranks_bytes(configuration, costs, timeline)
    ranks = [{**own, **more} for own, more in zip(ranks, beside, strict=True)]
    if slices is not None:
        for rank, more in zip(ranks, work.carried(slices, layers), strict=True):
            rank["activations"] += configuration.num_microbatches * more
    usable = cluster.usable_memory_bytes
    step = timeline.step_seconds
    return PricedStep(configuration, step, timeline, costs, tuple(ranks), usable, slices)


def _check(configuration: Configuration, cluster: Cluster, graph: Graph) -> None:
    own, total = configuration, cluster.num_devices
    if own.num_devices != total:
        raise UsageError(
            "AP127",
            f"dp={own.dp} × tp={own.tp} × pp={own.pp} × cp={own.cp} × ep={own.ep} is "
            f"{own.num_devices} "
            f"devices, the cluster has {total}",
            fix=f"degrees whose product is {total}",
        )
    parts = own.dp * own.ep
    if own.microbatch_size % parts:
        over = f"dp={own.dp}" + (f" × ep={own.ep}" if own.ep > 1 else "")
        raise UsageError(
            "AP124",
            f"micro-batches of {own.microbatch_size} samples cannot be split over {over}",
            fix=f"a multiple of {parts} samples",
        )
    if not graph.batch_dims and own.microbatch_size != graph.batch_size:
        raise UsageError(
            "AP125",
            f"this model can only be simulated with {graph.batch_size} samples, as captured",
            fix=f"micro-batches of {graph.batch_size} samples",
        )


def _layers(configuration: Configuration, structure: Structure) -> tuple[int, ...]:
    if configuration.layers is not None:
        if len(configuration.layers) != configuration.num_stages:
            raise UsageError(
                "AP128",
                f"layers of {len(configuration.layers)} stages for {configuration.num_stages}",
                fix="one number per stage, of all chunks",
            )
        return configuration.layers
    depth = configuration.depth or find_layers(structure).count
    return even_layers(depth, configuration.num_stages)


@dataclass(frozen=True)
class _Work:
    """One call's arguments."""

    graph: Graph
    blocks: Blocks
    cluster: Cluster
    configuration: Configuration
    cache: Cache
    basis: Basis = DEFAULT
    pins: tuple[Pin, ...] = ()

    @property
    def policy(self) -> PrecisionPolicy:
        """The bytes per parameter."""
        own = self.configuration
        return own.policy or policy(own.precision, own.optimizer)

    @property
    def structure(self) -> Structure:
        """The graph at the micro-batch's rows, shared by every use of it."""
        own, found = self.configuration, self.cache.structures
        base = (id(self.graph), own.precision, own.compiled, self.pins)
        if base not in found:
            graph = with_precision(self.graph, own.precision)
            if own.compiled:
                graph = with_fusion(graph, self.blocks)
            found[base] = (self.graph, Structure(graph, self.blocks))
        structure = found[base][1]
        key = (*base, own.microbatch_size)
        if key not in found:
            graph = structure.graph
            if graph.batch_dims:
                graph = graph.with_batch_size(own.microbatch_size)
            found[key] = (self.graph, replace(structure, graph=graph))
        return found[key][1]

    @property
    def mesh(self) -> Mesh:
        own = self.configuration
        return mesh_of(own.dp, own.tp, own.cp, own.ep)

    def stage(self, stage: int, run: LayersFirst) -> StageCost:
        """The cost of a stage, recomputed and overlapped as configured."""
        own = self.configuration
        solver = self._solver(stage % own.pp * self.mesh.size, self._link(stage))
        answer = solver.best(run, own.num_microbatches, 1)
        assert answer is not None, "no limit of memory or time can be exceeded"
        kept = own.products_kept if own.recompute == "selective" else None
        level = run.num_layers if own.recompute == "full" or kept is not None else 0
        rung = run.prefix(level)
        if kept is not None:
            full = run.prefix(level - round(kept * level)).full
            rung = Rung(full, tuple(a - b for a, b in zip(rung.full, full, strict=True)))
        cost = answer.figures.price(run, replace(answer.setting, rung=rung))
        if own.recompute == "selective" and kept is None:
            cost = selective(cost, run, answer, self.dims)
        return beside_compute(cost, run.num_blocks, OVERLAP) if own.overlap else cost

    def carried(self, slices: SliceShares, layers: Sequence[int]) -> Sequence[float]:
        """The bytes of keys and values that the slices of a micro-batch hand on, by rank."""
        return carried_by_layers(
            self.structure.graph, slices, layers,
            parts=self.mesh.size, again=self.configuration.recompute == "full",
        )  # fmt: skip

    def sent(self, runs: Sequence[LayersFirst]) -> list[float]:
        """The bytes that a device of each stage sends on of a micro-batch."""
        own = self.configuration
        parts = self.mesh.size // (1 if own.sequence_parallel else own.tp)
        return [sent_bytes(self.structure.graph, run, parts) for run in runs]

    def slices(self) -> SliceShares | None:
        """The slices of sequences, as equal as can be; None where sequences are whole.

        Raises PlanError AP548 for a model that slices would change.
        """
        count, graph = self.configuration.num_slices, self.structure.graph
        if self.configuration.schedule != "terapipe" or count == 1:
            return None

        def flops(node: Node) -> float:
            found = default_rules.work(node, input_specs(node, graph), node.outputs)
            return float(found.flops_forward + found.flops_backward)

        lengths = even_lengths(find_places(graph).length, count)
        return shares_by_work(graph, lengths, flops)

    @property
    def dims(self) -> Dims:
        """The dimensions of rows and positions of every value."""
        key, graph = ("dims", id(self.graph)), self.structure.graph
        found: Dims | None = self.cache.dims.get(key)
        if found is None:
            found = position_dims(
                graph, lambda node: default_rules.axis_strategies(node, graph, SMALLEST_AXIS)
            )
            self.cache.dims[key] = found
        return found

    def _link(self, stage: int) -> Link:
        """What joins a stage to the one before it, of chunks the last rank to the first."""
        size, pp = self.mesh.size, self.configuration.pp
        here, before = stage % pp * size, (stage - 1) % pp * size
        return self.cluster.send_link(range(before, before + size), range(here, here + size))

    def _solver(self, first: int, link: Link) -> IntraOp:
        own = self.configuration
        prices = self._prices(first)
        forced = Forced(
            dp=own.dp, tp=own.tp, cp=own.cp, ep=own.ep, sequence_parallel=own.sequence_parallel
        )  # fmt: skip
        key = (
            id(self.graph), id(self.cluster), own.precision, own.compiled, own.microbatch_size,
            prices.mesh,
            prices.groups, prices.speed, link, own.sequence_parallel, own.policy,
            own.optimizer, own.zero, self.pins, prices.profile,
        )  # fmt: skip
        if key not in self.cache.solvers:
            given = replace(
                restriction(prices.mesh, forced), gathers=(),
                pins=by_template(self.graph, self.blocks, self.pins),
            )  # fmt: skip
            model = StageModel(self.structure, prices, given, link)
            limits = Limits(float("inf"), (own.zero,), "none")
            self.cache.solvers[key] = IntraOp(model, limits, Effort(float("inf")))
        return self.cache.solvers[key]

    def _prices(self, first: int) -> Prices:
        own = self.configuration
        key = (id(self.graph), id(self.cluster), own.precision, own.compiled)
        shared = self.cache.prices.setdefault(key, (self.cluster, {}))[1]
        return _Given(
            self.mesh,
            self.cluster,
            tuple(range(first, first + self.mesh.size)),
            own.precision,
            own.optimizer,
            default_rules,
            shared,
            self.basis.used,
            given=own.policy,
        )


def _ranks_bytes(
    configuration: Configuration, costs: Sequence[StageCost], timeline: Timeline
) -> list[dict[str, float]]:
    """The bytes of every pipeline rank."""
    own = configuration
    held = parts_of_ranks(own.schedule, own.pp, own.num_chunks)
    return [
        _rank_bytes((costs[part] for part in parts), timeline.peak_activation_bytes[rank])
        for rank, parts in enumerate(held)
    ]


def _rank_bytes(chunks: Iterable[StageCost], activation_bytes: int) -> dict[str, float]:
    """A pipeline rank's bytes: states of all its chunks, what is transient or reserved once."""
    once = ("transient", "buffers", "reserve")
    found = together((cost.memory_bytes for cost in chunks), once)
    return {**found, "activations": float(activation_bytes)}
