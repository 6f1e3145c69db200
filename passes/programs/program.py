"""The captured program: the input of every later step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from ...planner.graph.graph import Blocks, Graph, Ref
from .batch import Batch, Example, InputPlace
from .outputs import OutputForm

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class Program:
    """Captured model: its forward and loss as a graph cut into blocks.

    ``model`` is the captured model, on the ``meta`` device. ``inputs`` maps each input's name to
    its location in the batch; floating inputs must be cast to their nodes' dtypes. ``example`` is a
    batch with which it was captured. ``literals`` are small tensors that the model's code makes of
    Python numbers; the graph reads them as buffers of these names. ``unused`` are the parameters
    that the loss does not depend on. ``outputs`` is the structure of the model's outputs, None if
    unknown; ``returned`` are the values whose gradients the model's caller computes, if the model
    returns no loss. ``recapture(rows, change)`` captures the model again, for a global batch of
    ``rows`` rows, at examples that ``change`` returns.
    """

    graph: Graph
    blocks: Blocks
    model: nn.Module
    dtype: Dtype
    inputs: Mapping[str, InputPlace]
    literals: Mapping[str, Tensor] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    outputs: OutputForm | None = None
    returned: tuple[Ref, ...] = ()
    example: Example | None = field(default=None, compare=False, repr=False)
    recapture: Callable[..., Program] | None = field(default=None, compare=False, repr=False)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers of the model that the graph reads (literals are left out)."""
        return tuple(
            node.name
            for node in self.graph.nodes
            if node.kind == "buffer" and node.name not in self.literals
        )

    def batch(self, inputs: Mapping[str, Tensor]) -> Batch:
        """Return a batch in the form of the example batch, with the tensors ``inputs`` by name."""
        assert self.example is not None
        return self.example.with_inputs(inputs)

    def of_global_batch(self, rows: int) -> Program | None:
        """Return the program captured for a global batch of ``rows`` rows, as numbers in the graph
        may depend on it. None if the model's code then takes other branches than for the planned
        batch."""
        if self.recapture is None:
            return self
        found, planned = self.recapture(rows), self.graph
        is_same = found.graph.batch_dims == planned.batch_dims
        is_same = is_same and found.graph.fingerprint == planned.fingerprint
        return replace(found, recapture=self.recapture) if is_same else None

    def with_batch_size(self, batch_size: int) -> Program:
        """Return the program rescaled to micro-batches of ``batch_size`` rows; numbers in its graph
        that depend on the global batch stay."""
        return replace(self, graph=self.graph.with_batch_size(batch_size))
