"""The plan: everything that a training run needs, in one readable JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from ..cost_model.cluster.cluster import Cluster
from ..cost_model.cluster.tf32 import has_tf32
from ..cost_model.ops.memory import GradientDtype, StateOptions
from ..cost_model.simulator.consistency import Consistency
from .graph import Blocks
from .layout import INVARIANT, Layout, Mesh, NodeLayout

SCHEMA = 6

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]
GradientOrder = Literal["backward", "priority"]
"""In which order gradients are summed: as the backward makes them, or as the next forward needs
their parameters."""
Float32Ops = Literal["autocast", "none"]
"""The ops that compute in float32 in a half-precision model: those of autocast's list, or none."""


Offload = Literal["none", "optimizer"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was planned: ``target`` and ``settings`` rebuild it, ``fingerprint`` checks it.

    ``seq`` is None where the model has no such dimension. ``float32_ops`` is "none" where the
    precision is no half precision. ``gradient_dtype``: what gradients are summed and held in.
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
    """A block's decisions. ``kind`` finds its layouts in its stage's ``layouts``."""

    name: str
    kind: str
    recompute: Recompute


@dataclass(frozen=True, slots=True)
class GradientSum:
    """An all-reduce of gradients, after the last backward: of one part of ``num_parts`` of the
    stage's bucket ``bucket`` (``gradient_buckets``), over each of ``axes`` in turn.

    The gradients are there when the backward of the stage's block ``block`` is done; -1: when the
    whole backward is. ``num_bytes`` is what is summed. ``algorithm``: what runs it (see
    ``cost_model.collectives.all_reduce``): "library" is the all-reduce of gloo; NCCL chooses its
    own, and the name is what it is taken to choose.
    """

    bucket: int
    block: int
    num_bytes: int
    axes: tuple[str, ...]
    algorithm: str
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A run of blocks on a mesh of devices.

    ``devices`` are cluster ranks in the mesh's row-major order. ``zero`` is the ZeRO stage
    of parameters that are replicated over mesh axis 0, the axis that shards states.
    ``layouts`` maps a node's name, in the first block of its kind in the whole graph, to
    what was chosen; names of inputs, constants and shared parameters stand for themselves.
    ``forward_seconds``/``backward_seconds`` are per micro-batch. ``shares`` are the rows of a
    micro-batch that each coordinate of mesh axis 0 takes; () where it is split evenly.
    ``gradient_sums`` are the all-reduces of a stage that shards no states, in the order in which
    they are started; () leaves them to the runtime: its buckets, by the library.
    """

    blocks: tuple[BlockPlan, ...]
    devices: tuple[int, ...]
    mesh: Mesh
    zero: int
    layouts: Mapping[str, NodeLayout]
    prediction: StagePrediction
    shares: tuple[int, ...] = ()
    gradient_sums: tuple[GradientSum, ...] = ()

    def layout_of(self, name: str, blocks: Blocks) -> NodeLayout | None:
        """Return the layout that the stage chose for a node, by the name of any layer."""
        return blocks.entry(self.layouts, name)

    def leaf_layout(self, name: str, blocks: Blocks) -> Layout:
        """Return the layout of a parameter, buffer or input; whole unless chosen otherwise."""
        found = self.layout_of(name, blocks)
        return (INVARIANT,) * len(self.mesh.shape) if found is None else found.outputs[0]


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted seconds per micro-batch, seconds per step, and bytes on the worst rank.

    ``seconds`` per micro-batch: forward, backward (recomputation included), compute,
    communication (what of it is exposed), states (gathering parameters and summing gradients) and
    hidden_states (what of that runs beside compute), send (to the next stage), receive, and where
    the backward is split weight_gradients (what of it can wait). Per step: parameter_gather and
    gradient_sync (whole), exposed_sync (what of these two adds to the step), slowed_share (of the
    compute beside them), optimizer.
    ``memory_bytes``: parameters, gradients, optimizer, activations, transient, buffers, reserve
    as the search prices them; of a finished plan those of the moment at which the rank is fullest,
    also master (the copy that is stepped), gathered, inputs, communication, communicators and
    fragmentation. Its transient bytes, and recomputation, are of stages that were run on fake
    tensors; working is the same by the rules of ops.
    """

    seconds: Mapping[str, float]
    memory_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ProfileUse:
    """The measurements that a plan rests on: where they were made, and how sure the rest is.

    ``device``, ``driver``, ``torch`` and ``threads`` are of the environment that was measured;
    ``mismatch`` says how it differs from the one planned for ("" if it does not).
    ``interpolation_error`` is the mean relative error of the interpolated seconds, estimated
    by leaving measurements out; 0 where nothing is interpolated.
    """

    device: str
    driver: str
    torch: str
    threads: int
    mismatch: str = ""
    interpolation_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The whole step.

    ``sources`` is the share of the time by where the figures come from ("measured",
    "interpolated", "spec"), and adds up to 1; ``sources_of`` the same for "compute" and
    "communication", which together add up to 1. ``profile`` is None where none was used.
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
    """Another plan that the search considered: its configuration in one line (see ``summary``),
    its predictions, and the main difference from the chosen plan."""

    summary: str
    step_seconds: float
    peak_memory_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Simplest:
    """Why a plan is not the fastest that was found: ``num_equal`` are within ``tolerance`` of
    ``fastest_seconds``, and it is the simplest of them. ``fastest`` is the fastest, in words."""

    tolerance: float
    num_equal: int
    fastest: str
    fastest_seconds: float


@dataclass(frozen=True, slots=True)
class SolverInfo:
    """How the plan was found, and how good it is under the cost model.

    No plan of the space that was searched takes less than ``bound_seconds`` (0 where none is
    known), so the plan's step is within ``gap`` of the best: gap = 1 - bound / step. Gradients are
    summed in backward order, by the library, in all that was searched. ``seconds``
    splits planning time by phase. ``stopped`` says what ended the search early, if anything did.

    ``layouts_gap``: the integer programs prove of every stage, on its mesh, how much less a
    micro-batch with its share of the step's end can take in other layouts, ZeRO stages and
    recomputation. This is by how much T, the dynamic program's time of the pipeline, would be less
    if each stage took so much less; of several stages per rank that of the pipeline that was cut
    again. None where it is not known. ``simplest`` is None for the fastest plan found. ``solver``
    solved the integer programs. ``is_reused``: the plan was not searched for again, and ``seconds``
    are those of the search that made it.
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
    """A part of the cluster, or a limit of memory, that was planned for.

    ``step_seconds`` is 0 where there is no plan; ``value`` is what counts (tokens per dollar,
    or bytes), None where it has none; ``reason`` says why it is no answer, "" if it is one.
    """

    name: str
    num_devices: int
    step_seconds: float
    value: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GoalReport:
    """What the plan is best at. ``chosen``: the part of the cluster, or the memory, in words.

    ``tokens_per_dollar`` (rows where the model has no sequences) and ``dollars_per_hour`` are of
    the devices used, None without prices. ``deadline_step_seconds``: what a step may take.
    """

    objective: str
    chosen: str
    dollars_per_hour: float | None
    tokens_per_dollar: float | None
    deadline_step_seconds: float | None
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Training with parameter servers: the plan's one stage is on every worker.

    ``workers`` and ``servers`` are cluster ranks, which may be the same. ``shares`` are the
    micro-batches of a step that each worker computes. ``staleness`` is the bound of ssp, else 0.
    With ``replicas`` every server also holds what the one before it holds.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    shares: tuple[int, ...]
    consistency: Consistency = "bsp"
    staleness: int = 0
    replicas: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a training run needs; ``run`` uses exactly it.

    ``replicated_ops`` have no rule; ``replicated_seconds`` are those of a step that every
    rank spends on the whole of each. ``unsharded_ops`` says which ops run whole because an
    axis does not divide them. ``goal`` is None for the fastest plan where nothing has a price.
    ``slices`` are the lengths of the slices that sequences are cut into, where they are.
    ``compiled``: blocks are priced, and run, compiled. ``gradient_order``: with "priority" a
    step's last sums of gradients, and their updates, run beside the next step's forward.
    ``offload``: what the host's memory holds besides: masters and states of the optimizer, which
    then steps on the host. ``servers`` is None without parameter servers.
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
    version: str = ""
    torch_version: str = ""
    goal: GoalReport | None = None
    slices: tuple[int, ...] = ()
    compiled: bool = False
    gradient_order: GradientOrder = "backward"
    offload: Offload = "none"
    schema: int = SCHEMA
    servers: ServerPlan | None = None

    @property
    def states(self) -> StateOptions:
        """How states are held."""
        return StateOptions(self.model.gradient_dtype, self.offload == "optimizer")

    @property
    def microbatch_size(self) -> int:
        return self.model.global_batch // self.num_microbatches

    @property
    def num_chunks(self) -> int:
        """How many stages share their devices; 1 where each has its own."""
        return len(self.stages) // len({frozenset(stage.devices) for stage in self.stages})

    @property
    def tf32(self) -> tuple[str, ...] | None:
        """The families whose float32 products run in TF32 on a device of the cluster; None where
        the plan does not say, or no device has TF32."""
        devices = [host.device for host in self.cluster.hosts if has_tf32(host.device)]
        said = [device.tf32 for device in devices if device.tf32 is not None]
        return tuple(sorted({name for each in said for name in each})) if said else None

    @property
    def has_pipeline(self) -> bool:
        return len(self.stages) > 1


def rows_text(shares: Sequence[int]) -> str:
    """Unequal shares, neighbours that are equal counted.

    >>> rows_text((3, 3, 5))
    '2×3:5'
    """
    found = [(len(list(group)), rows) for rows, group in groupby(shares)]
    return ":".join(f"{count}×{rows}" if count > 1 else str(rows) for count, rows in found)
