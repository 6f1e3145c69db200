"""A rank keeps the latest few of the messages that it has sent, however slow their receivers."""

from __future__ import annotations

import torch

from autoparallel.runtime.messages.ordered_channels import PendingSends


class Sent:
    """A send that its device has not got to, however often it is asked."""

    def __init__(self) -> None:
        self.is_waited_for = False

    def is_completed(self) -> bool:
        return False

    def wait(self) -> bool:
        self.is_waited_for = True
        return True


def test_a_host_that_runs_ahead_keeps_no_more_than_the_schedule_needs():
    """64 sends of a micro-batch each to two ranks: two to each are kept at any time."""
    outbox, kept = PendingSends(most=2), []
    works = {peer: [Sent() for _ in range(64)] for peer in (1, 2)}
    for m in range(64):
        for peer, own in works.items():
            tensor = torch.empty(8)
            kept.append(tensor.untyped_storage()._weak_ref())
            outbox.add(peer, [own[m]], (tensor,), f"0SEND_F{m}")
            del tensor
            assert sum(not torch.UntypedStorage._expired(each) for each in kept) <= 4
    assert [work.is_waited_for for work in works[1]] == [True] * 62 + [False] * 2
    outbox.finish()
    assert all(work.is_waited_for for own in works.values() for work in own)


def test_a_rank_that_waits_for_a_slow_receiver_says_so():
    told: list[tuple[str, tuple[int, ...]]] = []
    outbox = PendingSends(1, lambda what, peers: told.append((what, peers)))
    outbox.add(1, [Sent()], (torch.empty(8),), "0SEND_F0")
    outbox.add(2, [Sent()], (torch.empty(8),), "0SEND_F0")
    assert told == []
    outbox.add(1, [Sent()], (torch.empty(8),), "0SEND_F1")
    assert told == [("0SEND_F0: waiting for rank 1 to receive", (1,))]
    outbox.finish()
    assert [peers for _, peers in told] == [(1,), (1,), (2,)]
