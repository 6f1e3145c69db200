"""Terms of a stage's cost: tables of seconds and bytes over the choices of few decisions.

In: priced choices of layouts, priced conversions of values between layouts. Out: terms. A stage's
cost is the sum of its terms, each times its occurrences in blocks of each of ``BLOCK_MODES``. All
solvers read the same terms: variable elimination minimizes their weighted sum
(``intra_op.elimination``), the integer program has a column for each entry (``stage_problem``), and
a price is their value at given choices (``stage_cost``).

The amounts of an entry are the ``NUM_AMOUNTS`` columns named here: seconds of each resource, bytes
of states, bytes kept from forward to backward by recomputation mode, and the forward seconds that
each recomputation mode reruns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..costs.seconds import Resource, State
from ..integer_programs.program import classes_of
from ..kernels.recompute import BLOCK_MODES, RECOMPUTE_MODES, is_offloaded, without_offload
from ..plan import Recompute

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_CELLS = 4_000_000
"""Maximum elements of a cost table; the integer program solves problems with larger tables."""

KEPT_MODES: tuple[Recompute, ...] = ("none", *RECOMPUTE_MODES)
"""Modes of a block that differ in what they keep: the modes without offloading."""

KEPT_AS = np.array([KEPT_MODES.index(without_offload(mode)) for mode in BLOCK_MODES])
"""Index in ``KEPT_MODES`` of each of ``BLOCK_MODES``."""

ON_DEVICE = np.array([not is_offloaded(mode) for mode in BLOCK_MODES], dtype=np.float64)
"""Fraction of the kept bytes that stays on the device, by ``BLOCK_MODES``: 0 or 1."""

RECOMPUTED = [Resource.FORWARD_COMPUTE, Resource.FORWARD_ISSUE, Resource.FORWARD_COMMUNICATION]
"""Resources whose forward seconds recomputation may skip: device, host, collectives of ops."""

DEVICE, HOST, SENT = range(len(RECOMPUTED))
"""Columns of the resources ``RECOMPUTED`` in ``skipped_seconds`` and in ``RERUN``."""

SECONDS = slice(0, len(Resource))
"""Columns of amounts: seconds of each ``Resource`` without recomputation."""

RECEIVED = slice(SECONDS.stop, SECONDS.stop + 2)
"""Columns of amounts: seconds of received messages, forward and backward."""

STATES = slice(RECEIVED.stop, RECEIVED.stop + len(State))
"""Columns of amounts: bytes of each ``State``."""

HELD_STATES = slice(STATES.start, STATES.start + State.GATHERED)
"""Columns of amounts: bytes of the states that a device holds all the time."""

KEPT = slice(STATES.stop, STATES.stop + len(KEPT_MODES))
"""Columns of amounts: bytes kept by one micro-batch from forward to backward, by
``KEPT_MODES``."""

UNRECOMPUTED = slice(0, KEPT.start + 1)
"""Columns of the amounts of blocks without recomputation."""

RERUN = slice(KEPT.stop, KEPT.stop + len(RECOMPUTE_MODES) * len(RECOMPUTED))
"""Columns of amounts: forward seconds (device, host, collectives) that each of ``RECOMPUTE_MODES``
reruns."""

NUM_AMOUNTS = RERUN.stop

CONVERTED = (Resource.FORWARD_COMMUNICATION, Resource.BACKWARD_COMMUNICATION)
"""Resources of a layout conversion."""


class TooWideError(Exception):
    """Signal that cost tables would be too large; always caught inside the planner."""


def time_weights(seconds: Floats, occurrences: Sequence[float]) -> Floats:
    """Return the weight of each amount in seconds per micro-batch, for a term with ``occurrences``
    in blocks of each of ``BLOCK_MODES``; ``seconds``: weight of each ``Resource``. Rerun
    seconds count as the backward's."""
    found = np.zeros(NUM_AMOUNTS)
    found[SECONDS] = sum(occurrences) * seconds
    found[RECEIVED] = sum(occurrences)
    rerun = found[RERUN].reshape(len(RECOMPUTE_MODES), len(RECOMPUTED))
    counts = _by_kept_mode(occurrences)[1:]
    rerun[:, DEVICE] = counts * seconds[Resource.BACKWARD_COMPUTE]
    rerun[:, SENT] = counts * seconds[Resource.BACKWARD_COMMUNICATION]
    return found


def byte_weights(occurrences: Sequence[float], in_flight: int) -> Floats:
    """Return the weight of each amount in the bytes per device that a term takes all the time: its
    states, and the bytes that ``in_flight`` micro-batches keep."""
    found = np.zeros(NUM_AMOUNTS)
    found[HELD_STATES] = sum(occurrences)
    found[KEPT] = _by_kept_mode(ON_DEVICE * occurrences) * in_flight
    return found


def _by_kept_mode(occurrences: Sequence[float] | Floats) -> Floats:
    """Return the sums of values by ``BLOCK_MODES`` that have the same one of ``KEPT_MODES``."""
    found: Floats = np.bincount(KEPT_AS, occurrences, len(KEPT_MODES)).astype(np.float64)
    return found


@dataclass(frozen=True)
class ChoiceAmounts:
    """Amounts of the choices of one or several decisions: ``seconds[zero, choice, Resource]``,
    ``states[zero, choice, State]``, where ``zero`` numbers ``Prices.shardings``, and
    ``skipped_seconds[mode, choice, 3]``, the forward seconds (device, host, collectives) that each
    of ``RECOMPUTE_MODES`` does not rerun."""

    seconds: Floats
    states: Floats
    skipped_seconds: Floats

    def part(self, rows: slice | Ints) -> ChoiceAmounts:
        """Return the amounts of the choices numbered ``rows``."""
        return ChoiceAmounts(
            self.seconds[:, rows], self.states[:, rows], self.skipped_seconds[:, rows]
        )

    @staticmethod
    def joined(parts: Sequence[ChoiceAmounts]) -> ChoiceAmounts:
        """Return the amounts of the choices of all ``parts``, in order."""
        return ChoiceAmounts(
            np.concatenate([each.seconds for each in parts], axis=1),
            np.concatenate([each.states for each in parts], axis=1),
            np.concatenate([each.skipped_seconds for each in parts], axis=1),
        )

    @cached_property
    def rerun_seconds(self) -> Floats:
        """Return ``[choice, mode, 3]``: the forward seconds that each recomputation mode reruns."""
        own: Floats = self.seconds[0][:, None, RECOMPUTED] - self.skipped_seconds.swapaxes(0, 1)
        return own

    def weighted(self, weights: Floats, zeros: Sequence[int] | None = None) -> Floats:
        """Return ``[zero, choice]``: the sum of each choice's amounts, without kept bytes, times
        ``weights``."""
        which = list(range(len(self.seconds)) if zeros is None else zeros)
        found: Floats = np.zeros(())
        if weights[SECONDS].any():
            found = found + self.seconds[which] @ weights[SECONDS]
        if weights[STATES].any():
            found = found + self.states[which] @ weights[STATES]
        if weights[RERUN].any():
            found = found + self.rerun_seconds.reshape(-1, weights[RERUN].size) @ weights[RERUN]
        return np.broadcast_to(found, (len(which), self.seconds.shape[1]))

    def total(self, rows: Sequence[int]) -> Floats:
        """Return ``[zero, amount]``: the sum of the amounts of the choices numbered ``rows``."""
        found = np.zeros((len(self.seconds), NUM_AMOUNTS))
        which = list(rows)
        found[:, SECONDS] = self.seconds[:, which].sum(axis=1)
        found[:, STATES] = self.states[:, which].sum(axis=1)
        skipped = self.skipped_seconds[:, which].sum(axis=1)
        found[:, RERUN] = (found[0, SECONDS][RECOMPUTED] - skipped).ravel()
        return found


@dataclass(frozen=True, slots=True)
class Side:
    """A node, and for each choice of its decision the class of the layout that a term looks at."""

    node: str
    classes: Ints


@dataclass(frozen=True, eq=False)
class Term:
    """Term of a stage's cost: the layout in which a value is made, and those in which it is used.

    The amounts are the sum, over the distinct classes w of all ``uses``, of ``entries[s, w]``,
    where s is the class of ``maker`` (0 without one). ``columns[entry, amount]``: the amounts of
    one unit of each number of an entry.
    """

    maker: Side | None
    uses: tuple[Side, ...]
    entries: Floats
    columns: Floats

    def weighted(self, weights: Floats) -> Floats:
        """Return the sum of each entry's amounts times ``weights``, by the class of the maker and
        that of a use."""
        found: Floats = self.entries @ (self.columns @ weights)
        return found

    def placed(self, axis: Callable[[Side], Axis]) -> PlacedTerm:
        """Return the term over variables; ``axis(side)`` decides the class of a side."""
        maker = None if self.maker is None else axis(self.maker)
        return PlacedTerm(self, maker, tuple(map(axis, self.uses)))


Axis = tuple[int, Ints]
"""A variable (a decision, or a class of its choices), and the class that each value means."""


@dataclass(frozen=True, eq=False)
class PlacedTerm:
    """A ``Term`` over variables: that of its maker, if it has one, and those of its uses."""

    term: Term
    maker: Axis | None
    uses: tuple[Axis, ...]
    _tables: dict[bytes, Floats] = field(default_factory=dict, repr=False)

    @property
    def scope(self) -> tuple[int, ...]:
        """Return the variables, without duplicates."""
        return tuple(self._sizes)

    @cached_property
    def _sizes(self) -> dict[int, int]:
        axes = self.uses if self.maker is None else (self.maker, *self.uses)
        return {variable: len(classes) for variable, classes in axes}

    def table(self, weights: Floats) -> Floats:
        """Return the amounts times ``weights`` as a table over ``scope``; equal weights give the
        same object. Raises ``TooWideError`` if it would be too large.

        >>> one, both = np.array([0]), np.arange(2)
        >>> term = Term(None, (), np.array([[[1.0], [4.0]]]), np.eye(1))
        >>> PlacedTerm(term, (0, one), ((1, both), (2, both))).table(np.ones(1)).tolist()
        [[[1.0, 5.0], [5.0, 4.0]]]
        """
        key = (self.term.columns @ weights).tobytes()
        if key not in self._tables:
            if prod(self._sizes.values()) > MOST_CELLS:
                raise TooWideError
            self._tables[key] = self._table(self.term.weighted(weights))
        return self._tables[key]

    def _table(self, matrix: Floats) -> Floats:
        made = 0 if self.maker is None else self._along(self.maker)
        wanted = list(map(self._along, self.uses))
        total: Floats = matrix[made, wanted[0]]
        for number, use in enumerate(wanted[1:], start=1):
            own = matrix[made, use]
            for earlier in wanted[:number]:
                own = own * (earlier != use)
            total = total + own
        return total

    def _along(self, axis: Axis) -> Ints:
        variable, classes = axis
        return classes.reshape([-1 if other == variable else 1 for other in self.scope])

    def at(self, values: Sequence[int]) -> Floats:
        """Return the sum of the entries at the value of each variable."""
        row = self.term.entries[0 if self.maker is None else _class(self.maker, values)]
        if len(self.uses) == 1:
            only: Floats = row[_class(self.uses[0], values)]
            return only
        found: Floats = row[sorted({_class(use, values) for use in self.uses})].sum(axis=0)
        return found


def _class(axis: Axis, values: Sequence[int]) -> int:
    variable, classes = axis
    return int(classes[values[variable]])


def total(terms: Iterable[PlacedTerm], choices: Sequence[int]) -> Floats:
    """Return the sum of the amounts of ``terms`` at the choice of each decision."""
    entries: dict[int, tuple[Floats, Floats]] = {}
    for term in terms:
        key = id(term.term.columns)
        known = entries.get(key)
        own = term.at(choices)
        entries[key] = (term.term.columns, own if known is None else known[1] + own)
    return sum((own @ columns for columns, own in entries.values()), np.zeros(NUM_AMOUNTS))


@cache
def conversion_columns(repeats: tuple[bool, ...]) -> Floats:
    """Return the ``columns`` of a term whose entries are conversion seconds, forward and backward.
    ``repeats``: for each of ``RECOMPUTE_MODES``, whether it reruns the forward conversion."""
    found = np.zeros((2, NUM_AMOUNTS))
    found[[0, 1], CONVERTED] = 1.0
    found[0, RERUN].reshape(len(RECOMPUTE_MODES), -1)[:, SENT] = repeats
    return found


@cache
def kept_columns() -> Floats:
    """Return the ``columns`` of a term whose entries are bytes that recomputed blocks keep."""
    found = np.zeros((1, NUM_AMOUNTS))
    found[0, KEPT][1:] = 1.0
    return found


@cache
def received_columns() -> Floats:
    """Return the ``columns`` of a term whose entries are seconds of received messages, forward and
    backward."""
    found = np.zeros((2, NUM_AMOUNTS))
    found[:, RECEIVED] = np.eye(2)
    return found


def merge_classes(
    seconds: tuple[Floats, Floats], *, merge_columns: bool
) -> tuple[Ints, Ints, Floats]:
    """Merge equal rows, and equal columns, of conversion seconds (forward, backward).

    ``seconds[direction][s, w]`` convert from the made layout s to the wanted layout w; rows or
    columns merge only if they are equal in both directions. If several decisions share a conversion
    (``merge_columns`` false), only columns without costs are merged.

    Returns the class of each row, the class of each column, and the entries of a term, ``[row
    class, column class, direction]``.
    """
    costs = np.stack(seconds)
    row_of, rows = classes_of([costs[:, row].tobytes() for row in range(costs.shape[1])])
    reduced = costs[:, rows]
    keys: list[object] = [reduced[:, :, column].tobytes() for column in range(costs.shape[2])]
    if not merge_columns:
        keys = [column if reduced[:, :, column].any() else -1 for column in range(reduced.shape[2])]
    column_of, columns = classes_of(keys)
    return row_of, column_of, np.stack(tuple(reduced[:, :, columns]), axis=-1)
