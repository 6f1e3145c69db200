"""The captured program: what every later step starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from ...planner.graph import Blocks, Graph, Ref
from .outputs import OutputForm

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
BatchKey = str | int


@dataclass(frozen=True)
class Program:
    """A model's forward and loss as a graph cut into blocks.

    ``model`` is the model that was captured, on the ``meta`` device. ``inputs`` maps each
    input's name to its key in the batch (a string of a dict, a position of a tuple); an
    input of floating dtype is to be cast to its node's dtype. ``literals`` are small
    tensors that the model's code makes from Python numbers, as buffers of those names.
    ``unused`` are the parameters that the loss does not depend on. ``outputs`` is the form of
    what the model returns, None where that is not known; ``returned`` are the values that its
    caller differentiates, where it returns no loss.
    """

    graph: Graph
    blocks: Blocks
    model: nn.Module
    dtype: Dtype
    inputs: Mapping[str, BatchKey]
    literals: Mapping[str, Tensor] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    outputs: OutputForm | None = None
    returned: tuple[Ref, ...] = ()

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers that the graph reads, without the literals."""
        return tuple(
            node.name
            for node in self.graph.nodes
            if node.kind == "buffer" and node.name not in self.literals
        )

    def with_batch_size(self, batch_size: int) -> Program:
        """The same program for another batch (``Graph.with_batch_size``)."""
        return replace(self, graph=self.graph.with_batch_size(batch_size))
