"""The two sides of a lane: equal for a sound table, refused by name where they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_processes

from autoparallel.cost_model.simulator.actions import Schedule, format_table, parse_table
from autoparallel.passes.local.stage_cut import Boundary
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Mesh
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.messages.exchange import Exchange
from autoparallel.runtime.messages.ordered_channels import check_lanes

CPU = torch.device("cpu")
WHOLE = (INVARIANT, INVARIANT)


class Place:
    def __init__(self, rank: int) -> None:
        self.mesh, self.devices = Mesh(("dp", "tp"), (1, 1)), (rank,)


WRONG = {
    "other order": ("0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0SEND_F0"),
    "not sent": ("0SEND_F1 ", ""),
    "not received": ("0RECV_B1 ", ""),
}


def edited(schedule: Schedule, old: str, new: str) -> Schedule:
    text = format_table(schedule.table)
    assert old in text
    return replace(schedule, table=parse_table(text.replace(old, new, 1)))


def compare(schedule: Schedule, wrong: str, on: tuple[int, ...]) -> tuple[list[str], ...]:
    """On a rank: stages 0 and 2, or 1 and 3; a value jumps from 0 to 3 beside the chain."""
    rank = dist.get_rank()
    spec = TensorSpec((4, 6), "float32", requires_grad=True)
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
    crossing = [Boundary(f"v{s}{t}", s, t, spec, WHOLE, WHOLE) for s, t in pairs]
    stages = tuple(Place(owner) for owner in schedule.stage_rank)
    if wrong and rank in on:
        schedule = edited(schedule, *WRONG[wrong])
    exchange = Exchange([crossing], schedule=schedule, stages=stages, rank=rank, device=CPU)
    sent, taken = exchange.sequences()
    check_lanes(sent, taken)
    return (*sent.values(), *taken.values())


JUMPS = ((0, 5), (2, 3), (2, 5))
"""Stage 2 sends to both stages of rank 1 that follow, to the later of which stage 0 sends too."""


def compare_jumps() -> None:
    rank = dist.get_rank()
    spec = TensorSpec((4, 6), "float32", requires_grad=True)
    crossing = [
        Boundary(f"v{s}{t}", s, t, spec, WHOLE, WHOLE)
        for s, t in {*JUMPS, *((s, s + 1) for s in range(5))}
    ]
    schedule = build_schedule("interleaved", 6, 2, num_chunks=3)
    stages = tuple(Place(owner) for owner in schedule.stage_rank)
    exchange = Exchange([crossing], schedule=schedule, stages=stages, rank=rank, device=CPU)
    sent, taken = exchange.sequences()
    assert sent
    assert taken
    check_lanes(sent, taken)


def test_what_is_sent_at_once_to_several_stages_of_a_rank_is_taken_in_that_order() -> None:
    run_processes(2, compare_jumps)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return build_schedule("interleaved", 4, 2, num_chunks=2)


def test_both_sides_take_what_is_sent_in_its_order(schedule: Schedule) -> None:
    """The value that jumps is taken with the sender's other one, long before stage 3 needs it."""
    (sent, came), (back, taken) = run_processes(2, compare, schedule, "", ())
    assert sent == taken
    assert came == back
    assert sent[:4] == [
        f"0SEND_F{m} to stage {t}: v0{t} (4, 6) torch.float32" for m in (0, 1) for t in (1, 3)
    ]


@pytest.mark.parametrize(
    ("wrong", "on", "message"),
    [
        ("other order", (0,), "message 1 is 0SEND_F1 to stage 1: v01 .* on rank 0, and 0SEND_F0"),
        ("not sent", (0,), "message 3 is 2SEND_F0 .* on rank 0, and 0SEND_F1 to stage 1"),
        ("not sent", (0, 1), "is nothing on rank 0, and 0SEND_F1, which is not sent, on rank 1"),
        ("not received", (0,), "1SEND_B1 to stage 0: v01 .* on rank 1, and nothing on rank 0"),
    ],
)
def test_a_wrong_table_is_refused_when_the_exchange_is_made(
    schedule: Schedule, wrong: str, on: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RankError, match=r"AP542.*does not expect(.|\n)*" + message):
        run_processes(2, compare, schedule, wrong, on)
