"""A run of blocks as one stage: its kinds, and who reads what of whom.

In: each block's kind and its edges from elsewhere (``structure`` finds them). Out: how often
every kind and distinct edge occurs, in all and in recomputed blocks, and the classes of equal
blocks: what the run's price depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from ..graph import Ref
from ..plan import Recompute
from .ladder import Rung

T = TypeVar("T")
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
    ``again``: an earlier block of the stage reads the value too. It is kept once for all: what
    the blocks that are recomputed read counts with the first reader.
    """

    origin: Origin
    name: str
    index: int
    uses: tuple[Use, ...]
    first: Use | None = None
    again: bool = False

    @property
    def is_held(self) -> bool:
        """Whether the block keeps the value, if it is recomputed, for itself and later readers."""
        return self.origin != "parameter" and not self.again


@dataclass(frozen=True, slots=True)
class Weights:
    """How often kinds and edges occur: in all, and in recomputed blocks.

    ``kinds_selective`` and ``edges_selective`` count those of ``kinds_again`` and
    ``edges_again`` that are selectively recomputed.
    """

    kinds: Mapping[str, int]
    kinds_again: Mapping[str, int]
    edges: Mapping[Edge, int]
    edges_again: Mapping[Edge, int]
    kinds_selective: Mapping[str, int] = field(default_factory=dict)
    edges_selective: Mapping[Edge, int] = field(default_factory=dict)

    def repeated(self, edge: Edge, repeats: tuple[bool, bool]) -> int:
        """In how many blocks an edge's value is converted again; ``repeats``: whether a block is
        one of them that is recomputed fully, and selectively."""
        return _repeated(self.edges_again, self.edges_selective, edge, repeats)

    def repeated_inside(self, kind: str, repeats: tuple[bool, bool]) -> int:
        """The same of a value that blocks of a kind make and read themselves."""
        return _repeated(self.kinds_again, self.kinds_selective, kind, repeats)


def _repeated(
    again: Mapping[T, int], partly: Mapping[T, int], of: T, repeats: tuple[bool, bool]
) -> int:
    selective = partly.get(of, 0)
    return (again.get(of, 0) - selective) * repeats[0] + selective * repeats[1]


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Equal blocks of a run: of one kind, with the same edges from elsewhere."""

    kind: str
    edges: tuple[Edge, ...]
    count: int


Alike = tuple[str, tuple[Edge, ...]]
"""What equal blocks of a run have in common: their kind, and their edges from elsewhere."""


def _class_key(own: Alike) -> Any:
    kind, edges = own
    return kind, [
        (e.origin, e.name, e.index, e.uses, [e.first] if e.first else [], e.again) for e in edges
    ]


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
    def _alike(self) -> tuple[Alike, ...]:
        """By block what equal blocks share: one object for all that are equal.

        Most equal lists of edges are one object already, which is not read again.
        """
        marks = [*zip(self.kinds, map(id, self.edges_of), strict=True)]
        every = dict(zip(marks, zip(self.kinds, self.edges_of, strict=True), strict=True))
        known: dict[Alike, Alike] = {}
        one = {mark: known.setdefault(each, each) for mark, each in every.items()}
        return tuple([one[mark] for mark in marks])

    @cached_property
    def _distinct(self) -> list[tuple[Alike, int]]:
        """Every ``_alike`` in order, and how many blocks it is of."""
        counts = Counter(map(id, self._alike))
        every = dict(zip(map(id, self._alike), self._alike, strict=True))
        return [(own, counts[mark]) for mark, own in every.items()]

    @cached_property
    def block_classes(self) -> tuple[BlockClass, ...]:
        """The classes of equal blocks."""
        own = sorted(self._distinct, key=lambda each: _class_key(each[0]))
        return tuple(BlockClass(kind, edges, count) for (kind, edges), count in own)

    @cached_property
    def classes(self) -> tuple[tuple[BlockClass, ...], tuple[int, ...]]:
        """The classes of equal blocks, and which each block is of."""
        found = self.block_classes
        numbers = {(each.kind, each.edges): number for number, each in enumerate(found)}
        one = {id(own): numbers[own] for own, _ in self._distinct}
        return found, tuple([one[id(own)] for own in self._alike])

    @cached_property
    def class_counts(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """How many blocks each class has, and of which kind."""
        classes = self.block_classes
        return tuple(each.count for each in classes), tuple(each.kind for each in classes)

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
            edges_partly: Counter[Edge] = Counter()
            numbers = zip(self.block_classes, rung.full, rung.selective, strict=True)
            for own, full, some in numbers if rung.num_blocks else ():
                again[own.kind] += full + some
                partly[own.kind] += some
                for edge in own.edges:
                    edges[edge] += full + some
                    edges_partly[edge] += some
            self._weights[rung] = Weights(
                self.counts, again, self.edges, edges, partly, edges_partly
            )
        return self._weights[rung]

    @cached_property
    def edges(self) -> Counter[Edge]:
        found: Counter[Edge] = Counter()
        for (_, edges), count in self._distinct:
            for edge in edges:
                found[edge] += count
        return found

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
            self.block_classes,
            tuple(sorted(self.sent.items())),
            tuple(sorted(use for _, use in self.received)),
            self.shared,
            self.leaves,
            self.has_loss,
        )
