"""Roofline chart of a plan's ops (Williams, Waterman, Patterson, CACM 52(4), 2009).

In: the ops on one device, and the device. Out: a circle per op at its FLOPs per byte and predicted
rate, the roofs, and the longest ops as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from autoparallel.analysis.repriced import OpWork
from autoparallel.cost_model.cluster.cluster import Device
from autoparallel.cost_model.ops.compute import peak_flops
from autoparallel.html.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    Tick,
    line,
    number,
)
from autoparallel.options.words import count_text, percent_text, rate_text, seconds_text

MOST_ROWS = 24
"""Maximum number of ops listed in the table."""

LABEL_WIDTH = 190
"""Width of the label of the compute roof."""


@dataclass(frozen=True, slots=True)
class Roof:
    """Upper bound of a roofline chart (memory bandwidth or compute): its line and label."""

    path: str
    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class OpRow:
    """Row of the table of ops, and circle of the chart. ``x`` and ``y`` are "" for an op without
    FLOPs or bytes; ``radius`` grows with the op's share of compute time."""

    op: OpWork
    share: float
    intensity: float
    of_roof: float
    bound: str
    x: str
    y: str
    radius: str

    @property
    def direction(self) -> str:
        return "backward" if self.op.is_backward else "forward"

    @property
    def text(self) -> str:
        """Tooltip of the op's circle."""
        op = self.op
        return (
            f"{op.name}, {self.direction}, {op.module}: {percent_text(self.share)} of compute, "
            f"{seconds_text(op.seconds)} each, {count_text(self.intensity)} FLOP per byte, "
            f"{rate_text(op.flops / op.seconds, 'FLOP/s')}"
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline chart: ops by arithmetic intensity and FLOP/s, with the device's upper bounds."""

    rows: tuple[OpRow, ...]
    roofs: tuple[Roof, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    num_listed: int = MOST_ROWS


def power_text(value: float) -> str:
    """Write a power of ten with its SI prefix.

    >>> power_text(1e15), power_text(1e4), power_text(0.1)
    ('1 P', '10 k', '0.1 ')
    """
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale * 0.999:
            return f"{value / scale:g} {prefix}"
    return f"{value:g} "


def roofline(ops: Sequence[OpWork], device: Device, dtype: str) -> Roofline:
    """Return the roofline chart of ops on a device; matrix products compute in ``dtype``."""
    peak, rate = peak_flops(device, dtype), device.memory_bytes_per_second
    total = sum(op.total_seconds for op in ops) or 1.0
    counted = [op for op in ops if op.flops > 0 and op.num_bytes > 0]
    intensities = [op.flops / op.num_bytes for op in counted] or [1.0]
    rates = [op.flops / op.seconds for op in counted] or [peak]
    x = Scale(
        10 ** _power(floor, min(*intensities, peak / rate)),
        10 ** _power(ceil, max(*intensities, peak / rate)),
        LEFT,
        WIDTH - RIGHT,
        is_log=True,
    )
    low = max(10 ** _power(floor, min(rates)), peak * 1e-6)
    y = Scale(low, 10 ** _power(ceil, peak * 1.01), HEIGHT + 40 - BOTTOM, TOP, is_log=True)
    rows = [_row(op, total, peak, rate, x, y) for op in ops]
    return Roofline(
        tuple(rows),
        _roofs(x, y, peak, rate, dtype),
        x.ticks_of_powers(power_text),
        y.ticks_of_powers(lambda value: f"{power_text(value)}FLOP/s"),
    )


def _roofs(x: Scale, y: Scale, peak: float, rate: float, dtype: str) -> tuple[Roof, Roof]:
    """Return the bounds of FLOP/s: sloped by memory bandwidth, and flat by peak compute."""
    ridge = peak / rate
    start = max(x.low, y.low / rate)
    memory = line([(x(start), y(start * rate)), (x(ridge), y(peak))])
    compute = line([(x(ridge), y(peak)), (x(x.high), y(peak))])
    middle = (start * ridge) ** 0.5
    # left of the ridge no op lies as high as the level roof
    is_roomy = x(ridge) > LEFT + LABEL_WIDTH
    left, top = (x(ridge) - 8, y(peak) + 4) if is_roomy else (x(x.high), y(peak) + 16)
    slanted_left, slanted_top = x(middle) - 8, y(middle * rate) - 8
    memory_text, compute_text = rate_text(rate, "B/s"), rate_text(peak, "FLOP/s")
    return (
        Roof(memory, number(slanted_left), number(slanted_top), f"memory {memory_text}"),
        Roof(compute, number(left), number(top), f"{dtype} {compute_text}"),
    )


def _row(op: OpWork, total: float, peak: float, rate: float, x: Scale, y: Scale) -> OpRow:
    intensity, share = op.flops / op.num_bytes if op.num_bytes else 0.0, op.total_seconds / total
    least = max(op.flops / peak, op.num_bytes / rate)
    bound = "compute" if op.flops / peak >= op.num_bytes / rate else "memory"
    if op.seconds > 3 * least:
        bound = "launch" if op.seconds < 3e-5 else f"{bound}, far below"
    return OpRow(
        op,
        share,
        intensity,
        least / op.seconds,
        bound,
        number(x(intensity)) if intensity else "",
        number(y(max(op.flops / op.seconds, y.low))),
        number(2 + 20 * share**0.5),
    )


def _power(rounded: Callable[[float], int], value: float) -> int:
    """Return the base-10 logarithm of a value as an integer, by ``rounded`` (floor or ceil)."""
    return rounded(log10(value))
