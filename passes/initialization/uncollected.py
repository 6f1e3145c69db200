"""Suspension of the garbage collector for work that makes many lasting objects.

The collector visits all objects repeatedly as their number grows: a quarter of the time of
capturing a deep model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Suspend the garbage collector within a ``with`` block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
