"""What each block takes from elsewhere, and which blocks ask the same of the graph.

In: a graph and its blocks. Out, once per graph: for each block the values, leaves and parameters
that it reads, the values that later blocks read of it, and the number of its form. Blocks of one
form are of one kind, and what reaches them from elsewhere is alike: tensors, storages, what has
users elsewhere. Under equal layouts they cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .graph import Block, Blocks, Graph, Ref
from .pricing.structure import Structure

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Reads:
    """A block, and what it takes from elsewhere, each once and in the order of first use.

    ``values`` are other blocks', ``leaves`` inputs, constants and buffers; of its ``parameters``
    other blocks use the ``shared`` ones too. ``sends``: its values that later blocks read, each
    with the place of its node in the block and the position of the last reader.
    """

    block: Block
    values: tuple[Ref, ...]
    leaves: tuple[str, ...]
    parameters: tuple[str, ...]
    shared: tuple[bool, ...]
    sends: tuple[tuple[Ref, int, int], ...]


@dataclass(frozen=True)
class BlockForms:
    """The blocks of a graph by form. ``storages``: where each output's memory is."""

    structure: Structure
    storages: Mapping[Key, Key]

    @property
    def graph(self) -> Graph:
        return self.structure.graph

    @property
    def blocks(self) -> Blocks:
        return self.structure.blocks

    @cached_property
    def reads(self) -> tuple[Reads, ...]:
        """Of each block."""
        return tuple(map(self._reads, range(len(self.blocks.blocks))))

    @cached_property
    def forms(self) -> tuple[int, ...]:
        """For each block the first one of its form."""
        first: dict[tuple[Any, ...], int] = {}
        return tuple(
            first.setdefault(self._form(reads), position)
            for position, reads in enumerate(self.reads)
        )

    def _reads(self, position: int) -> Reads:
        block, graph = self.blocks.blocks[position], self.graph
        inside = set(block.nodes)
        values: dict[Ref, None] = {}
        leaves: dict[str, None] = {}
        parameters: dict[str, None] = {}
        for name in block.nodes:
            for ref in graph[name].inputs:
                if ref.name in inside:
                    continue
                kind = graph[ref.name].kind
                if kind == "op":
                    values[ref] = None
                elif kind == "parameter":
                    parameters[ref.name] = None
                else:
                    leaves[ref.name] = None
        return Reads(
            block, tuple(values), tuple(leaves), tuple(parameters),
            tuple(self.structure.is_shared(name) for name in parameters), self._sends[position],
        )  # fmt: skip

    @cached_property
    def _sends(self) -> list[tuple[tuple[Ref, int, int], ...]]:
        """For each block its values that later ones read, in the order in which it makes them."""
        found: list[list[tuple[Ref, int]]] = [[] for _ in self.blocks.blocks]
        for ref, made, last in self.structure.crossing:
            found[made].append((ref, last))
        sends = []
        for block, own in zip(self.blocks.blocks, found, strict=True):
            places = {name: place for place, name in enumerate(block.nodes)} if own else {}
            placed = [(ref, places[ref.name], last) for ref, last in own]
            sends.append(tuple(sorted(placed, key=lambda each: (each[1], each[0].index))))
        return sends

    def _form(self, reads: Reads) -> tuple[Any, ...]:
        """What the figures of a block follow from besides layouts: its kind has the rest."""
        graph, inside = self.graph, set(reads.block.nodes)
        numbers: dict[Key, int] = {}
        parts: list[Any] = [reads.block.kind, bool(reads.block.parameters), reads.shared]

        def number(key: Key) -> None:
            if key[0] not in inside and key not in numbers:
                numbers[key] = len(numbers)
                node = graph[key[0]]
                dims = graph.batch_dims.get(key[0])
                dim = None if dims is None else dims[key[1]]
                alone = self.of_parameters[key[0]]
                parts.append((node.kind, node.outputs[key[1]], dim, alone))

        places = {name: -1 - place for place, name in enumerate(reads.block.nodes)}
        for name in reads.block.nodes:
            node = graph[name]
            for ref in node.inputs:
                if ref.name not in inside:
                    key = ref.name, ref.index
                    number(key)
                    number(self.storages[key])
                    parts += (numbers[key], self._place(self.storages[key], numbers, places))
            for index in range(len(node.outputs)):
                root = self.storages[name, index]
                if root[0] != name:
                    number(root)
                    parts.append(self._place(root, numbers, places))
        return tuple(parts)

    @staticmethod
    def _place(key: Key, numbers: Mapping[Key, int], places: Mapping[str, int]) -> tuple[int, int]:
        """A value by its place in the block, or by its number among those from elsewhere."""
        return (numbers[key] if key in numbers else places[key[0]]), key[1]

    @cached_property
    def of_parameters(self) -> dict[str, bool]:
        """Whether a node's values are computed from parameters and nothing else."""
        known: dict[str, bool] = {}
        for node in self.graph:
            known[node.name] = node.kind == "parameter" or (
                node.kind == "op"
                and bool(node.inputs)
                and all(known[each.name] for each in node.inputs)
            )
        return known
