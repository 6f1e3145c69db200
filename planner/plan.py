"""The plan: all decisions of the planner, and the input of a training run; a readable JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any, Literal

from ..cost_model.cluster.cluster import Cluster
from ..cost_model.cluster.tf32 import has_tf32
from ..cost_model.ops.memory import GradientDtype, Offload, StateOptions
from ..cost_model.simulator.consistency import Consistency
from .graph.graph import Blocks
from .graph.layout import INVARIANT, SLICED, Layout, Mesh, NodeLayout, sent_axes
from .graph.state_sharding import state_sharding

SCHEMA = 6
OMITTED = {"omitted": True}
"""Metadata of a field that plan files omit where it has its default, as older files do."""

Recompute = Literal[
    "none", "none-offloaded", "selective", "attention", "attention-offloaded", "full"
]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
GradientOrder = Literal["backward", "priority"]
"""Order of gradient sums: "backward", as the backward completes the gradients, or "priority", as
the next forward needs the parameters."""
Mode = Literal["auto", "measured", "analytic"]
"""Source of prices. ``auto``: measured if possible, else interpolated, else from specifications;
``measured``: every queried op must be measured; ``analytic``: specifications only."""
Float32Ops = Literal["autocast", "none"]
"""Ops that compute in float32 in a half-precision model: autocast's list of them, or none."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The planned model: ``target`` and ``settings`` rebuild it, ``fingerprint`` (a hash) checks
    it.

    ``seq``: sequence length, None without sequences. ``float32_ops`` is "none" without half
    precision. ``gradient_dtype``: format in which gradients are summed and held.
    """

    target: str
    settings: Mapping[str, Any]
    fingerprint: str
    num_parameters: int
    global_batch: int
    seq: int | None
    precision: Precision
    optimizer: str
    float32_ops: Float32Ops = "none"
    gradient_dtype: GradientDtype = "master"


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Decisions for one block. ``kind`` is equal for blocks that are laid out alike."""

    name: str
    kind: str
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class GradientSum:
    """An all-reduce of gradients after the last backward: of part ``part`` of ``num_parts`` of the
    stage's bucket number ``bucket`` (``gradient_buckets``), over each of the mesh ``axes`` in turn.

    The gradients are complete after the backward of the stage's block number ``block``; -1: after
    the whole backward. ``num_bytes`` is the size of the sum. ``algorithm`` runs it (see
    ``cost_model.collectives.all_reduce``): "library" is the all-reduce of gloo; NCCL chooses its
    own, and the name is the assumed choice.
    """

    bucket: int
    block: int
    num_bytes: int
    axes: tuple[str, ...]
    algorithm: str
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class PlacedExpert:
    """An expert that other ranks than its owner compute: ``ranks``, numbered along the axes that
    spread experts, each compute an equal share of its tokens."""

    expert: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Placement of the experts of a layer, by node name. ``counts``: measured tokens of each
    expert; ``busiest``: tokens of the busiest rank / the mean if each expert were computed by its
    owner; ``placed``: as placed. ``copies``: most experts that a rank computes for others."""

    layer: str
    counts: tuple[int, ...]
    copies: int
    busiest: float
    placed: float
    experts: tuple[PlacedExpert, ...]

    @property
    def pairs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return each placed expert with its ranks."""
        return tuple((each.expert, each.ranks) for each in self.experts)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage: consecutive blocks on a mesh of devices, with all its decisions.

    ``devices``: cluster ranks in the mesh's row-major order. ``zero``: ZeRO stage of parameters
    that several ranks of ``Mesh.joint_axes`` hold whole. ``layouts`` maps a node, by its name in
    the first block of its kind in the whole graph, to its layout; inputs, constants and shared
    parameters have their own names. ``shares``: rows of a micro-batch at each index along
    mesh axis 0; () for an even split. ``gradient_sums``: all-reduces of a stage that shards no
    states, in the order in which they start; with () the runtime sums its buckets by the library.
    ``placements``: of experts by measured loads, () without these. ``shard_degree``: number of
    neighbouring ranks of the joint axes that shard the states together, and replicate them in other
    such groups (``graph.state_sharding``); 0 if all ranks are one group.
    """

    blocks: tuple[BlockPlan, ...]
    devices: tuple[int, ...]
    mesh: Mesh
    zero: int
    layouts: Mapping[str, NodeLayout]
    prediction: StagePrediction
    shares: tuple[int, ...] = ()
    gradient_sums: tuple[GradientSum, ...] = ()
    placements: tuple[ExpertPlacement, ...] = field(default=(), metadata=OMITTED)
    shard_degree: int = field(default=0, metadata=OMITTED)

    @property
    def expert_axes(self) -> tuple[int, ...]:
        """Return the mesh axes over which experts are spread."""
        sent = {axis for each in self.layouts.values() for axis in sent_axes(each)}
        return tuple(a for a, name in enumerate(self.mesh.axes) if name == "ep" or a in sent)

    @property
    def expert_degree(self) -> int:
        """Return the number of ranks that hold different experts; 1 without experts."""
        return prod(self.mesh.shape[axis] for axis in self.expert_axes)

    @property
    def slice_degree(self) -> int:
        """Return the number of ranks that hold slices of the same experts; 1 without slices."""
        sliced = {axis for each in self.layouts.values() for axis in _axes_of(each, SLICED)}
        return self.mesh.num_ranks([*sliced])

    @property
    def state_axes(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of mesh axes whose ranks hold some parameter whole, in ascending order;
        ZeRO shards its states over them."""
        held = {layout.outputs[0] for layout in self.layouts.values() if not layout.inputs}
        joint = self.mesh.joint_axes
        found = {tuple(axis for axis in joint if not own[axis].is_shard) for own in held}
        return tuple(sorted(axes for axes in found | {joint} if axes))

    def layout_of(self, name: str, blocks: Blocks) -> NodeLayout | None:
        """Return the stage's layout of node ``name``, which may be in any block of its kind."""
        return blocks.entry(self.layouts, name)

    def leaf_layout(self, name: str, blocks: Blocks) -> Layout:
        """Return the layout of a parameter, buffer or input; whole on every rank by default."""
        found = self.layout_of(name, blocks)
        return (INVARIANT,) * len(self.mesh.shape) if found is None else found.outputs[0]


def joint_axes(stages: Iterable[StagePlan]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of several mesh axes along which ranks communicate as one group, in stages on
    the same mesh: those of states, and those over which tokens are sent to experts."""
    found = set[tuple[int, ...]]()
    for stage in stages:
        found.update(stage.state_axes, map(sent_axes, stage.layouts.values()))
    return tuple(sorted(axes for axes in found if len(axes) > 1))


def grouped_axes(stages: Iterable[StagePlan]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Return the sets of mesh axes over which stages on the same mesh shard states in groups of
    ranks, each with the number of shards."""
    found = set[tuple[tuple[int, ...], int]]()
    for stage in stages:
        for axes in stage.state_axes if stage.zero else ():
            sharding = state_sharding(stage.mesh, axes, stage.shard_degree)
            if sharding.num_shards > 1 and sharding.num_replicas > 1:
                found.add((axes, sharding.num_shards))
    return tuple(sorted(found))


def _axes_of(layout: NodeLayout, label: str) -> tuple[int, ...]:
    return tuple(axis for axis, own in enumerate(layout.labels) if own == label)


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted seconds and bytes of a stage, on its worst rank.

    ``seconds`` per micro-batch: forward, backward (recomputation included), compute, communication
    (not overlapped), states (gathering parameters, summing gradients), hidden_states (the
    overlapped part of states), hidden_exchanges (of tokens with experts, beside compute, if any),
    send (to later stages), receive, and for split backwards weight_gradients (the part that can
    wait). Per step: parameter_gather, gradient_sync, exposed_sync (the part of both that lengthens
    the step), slowed_share (fraction of compute lost beside them), optimizer. ``memory_bytes``:
    parameters, gradients, optimizer, activations, transient, buffers, reserve as the search prices
    them. In a finished plan they are the bytes of its rank's peak, with master (the copy that the
    optimizer steps), gathered, inputs, communication, communicators and fragmentation; its
    transient and recomputation bytes come from running stages on fake tensors, and working has
    these bytes as the rules of ops predict them. ``host_bytes``: activations of one micro-batch
    that a device keeps in the host's memory; seconds then have host_copies (of them, in one
    direction) and exposed_copies (what forward and backward wait for them). state_copies: copies of
    gradients and parameters to and from it, a part of states.
    """

    seconds: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    host_bytes: int = field(default=0, metadata=OMITTED)


@dataclass(frozen=True, slots=True)
class ProfileUse:
    """The measurements behind a plan's prices: their environment and the error of interpolation.

    ``device``, ``driver``, ``torch`` and ``threads`` describe the measured environment;
    ``mismatch`` says how the planned environment differs from it ("" if it does not).
    ``interpolation_error`` is the mean relative error of the interpolated seconds, estimated by
    leaving measurements out; 0 without interpolation.
    """

    device: str
    driver: str
    torch: str
    threads: int
    mismatch: str = ""
    interpolation_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of the whole step.

    ``peak_memory_bytes``: of the fullest device. ``sources``: fractions of the time by source of
    prices ("measured", "interpolated", "spec"), with the sum 1; ``sources_of`` splits them into
    "compute" and "communication". ``profile`` is None without measurements.
    """

    step_seconds: float
    bubble_fraction: float
    tokens_per_second: float
    model_flops_utilization: float
    peak_memory_bytes: int
    sources: Mapping[str, float]
    sources_of: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    profile: ProfileUse | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan that the search considered: its configuration in one line, its predictions, and
    the main difference from the chosen plan (``reason``)."""

    summary: str
    step_seconds: float
    peak_memory_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Simplest:
    """The reason why a plan is not the fastest: it is the simplest of ``num_equal`` plans within
    the relative ``tolerance`` of ``fastest_seconds``. ``fastest`` describes the fastest plan."""

    tolerance: float
    num_equal: int
    fastest: str
    fastest_seconds: float


@dataclass(frozen=True, slots=True)
class SolverInfo:
    """Statistics of the search, and the quality of the plan under the cost model.

    ``bound_seconds``: lower bound on the step of any plan in the searched space (0 if unknown), so
    the plan's step is within ``gap`` = 1 - bound / step of the best. The searched space sums
    gradients in backward order, by the library. ``seconds``: planning time by phase. ``stopped``:
    cause of an early end, if any.

    ``layouts_gap``: the fraction by which better layouts, ZeRO stages and recomputation on the same
    meshes can at most shorten the pipeline's time in the dynamic program, proven by integer
    programs for every stage; with several stages per rank, for the pipeline before it was cut
    further. None if unknown. ``simplest`` is None if the plan is the fastest found. ``solver``
    solved the integer programs. ``is_reused``: the plan, and ``seconds``, are of an earlier search.
    """

    gap: float
    num_problems: int
    seconds: Mapping[str, float]
    bound_seconds: float = 0.0
    stopped: str = ""
    layouts_gap: float | None = None
    simplest: Simplest | None = None
    solver: str = "highs"
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """A part of the cluster, or a memory limit, for which a plan was searched.

    ``step_seconds`` is 0 without a plan; ``value`` is its objective (tokens per dollar, or bytes),
    None without a plan; ``reason`` says why the plan was rejected, "" if it was not.
    """

    name: str
    num_devices: int
    step_seconds: float
    value: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GoalReport:
    """The objective that a plan optimizes, and its result. ``chosen`` describes the chosen part of
    the cluster, or memory limit.

    ``tokens_per_dollar`` (rows if the model has no sequences) and ``dollars_per_hour`` count the
    used devices, None without prices. ``deadline_step_seconds``: maximum seconds of a step.
    """

    objective: str
    chosen: str
    dollars_per_hour: float | None
    tokens_per_dollar: float | None
    deadline_step_seconds: float | None
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Training with parameter servers, in which every worker runs the plan's only stage.

    ``workers`` and ``servers`` are cluster ranks, which may be the same. ``shares``: micro-batches
    of a step by worker. ``staleness``: bound on a worker's lead in iterations under ssp, else 0.
    With ``replicas`` each server's part is also held, as a copy, by the next server.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    shares: tuple[int, ...]
    consistency: Consistency = "bsp"
    staleness: int = 0
    replicas: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training run, which executes exactly its decisions.

    ``replicated_ops`` have no sharding rule; ``replicated_seconds``: seconds of a step that every
    rank spends on each of them. ``unsharded_ops`` run whole because an axis does not divide them.
    ``undivided_batch``: reason why only one micro-batch was searched, None if there is none.
    ``goal`` is None if the objective is time and devices have no price. ``slices``: lengths of
    sequence slices, if any. ``compiled``: blocks are priced, and run, compiled.
    ``gradient_order``: with "priority" a step's last gradient sums, and their updates, run beside
    the next step's forward. ``offload``: states that are kept in host memory, where the optimizer
    steps (``cost_model.ops.memory.Offload``). ``servers`` is None without parameter servers.
    ``tiles``: most tiles in which full recomputation runs the last ops of a block; 1: it runs them
    whole.
    """

    model: ModelInfo
    cluster: Cluster
    num_microbatches: int
    schedule: str
    stages: tuple[StagePlan, ...]
    prediction: Prediction
    alternatives: tuple[Alternative, ...]
    solver: SolverInfo
    replicated_ops: tuple[str, ...] = ()
    replicated_seconds: Mapping[str, float] = field(default_factory=dict)
    unsharded_ops: tuple[str, ...] = ()
    undivided_batch: str | None = field(default=None, metadata=OMITTED)
    version: str = ""
    torch_version: str = ""
    goal: GoalReport | None = None
    slices: tuple[int, ...] = ()
    compiled: bool = False
    gradient_order: GradientOrder = "backward"
    offload: Offload = "none"
    schema: int = SCHEMA
    servers: ServerPlan | None = None
    tiles: int = field(default=1, metadata=OMITTED)

    @property
    def states(self) -> StateOptions:
        """Format of summed gradients, and the states that are in host memory."""
        return StateOptions(self.model.gradient_dtype, self.offload)

    @property
    def most_tiles(self) -> int:
        """Return ``tiles``; 1 for a plan that is compiled or slices sequences."""
        return 1 if self.compiled or self.slices else self.tiles

    @property
    def microbatch_size(self) -> int:
        return self.model.global_batch // self.num_microbatches

    @property
    def num_chunks(self) -> int:
        """Return the number of stages per pipeline rank; 1 if each has its own devices."""
        return len(self.stages) // len({frozenset(stage.devices) for stage in self.stages})

    @property
    def tf32(self) -> tuple[str, ...] | None:
        """Return the families of ops whose float32 products run in TF32, on any device.

        None if the plan does not say, or if no device has TF32.
        """
        devices = [host.device for host in self.cluster.hosts if has_tf32(host.device)]
        said = [device.tf32 for device in devices if device.tf32 is not None]
        return tuple(sorted({name for each in said for name in each})) if said else None

    @property
    def has_pipeline(self) -> bool:
        return len(self.stages) > 1


def rows_text(shares: Sequence[int]) -> str:
    """Format rows by mesh index as text; a count replaces equal neighbours.

    >>> rows_text((3, 3, 5))
    '2×3:5'
    """
    found = [(len(list(group)), rows) for rows, group in groupby(shares)]
    return ":".join(f"{count}×{rows}" if count > 1 else str(rows) for count, rows in found)
