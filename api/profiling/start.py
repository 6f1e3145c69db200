"""Start of the processes of ``autoparallel profile``: one per device, here or by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import torch

from autoparallel.cache.database import database_path, measuring_environment
from autoparallel.cost_model.cluster.cluster_file import to_dict
from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import PlanOptions, plan_options
from autoparallel.options.progress import in_notebook, shown_to_callers, ticking
from autoparallel.planner.plan_file import decode, encode
from autoparallel.planning.plan import find_cluster
from autoparallel.runtime.launch.launch import is_launched, launch
from autoparallel.target.load import load_target


def profile(
    target: str,
    *,
    cluster: str = "local",
    settings: Sequence[str] = (),
    budget: float = 120.0,
    database: str | None = None,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Measure on this machine the times that planning ``target`` needs, within ``budget`` seconds.

    The Python form of ``autoparallel profile``: ``settings`` are texts of ``--set``, ``options``
    are keyword arguments of ``plan`` (``global_batch``, ...). Measurements are stored in the
    database, where planning finds them; a summary is returned. In a notebook a bar shows the
    seconds.

    Raises UsageError AP141 for an unknown option, and the errors of loading and measuring.
    """
    asked = plan_options(**options)
    # on a terminal the measuring process shows what it measures
    with (
        shown_to_callers(progress and in_notebook()) as observe,
        ticking(observe, "measuring", budget),
    ):
        return start_profiling(
            target,
            settings,
            cluster,
            options=asked,
            budget=budget,
            database=database_path(database),
            quiet=in_notebook() or not progress,
        )


def start_profiling(
    target: str,
    settings: Sequence[str],
    cluster: str,
    *,
    options: PlanOptions,
    budget: float,
    database: Path,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure with one process per device of ``cluster``, and return rank 0's summary.

    If ``quiet``, workers show no progress. A ``KeyboardInterrupt`` passes through; the database
    keeps all earlier measurements.
    """
    load_target(target, parse_settings(settings))
    found = find_cluster(_own_processes(cluster))
    measuring_environment(found)
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    num_processes = found.num_devices
    result: dict[str, Any] = launch(
        "autoparallel.profiling.worker:profile",
        {
            "target": target,
            "settings": list(settings),
            "cluster": to_dict(found),
            "options": options_to_json(options),
            "budget": budget,
            "database": str(database.resolve()),
            "quiet": quiet,
        },
        num_processes=num_processes,
    )
    return result


def _own_processes(cluster: str) -> str:
    """Return ``cluster``, or ``cpu:N`` for ``local`` under torchrun with N processes on CPUs."""
    if cluster == "local" and is_launched(os.environ) and not torch.cuda.is_available():
        return f"cpu:{os.environ['WORLD_SIZE']}"
    return cluster


def options_to_json(options: PlanOptions) -> dict[str, Any]:
    """Return options as JSON values, for another process."""
    return {own.name: encode(getattr(options, own.name)) for own in fields(options) if own.init}


def options_from_json(values: Mapping[str, Any]) -> PlanOptions:
    """Return the options that ``options_to_json`` turned into ``values``."""
    hints = get_type_hints(PlanOptions)
    return PlanOptions(**{name: decode(value, hints[name]) for name, value in values.items()})
