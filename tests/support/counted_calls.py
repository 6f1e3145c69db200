"""How much an answer takes, as the number of calls: the same on any machine under any load.

In: a function. Out: how many functions of Python were called until it returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def num_calls(function: Callable[[], object]) -> int:
    """Calls of Python functions, and resumptions of generators, while ``function`` runs."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found
