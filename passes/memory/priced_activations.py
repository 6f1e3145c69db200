"""The bytes that a micro-batch takes on a stage, by the rules of its ops: nothing is run.

In: a stage whose blocks are priced one by one (``planner.stage_walk``), and where in the step the
micro-batch is. Out: the same figures as ``saved_tensors`` finds by running the stage, which takes a
millisecond per op and moment; so plans of many ops, those whose blocks are compiled, and stages
that cannot be run on fake tensors have these.

The backward goes from the last block to the first. Before a block runs, it and the blocks before it
have all that they keep; after it, its weights have their gradients in the step's first micro-batch,
while any other has all gradients from the beginning; where gradients of weights are put off, what
is kept for these takes their place. As ``state_traffic`` has it, the block before is gathered
meanwhile, and the gradients of the block after are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...cost_model.ops.memory import exchange_bytes
from ...planner.block_walk import BlockCost
from ...planner.pricing.assembly import GATHERED_BLOCKS
from ...planner.pricing.stage_cost import together
from ...planner.stage_walk import StageWalk
from .saved_tensors import BUFFERS, Moment, StageActivations
from .state_traffic import BUCKET_BYTES, COMMUNICATION, GATHERED, GRADIENTS
from .storages import SAVED

WORKING = "working"
"""What the running block's largest op takes, and what its backward makes again."""


@dataclass(frozen=True)
class PricedStage:
    """A stage whose blocks ``walk`` has priced; ``gathered_bytes`` of parameters are whole for all
    of a step. ``splits``: gradients of weights are put off."""

    walk: StageWalk
    gathered_bytes: float
    splits: bool

    def run(self, moment: Moment) -> StageActivations:
        """One micro-batch of the stage."""
        inputs, resting = self._input_bytes, self._resting
        kept = sum(map(_kept, self._blocks))
        late = sum(block.late_bytes for block in self._blocks) if self.splits else 0
        gradients = {GRADIENTS: 0.0 if moment.is_first else self._gradients}
        forward = _fullest(together((resting, gradients, own), ()) for own in self._forward())
        backward = _fullest(together((resting, own), ()) for own in self._backward(moment))
        weights = {}
        if self.splits:
            weights = _fullest(together((resting, own), ()) for own in self._weights())
        return StageActivations(
            round(kept) + inputs, inputs, forward, backward, round(late), weights
        )

    @property
    def _blocks(self) -> list[BlockCost]:
        return self.walk.found

    @cached_property
    def _resting(self) -> Mapping[str, float]:
        """What is there whatever runs."""
        return {GATHERED: self.gathered_bytes, BUFFERS: self.walk.leaf_bytes("constant", "buffer")}

    @cached_property
    def _shared_gradients(self) -> float:
        return float(sum(states.gradients for _, states in self.walk.of_shared()))

    @cached_property
    def _gradients(self) -> float:
        return self._shared_gradients + sum(block.states.gradients for block in self._blocks)

    @cached_property
    def _input_bytes(self) -> int:
        """A micro-batch's parts of the batch."""
        return round(self.walk.leaf_bytes("input"))

    def _forward(self) -> Iterator[dict[str, float]]:
        """By block, what the micro-batch takes while it runs."""
        kept = 0.0
        for block in self._blocks:
            kept += _kept(block)
            whole = self._exchanged(block)[0] if self.walk.stage.zero == 3 else 0.0
            yield {
                SAVED: kept, WORKING: block.working_bytes, GATHERED: whole, COMMUNICATION: whole
            }  # fmt: skip

    def _backward(self, moment: Moment) -> Iterator[dict[str, float]]:
        """The same of the backward, or of the half that makes the gradients of inputs, at the
        beginning and at the end of each block."""
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
                gradients -= reduced * (1 - 1 / self.walk.prices.shards)
            if zero >= 2 or moment.is_last:
                yield {SAVED: kept + late, GRADIENTS: gradients, **taken, **self._sums(reduced)}
                summed = reduced * self._copies if zero else min(reduced, BUCKET_BYTES)

    def _weights(self) -> Iterator[dict[str, float]]:
        """The same of the half that makes the gradients of weights, which are summed at its end."""
        late, own = sum(block.late_bytes for block in self._blocks), 0.0
        for block in reversed(self._blocks):
            own += self._exchanged(block)[0] if self.walk.stage.zero >= 2 else 0.0
            gradients = self._gradients + own
            yield {SAVED: late, GRADIENTS: gradients, WORKING: block.working_bytes}
            late -= block.late_bytes

    def _sums(self, reduced: float) -> Mapping[str, float]:
        """What a reduce-scatter takes: the whole, this rank's part, and on gloo a copy."""
        if not self.walk.stage.zero:
            return {}
        copies = self._copies + 1 / self.walk.prices.shards
        return {COMMUNICATION: reduced * copies, WORKING: 0.0}

    @property
    def _copies(self) -> int:
        """Of the gradients that a reduce-scatter sums, until the next one: on gloo also as many
        bytes as it receives."""
        return 1 if self.walk.prices.device.kind == "cuda" else 2

    def _exchanged(self, block: BlockCost) -> tuple[float, float]:
        """The whole parameters of a block that are exchanged over "dp", in bytes as they compute
        and as their gradients are summed: the inverse of
        ``cost_model.ops.memory.exchange_bytes``."""
        rules, shards = self.walk.prices.policy, self.walk.prices.shards
        each = exchange_bytes(2, rules, self.walk.stage.zero, shards) / 2
        numel = block.states.gathered / each if each else 0.0
        return numel * rules.gathered_bytes, numel * rules.gradient_bytes


def _kept(block: BlockCost) -> float:
    """What a block keeps from its forward to its backward, but for parts of the batch."""
    return block.kept_bytes - block.batch_bytes


def _fullest(moments: Iterable[Mapping[str, float]]) -> dict[str, int]:
    return _rounded(max(moments, key=lambda own: sum(own.values())))


def _rounded(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items() if size}
