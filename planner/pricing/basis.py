"""What prices rest on besides the cluster's own figures: measurements, and how a program trains.

A search records in ``Asked`` what it asks a profile for: the ops and collectives whose times it
needs, each with where its answer came from and how much of the predicted time depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...cost_model.cluster.cluster import Source
from ...cost_model.collectives.collectives import CollectiveKind, Group
from ...cost_model.collectives.dispatch import Dispatcher, Routing
from ...cost_model.ops.memory import PrecisionPolicy
from ...cost_model.profile.case import OpCase
from ...cost_model.profile.lookup import Profile
from ..graph import Blocks
from ..precision import EIGHT_BITS
from ..replay import RecomputedPart
from ..rules.expert_traffic import ExpertKernels

Kind = CollectiveKind | Literal["p2p", "zero_gather", "zero_scatter"]
Partition = tuple[tuple[int, ...], ...]
"""Groups of cluster ranks that run a collective at the same time."""


@dataclass(slots=True)
class AskedOp:
    """An op: ``seconds`` is its predicted time over all its uses, ``error`` relative."""

    case: OpCase
    source: Source
    seconds: float = 0.0
    error: float = 0.0


@dataclass(slots=True)
class AskedTransfer:
    """A collective, or a message, on a group: the least and the most bytes asked for."""

    kind: Kind
    group: Group
    partition: Partition
    least_bytes: float
    most_bytes: float
    sources: dict[Source, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Asked:
    """All that was asked so far. ``uses`` says how often a node occurs in the model."""

    uses: Mapping[str, int] = field(default_factory=dict)
    num_microbatches: int = 1
    ops: dict[OpCase, AskedOp] = field(default_factory=dict)
    transfers: dict[tuple[Kind, Group], AskedTransfer] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    """Ops that do work but cannot be measured by themselves (an argument has no place in a
    profile)."""

    def of(self, num_microbatches: int) -> Asked:
        """The same record, for questions about one of so many micro-batches."""
        return Asked(self.uses, num_microbatches, self.ops, self.transfers, self.unwritten)

    def op(self, name: str, found: AskedOp, seconds: float) -> None:
        """A node's op was asked for; ``seconds`` of one use."""
        found = self.ops.setdefault(found.case, found)
        found.seconds += seconds * self.uses.get(name, 1) * self.num_microbatches

    def transfer(
        self, what: tuple[Kind, Group, Partition], num_bytes: float, seconds: float, source: Source
    ) -> None:
        """A collective or message was asked for."""
        kind, group, partition = what
        entry = self.transfers.get((kind, group))
        if entry is None:
            entry = AskedTransfer(kind, group, partition, num_bytes, num_bytes)
            self.transfers[kind, group] = entry
        entry.least_bytes = min(entry.least_bytes, num_bytes)
        entry.most_bytes = max(entry.most_bytes, num_bytes)
        entry.sources[source] = entry.sources.get(source, 0) + 1
        entry.seconds += seconds

    def add(self, other: Asked) -> None:
        """Take over what another record has and this one lacks."""
        for case, op in other.ops.items():
            self.ops.setdefault(case, op)
        for key, transfer in other.transfers.items():
            self.transfers.setdefault(key, transfer)

    @property
    def unmeasured(self) -> list[str]:
        """The ops and collectives whose answer was no measurement, with how many of each."""
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
    """For each node of a kind's first block how many blocks are of that kind."""
    counts: dict[str, int] = {}
    for block in blocks.blocks:
        counts[block.kind] = counts.get(block.kind, 0) + 1
    return {name: counts[kind] for kind, block in blocks.kinds.items() for name in block.nodes}


AttentionKernel = Literal["flash", "cudnn"]
"""The kernel of fused attention: PyTorch's FlashAttention-2, or cuDNN's, which TransformerEngine
runs on Hopper and later devices."""

Scaling = Literal["tensorwise", "rowwise", "mxfp8", "nvfp4"]
"""One scale for a tensor, for a row, for 32 elements (MXFP8), for 16 elements of 4 bits (NVFP4)."""

SCALINGS: Mapping[Scaling, tuple[str, float]] = {
    "tensorwise": (EIGHT_BITS, 1.0), "rowwise": ("float8_rowwise", 1.0),
    "mxfp8": ("mxfp8", 1 + 1 / 32), "nvfp4": ("nvfp4", 0.5 + 1 / 16),
}  # fmt: skip
"""The format of a product's factors, as ``cost_model.ops.compute`` knows it, and the bytes of a
cast element with its share of the scales."""


@dataclass(frozen=True, slots=True)
class CostAssumptions:
    """How a program trains.

    ``policy``: the bytes per parameter, where they are not those of the precision and the
    optimizer. ``recomputed``: selective recomputation runs these parts of a layer again and nothing
    else (``pricing.recomputed_parts``); without any it is this package's own. ``joint_states``: a
    parameter's states are sharded, and its gradient is summed, over all data-, expert- and context-
    parallel ranks that hold it whole, in one collective, as Megatron-LM's distributed optimizer and
    torchtitan's FSDP do. ``slowdown``: how much longer compute takes beside collectives of states,
    where that is not the device's; infinite where nothing runs beside compute. ``cast_bytes``: what
    casting an element of a product's factor to 8 bits moves: the largest value is found (2 bytes
    read) to scale by, then the tensor is cast in both layouts (2 read, 1 written twice), as torchao
    does with one scale per tensor. ``scaling``: how 8-bit products are scaled, of ``SCALINGS``.
    ``keeps_casts``: an 8-bit product keeps the cast of its input for its backward, as
    TransformerEngine's does, and not the input. ``regathers``: a linear layer whose weight is split
    by rows keeps of its input what the rank had before it was gathered, and gathers it again beside
    the gradient of the input (Megatron-LM's sequence parallelism: arXiv:2205.05198, section 4.2.2).
    ``casts_experts``: in fp8 the products of experts are 8-bit ones too. ``expert_kernels``: how
    the kernels of experts are cut (``planner.rules.expert_traffic``); where they are not separate,
    experts keep no more than what their products and activations read. ``dispatcher``: how tokens
    come to their experts. ``imbalance``: how many tokens the fullest rank of experts has, over the
    mean, and ``routing``: which experts a token visits. ``copies_states``: parameters and gradients
    pass through buffers that ZeRO 2 and 3 exchange; XLA exchanges the tensors themselves.
    ``attention``: the kernel of fused attention, where a device has an efficiency for it.
    """

    policy: PrecisionPolicy | None = None
    recomputed: tuple[RecomputedPart, ...] = ()
    joint_states: bool = False
    slowdown: float | None = None
    cast_bytes: float = 6.0
    scaling: Scaling = "tensorwise"
    keeps_casts: bool = False
    regathers: bool = False
    casts_experts: bool = False
    expert_kernels: ExpertKernels = "separate"
    dispatcher: Dispatcher = "gather"
    imbalance: float = 1.0
    routing: Routing = "any"
    copies_states: bool = True
    attention: AttentionKernel = "flash"

    @property
    def keeps_sent(self) -> bool:
        """Return whether the backward repeats no collective of an op that it does not run again.

        This package's own backward may: it calls the kernels of attention over several ranks again,
        with their collectives, for the tensors that autograd keeps.
        """
        return bool(self.recomputed)

    @property
    def sends_tokens(self) -> bool:
        """Return whether each rank of experts has tokens of its own, and sends them to experts."""
        return self.dispatcher != "gather"


RUNTIME = CostAssumptions()
"""This package's own runtime."""

Mode = Literal["auto", "measured", "analytic"]
"""``auto``: measured, else interpolated, else from specifications; ``measured``: every op that
the search asks for must have been measured; ``analytic``: specifications alone."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Measurements and how they are used. ``asked`` records every question.

    With ``only``, seconds that come from elsewhere count as none. ``assumptions``: what is trained
    by another program's rules.
    """

    profile: Profile | None = None
    mode: Mode = "auto"
    asked: Asked | None = None
    only: Source | None = None
    assumptions: CostAssumptions = RUNTIME

    @property
    def used(self) -> Profile | None:
        """The profile that prices come from."""
        return None if self.mode == "analytic" else self.profile


DEFAULT = Basis()
"""No measurements."""
