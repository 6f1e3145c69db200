"""What the user is told of initial weights that are not those of the model alone."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoparallel.passes.initialization.deferred_init import Deferred, Init


def say_if_drawn_apart(deferred: Deferred, asked: Init, rank: int | None = None) -> None:
    """Say on rank 0 that each rank draws its own shards, where nobody asked for that."""
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    if asked == "auto" and deferred.init == "sharded" and own == 0:
        sys.stderr.write(
            "autoparallel: initial weights are drawn by each rank for its shards, so they are not "
            "those of the model alone, whose numbers take a rank more than 10 s: "
            'init="exact" (--init exact) draws them\n'
        )
        sys.stderr.flush()
