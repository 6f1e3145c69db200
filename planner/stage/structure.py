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

from ..graph.graph import Block, Blocks, Graph, Node, Ref
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
    """A block's edges in a run of blocks that also makes all values it reads; ``first``: the first
    block that such a run contains; ``shared``: its parameters that other blocks use too."""

    edges: tuple[Edge, ...]
    first: int
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """Blocks of a graph and the values that they read. Runs of blocks are built once, on demand."""

    graph: Graph
    blocks: Blocks
    _runs: dict[tuple[int, int], Run] = field(default_factory=dict, repr=False)
    _numbers: dict[object, int] = field(default_factory=dict, repr=False)
    _leaf_bytes: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)
    _known: dict[Alike, tuple[Edge, ...]] = field(default_factory=dict, repr=False)

    def at_batch(self, batch_size: int) -> Structure:
        """Return the structure at another batch size, with all data that do not depend on it."""
        found = replace(self, graph=self.graph.with_batch_size(batch_size))
        found.__dict__.update({name: getattr(self, name) for name in _OF_ANY_BATCH})
        return found

    @cached_property
    def position(self) -> dict[str, int]:
        """Map each op node to the position of its block."""
        return {
            name: position
            for position, block in enumerate(self.blocks.blocks)
            for name in block.nodes
        }

    @cached_property
    def readers(self) -> dict[Ref, tuple[int, ...]]:
        """Map each value of a block to the ascending positions of the blocks that read it."""
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
        """Return the name of a parameter's layout: its template's, or its own if it is shared."""
        return parameter if self.is_shared(parameter) else self.blocks.template[parameter]

    @cached_property
    def outside(self) -> tuple[tuple[tuple[Ref, tuple[Use, ...]], ...], ...]:
        """Return, for each block, the values that it reads from outside, with their uses."""
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
        """Return the bytes on a rank of a run's inputs, constants and buffers (``leaf_bytes``)."""
        key = run.key, row_parts
        if key not in self._leaf_bytes:
            self._leaf_bytes[key] = leaf_bytes(self.graph, run.leaves, row_parts)
        return self._leaf_bytes[key]

    def leaf_bytes_of_blocks(self, row_parts: int) -> tuple[int, ...]:
        """Return the bytes on a rank of the inputs, constants and buffers of every block."""
        return tuple(leaf_bytes(self.graph, names, row_parts) for names in self.leaves)

    def _outside(self, block: Block) -> tuple[tuple[Ref, tuple[Use, ...]], ...]:
        inside = set(block.nodes)
        found: dict[Ref, list[Use]] = {}
        for name in block.nodes:
            node = self.graph[name]
            for position, ref in enumerate(node.inputs):
                if ref.name not in inside and self._is_priced(ref, node):
                    use = Use(block.kind, self.blocks.template[name], position)
                    found.setdefault(ref, []).append(use)
        return tuple((ref, tuple(uses)) for ref, uses in found.items())

    def _is_priced(self, ref: Ref, node: Node) -> bool:
        """Return whether a node's input from outside is laid out, and converted, separately."""
        kind = self.graph[ref.name].kind
        if kind == "parameter":
            return not is_own_parameter(ref, node, self.graph)
        return kind == "op"

    def own_parameters(self, block: Block) -> tuple[str, ...]:
        """Return the parameters that only ``block`` uses, but several times."""
        found: dict[str, None] = {}
        for name in block.nodes:
            for ref in self.graph[name].inputs:
                is_parameter = self.graph[ref.name].kind == "parameter"
                if is_parameter and not is_own_parameter(ref, self.graph[name], self.graph):
                    found[ref.name] = None
        return tuple(name for name in found if not self.is_shared(name))

    def own_parameter_edges(self, kind: str) -> tuple[Edge, ...]:
        """Return a kind's edges from parameters that are used in its block only, several times."""
        return tuple(
            Edge("parameter", self.parameter_key(ref.name), 0, uses)
            for ref, uses in self._template_outside[kind]
            if self._is_inner(ref)
        )

    def ends(self, kind: str) -> tuple[tuple[tuple[str, int], ...], tuple[Use, ...]]:
        """Return the boundary of a kind of block: its values that other blocks read, its uses of
        theirs."""
        wanted = [
            use
            for ref, uses in self._template_outside[kind]
            if not self._is_inner(ref)
            for use in uses
        ]
        return tuple(self._made_for_others.get(kind, ())), tuple(wanted)

    def _is_inner(self, ref: Ref) -> bool:
        return self.graph[ref.name].kind == "parameter" and not self.is_shared(ref.name)

    @cached_property
    def _template_outside(self) -> dict[str, tuple[tuple[Ref, tuple[Use, ...]], ...]]:
        found: dict[str, tuple[tuple[Ref, tuple[Use, ...]], ...]] = {}
        for block, outside in zip(self.blocks.blocks, self.outside, strict=True):
            found.setdefault(block.kind, outside)
        return found

    @cached_property
    def _made_for_others(self) -> dict[str, dict[tuple[str, int], None]]:
        """Map each kind to its values (by template) that other blocks read, or the loss."""
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
        """Return the run of blocks ``start`` to ``stop`` (exclusive)."""
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
        """Return, for each block, its edges in a run that makes all its values (``_Inside``)."""
        found = []
        for at, outside in enumerate(self.outside):
            names = [ref.name for ref, _ in outside]
            made = [self.position[name] for name in names if self.graph[name].kind == "op"]
            shared = tuple(name for name in dict.fromkeys(names) if name in self._shared)
            found.append(_Inside(self._edges(at, 0, {}), min(made, default=at), shared))
        return tuple(found)

    def _edges(self, at: int, start: int, received: dict[Ref, Use]) -> tuple[Edge, ...]:
        """Return a block's edges in a run that begins at ``start``; equal edges are one object."""
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
        """Return the first block from ``start`` on that reads ``ref`` of another block."""
        readers = self.readers[ref]
        at = bisect_left(readers, start)
        return readers[at + (readers[at] == self.position[ref.name])]

    def first_values(self, at: int) -> list[Ref]:
        """Return the values of other blocks that no block before block ``at`` reads."""
        values = (ref for ref, _ in self.outside[at] if self.graph[ref.name].kind == "op")
        return [ref for ref in values if self.first_reader(ref, 0) == at]

    def inner_edge(self, at: int, ref: Ref, uses: tuple[Use, ...]) -> Edge:
        """Return the edge to block ``at`` from a value that another block of its run makes."""
        return self._edge(at, ref, uses, 0, {})

    def _sent(self, start: int, stop: int) -> Mapping[tuple[str, int], int]:
        sent: Counter[tuple[str, int]] = Counter()
        made, last = self._crossed
        for at in np.flatnonzero((start <= made) & (made < stop) & (stop <= last)).tolist():
            ref, _, _ = self.crossing[at]
            sent[self.blocks.template[ref.name], ref.index] += 1
        return dict(sent)

    @cached_property
    def _crossed(self) -> tuple[Ints, Ints]:
        """Return the making blocks and the last reading blocks of ``crossing`` as arrays."""
        every = [(made, last) for _, made, last in self.crossing]
        made, last = np.array(every, dtype=np.int64).reshape(-1, 2).T
        return made, last

    @cached_property
    def crossing(self) -> tuple[tuple[Ref, int, int], ...]:
        """Return (value, making block, last reading block) of all values read by later blocks."""
        return tuple(
            (ref, self.position[ref.name], readers[-1])
            for ref, readers in self.readers.items()
            if readers[-1] > self.position[ref.name]
        )


def leaf_bytes(graph: Graph, names: Iterable[str], row_parts: int) -> int:
    """Return the bytes on a rank of inputs, constants and buffers, whatever their layouts.

    A leaf that counts the batch is split into ``row_parts`` parts; any other leaf is whole.
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
