"""Seconds of one op, forward and backward, on the device at hand.

In: an ``OpCase``. Out: the medians of repeated runs. The forward is one call of the op with
gradients recorded where the case asks for them; the backward is ``torch.autograd.grad`` of
its outputs with a fixed gradient, for the inputs that want one. It is repeated, after a
warm-up, until the 95 % interval of both medians (by order statistics,
Conover, "Practical Nonparametric Statistics", section 3.2) is narrow or the case's time is
used up.

On a CPU a monotonic clock is read around each run, so the dispatch of the op and of autograd
is inside the times, as it is in a training step. Runs take turns on several sets of inputs, 64 MB
or 16 sets of them, and their outputs live until their backwards: caches and memory pages are
about as cold as in a model of many layers (see ``clocks``).
On a GPU events in the stream stand around the kernels. Before each run a buffer larger than
the L2 cache is overwritten, so inputs come from memory, and the host is ahead of the device:
launching is outside the times unless the op itself launches slower than the device computes.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..cluster.detect import available_memory_bytes
from ..cluster.tf32 import torch_computing
from .arguments import MeasureError, build_call
from .case import OpCase
from .clocks import CpuClock, GpuClock, backward_of
from .records import Measurement

_RUN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_WARM_UP_RUNS = 2
_WARM_UP_SHARE = 0.2
_MEMORY_SHARE = 0.8
_BATCH_SHARE = 0.1
"""Largest share of one op's measuring time that a batch of timed executions may take."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for measuring one op. Measuring ends when the 95 % confidence interval of each median
    has a relative half-width of at most ``half_width``, or after ``case_seconds`` or
    ``max_repeats`` runs; the op is run at least once."""

    case_seconds: float = 1.0
    half_width: float = 0.03
    min_repeats: int = 7
    max_repeats: int = 1000


def measure(case: OpCase, device: Literal["cpu", "cuda"], *, budget: Budget) -> Measurement:
    """Measure the median seconds of an op's forward and backward on this machine, within the limits
    of ``budget``. Raises ``MeasureError`` if the op cannot be run alone."""
    import torch  # not below: if torch cannot be imported, no op is to blame

    _check_memory(case, device)
    try:
        with torch_computing(case.tf32):
            call = build_call(case, device)
            backward = backward_of(call)
            clock = GpuClock(call, backward) if device == "cuda" else CpuClock(call, backward)
            return _repeat(clock, budget)
    except MeasureError:
        raise
    except _RUN_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        text = (str(error) or type(error).__name__).strip().split("\n")[0]
        raise MeasureError(text, case) from error


def _item_bytes(dtype: str) -> int:
    """Return the bytes of an element of ``dtype``, from the bits in its name; 1 without a
    number."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _check_memory(case: OpCase, device: str) -> None:
    """Raise ``MeasureError`` if the op's tensors would not fit in the free memory of ``device``; on
    a CPU the system would kill the process."""
    if device == "cuda":
        import torch

        free = torch.cuda.mem_get_info()[0]
    else:
        free = available_memory_bytes()
    given = sum(tensor.numel * _item_bytes(tensor.dtype) for tensor in case.tensors)
    needed = 2 * given + max(case.num_bytes)
    if needed > free * _MEMORY_SHARE:
        raise MeasureError(
            f"it needs about {needed / 1e9:.3g} GB, of which {free / 1e9:.3g} GB are free", case
        )


def _repeat(clock: CpuClock | GpuClock, budget: Budget) -> Measurement:
    start = time.monotonic()

    def has_used(share: float) -> bool:
        return time.monotonic() - start >= share * budget.case_seconds

    clock.samples(1)
    count = 1
    for _ in range(_WARM_UP_RUNS):
        if has_used(_WARM_UP_SHARE):
            break
        batch_start = time.monotonic()
        clock.samples(count)
        each = (time.monotonic() - batch_start) / count
        count = max(1, min(clock.most, int(_BATCH_SHARE * budget.case_seconds / max(each, 1e-9))))
    forward: list[float] = []
    backward: list[float] = []
    check_at = budget.min_repeats
    while len(forward) < budget.max_repeats:
        for sample in clock.samples(min(count, budget.max_repeats - len(forward))):
            forward.append(sample[0])
            backward.append(sample[1])
        if has_used(1.0):
            break
        if len(forward) >= check_at:
            if _spread(forward, backward) <= budget.half_width:
                break
            check_at = math.ceil(len(forward) * 1.2)
    return Measurement(
        median_interval(forward)[0],
        median_interval(backward)[0],
        len(forward),
        _spread(forward, backward),
    )


def _spread(forward: Sequence[float], backward: Sequence[float]) -> float:
    return max(median_interval(forward)[1], median_interval(backward)[1])


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median of ``samples``, and the half-width of its 95 % confidence interval as a
    fraction of the median. In sorted order the interval reaches from sample (n − 1.96·√n)/2 to
    sample 1 + (n + 1.96·√n)/2 (normal approximation of the binomial), or over all samples if these
    are few.

    >>> median_interval([1.0, 2.0, 3.0])
    (2.0, 0.5)
    """
    ordered = sorted(samples)
    count = len(ordered)
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    reach = 1.96 * math.sqrt(count)
    low = max(0, math.floor((count - reach) / 2) - 1)
    high = min(count - 1, math.ceil((count + reach) / 2))
    if median <= 0:
        return median, 0.0
    return median, (ordered[high] - ordered[low]) / 2 / median
