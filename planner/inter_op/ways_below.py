"""Combinations of members' ways that take no longer than a given time.

In: what each way of each member takes, the most that all may take. Out: the combinations. They
grow member by member, and go no further where even the fastest ways of the members to come make
them too long (branch and bound, a level at a time).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pricing.decisions import Floats
from ..pricing.ladder import Ints
from .ways_kind import TooManyError

MOST_WAYS = 200_000
"""Combinations of the kinds' ways of a run that are looked at one by one."""

MOST_TRIED = 20 * MOST_WAYS
"""Combinations of which only the work is added up."""


def below(works: Sequence[Floats], most: float) -> Ints:
    """``[member, combination]``: a way of each member, where their work is at most so much.

    The last member's change fastest. Raises ``TooManyError``.

    >>> below([np.array([1.0, 3.0]), np.array([1.0, 2.0])], 4.0).tolist()
    [[0, 0, 1], [0, 1, 0]]
    """
    most *= 1 + 1e-9
    rest = sum(float(own.min()) for own in works)
    rows, total = np.zeros((0, 1), dtype=np.int64), np.zeros(1)
    for own in works:
        rest -= float(own.min())
        if len(total) * len(own) > MOST_TRIED:
            raise TooManyError
        every = total[:, None] + own
        first, last = np.nonzero(every + rest <= most)
        rows, total = np.vstack([rows[:, first], last]), every[first, last]
    if len(total) > MOST_WAYS:
        raise TooManyError
    return rows
