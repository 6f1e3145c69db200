"""Hosts without a switch: which devices are wired to which, and the wires that a group can use.

In: for every two devices of a host the number of links between them, and the devices of a
group. Out: over how many of its links each device can send at once while the group runs a
collective. A ring of the group that uses one link between neighbours carries data both ways
around, so each device sends over two of its links; two devices alone send to one another over
each link between them. Rings that share no link run at the same time. Source: NCCL,
src/graph/search.cc, which looks for as many rings as the wires have.

With a switch every device reaches every other over all of its links, and none of this matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, permutations

_Pair = tuple[int, int]
_Ring = tuple[_Pair, ...]
Wires = tuple[tuple[int, ...], ...]
"""Table of a host's wires: row i, column j has the number of links between its devices i and j."""

MOST_DEVICES = 8
"""Most devices of a host that is described by its wires; larger hosts have a switch."""

_HYBRID_CUBE_MESH: Wires = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
_ALL_PAIRS_TWICE: Wires = tuple(tuple(2 * (i != j) for j in range(4)) for i in range(4))
_ALL_PAIRS_ONCE: Wires = tuple(tuple(int(i != j) for j in range(8)) for i in range(8))

MOST_STEPS = 100_000
"""Most steps of the search for rings, each of which tries one more ring."""

WIRES: Mapping[str, Wires] = {
    "hybrid-cube-mesh": _HYBRID_CUBE_MESH,
    "all-pairs-twice": _ALL_PAIRS_TWICE,
    "all-pairs-once": _ALL_PAIRS_ONCE,
}
"""Known tables of wires by name. ``hybrid-cube-mesh``: 8 V100 with 6 links each, as ``nvidia-smi
topo -m`` shows them on DGX-1 and AWS p3.16xlarge; a host with fewer devices has the first ones.
``all-pairs-twice``: 4 V100, two links between any two. ``all-pairs-once``: 8 MI300X, one link
between any two."""


def are_wires(wires: Wires) -> bool:
    """Return true if a table of link counts is valid: square, symmetric, zeros on the diagonal.

    >>> are_wires(((0, 2), (2, 0))), are_wires(((0, 2), (1, 0)))
    (True, False)
    """
    size = len(wires)
    return all(len(row) == size and row[i] == 0 for i, row in enumerate(wires)) and all(
        wires[i][j] == wires[j][i] >= 0 for i in range(size) for j in range(i)
    )


def wires_among(wires: Wires, members: Sequence[int]) -> Wires:
    """Return the rows and columns of a host's table of link counts for the devices ``members``.

    >>> wires_among(WIRES["hybrid-cube-mesh"], (0, 3))
    ((0, 2), (2, 0))
    """
    return tuple(tuple(wires[i][j] for j in members) for i in members)


@lru_cache(maxsize=4096)
def num_links_used(wires: Wires) -> int:
    """Return the number of links over which each device can send at once in a collective of all
    devices, which uses as many disjoint rings as ``wires`` allows; 0 if there is no ring.

    >>> cube = WIRES["hybrid-cube-mesh"]
    >>> [num_links_used(wires_among(cube, range(n))) for n in (2, 4, 8)]
    [1, 4, 6]
    >>> num_links_used(wires_among(cube, (0, 2, 4, 6))), num_links_used(wires_among(cube, (3, 4)))
    (2, 0)
    """
    if len(wires) == 2:
        return wires[0][1]
    return 2 * _Search(wires).most_rings()


@dataclass
class _Search:
    """Search for the largest number of rings that share no link, each through all devices of a
    host. It stops after ``MOST_STEPS`` steps, which suffice for real hosts."""

    wires: Wires
    steps: int = 0

    def most_rings(self) -> int:
        number = len(self.wires)
        left = {(i, j): self.wires[i][j] for i, j in combinations(range(number), 2)}
        rings = [ring for ring in _rings(number) if all(left[pair] for pair in ring)]
        return self._most(rings, left, min(sum(row) // 2 for row in self.wires))

    def _most(self, rings: Sequence[_Ring], left: dict[_Pair, int], most: int) -> int:
        """Return the largest number of ``rings``, at most ``most``, that fit together in the links
        ``left`` (free links by pair of devices); a ring may be used several times."""
        best = 0
        for at, ring in enumerate(rings):
            self.steps += 1
            if best == most or self.steps > MOST_STEPS:
                break
            if all(left[pair] for pair in ring):
                for pair in ring:
                    left[pair] -= 1
                best = max(best, 1 + self._most(rings[at:], left, most - 1))
                for pair in ring:
                    left[pair] += 1
        return best


@cache
def _rings(number: int) -> tuple[_Ring, ...]:
    """List every ring through devices 0 … ``number`` − 1 once, as pairs of neighbours."""
    orders = [(0, *order) for order in permutations(range(1, number)) if order[0] <= order[-1]]
    return tuple(
        tuple((min(pair), max(pair)) for pair in zip(order, (*order[1:], 0), strict=True))
        for order in orders
    )
