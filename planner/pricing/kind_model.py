"""One kind of block on a mesh: its decisions, its edges, what each choice keeps.

In: priced decisions, and what finds the storages of a choice. Out: a ``KindModel``; bytes that
choices keep from forward to backward, as blocks are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..plan import Recompute
from .decisions import Decision, Floats
from .saved import Part
from .structure import Edge

Kept = tuple[tuple[tuple[Part, ...], ...], ...]
"""Per decision and choice the storages that are kept, with their bytes."""


Held = tuple[tuple[Part, ...], int, tuple[Part, ...], tuple[Part, ...]]
"""Of a choice: what autograd keeps, the most that a member works on, what is selected, what is
read of the batch."""


@dataclass(frozen=True)
class KindModel:
    """One kind of block on the mesh.

    ``where`` finds the decision of a member. ``edges`` are the values read inside the block
    by another decision. ``saved`` lists per decision and choice the (storage, bytes) that
    autograd keeps, ``selected`` those that selective recomputation keeps, ``read`` those of
    the batch, which any keeps; ``working_bytes``
    per decision and choice the most that a member's inputs and outputs take. ``held`` finds
    the four for one choice of a decision: most meshes never need them for all. ``priced`` keeps
    what is found of a choice of every decision.
    """

    kind: str
    decisions: tuple[Decision, ...]
    where: Mapping[str, int]
    edges: tuple[Edge, ...]
    has_parameters: bool
    held: Callable[[int, int], Held] = field(repr=False)
    priced: dict[tuple[int, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def _every(self, part: int) -> tuple[tuple[Any, ...], ...]:
        return tuple(
            tuple(self.held(number, choice)[part] for choice in range(len(decision.choices)))
            for number, decision in enumerate(self.decisions)
        )

    @cached_property
    def saved(self) -> Kept:
        return self._every(0)

    @cached_property
    def working_bytes(self) -> tuple[Floats, ...]:
        return tuple(np.array(sizes, dtype=np.float64) for sizes in self._every(1))

    @cached_property
    def selected(self) -> Kept:
        return self._every(2)

    @cached_property
    def read(self) -> Kept:
        return self._every(3)

    def parts(self, mode: Recompute) -> Kept:
        """What a block keeps from its forward to its backward, but for other blocks' values."""
        if mode == "none":
            return self.saved
        return self.selected if mode == "selective" else self.read

    def kept_bytes(self, mode: Recompute) -> Floats:
        """Bytes kept by each choice of all decisions, a storage counted with its first keeper.

        Their sum over a block's decisions is at most what it keeps.
        """
        counted: dict[str, int] = {}
        found = []
        for number, choices in enumerate(self.parts(mode)):
            for parts in choices:
                own = [size for name, size in parts if counted.setdefault(name, number) == number]
                found.append(float(sum(own)))
        return np.array(found)
