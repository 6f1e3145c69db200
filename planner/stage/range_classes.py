"""Classes of runs of blocks that cost the same, found without pricing or building the runs.

In: a graph's structure. Out: for each pair of cuts the number of its class. Runs are of one class
if their blocks pairwise have one kind and equal reads and writes: a value with few readers is
identified by the distance to its producer or last reader, any other value by its name. So a model
of L equal layers has about 4 L classes (with and without the first and the last block) for its L²/2
runs.

Classes that differ only in the repetitions of one block form a series. From the length at which
repeated blocks have equal reads inside the run, each further block adds the same seconds to a run
of the series, in any layouts: the minimum over all layouts is concave in the length.
``chord_bounds`` uses this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..graph.graph import Block, Blocks, Graph, Ref
from ..requests.pins import suggest
from .structure import Structure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FAR = 4
"""Distance in blocks beyond which a value is identified by its name, not by the distance."""

FEW_READERS = 2
"""Number of readers beyond which a value is identified by its name, not by the distance."""

NO_RUN = -1


@dataclass(frozen=True, eq=False)
class Series:
    """Classes of equal-cost runs (consecutive blocks) that differ only in how often one block is
    repeated; ``lengths`` are the numbers of repetitions, ascending.

    From length ``regular`` on, each further block adds the same to every cost.
    """

    classes: tuple[int, ...]
    lengths: tuple[int, ...]
    regular: int


@dataclass(frozen=True)
class RunClasses:
    """Classes of runs (consecutive blocks) that cost the same as a stage. ``numbers[k, i]``: class
    of blocks k to i − 1; ``firsts``: one run (start, stop) of each class; ``signatures``: for each
    block a number, equal for equal blocks; ``reach``: largest distance in blocks that this
    compares."""

    numbers: Ints
    firsts: tuple[tuple[int, int], ...]
    signatures: Ints
    reach: int

    @property
    def num_blocks(self) -> int:
        return len(self.signatures)

    @cached_property
    def lengths(self) -> Ints:
        """Return the number of blocks of a run, by class."""
        return np.array([stop - start for start, stop in self.firsts], dtype=np.int64)

    @cached_property
    def roles(self) -> Mapping[tuple[bool, bool], Ints]:
        """Map (whether a run of blocks begins at the model's first, whether it ends at the last) to
        the numbers of the classes of such runs."""
        size, found = self.num_blocks, {}
        for first in (True, False):
            for last in (True, False):
                starts = slice(0, 1) if first else slice(1, size)
                stops = slice(size, size + 1) if last else slice(1, size)
                own: Ints = np.unique(self.numbers[starts, stops])
                found[first, last] = own[own != NO_RUN]
        return found

    @cached_property
    def series(self) -> tuple[Series, ...]:
        """Return the classes in series. Classes of a series differ only in how often one block is
        repeated; every class is in one series."""
        found: dict[object, list[tuple[int, int]]] = {}
        for number, (start, stop) in enumerate(self.firsts):
            parts = self._parts(start, stop)
            most = max(range(len(parts)), key=lambda at: parts[at][1])
            key = (*parts[:most], parts[most][0], None, *parts[most + 1 :])
            found.setdefault(key, []).append((parts[most][1], number))
        return tuple(
            Series(
                tuple(number for _, number in sorted(members)),
                tuple(length for length, _ in sorted(members)),
                self.reach + 1,
            )
            for members in found.values()
        )

    @cached_property
    def _ends(self) -> Ints:
        """Return, for each block, the position after the last of the equal neighbours around it."""
        changes = np.flatnonzero(np.diff(self.signatures)) + 1
        bounds = np.append(changes, self.num_blocks)
        found: Ints = bounds[np.searchsorted(changes, np.arange(self.num_blocks), side="right")]
        return found

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return blocks ``start`` to ``stop`` as (block signature, repetitions) pairs."""
        found = []
        while start < stop:
            end = min(int(self._ends[start]), stop)
            found.append((int(self.signatures[start]), end - start))
            start = end
        return found


def run_classes(structure: Structure) -> RunClasses:
    """Return the classes of runs (consecutive blocks) that cost the same as a stage."""
    marks, reach = _marks(structure)
    known: dict[object, int] = {}
    signatures = np.array([known.setdefault(mark, len(known)) for mark in marks], dtype=np.int64)
    size = len(signatures)
    numbers = np.full((size + 1, size + 1), NO_RUN, dtype=np.int64)
    firsts: list[tuple[int, int]] = []
    ids = np.zeros(size + 1, dtype=np.int64)
    for length in range(1, size + 1):
        starts = np.arange(size - length + 1)
        pairs = ids[starts] * (size + 1) + signatures[starts + length - 1]
        _, where, ids = np.unique(pairs, return_index=True, return_inverse=True)
        numbers[starts, starts + length] = ids + len(firsts)
        firsts += [(int(start), int(start) + length) for start in where]
    return RunClasses(numbers, tuple(firsts), signatures, reach)


def _marks(structure: Structure) -> tuple[list[object], int]:
    """Return a key of each block, equal for blocks that cost the same at the same place in a stage,
    and the largest distance in blocks over which the keys identify values."""
    readers = structure.readers
    position = structure.position
    reach = 1

    def by_name(ref: Ref) -> bool:
        own = readers[ref]
        return len(own) > FEW_READERS or own[-1] - position[ref.name] > FAR

    made: dict[int, list[object]] = {}
    for ref, own in readers.items():
        maker = position[ref.name]
        if own[-1] > maker:
            template = structure.blocks.template[ref.name]
            far = by_name(ref)
            reach = reach if far else max(reach, own[-1] - maker)
            mark = ("made", ref) if far else ("made", template, ref.index, own[-1] - maker)
            made.setdefault(maker, []).append(mark)
    leaf_readers: dict[str, int] = {}
    for names in structure.leaves:
        for name in names:
            leaf_readers[name] = leaf_readers.get(name, 0) + 1
    loss = position[structure.graph.loss.name]
    marks: list[object] = []
    for at, block in enumerate(structure.blocks.blocks):
        read: list[object] = []
        for ref, uses in structure.outside[at]:
            if structure.graph[ref.name].kind == "parameter":
                read.append(("parameter", structure.parameter_key(ref.name), uses))
            elif by_name(ref):
                read.append(("value", ref, uses))
            else:
                template = structure.blocks.template[ref.name]
                read.append(("value", template, ref.index, at - position[ref.name], uses))
        leaves = [_leaf(structure, name, leaf_readers) for name in structure.leaves[at]]
        own_marks = tuple(made.get(at, ()))
        marks.append((block.kind, tuple(read), own_marks, tuple(leaves), at == loss))
    return marks, reach


def _leaf(structure: Structure, name: str, readers: Mapping[str, int]) -> object:
    """Return the key of an input or constant: its bytes, or its name if several blocks read it."""
    if readers[name] > 1:
        return name
    return sum(spec.num_bytes for spec in structure.graph[name].outputs)


def sampled_lengths(series: Series, growth: float = 1.3) -> tuple[int, ...]:
    """Return the lengths of a series (stages with more and more repetitions of one block) to price:
    all short lengths, then each ``growth`` times longer.

    >>> sampled_lengths(Series(tuple(range(100)), tuple(range(1, 101)), 2))
    (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 35, 46, 60, 78, 100)
    """
    chosen: list[int] = []
    for length in series.lengths[:-1]:
        if length <= series.regular or not chosen or length > chosen[-1] * growth - 0.5:
            chosen.append(length)
    return (*chosen, series.lengths[-1])


def chord_bounds(lengths: Ints, known: Ints, seconds: Floats, regular: int) -> Floats:
    """Return lower bounds of the seconds of stages of ``lengths`` repeated blocks from the bounds
    ``seconds`` for the lengths ``known``.

    The seconds are concave from length ``regular`` on, so bounds are interpolated linearly. Between
    shorter known lengths the bound is that of the next shorter one (a stage costs at least as much
    as one with fewer repetitions).

    >>> chord_bounds(np.arange(1, 6), np.array([1, 3, 5]), np.array([1.0, 3.0, 4.0]), 1).tolist()
    [1.0, 2.0, 3.0, 3.5, 4.0]
    """
    between = np.interp(lengths, known, seconds)
    before = seconds[np.maximum(np.searchsorted(known, lengths, side="right") - 1, 0)]
    start = known[np.maximum(np.searchsorted(known, lengths, side="right") - 1, 0)]
    found: Floats = np.where((start >= regular) | np.isin(lengths, known), between, before)
    return found


def at_least(lengths: Sequence[int], seconds: Floats, slope: float) -> Floats:
    """Return the lower bounds ``seconds`` of stages of ``lengths`` blocks, raised to the bound of
    each shorter stage plus ``slope`` seconds per further block.

    Removing blocks from the best solution of a longer stage gives a solution of the shorter stage,
    which costs at least ``slope`` less per block.

    >>> at_least((1, 2, 4), np.array([5.0, 1.0, 2.0]), 0.5).tolist()
    [5.0, 5.5, 6.5]
    """
    offsets = np.array(lengths) * slope
    found: Floats = np.maximum.accumulate(seconds - offsets) + offsets
    return found


def stage_begins(graph: Graph, blocks: Blocks, asked: Sequence[str]) -> tuple[int, ...]:
    """Return the positions, ascending, of the blocks that the paths ``asked`` (``--stage-at``)
    name.

    Raises ``UsageError`` AP181 for unknown modules, AP183 for modules that begin inside a block.
    """
    return tuple(sorted({_position(graph, blocks, path) for path in asked}))


def _position(graph: Graph, blocks: Blocks, path: str) -> int:
    names = [block.name for block in blocks.blocks]
    if path in names:
        return names.index(path)
    for position, block in enumerate(blocks.blocks):
        inside = [name for name in block.nodes if _is_under(graph[name].module, path)]
        if inside and inside[0] == _first_of_a_module(graph, block):
            return position
        if inside:
            raise UsageError(
                "AP183",
                f"--stage-at {path}: no stage can start there",
                why=f"it is inside the block {block.name}, and blocks are not divided",
                fix=f"--stage-at {block.name}",
            )
    raise UsageError(
        "AP181",
        f"--stage-at {path}: no such block or module",
        fix=suggest(
            path, [*names, *(node.module for node in graph if node.module)], is_pattern=False
        )
        or f"the blocks are {', '.join(names[:8])}{' …' if names[8:] else ''}",
    )


def _is_under(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _first_of_a_module(graph: Graph, block: Block) -> str:
    """Return a block's first op that belongs to a submodule; the model's own ops may precede it."""
    own = [name for name in block.nodes if graph[name].module]
    return (own or list(block.nodes))[0]


def without_inner(classes: RunClasses, begins: Collection[int]) -> RunClasses:
    """Return the classes without stages that contain a block of ``begins``, unless as the first."""
    if not begins:
        return classes
    numbers = classes.numbers.copy()
    for position in begins:
        numbers[:position, position + 1 :] = NO_RUN
    return replace(classes, numbers=numbers)
