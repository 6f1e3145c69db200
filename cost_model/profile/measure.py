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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..cluster.detect import available_memory_bytes
from ..cluster.tf32 import torch_computing
from .arguments import MeasureError, build_call
from .case import OpCase, ProfileError
from .clocks import CpuClock, GpuClock, backward_of
from .database import Database
from .environment import Environment, difference, environment_of
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
"""Largest share of a case's time that a batch of runs takes."""
_AGREEMENT = 1.1


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to measure: seconds in all and per case, and when a median is good enough.

    A case ends when the relative half-width of its medians' interval is ``half_width`` or
    less, or with its seconds; it is run once at least. ``visits`` is how often
    ``measure_all`` comes back to a case: something else on the machine may slow it down for
    seconds, which no number of runs in a row can tell.
    """

    total_seconds: float = 300.0
    case_seconds: float = 1.0
    half_width: float = 0.03
    min_repeats: int = 7
    max_repeats: int = 1000
    visits: int = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """State of ``measure_all``: ``done`` visits ``of`` all, and the next case (None at the end).

    ``seconds_left`` is expected from the cases so far, and never more than the budget.
    """

    done: int
    of: int
    seconds_left: float
    case: OpCase | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A visit of ``measure_all`` to a case: its measurement so far, or why there is none."""

    case: OpCase
    measurement: Measurement | None
    error: MeasureError | None = None


def measure(case: OpCase, device: Literal["cpu", "cuda"], *, budget: Budget) -> Measurement:
    """Median seconds of a case on this machine.

    Raises ``MeasureError`` where the op cannot be built or run by itself.
    """
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


def measure_all(
    cases: Sequence[OpCase],
    database: Database,
    environment: Environment,
    *,
    budget: Budget,
    observe: Callable[[Progress], None] | None = None,
    weights: Mapping[OpCase, float] | None = None,
) -> Iterator[Outcome]:
    """Measure each distinct case that ``database`` does not have, the weightiest first.

    A generator: it measures as it is iterated, and ends with the budget's seconds. All are
    visited once before any is again, and each measurement is in the database before it is
    yielded, so whatever interrupts the loop loses nothing. ``weights`` are expected shares
    of the predicted time. Raises ``ProfileError`` if ``environment`` is not this process's.
    """
    _check_here(environment)
    distinct = list(dict.fromkeys(cases))
    known = database.all(environment)
    database.describe(environment, [case for case in distinct if case in known])
    missing = [case for case in distinct if case not in known]
    if weights is not None:
        missing.sort(key=lambda case: -weights.get(case, 0.0))
    watch = _Watch(budget, of=len(distinct), known=len(distinct) - len(missing))
    tell = observe or (lambda progress: None)
    failed: set[OpCase] = set()
    for case in missing * budget.visits:
        tell(watch.progress(case))
        if watch.is_over:
            return
        if case not in failed:
            outcome = _visit(case, environment, database, budget)
            if outcome.error is not None:
                failed.add(case)
            yield outcome
        watch.done += 1
    tell(watch.progress(None))


def combined(first: Measurement, second: Measurement) -> Measurement:
    """Combine two measurements of one case, direction by direction.

    Where they agree it is their mean, weighted by repeats; where they do not, the faster:
    whatever else runs on a machine only ever adds time.
    """
    repeats = first.repeats + second.repeats

    def joined(one: float, other: float) -> float:
        if max(one, other) > _AGREEMENT * min(one, other):
            return min(one, other)
        return (one * first.repeats + other * second.repeats) / repeats

    return Measurement(
        joined(first.forward_seconds, second.forward_seconds),
        joined(first.backward_seconds, second.backward_seconds),
        repeats,
        max(first.spread, second.spread),
    )


def _check_here(environment: Environment) -> None:
    here = environment_of(environment.kind)
    if here != environment:
        why = difference(here, environment) or "measured elsewhere"
        raise ProfileError("the times would be stored for another machine", why)


def _visit(case: OpCase, environment: Environment, database: Database, budget: Budget) -> Outcome:
    """Measure a case, and keep it combined with its earlier measurement in the database."""
    try:
        found = measure(case, environment.kind, budget=budget)
    except MeasureError as error:
        return Outcome(case, None, error)
    before = database.get(environment, case)
    if before is not None:
        found = combined(before, found)
    database.put(environment, case, found)
    return Outcome(case, found)


class _Watch:
    """The time that a run over ``of`` cases, ``known`` of them measured, has used and has left."""

    def __init__(self, budget: Budget, *, of: int, known: int) -> None:
        self.budget = budget
        self.of, self.known = of * budget.visits, known * budget.visits
        self.done = self.known
        self.start = time.monotonic()

    @property
    def used_seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def is_over(self) -> bool:
        return self.used_seconds >= self.budget.total_seconds

    def progress(self, case: OpCase | None) -> Progress:
        measured = self.done - self.known
        each = self.used_seconds / measured if measured else self.budget.case_seconds
        left = max(0.0, self.budget.total_seconds - self.used_seconds)
        return Progress(self.done, self.of, min(left, each * (self.of - self.done)), case)


def _item_bytes(dtype: str) -> int:
    """Return the bytes of an element by the number of bits in its dtype's name."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _check_memory(case: OpCase, device: str) -> None:
    """Refuse cases that would not fit: on a CPU the system would end the process."""
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
    """The median, and the relative half-width of its 95 % interval by order statistics.

    The interval reaches from the sample of rank (n − 1.96·√n)/2 to the sample of rank
    1 + (n + 1.96·√n)/2 (the normal approximation of the binomial); all samples are inside
    it where there are few.

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
