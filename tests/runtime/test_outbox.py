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
