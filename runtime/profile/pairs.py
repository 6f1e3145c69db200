"""Measurement of each device and link of a cluster separately, to find the slow ones.

In: rounds of pairs of ranks that send each other messages at the same time. Out: the time of each
pair, for messages of several sizes, and of a product of matrices on each rank.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.profile.clocks import stopwatch
from ..messages.shared_objects import control_group, gather_values
from .links import WARMUP_CALLS, Links, message_call

SIZES = (1 << 14, 1 << 18, 1 << 22)
"""Sizes of messages in bytes on a CPU; the largest on a GPU is ``GPU_FACTOR`` times as large."""
GPU_FACTOR = 16
CALLS = 7
ROUND_SECONDS = 0.5
"""Time spent on the messages of one size; at least ``CALLS`` messages are sent."""
PRODUCT = {"cpu": 512, "cuda": 4096}
"""Number of rows of the square matrices that are multiplied, by kind of device."""

Pair = tuple[int, int]
Round = tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class PairTime:
    """Measured seconds of a message of ``num_bytes`` from one rank of ``pair`` to the other."""

    pair: Pair
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank's host and device, and its seconds for a matrix product that all ranks compute at
    once."""

    host: str
    device: str
    torch: str
    product_seconds: float


def rounds_of(cluster: Cluster) -> tuple[Round, ...]:
    """Return rounds of rank pairs that cover every link once or twice: first neighbours within
    hosts, then adjacent hosts, paired rank by rank. No rank is in two pairs of a round.

    >>> from ...cost_model.cluster.shorthand import parse_cluster
    >>> rounds_of(parse_cluster("2x2xcpu"))
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    >>> rounds_of(parse_cluster("3x1xcpu"))
    (((0, 1),), ((1, 2),), ((2, 0),))
    """
    sizes = [host.num_devices for host in cluster.hosts]
    starts = cluster.first_ranks
    rounds: list[Round] = []
    for odd in (0, 1):
        rounds.append(
            tuple(
                (start + at, start + at + 1)
                for start, size in zip(starts, sizes, strict=True)
                for at in range(odd, size - 1, 2)
            )
        )
    count = len(sizes)
    ring = [(host, (host + 1) % count) for host in range(count if count > 2 else count - 1)]
    for group in (
        ring[0 : count - count % 2 : 2],
        ring[1::2],
        ring[count - 1 :] if count % 2 else [],
    ):
        rounds.append(
            tuple(
                (starts[one] + at, starts[other] + at)
                for one, other in group
                for at in range(min(sizes[one], sizes[other]))
            )
        )
    return tuple(each for each in rounds if each)


def rank_facts(device: torch.device) -> list[RankFacts]:
    """Return every rank's host, device, torch version and seconds for a matrix product, in rank
    order, on every rank. Collective over all ranks.

    All ranks multiply at the same time, as they compute in training.
    """
    size = PRODUCT[device.type]
    left = torch.ones(size, size, device=device)
    watch = stopwatch(device.type)
    multiply = partial(torch.mm, left, left)
    watch.samples(multiply, WARMUP_CALLS)
    dist.barrier(group=control_group())
    seconds = median(watch.samples(multiply, CALLS))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return gather_values(RankFacts(socket.gethostname(), name, str(torch.__version__), seconds))


def pair_times(pairs: Round, device: torch.device) -> Iterator[PairTime]:
    """Measure messages within each of ``pairs``, all pairs at once; yield the time for each size
    and pair. Collective over all ranks. All pairs send equally many messages, so that none has the
    links for itself at the end."""
    factor = GPU_FACTOR if device.type == "cuda" else 1
    watch = stopwatch(device.type)
    for num_bytes in (*SIZES[:-1], SIZES[-1] * factor):
        call, _, actual = message_call(Links("p2p", pairs, (num_bytes,)), device)(num_bytes)
        for _ in range(WARMUP_CALLS):
            call()
        first = max(gather_values(watch.samples(call, 1)[0]))
        count = max(CALLS, min(20 * CALLS, int(ROUND_SECONDS / max(first, 1e-5))))
        dist.barrier(group=control_group())
        seconds = gather_values(median(watch.samples(call, count)))
        for pair in pairs:
            yield PairTime(pair, actual, max(seconds[each] for each in pair))


def all_pair_times(rounds: Sequence[Round], device: torch.device) -> list[PairTime]:
    """Measure all rounds of pairs, one after the other; return the time for each message size and
    pair. Collective over all ranks."""
    return [time for pairs in rounds for time in pair_times(pairs, device)]
