"""The bytes that a micro-batch takes on a stage, by the rules of its ops: nothing is run.

In: a stage whose blocks are priced one by one (``planner.stage_walk``), and where in the step the
micro-batch is. Out: the same figures as ``saved_tensors`` finds by running the stage, which takes a
millisecond per op and moment; so plans of many ops, those whose blocks are compiled, and stages
that cannot be run on fake tensors have these.

The backward goes from the last block to the first. While a block runs, the blocks before it have
all that they keep, the step's first micro-batch has the gradients of this block and of those after
it, and any other all gradients; where gradients of weights are put off, the blocks after it have
what is kept for these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..planner.block_walk import BlockCost
from ..planner.intra_op.assembly import GATHERED_BLOCKS
from ..planner.stage_walk import StageWalk
from .saved_tensors import BUFFERS, Moment, StageActivations
from .state_traffic import COMMUNICATION, GATHERED, GRADIENTS
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
        gradients = {} if moment.is_first else {GRADIENTS: self._gradients}
        forward = _fullest({**resting, **gradients, **own} for own in self._forward())
        backward = _fullest({**resting, **own} for own in self._backward(moment))
        weights = {}
        if self.splits:
            working = max(block.working_bytes for block in self._blocks)
            weights = _rounded(
                {**resting, GRADIENTS: self._gradients, SAVED: late, WORKING: working}
            )
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
            gathered = GATHERED_BLOCKS * block.states.gathered if self.walk.stage.zero == 3 else 0.0
            yield {SAVED: kept, WORKING: block.working_bytes, COMMUNICATION: gathered}

    def _backward(self, moment: Moment) -> Iterator[dict[str, float]]:
        """The same of the backward, or of the half that makes the gradients of inputs."""
        kept, late = sum(map(_kept, self._blocks)), 0.0
        gradients = self._shared_gradients if moment.is_first else self._gradients
        sums = self.walk.stage.zero >= 2 or moment.is_last
        if self.splits:
            gradients = 0.0 if moment.is_first else self._gradients
        for block in reversed(self._blocks):
            if moment.is_first and not self.splits:
                gradients += block.states.gradients
            again = block.gathered_bytes - GATHERED_BLOCKS * block.states.gathered
            exchanged = GATHERED_BLOCKS * block.states.gathered if sums else 0.0
            yield {
                SAVED: kept + late, GRADIENTS: gradients, COMMUNICATION: exchanged,
                WORKING: block.working_bytes + again,
            }  # fmt: skip
            kept -= _kept(block)
            late += block.late_bytes if self.splits else 0.0


def _kept(block: BlockCost) -> float:
    """What a block keeps from its forward to its backward, but for parts of the batch."""
    return block.kept_bytes - block.batch_bytes


def _fullest(moments: Iterator[dict[str, float]]) -> dict[str, int]:
    return _rounded(max(moments, key=lambda own: sum(own.values())))


def _rounded(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items() if size}
