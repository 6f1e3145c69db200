"""Group equal keys into classes, numbered in the order in which they first occur."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def classes_of(keys: Sequence[object]) -> tuple[Ints, Ints]:
    """Number the distinct keys in order of first occurrence; return each key's number, and for each
    number the position of its first key.

    >>> [found.tolist() for found in classes_of("abca")]
    [[0, 1, 2, 0], [0, 1, 2]]
    """
    numbers: dict[object, int] = {}
    firsts: list[int] = []
    for index, key in enumerate(keys):
        if key not in numbers:
            numbers[key] = len(firsts)
            firsts.append(index)
    return np.array([numbers[key] for key in keys]), np.array(firsts)
