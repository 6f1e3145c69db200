"""What was sent is freed when it has gone, whoever else is slow."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from processes import run_processes

from autoparallel.passes.stage_cut import Boundary
from autoparallel.planner.graph import TensorSpec
from autoparallel.planner.layout import INVARIANT, Mesh
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.exchange import Exchange
from autoparallel.runtime.outbox import Outbox

BIG = TensorSpec((4 << 20,), "float32", requires_grad=True)
"""Too much for the socket buffers: it only goes when it is received."""


class Place:
    def __init__(self, rank: int) -> None:
        self.mesh, self.devices = Mesh(("dp",), (1,)), (rank,)


def sends_to_a_slow_and_a_fast_one() -> tuple[bool, bool]:
    """Rank 0 sends to 1, which does not receive yet, and then to 2: which is still in memory?"""
    rank, whole = dist.get_rank(), (INVARIANT,)
    crossing = [Boundary(f"to{t}", 0, t, BIG, whole, whole) for t in (1, 2)]
    places = tuple(map(Place, range(3)))
    exchange = Exchange(
        [crossing], schedule=build_schedule("gpipe", 3, 1, edges=((0, 1), (0, 2))),
        stages=places, rank=rank, device=torch.device("cpu"),
    )  # fmt: skip
    held = (True, True)
    if rank == 2:
        exchange.post("forward", 2, 0)
        exchange.receive("forward", 2, 0)
    if rank == 0:
        values = {f"to{t}": torch.ones(BIG.shape) for t in (1, 2)}
        storages = [v.untyped_storage()._weak_ref() for v in values.values()]
        exchange.send("forward", 0, 0, values)
        del values
        gc.collect()
        deadline = time.monotonic() + 10
        while not torch.UntypedStorage._expired(storages[1]) and time.monotonic() < deadline:
            time.sleep(0.01)
        held = tuple(not torch.UntypedStorage._expired(each) for each in storages)
    dist.barrier()
    if rank == 1:
        exchange.post("forward", 1, 0)
        exchange.receive("forward", 1, 0)
    exchange.finish()
    return held


def test_a_message_is_freed_when_it_has_gone_though_an_earlier_one_has_not():
    first, second = run_processes(3, sends_to_a_slow_and_a_fast_one, backend="gloo")[0]
    assert first
    assert not second


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
    outbox, kept = Outbox(most=2), []
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
