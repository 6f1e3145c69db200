"""What a run of blocks consists of: kinds, and who reads what of whom.

In: the graph and its blocks. Out, once per graph: for each block the values that it reads
from elsewhere; and for each run of blocks how often every distinct edge between kinds
occurs in it, what it receives from earlier stages and sends to later ones. Node names are
those of the first block of a kind (the template) unless a value stands for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..graph import Block, Blocks, Graph, Node, Ref
from ..plan import Recompute
from .decisions import is_own_parameter
from .ladder import Rung

Origin = Literal["block", "parameter", "received"]


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """The ``position``-th input of a node of a kind (by template name)."""

    kind: str
    node: str
    position: int


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A value and all its uses in one block: its conversions are made once per block.

    ``name``/``index``: of a block's value its template; of a parameter its key; of a
    received value the template of who made it, with ``first``, the stage's first use of it.
    """

    origin: Origin
    name: str
    index: int
    uses: tuple[Use, ...]
    first: Use | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """How often kinds and edges occur: in all, and in recomputed blocks.

    ``kinds_selective`` counts those of ``kinds_again`` that are selectively recomputed.
    """

    kinds: Mapping[str, int]
    kinds_again: Mapping[str, int]
    edges: Mapping[Edge, int]
    edges_again: Mapping[Edge, int]
    kinds_selective: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Equal blocks of a run: of one kind, with the same edges from elsewhere."""

    kind: str
    edges: tuple[Edge, ...]
    count: int


def _class_key(own: tuple[str, tuple[Edge, ...]]) -> Any:
    kind, edges = own
    return kind, [(e.origin, e.name, e.index, e.uses, [e.first] if e.first else []) for e in edges]


@dataclass(frozen=True)
class Run:
    """Blocks ``start`` to ``stop`` (exclusive) as one stage.

    ``kinds`` and ``edges_of`` list each block's kind and its edges from elsewhere; ``counts``
    and ``edges`` count them. ``leaves`` are the inputs, constants and buffers that it reads.
    Runs of equal ``key`` cost the same; those of one ``family`` share decisions.
    ``received`` maps each first use to a received value, ``sent`` counts produced values
    that later stages read, by template. ``shared`` are the parameters of several blocks.
    """

    start: int
    stop: int
    kinds: tuple[str, ...]
    edges_of: tuple[tuple[Edge, ...], ...]
    received: tuple[tuple[Ref, Use], ...]
    sent: Mapping[tuple[str, int], int]
    shared: tuple[str, ...]
    leaves: tuple[str, ...]
    has_loss: bool
    key: int = -1
    family: int = -1
    _weights: dict[Rung, Weights] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        return Counter(self.kinds)

    @cached_property
    def recompute_order(self) -> tuple[int, ...]:
        """The order in which blocks (offsets) are recomputed: the commonest kind's first."""
        commonest = max(self.counts, key=lambda kind: self.counts[kind])
        rest = [offset for offset, kind in enumerate(self.kinds) if kind != commonest]
        return (*(o for o, kind in enumerate(self.kinds) if kind == commonest), *rest)

    @cached_property
    def classes(self) -> tuple[tuple[BlockClass, ...], tuple[int, ...]]:
        """The classes of equal blocks, and which each block is of."""
        own = list(zip(self.kinds, self.edges_of, strict=True))
        distinct = sorted(dict.fromkeys(own), key=_class_key)
        numbers = {each: number for number, each in enumerate(distinct)}
        counts = Counter(own)
        found = tuple(BlockClass(kind, edges, counts[kind, edges]) for kind, edges in distinct)
        return found, tuple(numbers[each] for each in own)

    @cached_property
    def class_counts(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """How many blocks each class has, and of which kind."""
        classes, _ = self.classes
        return tuple(each.count for each in classes), tuple(each.kind for each in classes)

    def prefix(self, num_full: int) -> Rung:
        """The first blocks of ``recompute_order`` recomputed fully."""
        classes, of_block = self.classes
        counts = Counter(of_block[offset] for offset in self.recompute_order[:num_full])
        return Rung(tuple(counts[n] for n in range(len(classes))), (0,) * len(classes))

    def modes(self, rung: Rung) -> tuple[Recompute, ...]:
        """How each block is recomputed: of a class the first fully, then selectively."""
        if not rung.num_blocks:
            return tuple("none" for _ in self.kinds)
        seen: Counter[int] = Counter()
        found: list[Recompute] = []
        for number in self.classes[1]:
            full, selective = rung.full[number], rung.selective[number]
            place = seen[number]
            seen[number] += 1
            found.append("full" if place < full else
                         "selective" if place < full + selective else "none")  # fmt: skip
        return tuple(found)

    def weights(self, rung: Rung) -> Weights:
        """The occurrences when so many blocks of each class are recomputed."""
        if rung not in self._weights:
            again: Counter[str] = Counter()
            partly: Counter[str] = Counter()
            edges: Counter[Edge] = Counter()
            numbers = zip(self.classes[0], rung.full, rung.selective, strict=True)
            for own, full, some in numbers if rung.num_blocks else ():
                again[own.kind] += full + some
                partly[own.kind] += some
                for edge in own.edges:
                    edges[edge] += full + some
            self._weights[rung] = Weights(self.counts, again, self.edges, edges, partly)
        return self._weights[rung]

    @cached_property
    def edges(self) -> Counter[Edge]:
        return Counter(edge for edges in self.edges_of for edge in edges)

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @cached_property
    def full_family(self) -> object:
        """What runs must share for one's layouts to be meaningful in another."""
        return (
            tuple(self.counts),
            tuple(sorted(use for _, use in self.received)),
            tuple(sorted(self.sent)),
            self.shared,
            self.has_loss,
        )

    @cached_property
    def full_key(self) -> object:
        """What the run's price depends on."""
        return (
            tuple(self.counts.items()),
            self.classes[0],
            tuple(sorted(self.sent.items())),
            tuple(sorted(use for _, use in self.received)),
            self.shared,
            self.leaves,
            self.has_loss,
        )


@dataclass(frozen=True)
class Structure:
    """The graph's blocks with what they read. ``runs`` are made on demand and kept."""

    graph: Graph
    blocks: Blocks
    _runs: dict[tuple[int, int], Run] = field(default_factory=dict, repr=False)
    _numbers: dict[object, int] = field(default_factory=dict, repr=False)

    @cached_property
    def position(self) -> dict[str, int]:
        """For each op node the position of its block."""
        return {
            name: position
            for position, block in enumerate(self.blocks.blocks)
            for name in block.nodes
        }

    @cached_property
    def readers(self) -> dict[Ref, tuple[int, ...]]:
        """For each value of a block the positions of the blocks that read it."""
        found: dict[Ref, dict[int, None]] = {}
        for position, block in enumerate(self.blocks.blocks):
            for name in block.nodes:
                for ref in self.graph[name].inputs:
                    if self.graph[ref.name].kind == "op":
                        found.setdefault(ref, {})[position] = None
        return {ref: tuple(positions) for ref, positions in found.items()}

    def is_shared(self, parameter: str) -> bool:
        """Whether several blocks use a parameter."""
        return len({self.position[user] for user in self.graph.users[parameter]}) > 1

    def parameter_key(self, parameter: str) -> str:
        """The name that a parameter's layout goes by: its template's, or its own if shared."""
        return parameter if self.is_shared(parameter) else self.blocks.template[parameter]

    @cached_property
    def outside(self) -> tuple[tuple[tuple[Ref, tuple[Use, ...]], ...], ...]:
        """For each block the values from elsewhere that it reads, with their uses."""
        return tuple(self._outside(block) for block in self.blocks.blocks)

    @cached_property
    def leaves(self) -> tuple[tuple[str, ...], ...]:
        """For each block the batch inputs, constants and buffers that it reads."""
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
        """Whether a use of a value from elsewhere has a layout of its own to convert from."""
        kind = self.graph[ref.name].kind
        if kind == "parameter":
            return not is_own_parameter(ref, node, self.graph)
        return kind == "op"

    def own_parameters(self, block: Block) -> tuple[str, ...]:
        """The parameters that only this block uses, in several places of it."""
        found: dict[str, None] = {}
        for name in block.nodes:
            for ref in self.graph[name].inputs:
                is_parameter = self.graph[ref.name].kind == "parameter"
                if is_parameter and not is_own_parameter(ref, self.graph[name], self.graph):
                    found[ref.name] = None
        return tuple(name for name in found if not self.is_shared(name))

    def own_parameter_edges(self, kind: str) -> tuple[Edge, ...]:
        """The edges inside a kind whose values are parameters that it uses in several places."""
        return tuple(
            Edge("parameter", self.parameter_key(ref.name), 0, uses)
            for ref, uses in self._template_outside[kind]
            if self._is_inner(ref)
        )

    def ends(self, kind: str) -> tuple[tuple[tuple[str, int], ...], tuple[Use, ...]]:
        """What joins a kind's blocks to others: values made for them, uses of their values."""
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
        """For each kind the values, by template, that other blocks read, and the loss."""
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
        """The run of blocks ``start`` to ``stop`` (exclusive)."""
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
        received: dict[Ref, Use] = {}
        shared: dict[str, None] = {}
        edges: list[tuple[Edge, ...]] = []
        for offset in range(len(blocks)):
            own: list[Edge] = []
            for ref, uses in self.outside[start + offset]:
                own.append(self._edge(ref, uses, start, received))
                if own[-1].origin == "parameter" and self.is_shared(ref.name):
                    shared[ref.name] = None
            edges.append(tuple(own))
        return Run(
            start,
            stop,
            tuple(block.kind for block in blocks),
            tuple(edges),
            tuple(received.items()),
            self._sent(start, stop),
            tuple(sorted(shared)),
            tuple(dict.fromkeys(name for names in self.leaves[start:stop] for name in names)),
            self.position[self.graph.loss.name] in range(start, stop),
        )

    def _edge(self, ref: Ref, uses: tuple[Use, ...], start: int, received: dict[Ref, Use]) -> Edge:
        if self.graph[ref.name].kind == "parameter":
            return Edge("parameter", self.parameter_key(ref.name), 0, uses)
        template = self.blocks.template[ref.name]
        if self.position[ref.name] >= start:
            return Edge("block", template, ref.index, uses)
        first = received.setdefault(ref, uses[0])
        return Edge("received", template, ref.index, uses, first)

    def inner_edge(self, ref: Ref, uses: tuple[Use, ...]) -> Edge:
        """The edge of a value that a block of the same run makes."""
        return self._edge(ref, uses, 0, {})

    def _sent(self, start: int, stop: int) -> Mapping[tuple[str, int], int]:
        sent: Counter[tuple[str, int]] = Counter()
        for ref, made, last in self.crossing:
            if start <= made < stop <= last:
                sent[self.blocks.template[ref.name], ref.index] += 1
        return dict(sent)

    @cached_property
    def crossing(self) -> tuple[tuple[Ref, int, int], ...]:
        """Values read outside their block: made in which block, last read in which."""
        return tuple(
            (ref, self.position[ref.name], readers[-1])
            for ref, readers in self.readers.items()
            if readers[-1] > self.position[ref.name]
        )
