"""Catalogue of pipeline schedules: description, source, bubble and memory of each.

``bubble`` and ``memory`` are the published formulas for D ranks, N micro-batches and K chunks per
rank, where a rank's forward, input backward and weight backward of a micro-batch take F, I and W (B
= I + W), equal on all ranks, without communication. The unit of memory is a rank's activations of
one micro-batch; a chunk's count 1/K. Tests check tables and simulations against both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

from ...cost_model.simulator.actions import (
    BACKWARD,
    FORWARD,
    WEIGHT_BACKWARD,
    Action,
    Table,
    Weights,
)
from .orders import (
    chimera,
    gpipe,
    inference,
    interleaved_1f1b,
    looped_bfs,
    one_forward_one_backward,
    terapipe,
    updating_1f1b,
)
from .zero_bubble import dualpipev, zb_h1, zb_h2, zbv

Family = Literal["synchronous", "asynchronous", "inference"]


class Size(NamedTuple):
    """Numbers that determine a schedule's order of actions. Chunks are stages per rank, slices are
    parts of each sequence, and ``per_update`` is the number of micro-batches per weight update."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    num_slices: int = 1
    per_update: int = 1


Orders = Callable[[Size], Table]
"""Function that returns the compute actions of each pipeline rank in order."""


class InFlight(Protocol):
    """Function (num_stages, num_microbatches, stage) → largest number of micro-batches whose
    activations ``stage`` holds at once. For several stages (chunks) per rank it also takes their
    number."""

    def __call__(
        self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """Description of a pipeline schedule.

    Synchronous schedules give one device's result exactly; asynchronous schedules compute gradients
    at older weights, as ``weights`` says. ``chunks``: minimum and maximum stages per rank.
    ``is_v``: chunks run alternately down and up the ranks (a V). ``splits_backward``: for a user's
    schedule, whether it computes weight gradients in separate actions; None for built-in schedules.
    """

    name: str
    description: str
    source: str
    orders: Orders
    in_flight: InFlight
    bubble: str
    memory: str
    family: Family = "synchronous"
    chunks: tuple[int, int] = (1, 1)
    weights: Weights = "flushed"
    is_v: bool = False
    splits_backward: bool | None = None

    @property
    def trains(self) -> bool:
        return self.family != "inference"

    @property
    def is_registered(self) -> bool:
        return self.splits_backward is not None


MANY = 2**31
"""Maximum number of chunks of a schedule that sets no limit."""


def stages_of_ranks(num_ranks: int, num_chunks: int, *, is_v: bool) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank. Each chunk places one stage on every rank, in ascending order
    of ranks; in a V (``is_v``) every second chunk goes in descending order."""
    rows = [
        range(first, first + num_ranks) for first in range(0, num_ranks * num_chunks, num_ranks)
    ]
    return tuple(
        zip(*(row[:: -1 if is_v and n % 2 else 1] for n, row in enumerate(rows)), strict=True)
    )


def _held(actions: Iterable[Action], stage: int) -> int:
    """Return the largest number of micro-batches of ``stage`` that are, at one time, between their
    forward and their backward (their weight backward if backwards are split)."""
    held = most = 0
    for action in actions:
        if action.stage == stage:
            if action.kind == FORWARD:
                held += 1
                most = max(most, held)
            elif action.kind in (BACKWARD, WEIGHT_BACKWARD):
                held -= 1
    return most


def counted(orders: Orders, *, v_shape: bool = False) -> InFlight:
    """Return a function that counts, in the table that ``orders`` builds, the most micro-batches
    that a stage holds at once. ``v_shape``: odd chunks run from the last rank to the first."""

    def in_flight(
        num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /
    ) -> int:
        num_ranks = num_stages // num_chunks
        chunk, rank = divmod(stage, num_ranks)
        if v_shape and chunk % 2:
            rank = num_ranks - 1 - rank
        return _held(orders(Size(num_ranks, num_microbatches, num_chunks))[rank], stage)

    return in_flight


def _both_ways(num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /) -> int:
    """Return the most micro-batches that Chimera's rank ``stage`` holds at once, in two stages."""
    return _held_both_ways(num_stages, num_microbatches)[stage]


@lru_cache(maxsize=16)
def _held_both_ways(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return, by rank of Chimera, the most micro-batches held at once over its two stages."""
    most = []
    for row in chimera(num_stages, num_microbatches):
        held = accumulate(1 if action.kind == FORWARD else -1 for action in row)
        most.append(max(held, default=0))
    return tuple(most)


def _interleaved(size: Size) -> Table:
    return interleaved_1f1b(size.num_ranks, size.num_microbatches, size.num_chunks)


def _zb_h1(size: Size) -> Table:
    return zb_h1(size.num_ranks, size.num_microbatches, size.num_chunks)


def _zbv(size: Size) -> Table:
    return zbv(size.num_ranks, size.num_microbatches)


def _dualpipev(size: Size) -> Table:
    return dualpipev(size.num_ranks, size.num_microbatches)


def _all(num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /) -> int:
    return num_microbatches


def _to_the_end(num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /) -> int:
    return min(num_microbatches, num_stages - stage)


def _once(num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /) -> int:
    return 1


SYNCHRONOUS = (
    ScheduleInfo(
        "gpipe",
        "all forwards, then all backwards",
        "Huang et al. 2019, GPipe (arXiv:1811.06965), figure 2c",
        lambda size: gpipe(size.num_ranks, size.num_microbatches),
        _all,
        "(D-1) / (D-1+N)",
        "N",
    ),
    ScheduleInfo(
        "1f1b",
        "one forward, one backward; memory does not grow with the micro-batches",
        "Narayanan et al. 2021, PipeDream-Flush (arXiv:2006.09503), figure 3",
        lambda size: one_forward_one_backward(size.num_ranks, size.num_microbatches),
        _to_the_end,
        "(D-1) / (D-1+N)",
        "D - rank",
    ),
    ScheduleInfo(
        "eager-1f1b",
        "1F1B with twice the warm-up, which hides the round trip of the messages",
        "Zhuang et al. 2023 (arXiv:2211.05322), section 4",
        lambda size: one_forward_one_backward(size.num_ranks, size.num_microbatches, eager=2),
        lambda num_stages, num_microbatches, stage, num_chunks=1: min(
            num_microbatches, 2 * (num_stages - stage) - 1
        ),
        "(D-1) / (D-1+N)",
        "2 (D - rank) - 1",
    ),
    ScheduleInfo(
        "interleaved",
        "1F1B with several stages per rank, which divides the bubble by their number",
        "Narayanan et al. 2021 (arXiv:2104.04473), section 2.2",
        _interleaved,
        counted(_interleaved),
        "(D-1) / (D-1+KN)",
        "D + (D-1)/K at most",
        chunks=(1, MANY),
    ),
    ScheduleInfo(
        "bfs",
        "several stages per rank, each run for all micro-batches in a row",
        "Lamy-Poirier 2022 (arXiv:2211.05953), section 4",
        lambda size: looped_bfs(size.num_ranks, size.num_microbatches, size.num_chunks),
        _all,
        "(D-1) / (D-1+KN)",
        "N",
        chunks=(1, MANY),
    ),
    ScheduleInfo(
        "zb-h1",
        "1F1B whose weight gradients wait and fill the bubble",
        "Qi et al. 2023 (arXiv:2401.10241), section 2.1",
        _zb_h1,
        counted(_zb_h1),
        "(D-1)(F+I-W) / work",
        "D",
        chunks=(1, MANY),
    ),
    ScheduleInfo(
        "zb-h2",
        "twice the memory of 1F1B, no bubble where F = I = W",
        "Qi et al. 2023 (arXiv:2401.10241), section 2.2",
        lambda size: zb_h2(size.num_ranks, size.num_microbatches),
        lambda num_stages, num_microbatches, stage, num_chunks=1: min(
            num_microbatches, 2 * num_stages - 1
        ),
        "(D-1)(F+I-2W) / work",
        "2 D - 1",
    ),
    ScheduleInfo(
        "zbv",
        "two chunks per rank in a V: the memory of 1F1B, no bubble where F = I = W",
        "Qi et al. 2023 (arXiv:2401.10241), section 6",
        _zbv,
        counted(_zbv, v_shape=True),
        "0 where F = I = W",
        "D",
        chunks=(2, 2),
        is_v=True,
    ),
    ScheduleInfo(
        "dualpipev",
        "two chunks per rank in a V, forwards of one paired with backwards of the other",
        "DeepSeek, github.com/deepseek-ai/DualPipe; arXiv:2412.19437, section 3.2.1",
        _dualpipev,
        counted(_dualpipev, v_shape=True),
        "(D-1)(F&B+B-3W) / work, of chunks",
        "D + 1/2",
        chunks=(2, 2),
        is_v=True,
    ),
    ScheduleInfo(
        "chimera",
        "1F1B in both directions at once; every rank holds two parts of the model",
        "Li and Hoefler 2021 (arXiv:2107.06925), sections 3.1 and 3.5",
        lambda size: chimera(size.num_ranks, size.num_microbatches),
        _both_ways,
        "(D-2) / (D-2+3N/2) where B = 2F, N = D",
        "D/2 + 1 to D",
    ),
    ScheduleInfo(
        "terapipe",
        "slices of the sequence follow each other through causal attention",
        "Li et al. 2021 (arXiv:2102.07988), section 3",
        lambda size: terapipe(size.num_ranks, size.num_microbatches, size.num_slices),
        _all,
        "(D-1) / (D-1+SN), S equal slices",
        "N",
    ),
)

ASYNCHRONOUS = (
    ScheduleInfo(
        "pipedream",
        "1F1B that updates after every backward; a backward uses its forward's weights",
        "Harlap et al. 2018 (arXiv:1806.03377), section 3",
        lambda size: updating_1f1b(size.num_ranks, size.num_microbatches),
        _to_the_end,
        "0 once filled",
        "D - rank, and D - rank versions of the weights",
        family="asynchronous",
        weights="stashed",
    ),
    ScheduleInfo(
        "pipedream-2bw",
        "1F1B that never drains; two versions of the weights, gradients one update late",
        "Narayanan et al. 2021 (arXiv:2006.09503), section 3.1",
        lambda size: updating_1f1b(size.num_ranks, size.num_microbatches, size.per_update),
        _to_the_end,
        "0 once filled",
        "D - rank, and 2 versions of the weights",
        family="asynchronous",
        weights="double-buffered",
    ),
    ScheduleInfo(
        "ampnet",
        "an update on every backward, with the newest weights; nothing is stashed",
        "Gaunt et al. 2017 (arXiv:1705.09786), section 3",
        lambda size: updating_1f1b(size.num_ranks, size.num_microbatches),
        _to_the_end,
        "0 once filled",
        "D - rank",
        family="asynchronous",
        weights="latest",
    ),
)

INFERENCE = (
    ScheduleInfo(
        "inference",
        "forwards only",
        "",
        lambda size: inference(size.num_ranks, size.num_microbatches),
        _once,
        "(D-1) / (D-1+N)",
        "1",
        family="inference",
    ),
)

SCHEDULES: Mapping[str, ScheduleInfo] = {
    info.name: info for info in (*SYNCHRONOUS, *ASYNCHRONOUS, *INFERENCE)
}
"""Built-in schedules by name. ``request`` lists the schedules of ``plan --parallel schedule=``;
``simulate`` accepts all that train."""

LOOPED = tuple(name for name, info in SCHEDULES.items() if info.chunks[1] == MANY)
"""Schedules with any number of stages per rank; stage ``s`` is on rank ``s % num_ranks``."""
