"""Tables shared by searches of one model, whatever the cluster, memory and features.

In: a graph with its blocks, a number format. Out: the graph in that format, its structure at every
micro-batch size, and the cache of prices. The key of every table contains all facts it depends on,
so a search for other devices or less memory only adds tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..costs.precision import with_precision
from ..costs.price_cache import PriceCache
from ..graph.graph import Blocks, Graph
from ..plan import Precision
from ..stage.structure import Structure


@dataclass
class GraphTables:
    """Cost tables of a graph in one number format. ``graphs``: structures by micro-batch size."""

    structure: Structure
    graphs: dict[int, Structure] = field(default_factory=dict)
    cache: PriceCache = field(default_factory=PriceCache)

    @staticmethod
    def of(graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        return GraphTables(Structure(with_precision(graph, precision), blocks))


@dataclass
class SharedTables:
    """Cost tables of all graphs searched so far, keyed by the identity of the graphs."""

    _known: dict[tuple[int, int, Precision], tuple[Graph, Blocks, GraphTables]] = field(
        default_factory=dict
    )

    def of(self, graph: Graph, blocks: Blocks, precision: Precision) -> GraphTables:
        key = (id(graph), id(blocks), precision)
        if key not in self._known:  # graph and blocks live as long as their ids are used
            self._known[key] = graph, blocks, GraphTables.of(graph, blocks, precision)
        return self._known[key][2]
