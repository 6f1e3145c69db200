"""Pipeline schedules: the order in which each pipeline rank computes, as pure functions.

In: a schedule's name, how many stages and micro-batches. Out: the action table that the
checks, the simulator and the interpreter share. A schedule is defined by the order of its
compute actions alone (``schedules_orders``); sends and receives are added by one rule for
all schedules (``schedules_messages``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..cost_model.actions import Edges, Schedule, Table, Wiring, chain
from .errors import UsageError
from .schedules_messages import complete
from .schedules_orders import (
    depths,
    gpipe,
    inference,
    interleaved_1f1b,
    interleaved_in_flight,
    looped_bfs,
    one_forward_one_backward,
    round_size,
)

Orders = Callable[[int, int], Table]
"""(num_ranks, num_microbatches) → the compute actions of each pipeline rank, in order."""

LoopedOrders = Callable[[int, int, int], Table]
"""(num_ranks, num_microbatches, num_chunks) → the same, with several stages per rank."""


class InFlight(Protocol):
    """(num_stages, num_microbatches, stage) → the most micro-batches whose activations it holds.

    A looped schedule also asks for the number of chunks per rank.
    """

    def __call__(
        self, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1, /
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule by name: what it is, its compute orders, and what it holds in memory.

    ``looped`` schedules run several stages (chunks) per rank.
    """

    name: str
    description: str
    source: str
    orders: Orders | None
    in_flight: InFlight
    trains: bool = True
    looped: LoopedOrders | None = None


SCHEDULES: Mapping[str, ScheduleInfo] = {
    info.name: info
    for info in (
        ScheduleInfo(
            "gpipe",
            "all forwards, then all backwards",
            "Huang et al. 2019, GPipe, figure 2c",
            gpipe,
            lambda num_stages, num_microbatches, stage, num_chunks=1: num_microbatches,
        ),
        ScheduleInfo(
            "1f1b",
            "one forward, one backward; memory does not grow with the micro-batches",
            "Narayanan et al. 2021, PipeDream-Flush, figure 2",
            one_forward_one_backward,
            lambda num_stages, num_microbatches, stage, num_chunks=1: min(
                num_microbatches, num_stages - stage
            ),
        ),
        ScheduleInfo(
            "eager-1f1b",
            "1F1B with twice the warm-up, which hides the round trip of the messages",
            "Zhuang et al. 2023, arXiv:2211.05322, section 4",
            partial(one_forward_one_backward, eager=2),
            lambda num_stages, num_microbatches, stage, num_chunks=1: min(
                num_microbatches, 2 * (num_stages - stage) - 1
            ),
        ),
        ScheduleInfo(
            "inference",
            "forwards only",
            "",
            inference,
            lambda num_stages, num_microbatches, stage, num_chunks=1: 1,
            trains=False,
        ),
        ScheduleInfo(
            "interleaved-1f1b",
            "1F1B with several stages per rank, which divides the bubble by their number",
            "Narayanan et al. 2021, arXiv:2104.04473, section 2.2",
            None,
            lambda num_stages, num_microbatches, stage, num_chunks=1: interleaved_in_flight(
                num_stages, num_microbatches, stage, num_chunks
            ),
            looped=interleaved_1f1b,
        ),
        ScheduleInfo(
            "bfs",
            "several stages per rank, each run for all micro-batches in a row",
            "Lamy-Poirier 2022, arXiv:2211.05953",
            None,
            lambda num_stages, num_microbatches, stage, num_chunks=1: num_microbatches,
            looped=looped_bfs,
        ),
    )
}
"""Every schedule by its name. Those that ``--parallel schedule=`` of ``plan`` takes are in
``request``: the runtime executes one stage per rank, so the looped ones are for ``simulate``.
"""

LOOPED = tuple(name for name, info in SCHEDULES.items() if info.looped is not None)


def build_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_chunks: int = 1,
    prefetch: int = 2,
    edges: Edges | None = None,
) -> Schedule:
    """The action table of the schedule ``name``.

    ``edges`` say which stages need which; without them each needs the one before.

    ``num_chunks`` stages share a pipeline rank, in looped schedules: stage ``s`` is on rank
    ``s % (num_stages / num_chunks)``. ``prefetch`` is how many compute actions ahead of its
    use a receive is posted: 2 posts the next one of each direction while forwards and
    backwards alternate. Raises UsageError for an unknown name, an empty pipeline, or chunks
    and micro-batches that the schedule cannot have.

    >>> from autoparallel.cost_model.actions import format_table
    >>> print(format_table(build_schedule("1f1b", 2, 2).table))
    0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1 0REDUCE 0STEP
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE 1STEP
    """
    if name not in SCHEDULES:
        raise UsageError(
            "AP150", f"there is no schedule named {name!r}", where="schedule",
            fix=f"use one of {', '.join(SCHEDULES)}",
        )  # fmt: skip
    if num_stages < 1 or num_microbatches < 1:
        raise UsageError(
            "AP151", f"a schedule of {num_stages} stages and {num_microbatches} micro-batches",
            why="a pipeline has at least one stage and one micro-batch", where="schedule",
        )  # fmt: skip
    if edges is None or edges == chain(num_stages):
        orders = _orders(SCHEDULES[name], num_stages, num_microbatches, num_chunks)
        return Schedule(name, num_microbatches, *complete(orders, prefetch=prefetch))
    if name not in OF_GRAPHS:
        raise UsageError(
            "AP154", f"schedule {name!r} runs stages one after the other", where="schedule",
            why="this plan has stages that do not need each other",
            fix=f"use one of {', '.join(OF_GRAPHS)}",
        )  # fmt: skip
    orders = OF_GRAPHS[name](num_microbatches, depths(Wiring.of(num_stages, edges)))
    tied = complete(orders, prefetch=prefetch, edges=edges)
    return Schedule(name, num_microbatches, *tied, edges=edges)


OF_GRAPHS: Mapping[str, Callable[[int, tuple[int, ...]], Table]] = {
    "gpipe": lambda num_microbatches, depth: gpipe(len(depth), num_microbatches),
    "1f1b": lambda num_microbatches, depth: one_forward_one_backward(
        len(depth), num_microbatches, depth=depth
    ),
    "eager-1f1b": lambda num_microbatches, depth: one_forward_one_backward(
        len(depth), num_microbatches, depth=depth, eager=2
    ),
    "inference": lambda num_microbatches, depth: inference(len(depth), num_microbatches),
}
"""The orders of the schedules that run stages of any graph, by the stages' depths."""


def in_flight(name: str, depth: int, num_stages: int, num_microbatches: int) -> int:
    """The most micro-batches that a stage of this depth (see ``depths``) holds at once.

    >>> in_flight("1f1b", 2, 3, 8), in_flight("gpipe", 2, 3, 8), in_flight("gpipe", 1, 1, 8)
    (2, 8, 1)
    """
    return 1 if num_stages == 1 else SCHEDULES[name].in_flight(depth, num_microbatches, 0)


def _orders(info: ScheduleInfo, num_stages: int, num_microbatches: int, num_chunks: int) -> Table:
    if num_chunks < 1 or num_stages % num_chunks:
        raise _bad_chunks(f"{num_stages} stages are not {num_chunks} chunks on each rank")
    num_ranks = num_stages // num_chunks
    if info.looped is None:
        assert info.orders is not None
        if num_chunks > 1:
            raise _bad_chunks(
                f"schedule {info.name!r} runs one chunk per rank, not {num_chunks}",
                f"one of {', '.join(LOOPED)}",
            )
        return info.orders(num_ranks, num_microbatches)
    if info.looped is interleaved_1f1b and not round_size(num_ranks, num_microbatches):
        raise _bad_chunks(
            f"{num_microbatches} micro-batches cannot go in equal rounds through {num_ranks} ranks",
            f"a multiple of {num_ranks} micro-batches",
        )
    return info.looped(num_ranks, num_microbatches, num_chunks)


def _bad_chunks(what: str, fix: str = "") -> UsageError:
    return UsageError("AP153", what, where="schedule", fix=fix)
