"""Lower bounds of the bytes of a stage, over all meshes and layouts.

In: the graph, the classes of runs, a number of devices D, the bytes per parameter. Out: for every
class a lower bound per device: each tensor is split into at most D parts. A stage holds its states;
for every block, the values that autograd keeps or, if the block is recomputed, the values from
other blocks that it is the first to read; in the backward of a block all its saved values,
recomputed or not; and the inputs and outputs of its largest op. No tables are needed, so runs that
cannot fit are excluded at no cost. With the tables of a mesh, states are as small as a choice of
its layouts allows, and the backward of a block also holds the parameters that ZeRO gathers.

For the whole model, a lower bound of the bytes of all devices, for any cut into stages: its states,
and the saved values of every block for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...cost_model.ops.memory import PrecisionPolicy
from ..costs.kept_bytes import memory_of
from ..costs.prices import Prices
from ..graph.graph import Block, Ref, TensorSpec
from ..graph.layout import Mesh
from ..kernels.tiles import last_region
from ..stage.range_classes import Floats, RunClasses
from ..stage.stage_model import StageModel
from ..stage.structure import Structure


@dataclass(frozen=True, slots=True)
class _BlockSizes:
    """Bytes of a kind of block: saved values, (elements, bytes per element) of states, and each
    op's inputs and outputs.

    ``read``: for each block of the kind, sizes of the values that it is the first to read.
    """

    saved: tuple[int, ...]
    read: tuple[tuple[int, ...], ...]
    states: tuple[tuple[int, int], ...]
    ops: tuple[tuple[int, ...], ...]

    def on(self, num_devices: int) -> tuple[float, float, float, float]:
        """Return four numbers of bytes per device: states, activations that are held all the time,
        activations that are held only in the block's backward, tensors of the largest op."""
        saved = sum(n // num_devices for n in self.saved)
        read = min(sum(n // num_devices for n in own) for own in self.read)
        states = sum(numel // num_devices * size for numel, size in self.states)
        largest = max((sum(n // num_devices for n in own) for own in self.ops), default=0)
        held = min(saved, read)
        return float(states), float(held), float(saved - held), float(largest)


@dataclass
class LeastBytes:
    """Lower bounds of the bytes of runs of blocks, for one or more micro-batches in flight."""

    structure: Structure
    classes: RunClasses
    _sizes: dict[str, _BlockSizes] = field(default_factory=dict)
    _found: dict[tuple[int, PrecisionPolicy], Floats] = field(default_factory=dict)
    _leaves: dict[int, Floats] = field(default_factory=dict)
    _of_kinds: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)

    def on(self, num_devices: int, prices: Prices) -> Floats:
        """Return the lower bounds by class of runs, without bytes that hold no tensor."""
        key = (num_devices, prices.policy)
        if key not in self._found:
            own = self._by_kind(num_devices, prices)
            self._found[key] = self._by_class(num_devices, own)
        return self._found[key]

    def on_mesh(self, model: StageModel, zeros: Sequence[int]) -> Floats:
        """Return the lower bounds on the mesh of ``model``, whichever of the ZeRO stages ``zeros``
        is used, by class of runs, without bytes that hold no tensor."""
        num_devices, kinds = model.prices.mesh.size, self.structure.blocks.kinds
        own = self._by_kind(num_devices, model.prices)
        every = []
        for zero in zeros:
            by_kind = {}
            for kind in kinds:
                states, gathered = model.kind(kind).least_states(zero)
                _, held, backward, largest = own[kind]
                by_kind[kind] = states, held, backward + gathered, largest
            every.append(self._by_class(num_devices, by_kind))
        found: Floats = np.minimum.reduce(every)
        return found

    def _by_kind(self, num_devices: int, prices: Prices) -> dict[str, tuple[float, ...]]:
        """Return the bytes per device of each kind of block (``_BlockSizes.on``)."""
        if num_devices not in self._of_kinds:
            for kind, block in self.structure.blocks.kinds.items():
                if kind not in self._sizes:
                    self._sizes[kind] = self._of_block(block, prices)
            self._of_kinds[num_devices] = {
                kind: own.on(num_devices) for kind, own in self._sizes.items()
            }
        return self._of_kinds[num_devices]

    def _by_class(self, num_devices: int, by_kind: Mapping[str, tuple[float, ...]]) -> Floats:
        """Return the bytes of each class of runs, from those of each kind of block."""
        kinds = self.structure.blocks.kinds
        own = np.array([by_kind[kind] for kind in kinds])[self._kind_of]
        starts, stops = self._ends
        always = np.append(0.0, np.cumsum(own[:, 0] + own[:, 1]))
        if num_devices not in self._leaves:
            leaves = np.array(self.structure.leaf_bytes_of_blocks(num_devices), dtype=np.float64)
            self._leaves[num_devices] = range_max(leaves, starts, stops)
        found: Floats = always[stops] - always[starts]
        for column in (own[:, 2], own[:, 3]):
            found += range_max(column, starts, stops)
        return found + self._leaves[num_devices]

    @cached_property
    def _kind_of(self) -> np.ndarray:
        """Return the index of each block's kind."""
        numbers = {kind: number for number, kind in enumerate(self.structure.blocks.kinds)}
        return np.array([numbers[block.kind] for block in self.structure.blocks.blocks])

    @cached_property
    def _ends(self) -> np.ndarray:
        """Return two arrays by class: first block of a run, and the block after its last."""
        return np.array(self.classes.firsts).T

    def total(self, prices: Prices) -> float:
        """Return a lower bound of the bytes of the whole model, over all devices."""
        structure, shared = self.structure, dict[str, None]()
        sizes = {
            kind: sum(self._of_block(block, prices).on(1)[:2])
            for kind, block in structure.blocks.kinds.items()
        }
        for block in structure.blocks.blocks:
            shared |= dict.fromkeys(name for name in block.parameters if structure.is_shared(name))
        nodes = (structure.graph[name] for name in shared)
        once = [_states(node.spec, prices.policy) for node in nodes if node.kind == "parameter"]
        return sum(sizes[block.kind] for block in structure.blocks.blocks) + float(
            sum(numel * size for numel, size in once)
        )

    def _tiled(self, block: Block, prices: Prices) -> set[str]:
        """Return the ops that full recomputation may run tile by tile, by rows or by positions."""
        graph, found = self.structure.graph, set[str]()
        if prices.assumptions.tiles > 1:
            for parts in (1, graph.batch_size):
                mesh = Mesh(("dp",), (parts,))
                region = last_region(block.nodes, graph, prices.rules, mesh)
                if region is not None:
                    found.update(region.strategies)
        return found

    def _of_block(self, block: Block, prices: Prices) -> _BlockSizes:
        graph, tiled = self.structure.graph, self._tiled(block, prices)
        nodes = [graph[name] for name in block.nodes if name not in tiled]
        saved: dict[Ref, int] = {}
        for node in nodes:
            if any(spec.requires_grad for spec in node.outputs):
                for ref in prices.rules.saved(node, graph):
                    root, spec = memory_of(ref, node, graph, prices)
                    if graph[root.name].kind in ("op", "input"):
                        saved[root] = spec.num_bytes
        ops = [
            [graph.spec(ref).num_bytes for ref in dict.fromkeys(node.inputs)]
            + [spec.num_bytes for spec in node.outputs]
            for node in nodes
        ]
        return _BlockSizes(
            tuple(saved.values()),
            self._first_read[block.kind],
            tuple(
                _states(graph[name].spec, prices.policy)
                for name in block.parameters
                if graph[name].kind == "parameter" and not self.structure.is_shared(name)
            ),
            tuple(map(tuple, ops)),
        )

    @cached_property
    def _first_read(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Map each kind to the sizes of values that its blocks are the first to read
        (``_BlockSizes.read``)."""
        structure, found = self.structure, dict[str, dict[tuple[int, ...], None]]()
        for at, block in enumerate(structure.blocks.blocks):
            values = structure.first_values(at)
            sizes = tuple(structure.graph.spec(ref).num_bytes for ref in values)
            found.setdefault(block.kind, {})[sizes] = None
        return {kind: tuple(every) for kind, every in found.items()}


def _states(spec: TensorSpec, policy: PrecisionPolicy) -> tuple[int, int]:
    """Return a parameter's number of elements, and the least bytes of states per element."""
    if spec.stored:
        return spec.stored_bytes, 1
    if not spec.requires_grad:
        return spec.numel, policy.gathered_bytes
    gradient = policy.gradient_bytes * (not policy.moves_gradients)
    parameter = policy.parameter_bytes * (not policy.moves_parameters)
    return spec.numel, parameter + gradient + policy.optimizer_bytes


def range_max(values: Floats, starts: np.ndarray, stops: np.ndarray) -> Floats:
    """Return the maximum of ``values[start:stop]`` for every pair of start and stop.

    >>> range_max(np.array([3.0, 1.0, 2.0]), np.array([0, 1, 1]), np.array([1, 2, 3])).tolist()
    [3.0, 1.0, 2.0]
    """
    lengths = stops - starts
    found = np.zeros(len(starts))
    doubled, length = values, 1  # maxima of so many values from each on
    while True:
        at = np.flatnonzero((lengths >= length) & (lengths < 2 * length))
        found[at] = np.maximum(doubled[starts[at]], doubled[stops[at] - length])
        if 2 * length > len(values):
            return found
        doubled = np.maximum(doubled[:-length], doubled[length:])
        length *= 2
