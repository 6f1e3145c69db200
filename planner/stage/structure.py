"""Structure of a model: kinds of blocks, the values that blocks read from each other, and runs.

In: the graph and its blocks. Out, once per graph: for each block the values that it reads from
outside; and for each run of blocks the occurrences of every distinct edge between kinds, and the
values received from earlier stages and sent to later stages. Nodes are named by the first block of
their kind (the template), other values by their own name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..graph.graph import Block, Blocks, Graph, Ref
from .block_range import Alike
from .block_range import BlockClass as BlockClass
from .block_range import Edge as Edge
from .block_range import Occurrences as Occurrences
from .block_range import Row as Row
from .block_range import Run as Run
from .block_range import Use as Use
from .decisions import is_own_parameter
from .recompute_policy import Ints


@dataclass(frozen=True, slots=True)
class _Inside:
    """A block's edges (values it reads) in a stage that also makes all these values; ``first``: the
    first block that such a stage contains; ``shared``: its parameters that other blocks use too."""

    edges: tuple[Edge, ...]
    first: int
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """Blocks of a graph and the values that they read from each other. Runs (consecutive blocks as
    a stage) are built once, on demand."""

    graph: Graph
    blocks: Blocks
    _runs: dict[tuple[int, int], Run] = field(default_factory=dict, repr=False)
    _numbers: dict[object, int] = field(default_factory=dict, repr=False)
    _leaf_bytes: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)
    _known: dict[Alike, tuple[Edge, ...]] = field(default_factory=dict, repr=False)

    def at_batch(self, batch_size: int) -> Structure:
        """Return the structure at another batch size; data that do not depend on it are shared."""
        found = replace(self, graph=self.graph.with_batch_size(batch_size))
        found.__dict__.update({name: getattr(self, name) for name in _OF_ANY_BATCH})
        return found

    @cached_property
    def position(self) -> dict[str, int]:
        """Map each op node to the position of its block in the model."""
        return {
            name: position
            for position, block in enumerate(self.blocks.blocks)
            for name in block.nodes
        }

    @cached_property
    def readers(self) -> dict[Ref, tuple[int, ...]]:
        """Map each value made by an op to the ascending positions of the blocks that read it."""
        found: dict[Ref, dict[int, None]] = {}
        for position, block in enumerate(self.blocks.blocks):
            for name in block.nodes:
                for ref in self.graph[name].inputs:
                    if self.graph[ref.name].kind == "op":
                        found.setdefault(ref, {})[position] = None
        return {ref: tuple(positions) for ref, positions in found.items()}

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Names of the parameters that several blocks use."""
        position, users = self.position, self.graph.users
        return frozenset(
            node.name
            for node in self.graph.parameters
            if len(users[node.name]) > 1 and len({position[user] for user in users[node.name]}) > 1
        )

    def is_shared(self, parameter: str) -> bool:
        """Return whether several blocks use a parameter."""
        return parameter in self._shared

    def parameter_key(self, parameter: str) -> str:
        """Return the name under which a parameter's layout is stored: the corresponding parameter
        in the first block of the kind, or its own name if several blocks use it."""
        return parameter if self.is_shared(parameter) else self.blocks.template[parameter]

    @cached_property
    def outside(self) -> tuple[tuple[tuple[Ref, tuple[Use, ...]], ...], ...]:
        """Return, for each block, the values that it reads from outside, each with its uses."""
        return tuple(self._outside(block) for block in self.blocks.blocks)

    @cached_property
    def leaves(self) -> tuple[tuple[str, ...], ...]:
        """Return, for each block, the batch inputs, constants and buffers that it reads."""
        kinds = ("input", "constant", "buffer")
        return tuple(
            tuple(
                dict.fromkeys(
                    ref.name
                    for name in block.nodes
                    for ref in self.graph[name].inputs
                    if self.graph[ref.name].kind in kinds
                )
            )
            for block in self.blocks.blocks
        )

    def leaf_bytes(self, run: Run, row_parts: int) -> int:
        """Return the bytes per rank of the inputs, constants and buffers that the blocks ``run``
        read; the batch is split into ``row_parts`` parts."""
        key = run.key, row_parts
        if key not in self._leaf_bytes:
            self._leaf_bytes[key] = leaf_bytes(self.graph, run.leaves, row_parts)
        return self._leaf_bytes[key]

    def leaf_bytes_of_blocks(self, row_parts: int) -> tuple[int, ...]:
        """Return, for each block, the bytes per rank of the inputs, constants and buffers that it
        reads; the batch is split into ``row_parts`` parts."""
        return tuple(leaf_bytes(self.graph, names, row_parts) for names in self.leaves)

    def _outside(self, block: Block) -> tuple[tuple[Ref, tuple[Use, ...]], ...]:
        inside = set(block.nodes)
        found: dict[Ref, list[Use]] = {}
        for name in block.nodes:
            node = self.graph[name]
            for position, ref in enumerate(node.inputs):
                if ref.name not in inside and self._is_priced(ref):
                    use = Use(block.kind, self.blocks.template[name], position)
                    found.setdefault(ref, []).append(use)
        return tuple((ref, tuple(uses)) for ref, uses in found.items())

    def _is_priced(self, ref: Ref) -> bool:
        """Return whether the layout of a node's input from outside the block is chosen apart."""
        kind = self.graph[ref.name].kind
        return kind == "op" or (kind == "parameter" and self.is_shared(ref.name))

    def own_parameters(self, block: Block) -> tuple[str, ...]:
        """Return the parameters that ``block`` alone uses, but more than once."""
        found: dict[str, None] = {}
        for name in block.nodes:
            for ref in self.graph[name].inputs:
                is_parameter = self.graph[ref.name].kind == "parameter"
                if is_parameter and not is_own_parameter(ref, self.graph[name], self.graph):
                    found[ref.name] = None
        return tuple(name for name in found if not self.is_shared(name))

    def ends(self, kind: str) -> tuple[tuple[tuple[str, int], ...], tuple[Use, ...]]:
        """Return the values of a kind of block, as (node, output), that other blocks read or that
        are the loss, and the uses in the block of other blocks' values."""
        wanted = [use for _, uses in self._template_outside[kind] for use in uses]
        return tuple(self._made_for_others.get(kind, ())), tuple(wanted)

    @cached_property
    def _template_outside(self) -> dict[str, tuple[tuple[Ref, tuple[Use, ...]], ...]]:
        found: dict[str, tuple[tuple[Ref, tuple[Use, ...]], ...]] = {}
        for block, outside in zip(self.blocks.blocks, self.outside, strict=True):
            found.setdefault(block.kind, outside)
        return found

    @cached_property
    def _made_for_others(self) -> dict[str, dict[tuple[str, int], None]]:
        """Map each kind of block to its values that other blocks read or that are the loss, as keys
        (node of the kind's first block, output)."""
        found: dict[str, dict[tuple[str, int], None]] = {}
        for ref, readers in self.readers.items():
            block = self.blocks.blocks[self.position[ref.name]]
            if any(reader != self.position[ref.name] for reader in readers):
                key = (self.blocks.template[ref.name], ref.index)
                found.setdefault(block.kind, {})[key] = None
        loss = self.graph.loss
        kind = self.blocks.blocks[self.position[loss.name]].kind
        found.setdefault(kind, {})[self.blocks.template[loss.name], loss.index] = None
        return found

    def run(self, start: int, stop: int) -> Run:
        """Return the blocks ``start`` to ``stop`` (exclusive) as a stage."""
        found = self._runs.get((start, stop))
        if found is None:
            found = self._run(start, stop)
            key = self._numbers.setdefault(("key", found.full_key), len(self._numbers))
            family = self._numbers.setdefault(("family", found.full_family), len(self._numbers))
            found = replace(found, key=key, family=family)
            self._runs[start, stop] = found
        return found

    def _run(self, start: int, stop: int) -> Run:
        blocks = self.blocks.blocks[start:stop]
        inside = self._inside[start:stop]
        received: dict[Ref, Use] = {}
        edges = tuple(
            [
                own.edges if own.first >= start else self._edges(at, start, received)
                for at, own in enumerate(inside, start)
            ]
        )
        return Run(
            start,
            stop,
            tuple([block.kind for block in blocks]),
            edges,
            tuple(received.items()),
            self._sent(start, stop),
            tuple(sorted({name for own in inside if own.shared for name in own.shared})),
            tuple(dict.fromkeys(name for names in self.leaves[start:stop] for name in names)),
            self.position[self.graph.loss.name] in range(start, stop),
        )

    @cached_property
    def _inside(self) -> tuple[_Inside, ...]:
        """Return, for each block, the values (``Edge``) it reads, if its stage makes them all."""
        found = []
        for at, outside in enumerate(self.outside):
            names = [ref.name for ref, _ in outside]
            made = [self.position[name] for name in names if self.graph[name].kind == "op"]
            shared = tuple(name for name in dict.fromkeys(names) if name in self._shared)
            found.append(_Inside(self._edges(at, 0, {}), min(made, default=at), shared))
        return tuple(found)

    def _edges(self, at: int, start: int, received: dict[Ref, Use]) -> tuple[Edge, ...]:
        """Return the edges (values it reads) of block ``at`` in a stage that begins at block
        ``start``; equal edges are one object. Values from earlier stages are added to
        ``received``."""
        outside = self.outside[at]
        own = tuple([self._edge(at, ref, uses, start, received) for ref, uses in outside])
        return self._known.setdefault((self.blocks.blocks[at].kind, own), own)

    def _edge(
        self, at: int, ref: Ref, uses: tuple[Use, ...], start: int, received: dict[Ref, Use]
    ) -> Edge:
        if self.graph[ref.name].kind == "parameter":
            return Edge("parameter", self.parameter_key(ref.name), 0, uses)
        template = self.blocks.template[ref.name]
        again = self.first_reader(ref, start) != at
        if self.position[ref.name] >= start:
            return Edge("block", template, ref.index, uses, None, again)
        first = received.setdefault(ref, uses[0])
        return Edge("received", template, ref.index, uses, first, again)

    def first_reader(self, ref: Ref, start: int) -> int:
        """Return the first block from ``start`` on that reads ``ref`` from another block."""
        readers = self.readers[ref]
        at = bisect_left(readers, start)
        return readers[at + (readers[at] == self.position[ref.name])]

    def first_values(self, at: int) -> list[Ref]:
        """Return the values of other blocks that no block before block ``at`` reads."""
        values = (ref for ref, _ in self.outside[at] if self.graph[ref.name].kind == "op")
        return [ref for ref in values if self.first_reader(ref, 0) == at]

    def _sent(self, start: int, stop: int) -> Mapping[tuple[str, int], int]:
        sent: Counter[tuple[str, int]] = Counter()
        made, last = self._crossed
        for at in np.flatnonzero((start <= made) & (made < stop) & (stop <= last)).tolist():
            ref, _, _ = self.crossing[at]
            sent[self.blocks.template[ref.name], ref.index] += 1
        return dict(sent)

    @cached_property
    def _crossed(self) -> tuple[Ints, Ints]:
        """Return two arrays over ``crossing``: blocks that make, and that last read, the values."""
        every = [(made, last) for _, made, last in self.crossing]
        made, last = np.array(every, dtype=np.int64).reshape(-1, 2).T
        return made, last

    @cached_property
    def crossing(self) -> tuple[tuple[Ref, int, int], ...]:
        """Return (value, block that makes it, last block that reads it) if later blocks do."""
        return tuple(
            (ref, self.position[ref.name], readers[-1])
            for ref, readers in self.readers.items()
            if readers[-1] > self.position[ref.name]
        )


def leaf_bytes(graph: Graph, names: Iterable[str], row_parts: int) -> int:
    """Return the bytes per rank of the inputs, constants and buffers ``names``, whatever their
    layouts.

    A tensor with a batch dimension is split into ``row_parts`` parts; any other is whole.
    """
    total = 0
    for name in names:
        dims = graph.batch_dims.get(name, ())
        for index, spec in enumerate(graph[name].outputs):
            is_cut = index < len(dims) and dims[index] is not None
            total += -(-spec.num_bytes // row_parts) if is_cut else spec.num_bytes
    return total


_OF_ANY_BATCH = (
    "position",
    "readers",
    "outside",
    "leaves",
    "crossing",
    "_crossed",
    "_inside",
    "_shared",
    "_template_outside",
    "_made_for_others",
)
"""Cached properties that do not depend on the batch size."""
