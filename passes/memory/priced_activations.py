"""The bytes of a micro-batch on a stage by the rules of its ops, without running it.

In: a stage whose blocks are priced one by one (``planner.evaluate.evaluate.stage_walk``), and the
micro-batch's moment in the step. Out: the same figures as ``saved_tensors`` finds by running the
stage, which takes a millisecond per op and moment; so plans of many ops, plans with compiled
blocks, and stages that cannot be run on fake tensors use these.

The backward goes from the last block to the first. Before a block runs, it and the blocks before it
hold all their kept values; after it, its weights get their gradients in the step's first
micro-batch, while later micro-batches hold all gradients from the beginning; deferred weight
gradients are replaced by the values kept for them. As in ``state_traffic``, the block before is
gathered meanwhile, and the gradients of the block after are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...cost_model.ops.memory import exchange_bytes
from ...planner.evaluate.block_walk import BlockCost
from ...planner.evaluate.stage_walk import StageWalk
from ...planner.graph.state_sharding import state_sharding
from ...planner.stage.kind_model import GATHERED_BLOCKS
from ...planner.stage.stage_cost import combine_bytes
from .saved_tensors import BUFFERS, Moment, StageActivations
from .state_traffic import BUCKET_BYTES, COMMUNICATION, GATHERED, GRADIENTS
from .storages import SAVED

WORKING = "working"
"""Memory category of the temporary tensors of the running block: of its largest op, values
recomputed in its backward, and offloaded values on their way."""


@dataclass(frozen=True)
class PricedStage:
    """Stage whose activation bytes are computed from predicted costs of its blocks (``walk``), not
    by execution. ``gathered_bytes``: bytes of parameters that stay gathered during the whole step;
    ``splits``: the backward defers weight gradients."""

    walk: StageWalk
    gathered_bytes: float
    splits: bool

    def run(self, moment: Moment) -> StageActivations:
        """Return the activation bytes of one micro-batch on one rank of the stage. ``moment``:
        whether it is the step's first or last."""
        inputs, resting = self._input_bytes, self._resting
        kept = sum(map(_kept, self._blocks))
        late = sum(block.late_bytes for block in self._blocks) if self.splits else 0
        gradients = {GRADIENTS: 0.0 if moment.is_first else self._gradients}
        forward = _fullest(combine_bytes((resting, gradients, own), ()) for own in self._forward())
        backward = _fullest(combine_bytes((resting, own), ()) for own in self._backward(moment))
        weights = {}
        if self.splits:
            weights = _fullest(combine_bytes((resting, own), ()) for own in self._weights())
        return StageActivations(
            round(kept) + inputs, inputs, forward, backward, round(late), weights
        )

    @property
    def _blocks(self) -> list[BlockCost]:
        return self.walk.found

    @cached_property
    def _resting(self) -> Mapping[str, float]:
        """Bytes on one rank, by category, that are held during the whole micro-batch: gathered
        parameters, buffers, and on their way to or from host memory offloaded values of another
        block, and states of the running block and another."""
        values = max((block.host_bytes for block in self._blocks), default=0.0)
        shared = sum(states.gathered for _, states in self.walk.of_shared())
        gathered = max(shared, *(block.states.gathered for block in self._blocks))
        return {
            GATHERED: self.gathered_bytes,
            BUFFERS: self.walk.leaf_bytes("constant", "buffer"),
            WORKING: values + GATHERED_BLOCKS * self._numel(gathered) * self._moved,
        }

    @cached_property
    def _shared_gradients(self) -> float:
        return float(sum(states.gradients for _, states in self.walk.of_shared()))

    @cached_property
    def _gradients(self) -> float:
        return self._shared_gradients + sum(block.states.gradients for block in self._blocks)

    @cached_property
    def _input_bytes(self) -> int:
        """Bytes on one rank of the batch inputs that a micro-batch reads."""
        return round(self.walk.leaf_bytes("input"))

    def _forward(self) -> Iterator[dict[str, float]]:
        """Yield for each block (layer) the bytes by category that the micro-batch takes during the
        block's forward."""
        kept = 0.0
        for block in self._blocks:
            kept += _kept(block)
            whole = self._exchanged(block)[0] if self.walk.stage.zero == 3 else 0.0
            working = block.working_bytes + block.host_bytes
            yield {SAVED: kept, WORKING: working, GATHERED: whole, COMMUNICATION: whole}

    def _backward(self, moment: Moment) -> Iterator[dict[str, float]]:
        """Yield the bytes by category that the micro-batch takes at the beginning and at the end of
        each block's backward (only of input gradients, if weight gradients are deferred)."""
        kept, late = sum(map(_kept, self._blocks)), 0.0
        gradients = 0.0 if moment.is_first else self._gradients
        makes = moment.is_first and not self.splits
        gradients += self._shared_gradients if makes else 0.0
        zero, summed = self.walk.stage.zero, 0.0
        for at, block in reversed(list(enumerate(self._blocks))):
            whole, reduced = self._exchanged(block)
            before = self._exchanged(self._blocks[at - 1])[0] if at else 0.0
            again = block.gathered_bytes - GATHERED_BLOCKS * block.states.gathered
            taken = {
                GATHERED: whole if zero == 3 else 0.0,
                COMMUNICATION: (before if zero == 3 else 0.0) + summed,
                WORKING: block.working_bytes + again,
            }
            yield {SAVED: kept + late, GRADIENTS: gradients, **taken}
            kept -= _kept(block)
            late += block.late_bytes if self.splits else 0.0
            gradients += block.states.gradients if makes else 0.0
            own = whole if zero >= 2 and not self.splits else 0.0
            yield {SAVED: kept + late, GRADIENTS: gradients + own, **taken}
            if zero == 1 and moment.is_last:
                gradients -= reduced * (1 - 1 / self._shards)
            if zero >= 2 or moment.is_last:
                yield {SAVED: kept + late, GRADIENTS: gradients, **taken, **self._sums(reduced)}
                summed = reduced * self._copies if zero else min(reduced, BUCKET_BYTES)

    def _weights(self) -> Iterator[dict[str, float]]:
        """Yield for each block (layer) the bytes by category that the micro-batch takes while the
        block computes its deferred weight gradients."""
        late, own = sum(block.late_bytes for block in self._blocks), 0.0
        for block in reversed(self._blocks):
            own += self._exchanged(block)[0] if self.walk.stage.zero >= 2 else 0.0
            gradients = self._gradients + own
            yield {SAVED: late, GRADIENTS: gradients, WORKING: block.working_bytes}
            late -= block.late_bytes

    def _sums(self, reduced: float) -> Mapping[str, float]:
        """Return the bytes that reduce-scattering ``reduced`` bytes of gradients takes: the whole
        input, this rank's shard and, on gloo, a copy of the input."""
        if not self.walk.stage.zero:
            return {}
        copies = self._copies + 1 / self._shards
        return {COMMUNICATION: reduced * copies, WORKING: 0.0}

    @property
    def _shards(self) -> int:
        """Number of ranks over which ZeRO shards a replicated parameter."""
        mesh = self.walk.stage.mesh
        return state_sharding(mesh, mesh.joint_axes, self.walk.stage.shard_degree).num_shards

    @property
    def _copies(self) -> int:
        """Number of buffers as large as the unsharded gradients that a reduce-scatter keeps until
        the next: 2 on gloo, which receives as many bytes as it sends, else 1."""
        return 1 if self.walk.prices.device.kind == "cuda" else 2

    def _exchanged(self, block: BlockCost) -> tuple[float, float]:
        """Return the unsharded bytes of a block's parameters that ZeRO shards, in the compute dtype
        and in the dtype in which gradients are summed. They follow from the block's buffer bytes,
        by the inverse of ``cost_model.ops.memory.exchange_bytes``."""
        rules = self.walk.prices.policy
        numel = self._numel(block.states.gathered) if self._shards > 1 else 0.0
        return numel * rules.gathered_bytes, numel * rules.gradient_bytes

    def _numel(self, gathered_bytes: float) -> float:
        """Return the elements of parameters that ZeRO shards or that are offloaded, from the bytes
        of their buffers."""
        each = exchange_bytes(2, self.walk.prices.policy, self.walk.stage.zero, self._shards) / 2
        return gathered_bytes / each if each else 0.0

    @property
    def _moved(self) -> float:
        """Bytes per parameter of a block's states on their way to or from host memory."""
        rules, zero = self.walk.prices.policy, self.walk.stage.zero
        moved = rules.gradient_bytes * rules.moves_gradients
        return (moved + rules.moved_shard(zero, self._shards)) / (self._shards if zero else 1)


def _kept(block: BlockCost) -> float:
    """Return the bytes that a block keeps from its forward to its backward, without batch
    inputs."""
    return block.kept_bytes - block.batch_bytes


def _fullest(moments: Iterable[Mapping[str, float]]) -> dict[str, int]:
    return _rounded(max(moments, key=lambda own: sum(own.values())))


def _rounded(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items() if size}
