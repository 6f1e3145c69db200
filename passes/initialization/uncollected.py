"""Work that makes many objects, and keeps them, done without the garbage collector.

The collector goes through all objects again and again as their number grows: a quarter of the
time of capturing a deep model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """While inside, no garbage is looked for."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
