"""Starting ``autoparallel profile``'s processes: one per device, here or those of torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoparallel.cost_model.cluster_file import to_dict
from autoparallel.options import parse_settings
from autoparallel.planning import find_cluster
from autoparallel.profiles import measuring_environment
from autoparallel.runtime.launch import is_launched, launch
from autoparallel.targets import load_target


def start_profiling(
    target: str,
    settings: Sequence[str],
    cluster: str,
    *,
    options: Mapping[str, Any],
    budget: float,
    database: Path,
) -> dict[str, Any]:
    """Measures with one process per device of ``cluster``; what was done, on rank 0.

    ``options`` are those of ``plan_options``. A ``KeyboardInterrupt`` goes through; what was
    measured until then is in the database.
    """
    load_target(target, parse_settings(settings))
    found = find_cluster(_own_processes(cluster))
    measuring_environment(found)
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    num_processes = found.num_devices
    result: dict[str, Any] = launch(
        "autoparallel.profile_worker:profile",
        {
            "target": target,
            "settings": list(settings),
            "cluster": to_dict(found),
            "options": dict(options),
            "budget": budget,
            "database": str(database.resolve()),
        },
        num_processes=num_processes,
    )
    return result


def _own_processes(cluster: str) -> str:
    """``local`` under torchrun on CPUs: the processes that it started."""
    import torch

    if cluster == "local" and is_launched(os.environ) and not torch.cuda.is_available():
        return f"cpu:{os.environ['WORLD_SIZE']}"
    return cluster
