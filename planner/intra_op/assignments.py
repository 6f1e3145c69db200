"""Every assignment of values to variables, as an array."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ..integer_programs.program import Ints


def assignments(sizes: Sequence[int]) -> Ints:
    """``[variable, assignment]``: each variable's values, the last one's change fastest.

    As ``np.indices``, but for any number of variables: those of one value are no dimension.

    >>> assignments((2, 1, 2)).tolist()
    [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    """
    wide = [at for at, size in enumerate(sizes) if size != 1]
    shape = [sizes[at] for at in wide]
    found = np.zeros((len(sizes), prod(shape)), dtype=np.int64)
    if wide:
        found[wide] = np.indices(shape).reshape(len(wide), -1)
    return found
