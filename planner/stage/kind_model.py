"""Model of a kind of block on a mesh: its decisions, its edges, and the bytes that choices keep.

In: priced decisions, and a function that finds the storages of a choice. Out: a ``KindModel``; the
bytes that choices keep from forward to backward, by recomputation mode; the cost of one block
(``RowCost``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..costs.kept_bytes import Part
from ..costs.seconds import HELD, Resource, State
from ..plan import Recompute
from .decisions import ZEROS, Decision, Floats
from .structure import Edge

NUM_FIGURES = len(Resource) + 3
RECEIVED, STATES, KEPT = range(len(Resource), NUM_FIGURES)
"""Columns of ``RowCost.unrecomputed`` that follow the seconds of each resource."""

NO_STATES = np.zeros((len(ZEROS), len(State)))


@dataclass(frozen=True)
class RowCost:
    """Cost of one occurrence of a term of a stage's cost: a block, a shared parameter, or an edge
    (value that a block reads).

    ``mode`` is the block's recomputation: none, full or selective. ``seconds[mode, zero,
    RESOURCE]``, ``kept_bytes[mode]`` (for the backward), ``states[zero]``.
    ``recompute_seconds[mode]``: device seconds of full and selective recomputation.
    ``transient_bytes[mode, zero]``: gathered parameters and recomputed values; ``working_bytes``:
    memory of the largest op.
    """

    seconds: Floats
    recompute_seconds: Floats
    kept_bytes: Floats
    states: Floats = field(default_factory=lambda: NO_STATES)
    working_bytes: float = 0.0
    transient_bytes: Floats = field(default_factory=lambda: NO_STATES)

    @cached_property
    def unrecomputed(self) -> Floats:
        """Return an array ``[zero, figure]`` for blocks without recomputation: seconds by resource
        and of received messages, bytes of states, bytes kept."""
        found = np.zeros((len(ZEROS), NUM_FIGURES))
        found[:, : len(Resource)] = self.seconds[0]
        found[:, STATES] = self.states[:, HELD].sum(axis=1)
        found[:, KEPT] = self.kept_bytes[0]
        return found


Kept = tuple[tuple[tuple[Part, ...], ...], ...]
"""Kept tensors as (storage, bytes), by decision and choice."""


class SavedTensors(NamedTuple):
    """Bytes per rank of a decision's choice, with storages (memory of a tensor and its views) as
    (storage, bytes): ``saved`` by autograd, ``selected`` for selective recomputation, ``read`` from
    the batch; ``working_bytes``: inputs and outputs of the largest op."""

    saved: tuple[Part, ...]
    working_bytes: int
    selected: tuple[Part, ...]
    read: tuple[Part, ...]


@dataclass(frozen=True)
class KindModel:
    """Decisions (nodes whose layouts are chosen together) of a kind of block on a mesh, with their
    bytes.

    ``where`` maps a node to its decision. ``edges`` are values of one decision of the block that
    another reads. ``held(decision, choice)`` returns ``SavedTensors``, on demand, as most meshes do
    not need all; ``saved``, ``working_bytes``, ``selected`` and ``read`` list them by decision and
    choice. ``costs`` caches a block's cost by choices.
    """

    kind: str
    decisions: tuple[Decision, ...]
    where: Mapping[str, int]
    edges: tuple[Edge, ...]
    has_parameters: bool
    held: Callable[[int, int], SavedTensors] = field(repr=False)
    costs: dict[tuple[int, ...], RowCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def _held(self) -> tuple[tuple[SavedTensors, ...], ...]:
        return tuple(
            tuple(self.held(number, choice) for choice in range(len(decision.choices)))
            for number, decision in enumerate(self.decisions)
        )

    @cached_property
    def saved(self) -> Kept:
        return tuple(tuple(held.saved for held in choices) for choices in self._held)

    @cached_property
    def working_bytes(self) -> tuple[Floats, ...]:
        return tuple(
            np.array([held.working_bytes for held in choices], dtype=np.float64)
            for choices in self._held
        )

    @cached_property
    def selected(self) -> Kept:
        return tuple(tuple(held.selected for held in choices) for choices in self._held)

    @cached_property
    def read(self) -> Kept:
        return tuple(tuple(held.read for held in choices) for choices in self._held)

    def parts(self, mode: Recompute) -> Kept:
        """Return the storages (memory of a tensor and its views) kept from forward to backward
        under a recomputation mode, as (storage, bytes) by decision and choice, without values of
        other blocks."""
        if mode == "none":
            return self.saved
        return self.selected if mode == "selective" else self.read

    def kept_bytes(self, mode: Recompute) -> Floats:
        """Return the bytes that each choice of each decision (nodes laid out together) keeps from
        forward to backward; a storage that several decisions keep counts for the first.

        The sum over a block's decisions is at most the bytes that the block keeps.
        """
        counted: dict[str, int] = {}
        found = []
        for number, choices in enumerate(self.parts(mode)):
            for parts in choices:
                own = [size for name, size in parts if counted.setdefault(name, number) == number]
                found.append(float(sum(own)))
        return np.array(found)
