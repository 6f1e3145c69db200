"""Runs of blocks as stages: their kinds of blocks, and the values that the blocks read.

In: each block's kind and its edges from other blocks (``structure`` finds them). Out: the
occurrences of every kind and distinct edge, in recomputed and other blocks, and the classes of
equal blocks: all facts that determine the run's price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ..graph.graph import Ref
from ..kernels.recompute import BLOCK_MODES, ONCE
from ..plan import Recompute
from .recompute_policy import RecomputePolicy

Origin = Literal["block", "parameter", "received"]


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """Use of a value: input number ``position`` of ``node``, which belongs to the first block of
    the kind ``kind`` and stands for the corresponding nodes of all blocks of this kind."""

    kind: str
    node: str
    position: int


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A value from outside a block (or from another decision in it) and all its uses in the block,
    which share its layout conversions.

    ``name``/``index``: the node that makes the value, named by the first block of its kind; for a
    parameter the name of its layout. ``first``: for a value received from another stage, its first
    use in the stage. ``again``: an earlier block of the stage reads the value too; under
    recomputation its bytes count for the first reader.
    """

    origin: Origin
    name: str
    index: int
    uses: tuple[Use, ...]
    first: Use | None = None
    again: bool = False

    @property
    def is_held(self) -> bool:
        """Return whether a recomputed block keeps the value, for itself and later readers."""
        return self.origin != "parameter" and not self.again


Row = str | Edge
"""Term of a stage's cost: kind of block, parameter of several blocks (by name), or edge."""

Occurrences = tuple[int, ...]
"""Occurrences of a row in blocks of each of ``BLOCK_MODES``."""


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Class of equal blocks in a stage: ``count`` blocks of one kind with equal values from other
    blocks (``edges``)."""

    kind: str
    edges: tuple[Edge, ...]
    count: int


Alike = tuple[str, tuple[Edge, ...]]
"""Key of a class of equal blocks: (kind, edges from other blocks)."""


def _class_key(own: Alike) -> Any:
    kind, edges = own
    return kind, [
        (e.origin, e.name, e.index, e.uses, [e.first] if e.first else [], e.again) for e in edges
    ]


@dataclass(frozen=True)
class Run:
    """Consecutive blocks ``start`` to ``stop`` (exclusive) of the model as a stage.

    ``kinds`` and ``edges_of``: each block's kind and the values that it reads from other blocks;
    ``counts`` and ``edges`` count them. ``leaves``: inputs, constants and buffers that the blocks
    read. Runs with equal ``key`` cost the same; runs of one ``family`` have the same kinds, and so
    the same decisions. ``received``: each received value with its first use. ``sent``: number of
    values that later stages read, by the node of the first block of the kind. ``shared``:
    parameters that several blocks use.
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
    _occurrences: dict[RecomputePolicy, Mapping[Row, Occurrences]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def counts(self) -> Mapping[str, int]:
        return Counter(self.kinds)

    @cached_property
    def _alike(self) -> tuple[Alike, ...]:
        """Return, for each block, its kind and edges (values that it reads from other blocks), as
        the same object for equal blocks.

        Most equal tuples of edges are the same object already, which is hashed only once.
        """
        marks = [*zip(self.kinds, map(id, self.edges_of), strict=True)]
        every = dict(zip(marks, zip(self.kinds, self.edges_of, strict=True), strict=True))
        known: dict[Alike, Alike] = {}
        one = {mark: known.setdefault(each, each) for mark, each in every.items()}
        return tuple([one[mark] for mark in marks])

    @cached_property
    def _distinct(self) -> list[tuple[Alike, int]]:
        """Return (kind and edges, number of blocks) for each class of equal blocks."""
        counts = Counter(map(id, self._alike))
        every = dict(zip(map(id, self._alike), self._alike, strict=True))
        return [(own, counts[mark]) for mark, own in every.items()]

    @cached_property
    def block_classes(self) -> tuple[BlockClass, ...]:
        """Return the classes of equal blocks: one kind, equal values read from other blocks."""
        own = sorted(self._distinct, key=lambda each: _class_key(each[0]))
        return tuple(BlockClass(kind, edges, count) for (kind, edges), count in own)

    @cached_property
    def classes(self) -> tuple[tuple[BlockClass, ...], tuple[int, ...]]:
        """Return the classes of equal blocks, and for each block the number of its class."""
        found = self.block_classes
        numbers = {(each.kind, each.edges): number for number, each in enumerate(found)}
        one = {id(own): numbers[own] for own, _ in self._distinct}
        return found, tuple([one[id(own)] for own in self._alike])

    @cached_property
    def class_counts(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return two tuples by class of equal blocks: numbers of blocks, and kinds of block."""
        classes = self.block_classes
        return tuple(each.count for each in classes), tuple(each.kind for each in classes)

    def modes(self, policy: RecomputePolicy) -> tuple[Recompute, ...]:
        """Return each block's recomputation mode. In each class of equal blocks the first are
        recomputed fully, the next selectively and so on (``BLOCK_MODES``), as many as ``policy``
        says, and the rest not at all."""
        if not policy.num_blocks:
            return tuple("none" for _ in self.kinds)
        listed = [
            [mode for mode, count in zip(BLOCK_MODES[1:], own, strict=True) for _ in range(count)]
            for own in zip(*policy.filled(len(self.block_classes)), strict=True)
        ]
        left = [iter(own) for own in listed]
        return tuple(next(left[number], "none") for number in self.classes[1])

    def occurrences(self, policy: RecomputePolicy) -> Mapping[Row, Occurrences]:
        """Map each term of the stage's cost (kind of block, shared parameter, or value that a block
        reads) to how often it occurs in blocks of each of ``BLOCK_MODES``."""
        if policy not in self._occurrences:
            recomputed: dict[Row, list[int]] = {}
            numbers = zip(*policy.filled(len(self.block_classes)), strict=True)
            pairs = zip(self.block_classes, numbers, strict=True)
            for own, counts_of in pairs if policy.num_blocks else ():
                own_rows: tuple[Row, ...] = (own.kind, *own.edges)
                for row in own_rows:
                    so_far = recomputed.get(row, ONCE[1:])
                    recomputed[row] = [a + b for a, b in zip(so_far, counts_of, strict=True)]
            rows: dict[Row, Occurrences] = {}
            counts: list[tuple[Row, int]] = [*self.counts.items(), *self.edges.items()]
            for row, count in counts:
                again = recomputed.get(row, ONCE[1:])
                rows[row] = (count - sum(again), *again)
            rows |= dict.fromkeys(self.shared, ONCE)
            self._occurrences[policy] = rows
        return self._occurrences[policy]

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
        """Return a key that is equal for runs (consecutive blocks) with the same kinds of blocks
        and the same received and sent values."""
        return (
            tuple(self.counts),
            tuple(sorted(use for _, use in self.received)),
            tuple(sorted(self.sent)),
            self.shared,
            self.has_loss,
        )

    @cached_property
    def full_key(self) -> object:
        """Return a key of all facts that determine the cost of these blocks as a stage."""
        return (
            self.classes,
            tuple(sorted(self.sent.items())),
            tuple(sorted(use for _, use in self.received)),
            self.shared,
            self.leaves,
            self.has_loss,
        )
