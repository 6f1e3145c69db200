"""Model of a kind of block on a mesh: its decisions, its edges, and the bytes that choices keep.

In: priced decisions, and a function that finds the storages of a choice. Out: a ``KindModel``; the
bytes that choices keep from forward to backward, by recomputation mode; the cost of one block
(``RowCost``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..costs.kept_bytes import (
    RECOMPUTE_MODES,
    LastOps,
    Part,
    again_parts,
    kept_parts,
    read_parts,
    saved_parts,
    working_bytes,
)
from ..costs.prices import Prices
from ..costs.seconds import HELD, Resource, State
from ..graph.graph import Graph, Node
from ..graph.layout import NodeLayout
from ..kernels.recompute import BLOCK_MODES, Replay, is_offloaded, without_offload
from ..plan import Recompute
from .decisions import Decision
from .structure import Edge
from .terms import (
    DEVICE,
    KEPT,
    KEPT_AS,
    KEPT_MODES,
    ON_DEVICE,
    RECOMPUTED,
    RERUN,
    SECONDS,
    SENT,
    STATES,
    ChoiceAmounts,
    Floats,
)


@dataclass(frozen=True)
class RowCost:
    """Cost of one occurrence of a row of a stage's cost: a block, a shared parameter, an edge
    (value that a block reads) or a boundary, with given layouts.

    ``amounts[zero, amount]``: see ``terms``.
    ``made_again[mode]``: bytes of the values that a recomputed block holds while its backward runs;
    ``working_bytes[mode]``: memory of the largest op. In both, recomputation may run ops tile by
    tile; ``made_whole[mode]``: values held if no op does.
    """

    amounts: Floats
    working_bytes: Floats = field(default_factory=lambda: np.zeros(len(BLOCK_MODES)))
    made_again: Floats = field(default_factory=lambda: np.zeros(len(BLOCK_MODES)))
    made_whole: Floats = field(default_factory=lambda: np.zeros(len(BLOCK_MODES)))

    @cached_property
    def seconds(self) -> Floats:
        """Return ``[mode, zero, Resource]``; rerun seconds count with the backward."""
        found = np.repeat(self.amounts[None, :, SECONDS], len(KEPT_MODES), axis=0)
        shape = (len(self.amounts), len(RECOMPUTE_MODES), len(RECOMPUTED))
        rerun = self.amounts[:, RERUN].reshape(shape).swapaxes(0, 1)
        found[1:, :, BACKWARD] += rerun
        every: Floats = found[KEPT_AS]
        return every

    @cached_property
    def rerun_seconds(self) -> Floats:
        """Return ``[mode, resource]``: seconds that recomputation reruns (device, host,
        collectives)."""
        rerun = self.amounts[0, RERUN].reshape(len(RECOMPUTE_MODES), len(RECOMPUTED))
        found: Floats = np.concatenate([np.zeros((1, len(RECOMPUTED))), rerun])[KEPT_AS]
        return found

    @property
    def recompute_seconds(self) -> Floats:
        """Return ``[mode]``: device seconds of recomputation."""
        found: Floats = self.rerun_seconds[:, DEVICE] + self.rerun_seconds[:, SENT]
        return found

    @property
    def kept_bytes(self) -> Floats:
        """Return ``[mode]``: bytes kept on the device for the backward."""
        found: Floats = self.amounts[0, KEPT][KEPT_AS] * ON_DEVICE
        return found

    @property
    def host_bytes(self) -> Floats:
        """Return ``[mode]``: bytes kept in the host's memory for the backward."""
        found: Floats = self.amounts[0, KEPT][KEPT_AS] * (1 - ON_DEVICE)
        return found

    @cached_property
    def whole(self) -> RowCost:
        """Return the same cost if no op runs tile by tile."""
        working = np.broadcast_to(self.working_bytes[0], len(BLOCK_MODES))
        return RowCost(self.amounts, working, self.made_whole, self.made_whole)

    @property
    def states(self) -> Floats:
        """Return ``[zero, State]``: bytes of states."""
        found: Floats = self.amounts[:, STATES]
        return found

    @property
    def transient_bytes(self) -> Floats:
        """Return ``[mode, zero]``: bytes of gathered parameters and recomputed values."""
        found: Floats = self.made_again[:, None] + GATHERED_BLOCKS * self.states[:, State.GATHERED]
        return found


BACKWARD = [Resource.BACKWARD_COMPUTE, Resource.BACKWARD_ISSUE, Resource.BACKWARD_COMMUNICATION]
"""Resources of the backward that rerun the resources ``RECOMPUTED``."""

GATHERED_BLOCKS = 2
"""Number of blocks whose parameters ZeRO 3 holds whole at once: the running block and the next."""

Kept = tuple[tuple[tuple[Part, ...], ...], ...]
"""Kept tensors as (storage, bytes), by decision and choice."""


@dataclass(frozen=True)
class OpStorages:
    """Bytes per rank that an op with a layout uses, on demand. Storages (memory of a tensor and its
    views) are (storage, bytes): ``kept`` in a mode of recomputation, made ``again`` in the backward
    of full recomputation; ``working_bytes``: its inputs and outputs, ``working_again`` under full
    recomputation. ``replay`` and ``last``: the ops of the block that recomputation reruns, and
    those of them that it runs tile by tile."""

    node: Node
    layout: NodeLayout
    graph: Graph
    prices: Prices
    replay: Replay
    last: LastOps
    _kept: dict[Recompute, tuple[Part, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def kept(self, mode: Recompute) -> tuple[Part, ...]:
        """Return the storages kept from forward to backward in one of ``KEPT_MODES``: those that
        autograd saves, those that recomputation keeps, or, if all is rerun, those read from the
        batch."""
        if mode not in self._kept:
            own = self.node, self.layout, self.graph, self.prices
            if mode in ("none", "full"):
                self._kept[mode] = (saved_parts if mode == "none" else read_parts)(*own)
            else:
                self._kept[mode] = kept_parts(*own, of=self.replay.kept[mode])
        return self._kept[mode]

    @cached_property
    def again(self) -> tuple[Part, ...]:
        return again_parts(self.node, self.layout, self.graph, self.prices, self.last)

    @cached_property
    def working_bytes(self) -> int:
        return working_bytes(self.node, self.layout, self.graph, self.prices)

    @property
    def working_again(self) -> int:
        return self.last.part(self.node.name, self.working_bytes)


@dataclass(frozen=True)
class ChoiceStorages:
    """``OpStorages`` of all ops of a choice together; ``working_bytes`` of the largest op."""

    ops: tuple[OpStorages, ...]
    _kept: dict[Recompute, tuple[Part, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def kept(self, mode: Recompute) -> tuple[Part, ...]:
        if mode not in self._kept:
            self._kept[mode] = _distinct(each.kept(mode) for each in self.ops)
        return self._kept[mode]

    @cached_property
    def again(self) -> tuple[Part, ...]:
        return _distinct(each.again for each in self.ops)

    @cached_property
    def working_bytes(self) -> int:
        return max((each.working_bytes for each in self.ops), default=0)

    @cached_property
    def working_again(self) -> int:
        return max((each.working_again for each in self.ops), default=0)


Storages = OpStorages | ChoiceStorages


def _distinct(parts: Iterable[tuple[Part, ...]]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(part for own in parts for part in own))


@dataclass(frozen=True)
class KindModel:
    """Decisions (nodes whose layouts are chosen together) of a kind of block on a mesh, with their
    bytes.

    ``amounts`` are of the choices of all decisions, in order. ``where`` maps a node to its
    decision. ``edges``: values of one decision of the block that another reads, and parameters that
    are used more than once. ``constant[zero, Resource]``: seconds of a block that no choice
    changes. ``held(decision, choice)`` returns the choice's ``Storages``; ``parts``, ``again``,
    ``working_bytes`` and ``working_again`` list them by decision and choice. ``costs`` caches a
    block's cost by choices.
    """

    kind: str
    decisions: tuple[Decision, ...]
    amounts: ChoiceAmounts = field(repr=False)
    where: Mapping[str, int]
    edges: tuple[Edge, ...]
    constant: Floats = field(repr=False)
    held: Callable[[int, int], Storages] = field(repr=False)
    costs: dict[tuple[int, ...], RowCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _parts: dict[Recompute, Kept] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return, for each decision, the number of its first choice among those of all."""
        sizes = [len(decision.choices) for decision in self.decisions]
        return tuple(np.cumsum([0, *sizes[:-1]]).tolist())

    def split(self, values: Floats) -> list[Floats]:
        """Split values of all choices (the last axis) into an array for each decision."""
        return np.split(values, self.starts[1:], axis=-1)

    def least_states(self, zero: int) -> tuple[float, float]:
        """Return two numbers of bytes under a ZeRO stage: the least states of a block, and by how
        much more they are, at least, while its parameters are gathered."""
        states = self.amounts.states[zero]
        held = states[:, HELD].sum(axis=1)
        both = held + GATHERED_BLOCKS * states[:, State.GATHERED]
        least, most = (sum(float(own.min()) for own in self.split(each)) for each in (held, both))
        return least, most - least

    @cached_property
    def _held(self) -> tuple[tuple[Storages, ...], ...]:
        return tuple(
            tuple(self.held(number, choice) for choice in range(len(decision.choices)))
            for number, decision in enumerate(self.decisions)
        )

    @cached_property
    def working_bytes(self) -> tuple[Floats, ...]:
        return tuple(
            np.array([held.working_bytes for held in choices], dtype=np.float64)
            for choices in self._held
        )

    @cached_property
    def working_again(self) -> tuple[Floats, ...]:
        return tuple(
            np.array([held.working_again for held in choices], dtype=np.float64)
            for choices in self._held
        )

    @cached_property
    def again(self) -> Kept:
        return tuple(tuple(held.again for held in choices) for choices in self._held)

    def parts(self, mode: Recompute) -> Kept:
        """Return the storages (memory of a tensor and its views) kept from forward to backward
        under a recomputation mode, as (storage, bytes) by decision and choice, without values of
        other blocks."""
        base = without_offload(mode)
        if base not in self._parts:
            self._parts[base] = tuple(
                tuple(held.kept(base) for held in choices) for choices in self._held
            )
        return self._parts[base]

    def kept_bytes(self, mode: Recompute) -> Floats:
        """Return the bytes that each choice of each decision (nodes laid out together) keeps on the
        device from forward to backward; a storage that several decisions keep counts for the first.

        The sum over a block's decisions is at most the bytes that the block keeps.
        """
        if is_offloaded(mode):
            return np.zeros(self.amounts.seconds.shape[1])
        counted: dict[str, int] = {}
        found = []
        for number, choices in enumerate(self.parts(mode)):
            for parts in choices:
                own = [size for name, size in parts if counted.setdefault(name, number) == number]
                found.append(float(sum(own)))
        return np.array(found)
