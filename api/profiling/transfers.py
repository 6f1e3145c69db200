"""Transfers that are to be measured, and the place in the profile database where they belong."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.cost_model.profile.records import Transfer
from autoparallel.runtime.profile.links import Links, LinkTime

LEAST_BYTES, MOST_BYTES, STEP = 1 << 10, 1 << 28, 4
"""Sizes of transfers: from the first to the second, as far as is asked, each ``STEP`` times
the one before."""


@dataclass(frozen=True, slots=True)
class LinkTodo:
    """Transfers to measure, and the place in the database where they belong.

    ``is_asked``: the search asked for them; others are measured where time is left.
    """

    links: Links
    level: str
    library: str
    num_hosts: int
    is_asked: bool

    def transfer(self, found: LinkTime) -> Transfer:
        return Transfer(
            self.level, self.library, self.links.kind, len(self.links.partition[0]),
            self.num_hosts, found.num_bytes, found.seconds, found.repeats,
        )  # fmt: skip

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        ranks = len(self.links.partition[0])
        return (self.level, self.library, self.links.kind, ranks, self.num_hosts)


def sizes_to(most_bytes: float, step: int = STEP) -> tuple[int, ...]:
    """Sizes to measure for transfers of up to ``most_bytes``.

    >>> sizes_to(20_000)
    (1024, 4096, 16384, 65536)
    """
    sizes = [LEAST_BYTES]
    while sizes[-1] < min(most_bytes, MOST_BYTES):
        sizes.append(sizes[-1] * step)
    return tuple(sizes)
