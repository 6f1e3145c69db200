"""Basis of prices beside the cluster's figures: measurements, and assumptions about the program.

A search records its queries in ``CostQueries``: ops and collectives, each with the source of its
time and the predicted time that depends on it. Other training systems have their assumptions by
name (``assumptions_of``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from ...cost_model.cluster.cluster import Source
from ...cost_model.collectives.collectives import CollectiveKind, Group
from ...cost_model.collectives.dispatch import Dispatcher, Routing
from ...cost_model.ops.memory import PrecisionPolicy
from ...cost_model.profile.case import OpCase
from ...cost_model.profile.lookup import Profile
from ..graph.graph import Blocks
from ..kernels.recompute import RecomputedPart
from ..kernels.tiles import MOST_TILES
from ..ops.experts import ExpertKernels
from ..plan import Mode, Plan, Precision, StagePlan
from .expert_loads import ExpertLoads
from .precision import EIGHT_BITS

Kind = CollectiveKind | Literal["p2p", "zero_gather", "zero_scatter"]
Partition = tuple[tuple[int, ...], ...]
"""Groups of cluster ranks that run a collective at the same time."""


@dataclass(slots=True)
class QueriedOp:
    """An op whose price was queried. ``seconds``: predicted, of all its uses in a step; ``error``:
    relative error of an interpolated price."""

    case: OpCase
    source: Source
    seconds: float = 0.0
    error: float = 0.0


@dataclass(slots=True)
class QueriedTransfer:
    """A collective or message whose price was queried on a group of ranks. ``least_bytes`` to
    ``most_bytes``: sizes queried; ``seconds``: summed over queries."""

    kind: Kind
    group: Group
    partition: Partition
    least_bytes: float
    most_bytes: float
    sources: dict[Source, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class CostQueries:
    """Record of all queries of prices. ``uses`` maps a node of the first block of each kind to the
    number of blocks of the kind."""

    uses: Mapping[str, int] = field(default_factory=dict)
    num_microbatches: int = 1
    ops: dict[OpCase, QueriedOp] = field(default_factory=dict)
    transfers: dict[tuple[Kind, Group], QueriedTransfer] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    """Ops with work that a profile cannot measure alone, as it cannot express an argument."""

    def of(self, num_microbatches: int) -> CostQueries:
        """Return the same record, which counts further queries ``num_microbatches`` times."""
        return CostQueries(self.uses, num_microbatches, self.ops, self.transfers, self.unwritten)

    def op(self, name: str, found: QueriedOp, seconds: float) -> None:
        """Record a query of the op of node ``name``; ``seconds`` is the time of one use."""
        found = self.ops.setdefault(found.case, found)
        found.seconds += seconds * self.uses.get(name, 1) * self.num_microbatches

    def transfer(
        self, what: tuple[Kind, Group, Partition], num_bytes: float, seconds: float, source: Source
    ) -> None:
        """Record a query of a collective or message of ``num_bytes``: its kind, its group of ranks,
        and all groups that run it at the same time."""
        kind, group, partition = what
        entry = self.transfers.get((kind, group))
        if entry is None:
            entry = QueriedTransfer(kind, group, partition, num_bytes, num_bytes)
            self.transfers[kind, group] = entry
        entry.least_bytes = min(entry.least_bytes, num_bytes)
        entry.most_bytes = max(entry.most_bytes, num_bytes)
        entry.sources[source] = entry.sources.get(source, 0) + 1
        entry.seconds += seconds

    def add(self, other: CostQueries) -> None:
        """Add the entries of ``other`` that are missing here."""
        for case, op in other.ops.items():
            self.ops.setdefault(case, op)
        for key, transfer in other.transfers.items():
            self.transfers.setdefault(key, transfer)

    @property
    def unmeasured(self) -> list[str]:
        """Return the ops and collectives that are not measured, as texts with their counts."""
        counts: dict[str, int] = {}
        for op in self.ops.values():
            if op.source != "measured":
                counts[op.case.op] = counts.get(op.case.op, 0) + 1
        for name in self.unwritten:
            counts[name] = counts.get(name, 0) + 1
        for transfer in self.transfers.values():
            if "spec" in transfer.sources:
                name = f"{transfer.kind} of {transfer.group.num_ranks} ranks"
                counts[name] = counts.get(name, 0) + transfer.sources["spec"]
        return [f"{name} ({count})" for name, count in sorted(counts.items())]


def uses_of(blocks: Blocks) -> dict[str, int]:
    """Map each node of the first block of a kind to the number of blocks of the kind."""
    counts: dict[str, int] = {}
    for block in blocks.blocks:
        counts[block.kind] = counts.get(block.kind, 0) + 1
    return {name: counts[kind] for kind, block in blocks.kinds.items() for name in block.nodes}


AttentionKernel = Literal["flash", "cudnn"]
"""Kernel of fused attention: PyTorch's FlashAttention-2, or cuDNN's (TransformerEngine, Hopper)."""

Scaling = Literal["tensorwise", "rowwise", "mxfp8", "nvfp4"]
"""Unit of 8-bit and 4-bit scaling: a tensor, a row, 32 elements (MXFP8), 16 of 4 bits (NVFP4)."""

SCALINGS: Mapping[Scaling, tuple[str, float]] = {
    "tensorwise": (EIGHT_BITS, 1.0),
    "rowwise": ("float8_rowwise", 1.0),
    "mxfp8": ("mxfp8", 1 + 1 / 32),
    "nvfp4": ("nvfp4", 0.5 + 1 / 16),
}
"""Format of a product's factors by scaling, as named in ``cost_model.ops.compute``, and bytes of a
cast element with its share of the scales."""


@dataclass(frozen=True, slots=True)
class CostAssumptions:
    """Assumptions about the training program whose cost is predicted.

    ``policy``: bytes per parameter, if precision and optimizer do not determine them.
    ``recomputed``: parts of a layer that selective recomputation reruns
    (``costs.recomputed_parts``); by default this package's own selection. ``slowdown``: factor of
    compute beside collectives of states, if not the device's; infinite if they do not overlap
    compute. ``cast_bytes``: memory traffic of casting an element to 8 bits: 2 bytes read to find
    the largest value, 2 read and 1 written for each of two layouts, as torchao does with one scale
    per tensor. ``scaling``: scaling of 8-bit products, from ``SCALINGS``. ``keeps_casts``: an 8-bit
    product keeps its cast input for the backward instead of the input (TransformerEngine).
    ``regathers``: a linear layer whose weight is split by rows keeps its input as split before the
    gather, and gathers it again in the backward (Megatron-LM's sequence parallelism:
    arXiv:2205.05198, section 4.2.2). ``casts_experts``: in fp8 products of experts are 8-bit, too.
    ``expert_kernels``: kernels of experts (``planner.ops.experts``); unless separate, experts keep
    only inputs of products and activations. ``dispatcher``: transport of tokens to experts.
    ``imbalance``: tokens of the fullest rank of experts divided by the mean; measured ``loads`` say
    it for each layer. ``hides_exchanges``: tokens are sent while other ops run, maybe in halves
    (``cost_model.collectives.dispatch``). ``routing``: experts that a token may visit.
    ``plain_slices``: as in Megatron-LM, slices of experts have the same columns of both halves of
    their first product, and one message has the counts of all ranks that share experts; else ranks
    exchange columns (``planner.ops.experts``), gather counts, and gather rows by exchanges.
    ``tiles``: most tiles in which full recomputation runs the last ops of a block
    (``planner.kernels.tiles``). ``copies_states``: parameters and gradients pass through buffers in
    ZeRO 2 and 3 (not in XLA).
    ``attention``: kernel of fused attention, if a device has an efficiency for it.
    ``shard_degree``: number of neighbouring ranks over which ZeRO shards instead of over all: 0 for
    those of one host or all, 1 for always all.
    """

    policy: PrecisionPolicy | None = None
    recomputed: tuple[RecomputedPart, ...] = ()
    slowdown: float | None = None
    cast_bytes: float = 6.0
    scaling: Scaling = "tensorwise"
    keeps_casts: bool = False
    regathers: bool = False
    casts_experts: bool = False
    expert_kernels: ExpertKernels = "separate"
    dispatcher: Dispatcher = "gather"
    imbalance: float = 1.0
    hides_exchanges: bool = False
    loads: ExpertLoads | None = None
    routing: Routing = "any"
    plain_slices: bool = False
    copies_states: bool = True
    attention: AttentionKernel = "flash"
    tiles: int = 1
    shard_degree: int = 1

    @property
    def keeps_sent(self) -> bool:
        """Return whether the backward repeats an op's collectives only if it reruns the op.

        This package's own backward repeats more: it reruns the kernels of attention over several
        ranks, with their collectives, for the tensors that autograd keeps.
        """
        return bool(self.recomputed)

    @property
    def sends_tokens(self) -> bool:
        """Return whether expert-parallel ranks hold different tokens and send them to experts."""
        return self.dispatcher != "gather"


RUNTIME = CostAssumptions(
    dispatcher="alltoall", hides_exchanges=True, tiles=MOST_TILES, shard_degree=0
)
"""Assumptions that hold for this package's own runtime."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Source of prices beside the cluster's figures: measurements (``profile``, used as ``mode``
    says).

    ``asked`` records every query. With ``only``, seconds from other sources count as zero.
    ``assumptions``: facts about the training program.
    """

    profile: Profile | None = None
    mode: Mode = "auto"
    asked: CostQueries | None = None
    only: Source | None = None
    assumptions: CostAssumptions = RUNTIME

    @property
    def used(self) -> Profile | None:
        """Profile that prices are taken from; None without one, or in mode "analytic"."""
        return None if self.mode == "analytic" else self.profile

    @property
    def without_tiles(self) -> Basis:
        """Return the same source of prices for a program that runs no ops tile by tile."""
        return replace(self, assumptions=replace(self.assumptions, tiles=1))

    def with_shard_degree(self, degree: int) -> Basis:
        """Return the same source of prices with another ``CostAssumptions.shard_degree``."""
        return replace(self, assumptions=replace(self.assumptions, shard_degree=degree))

    def assumptions_in(self, plan: Plan, stage: StagePlan) -> CostAssumptions:
        """Return the assumptions about the program that runs a stage of ``plan``."""
        return replace(
            self.assumptions,
            tiles=min(self.assumptions.tiles, plan.most_tiles),
            shard_degree=stage.shard_degree or 1,
        )


DEFAULT = Basis()
"""Basis without measurements."""


SystemName = Literal["run", "megatron", "torchtitan", "deepspeed"]
SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)
Kernels = Literal["eager", "compiled", "fused"]


@dataclass(frozen=True, slots=True)
class System:
    """A training system. ``assumptions``: about its costs, in fp8; ``splits_sequences``: its tensor
    parallelism splits values between products along sequences."""

    title: str
    kernels: Kernels
    splits_sequences: bool
    assumptions: CostAssumptions


_SHARED = CostAssumptions(expert_kernels="activation", dispatcher="alltoall", plain_slices=True)

_SYSTEMS: Mapping[SystemName, System] = {
    "run": System("autoparallel run", "eager", False, RUNTIME),
    "megatron": System(
        "Megatron-LM",
        "fused",
        True,
        replace(
            _SHARED,
            recomputed=("core_attn",),
            cast_bytes=4.0,
            regathers=True,
            keeps_casts=True,
            casts_experts=True,
            attention="cudnn",
        ),
    ),
    "torchtitan": System("torchtitan", "compiled", True, _SHARED),
    "deepspeed": System("DeepSpeed", "eager", False, replace(_SHARED, expert_kernels="separate")),
}


def system(name: SystemName) -> System:
    """Return the training system with this name."""
    return _SYSTEMS[name]


def assumptions_of(name: SystemName, precision: Precision) -> CostAssumptions:
    """Return the cost assumptions of a system at a precision.

    >>> [assumptions_of(name, "fp8").keeps_casts for name in SYSTEMS]
    [False, True, False, False]
    """
    own = _SYSTEMS[name].assumptions
    return own if precision == "fp8" else replace(own, keeps_casts=False, casts_experts=False)
