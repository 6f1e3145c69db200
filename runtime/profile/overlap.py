"""Measuring what compute loses while a collective runs beside it.

In: a kind of collective, its bytes, the group, the device. Out: what to time, and what to take
off. Matrix products that take about twice as long as the collective run beside it, and alone: the
difference is what the collective costs where it is hidden. On a GPU the two share memory and
multiprocessors, on a CPU its cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...cost_model.profile.clocks import stopwatch
from ..messages.communicator import all_gather, reduce_scatter
from .states import ITEM_BYTES, Timed

SIZES = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the factors, by kind of device."""
COMPUTE_RATIO = 2.0
"""The collective is slower beside compute, too, and must end first: waiting for it is no loss."""
CALIBRATION_CALLS = 5


def overlap_calls(
    kind: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Timed:
    """What to time for a collective of about ``num_bytes`` beside matrix products, what to take off
    (the products alone), and the bytes it really has.

    ``kind``: "all_reduce", "all_gather" or "reduce_scatter"; the bytes are those of the whole
    tensor. All ranks of ``group`` call it together, and compute as long as the slowest of them
    needs to hide its collective.
    """
    size = dist.get_world_size(group)
    part = max(1, num_bytes // ITEM_BYTES // size)
    whole, own = (torch.zeros(count, device=device) for count in (size * part, part))
    starts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_gather": lambda: all_gather(whole, own, group=group, async_op=True),
        "reduce_scatter": lambda: reduce_scatter(own, whole, group=group, async_op=True),
    }
    start = starts[kind]
    rows = SIZES[device.type]
    left, product = (torch.ones(rows, rows, device=device) for _ in range(2))

    def multiply() -> None:
        torch.mm(left, left, out=product)

    ratio = _seconds(lambda: start().wait(), device) / _seconds(multiply, device)
    box = torch.tensor(ratio, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    count = max(1, math.ceil(COMPUTE_RATIO * float(box)))

    def compute() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        work = start()
        compute()
        work.wait()

    return both, compute, size * part * ITEM_BYTES


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    samples = stopwatch(device.type).samples(call, CALIBRATION_CALLS)
    return max(min(samples), 1e-9)
