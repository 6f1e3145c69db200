"""The messages that ranks hold, against queues and memory that are written out here."""

from __future__ import annotations

import pytest

from autoparallel.cost_model.simulator.actions import Action, Schedule, parse_table
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, SCHEDULES
from autoparallel.planner.schedules.held import (
    KEPT_ON_GLOO,
    MessageBytes,
    messages_held,
    sends_kept,
)
from autoparallel.planner.schedules.schedules import build_schedule, can_have


def unit_messages(schedule: Schedule) -> MessageBytes:
    """Every message of a chain, forward and backward, takes one byte on either side."""
    edges = schedule.wiring.consumers
    pairs = [(s, t) for s, targets in enumerate(edges) for t in targets]
    both = dict.fromkeys((*pairs, *((t, s) for s, t in pairs)), 1.0)
    return MessageBytes(both, both)


def held(schedule: Schedule, rank: int, most: int) -> dict[Action, float]:
    return dict(messages_held(schedule, rank, unit_messages(schedule), most))


def test_what_a_sender_sends_before_is_received_too() -> None:
    """Rank 0 sends both micro-batches to stage 1 and then stage 2's; rank 1 wants that first."""
    table = parse_table(
        "0F0 0SEND_F0 2F0 2SEND_F0 0F1 0SEND_F1\n3RECV_F0 3F0 1RECV_F0 1F0 1RECV_F1 1F1"
    )
    schedule = Schedule("example", 2, (0, 1, 0, 1), table, edges=((0, 1), (2, 3)))
    assert list(held(schedule, 1, 1).values()) == [1.0, 0.0, 0.0]
    assert list(held(schedule, 0, 1).values()) == [0.0, 1.0, 1.0]
    assert list(held(schedule, 0, 8).values()) == [0.0, 1.0, 2.0]


def test_a_stage_of_the_same_rank_takes_its_message_from_memory() -> None:
    table = parse_table("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1")
    schedule = Schedule("example", 2, (0, 0), table)
    assert list(held(schedule, 0, 1).values()) == [0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("name", [*SCHEDULES, *CHUNKED_SCHEDULES])
def test_messages_do_not_grow_with_the_micro_batches_but_where_they_arrive_early(
    name: str, count: int
) -> None:
    """Sends are bounded by what is kept of each receiver; all is taken in the end."""
    chunks = 2 if name in CHUNKED_SCHEDULES else 1
    if not can_have(name, 4 * chunks, count, chunks):
        pytest.skip("the schedule cannot have so many")
    schedule = build_schedule(name, 4 * chunks, count, num_chunks=chunks)
    most = sends_kept(schedule, is_gpu=True)
    assert sends_kept(schedule, is_gpu=False) == max(most, KEPT_ON_GLOO)
    for rank in range(4):
        found = held(schedule, rank, most)
        peers = {
            schedule.stage_rank[t]
            for s in schedule.stages(rank)
            for t in (s - 1, s + 1)
            if 0 <= t < schedule.num_stages
        } - {rank}
        assert list(found.values())[-1] <= most * len(peers)
        if name in SCHEDULES:
            assert max(found.values()) <= most * len(peers)
