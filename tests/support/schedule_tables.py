"""Micro-batches that the stages of a schedule hold."""

from __future__ import annotations

from autoparallel.cost_model.simulator.actions import Schedule
from autoparallel.planner.schedules.check import _held_through


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each stage, the most micro-batches whose activations it holds at once.

    A micro-batch is held from its forward to its backward (to its weight backward if the backward
    is split); without a backward, during its forward only. A sliced micro-batch counts while any of
    its slices is held.
    """
    peaks = [0] * schedule.num_stages
    for row in schedule.table:
        for held in _held_through(row):
            for stage, count in held.items():
                peaks[stage] = max(peaks[stage], count)
    return tuple(peaks)
