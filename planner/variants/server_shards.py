"""Distribution of parameters over servers, balanced by number of elements.

In: the elements of every parameter, by name and block, the number of servers. Out: runs of elements
(``Shard``), each on one server. A parameter larger than ``1 / PIECES`` of a server's even share is
cut into equal pieces; then every piece, the largest first, goes to the server with the fewest
elements (longest processing time first). So the fullest server holds at most ``1 / PIECES`` of a
share more than the emptiest.

Source: Graham 1969, "Bounds on Multiprocessing Timing Anomalies"; Li et al. 2014, "Scaling
Distributed Machine Learning with the Parameter Server", section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

PIECES = 32
"""Minimum number of pieces in an even share: servers then differ by at most 3 %."""
LEAST_ELEMENTS = 1024
"""Minimum elements of a piece, as each piece costs the bookkeeping of a request."""


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Elements ``start`` to ``stop`` of a parameter in memory order, which ``server`` holds."""

    parameter: str
    start: int
    stop: int
    server: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def shards_of(sizes: Mapping[str, int], num_servers: int) -> tuple[Shard, ...]:
    """Assign the elements of parameters to servers evenly; return the shards in the order of
    parameters. ``sizes``: number of elements by parameter.

    >>> [shard.server for shard in shards_of({"a": 10, "b": 6, "c": 5}, 2)]
    [0, 1, 1]
    """
    most = max(LEAST_ELEMENTS, sum(sizes.values()) // num_servers // PIECES)
    pieces = [
        (name, start, stop)
        for name, size in sizes.items()
        for start, stop in _pieces(size, most if num_servers > 1 else size)
    ]
    loads = [0] * num_servers
    found = {}
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        server = min(range(num_servers), key=loads.__getitem__)
        loads[server] += piece[2] - piece[1]
        found[piece] = server
    return _joined([Shard(*piece, found[piece]) for piece in pieces])


def _pieces(size: int, most: int) -> list[tuple[int, int]]:
    """Cut ``size`` elements into the fewest equal (start, stop) pieces of at most ``most``."""
    count = max(1, -(-size // max(1, most)))
    cuts = [size * index // count for index in range(count + 1)]
    return [pair for pair in pairwise(cuts) if pair[0] < pair[1] or not size]


def _joined(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Join neighbouring shards of a parameter that are on the same server."""
    found: list[Shard] = []
    for shard in shards:
        last = found[-1] if found else None
        if last is not None and (last.parameter, last.stop, last.server) == (
            shard.parameter,
            shard.start,
            shard.server,
        ):
            found[-1] = Shard(last.parameter, last.start, shard.stop, last.server)
        else:
            found.append(shard)
    return tuple(found)


def elements_of(
    shards: Sequence[Shard], block_of: Mapping[str, int], num_servers: int
) -> dict[int, list[int]]:
    """Map the position of each block to its number of elements on each server. ``block_of`` maps
    parameters to blocks."""
    found: dict[int, list[int]] = {}
    for shard in shards:
        held = found.setdefault(block_of[shard.parameter], [0] * num_servers)
        held[shard.server] += shard.size
    return found
