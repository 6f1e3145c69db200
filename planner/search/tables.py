"""What searches of one model share, whatever the cluster, its memory and what is allowed.

In: a graph with its blocks, a number format. Out: the graph in that format, its structure at every
micro-batch size, and the cache of prices. Every table in these is found by all that it follows
from, so that a search for other devices or with less memory makes only what it is first to ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph import Blocks, Graph
from ..plan import Precision
from ..precision import with_precision
from ..pricing.price_cache import PriceCache
from ..pricing.structure import Structure


@dataclass
class GraphTables:
    """Of a graph in one format. ``graphs`` is by micro-batch size."""

    structure: Structure
    graphs: dict[int, Structure] = field(default_factory=dict)
    cache: PriceCache = field(default_factory=PriceCache)

    @staticmethod
    def of(graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        return GraphTables(Structure(with_precision(graph, precision), blocks))


@dataclass
class SharedTables:
    """The tables of graphs that were met; a graph with its blocks counts by identity."""

    _known: dict[tuple[int, int, Precision], tuple[Graph, Blocks, GraphTables]] = field(
        default_factory=dict
    )

    def of(self, graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        key = (id(graph), id(blocks), precision)
        if key not in self._known:  # graph and blocks live as long as their ids are used
            self._known[key] = graph, blocks, GraphTables.of(graph, blocks, precision)
        return self._known[key][2]
