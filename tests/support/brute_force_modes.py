"""How blocks of a stage are recomputed or offloaded: bytes of each mode, and waits for copies.

In: the bytes that a block saves and reads; a function that sums storages. Out: by mode, the bytes
that the block keeps on the device, makes again in its backward, and keeps in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from brute_force_layouts import Floats

from autoparallel.cost_model.cluster.cluster import Device
from autoparallel.planner.costs.kept_bytes import Part, Replay, kept_parts, saved_parts
from autoparallel.planner.plan import Recompute

OFFLOADED: dict[Recompute, Recompute] = {
    "none-offloaded": "none",
    "attention-offloaded": "attention",
}
"""The mode of a block whose kept values wait in the host's memory, without that."""

MODES: tuple[Recompute, ...] = ("none", "selective", "attention", "full", *OFFLOADED)
SEARCHED: tuple[Recompute, ...] = ("none", "selective", "full")

Modes = tuple[Recompute, ...]
"""How each block of a stage is recomputed."""

LAUNCH_SECONDS = 2e-5
"""Of the copies of a block."""

ByMode = dict[Recompute, Floats]
Sum = Callable[[Callable[..., Iterable[Part]]], Floats]


def held_by_mode(
    saved: Floats, given: tuple[Floats, Floats], replay: Replay, sum_of: Sum
) -> tuple[ByMode, ByMode, ByMode]:
    """Bytes kept on the device, made again, and kept on the host. ``given``: bytes of other
    blocks' values and of the batch that the block reads."""
    read, batch = given
    none = np.zeros_like(saved)
    kept: ByMode = {"none": saved, "full": read + batch}
    made: ByMode = {"none": none, "full": saved}
    modes: Modes = ("selective", "attention")
    for mode in modes:

        def selected(*of: Any, own: Recompute = mode) -> Iterable[Part]:
            return kept_parts(*of, of=replay.kept[own])

        def either(*of: Any, own: Callable[..., Iterable[Part]] = selected) -> set[Part]:
            return {*saved_parts(*of), *own(*of)}

        alone = sum_of(selected)
        kept[mode], made[mode] = read + alone, sum_of(either) - alone
    host = {mode: kept[base] for mode, base in OFFLOADED.items()}
    made |= {mode: made[base] + host[mode] for mode, base in OFFLOADED.items()}
    return kept | dict.fromkeys(OFFLOADED, none), made, host


def waits(host_bytes: Floats | None, device: Device, hides: Floats) -> Floats:
    """Seconds of forward and backward in which copies of ``host_bytes`` are waited for, as the
    compute ``hides`` is shorter."""
    if host_bytes is None:
        return np.zeros_like(hides)
    copied = host_bytes / (device.host_link_bytes_per_second or 12e9)
    found: Floats = np.maximum(0.0, copied - hides) + LAUNCH_SECONDS * (host_bytes > 0)
    return found
