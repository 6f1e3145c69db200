"""The lines that a schedule's messages go by: from one stage to another, on different ranks.

In: a schedule, the ``StageCosts`` of its stages. Out: by direction and stage, the lines that it
sends by and receives by, each with the ranks at its ends and what a message takes on it.
"""

from __future__ import annotations

from typing import NamedTuple

from .action_costs import message_costs, wiring_of_ranks
from .actions import Schedule
from .stage_costs import StageCosts


class Line(NamedTuple):
    """From stage ``source`` to stage ``target``; seconds as in ``MessageCost``."""

    source: int
    target: int
    sender: int
    receiver: int
    latency: float
    occupied: float
    send_call: float
    receive_call: float


Lines = tuple[tuple[Line, ...], ...]
"""Of each stage."""


def lines_of(schedule: Schedule, costs: StageCosts) -> tuple[tuple[Lines, Lines], bool]:
    """The lines into each stage, of forwards' and of backwards' messages; whether each stage has
    one at most of either."""
    wiring, ranks = wiring_of_ranks(schedule), schedule.stage_rank
    there, back = (
        tuple(
            tuple(
                Line(source, stage, ranks[source], ranks[stage], *found[source, stage])
                for source in sources
            )
            for stage, sources in enumerate(needed)
        )
        for needed, found in zip(wiring, message_costs(schedule, costs), strict=True)
    )
    return (there, back), all(len(own) < 2 for own in (*there, *back))


def outgoing(lines: Lines) -> Lines:
    """The same by the stage that they come from, by target in ascending order."""
    found: list[list[Line]] = [[] for _ in lines]
    for own in lines:
        for line in own:
            found[line.source].append(line)
    return tuple(map(tuple, found))
