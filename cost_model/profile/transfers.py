"""Seconds of collectives and messages from measured ones.

In: measured transfers. Out: seconds of another size of the same collective in an equal
group; and, for groups that were not measured, the latency and bandwidth of the level they
talk over. Between measured sizes (which lie apart by factors, not by differences) time is
linear in bytes; below the smallest it is that of the smallest, for latency does not shrink;
above the largest it goes on as between the last two, which is α + S/β at the rate reached.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..collectives.collectives import Group
from .case import ProfileError
from .interpolation import pooled_adjacent
from .records import Transfer

MessageSource = Literal["measured", "interpolated"]


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Measured ``seconds`` of successive messages over a link, which carry ``num_bytes`` in all."""

    num_messages: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferCurve:
    """Measured seconds of a collective or message, for one layout of ranks, at ascending sizes; the
    seconds do not decrease with the bytes."""

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, num_bytes: float) -> tuple[float, MessageSource]:
        sizes, times = self.num_bytes, self.seconds
        index = bisect_left(sizes, num_bytes)
        if index < len(sizes) and sizes[index] == num_bytes:
            return times[index], "measured"
        if index == 0:
            return times[0], "interpolated"
        if len(sizes) == 1:
            return times[0] * num_bytes / sizes[0], "interpolated"
        index = min(index, len(sizes) - 1)
        slope = (times[index] - times[index - 1]) / (sizes[index] - sizes[index - 1])
        return times[index - 1] + slope * (num_bytes - sizes[index - 1]), "interpolated"


def level_of(group: Group) -> str:
    """Return the name of the kind of links over which a group communicates, within hosts ("intra"),
    between hosts ("inter") or both ("mixed").

    >>> from ..cluster.cluster import Link
    >>> fast, slow = Link("nvlink4", 0.0, 1.0), Link("ethernet-100g", 0.0, 1.0)
    >>> level_of(Group(8, 8, 1, fast, slow)), level_of(Group(4, 1, 4, fast, slow))
    ('intra:nvlink4', 'inter:ethernet-100g')
    >>> level_of(Group(4, 4, 1, Link("nvlink2", 0.0, 1.0, num_links=2, of_links=6), slow))
    'intra:nvlink2x2'
    """
    within = group.intra.name + (f"x{group.intra.num_links}" if group.intra.of_links else "")
    if group.num_hosts == 1:
        return f"intra:{within}"
    if group.ranks_per_host == 1 and group.is_even:
        return f"inter:{group.inter.name}"
    return f"mixed:{within}+{group.inter.name}"


def overlapped(kind: str) -> str:
    """Return the name under which the database records how many seconds of compute a collective
    costs that runs at the same time. ``kind``: kind of collective.

    >>> overlapped("all_gather")
    'all_gather beside compute'
    """
    return f"{kind} beside compute"


def transfer_curve(transfers: Iterable[Transfer]) -> TransferCurve:
    """Return seconds as a function of bytes, from transfers of one collective and group of
    ranks."""
    ordered = sorted(transfers, key=lambda each: each.num_bytes)
    seconds = pooled_adjacent(np.array([each.seconds for each in ordered]), np.ones(len(ordered)))
    return TransferCurve(
        tuple(float(each.num_bytes) for each in ordered), tuple(map(float, seconds))
    )


def link_points(transfers: Iterable[Transfer]) -> tuple[LinkPoint, ...]:
    """Return points to fit the latency and rate of a link, from ``transfers`` measured over it.
    They are messages, with the most pairs of ranks at once, if any were measured, else ring
    collectives: an all-gather or reduce-scatter of S bytes among n ranks sends n − 1 messages and
    S(n − 1)/n bytes one after the other, an all-reduce twice as many (Thakur et al., IJHPCA 19(1),
    2005, section 4)."""
    listed = list(transfers)
    messages = [each for each in listed if each.kind == "p2p"]
    if messages:
        most = max(each.num_ranks for each in messages)
        messages = [each for each in messages if each.num_ranks == most]
        return tuple(LinkPoint(1, each.num_bytes, each.seconds) for each in messages)
    points = []
    for each in listed:
        rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(each.kind, 0)
        steps = rounds * (each.num_ranks - 1)
        if steps:
            points.append(LinkPoint(steps, steps * each.num_bytes / each.num_ranks, each.seconds))
    return tuple(points)


def fit_link(points: Sequence[LinkPoint]) -> tuple[float, float]:
    """Fit a link's latency α (seconds per message) and rate β (bytes per second) to measured
    points; return (α, β). They minimize Σ ((messages·α + bytes/β) / seconds − 1)² over α ≥ 0, β >
    0. Raises ``ProfileError`` if the points have fewer than two sizes.

    >>> alpha, rate = fit_link([LinkPoint(1, 1e3, 2e-6), LinkPoint(1, 1e6, 1.001e-3)])
    >>> round(alpha * 1e6, 6), round(rate)
    (1.0, 1000000000)
    """
    if len({point.num_bytes / point.num_messages for point in points}) < 2:
        raise ProfileError("fitting a link needs transfers of at least two sizes")
    rows = np.array([(p.num_messages / p.seconds, p.num_bytes / p.seconds) for p in points])
    ones = np.ones(len(rows))
    scale = rows.max(axis=0)
    alpha, per_byte = np.linalg.lstsq(rows / scale, ones, rcond=None)[0] / scale
    if alpha < 0:
        alpha, per_byte = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if per_byte <= 0:
        largest = max(points, key=lambda point: point.num_bytes)
        per_byte = largest.seconds / largest.num_bytes
        alpha = 0.0
    return float(alpha), float(1 / per_byte)
