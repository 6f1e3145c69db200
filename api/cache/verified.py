"""Record of plans that were verified on this machine, reported when a run begins.

In: a plan. Out: a marker file in the user's cache folder, named by a hash of the computation.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from autoparallel.cache.plan_cache import default_folder
from autoparallel.planner.plan import Plan
from autoparallel.planner.schedules.schedules import table_text


def mark_verified(plan: Plan) -> None:
    """Write a marker file that says that ``plan`` was verified, if the user's folder is
    writable."""
    with suppress(OSError):
        path = _path(plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def verification_text(plan: Plan) -> str:
    """Return a sentence, for the start of a run, on whether ``plan`` was verified."""
    with suppress(OSError):
        if _path(plan).exists():
            return "this plan of this model was verified against one device"
    return "this plan of this model was not verified: autoparallel verify PLAN compares all of it"


def _path(plan: Plan) -> Path:
    """Return the path of a plan's marker file, named by a hash of its model, layouts and
    schedule."""
    stages = [
        (
            stage.devices,
            stage.mesh,
            (stage.zero, stage.shard_degree),
            sorted(stage.layouts.items()),
            stage.shares,
            [block.recompute for block in stage.blocks],
        )
        for stage in plan.stages
    ]
    table = table_text(plan.schedule, len(plan.stages), plan.num_microbatches, plan.num_chunks)
    parts = (
        plan.model.fingerprint,
        plan.schedule + table,
        plan.num_microbatches,
        plan.slices,
        stages,
    )
    return default_folder() / "verified" / hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
