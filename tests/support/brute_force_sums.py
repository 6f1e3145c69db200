"""Sums that the brute force over a stage needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from brute_force_layouts import Floats

from autoparallel.planner.costs.seconds import Seconds

OF_STATES = (
    "forward_states",
    "backward_states",
    "forward_slowed",
    "backward_slowed",
    "parameter_gather",
    "gradient_sync",
    "gather_slowed",
    "sync_slowed",
    "optimizer",
    "forward_copies",
    "backward_copies",
)
"""What gathering parameters, summing gradients and the optimizer take."""


def new_only(columns: Sequence[Floats]) -> Iterator[Floats]:
    """Each column where it differs from all before it, and 0 elsewhere."""
    for number, column in enumerate(columns):
        new = np.ones(len(column), dtype=bool)
        for earlier in columns[:number]:
            new &= earlier != column
        yield column * new


def of_states(seconds: Seconds) -> list[float]:
    """By ``OF_STATES``; parameters have nothing else."""
    assert not any(seconds[:4])
    return [getattr(seconds, name) for name in OF_STATES]
