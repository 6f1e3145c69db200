"""Processes that measure before planning, started for it: one per device of this machine.

Each loads the target by its name; rank 0 captures it and leads (``work_list``). Options are passed
as JSON.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from autoparallel.cache.database import database_path
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.cluster_file import from_dict, to_dict
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import Observe, ticking
from autoparallel.planner.errors import AutoparallelError, InfeasibleError, TimeLimitError
from autoparallel.planning.capture import capture_target
from autoparallel.profiling.start import options_from_json, options_to_json
from autoparallel.profiling.work_list import PlanWork, measure_together
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

PHASE = "measuring"


def start_measuring(
    target: Target, cluster: Cluster, options: PlanOptions, observe: Observe
) -> None:
    """Measure the times that planning ``target`` needs, with one process per device.

    If measuring fails, planning continues without measured times, and stderr says why. A
    ``KeyboardInterrupt`` passes through; earlier measurements are kept.
    """
    if sys.path[0] != os.getcwd():
        sys.path.insert(0, os.getcwd())
    number = cluster.num_devices
    arguments = {
        "target": target.name,
        "settings": dict(target.settings),
        "cluster": to_dict(cluster),
        "options": options_to_json(options),
        "began": time.time(),
    }
    try:
        with ticking(observe, PHASE, options.measure_seconds):
            launch(
                "autoparallel.profiling.first_worker:measure",
                arguments,
                num_processes=number,
            )
    except (InfeasibleError, TimeLimitError):
        return  # planning reports the same error
    except AutoparallelError as error:
        print(f"autoparallel: planned without measuring, which failed: {error}", file=sys.stderr)


def measure(
    worker: Worker,
    *,
    target: str,
    settings: Mapping[str, Any],
    cluster: Mapping[str, Any],
    options: Mapping[str, Any],
    began: float,
) -> None:
    """Load the target, and measure in each process the tasks that rank 0 lists. Collective.

    ``began`` is the time (``time.time``) at which the user's wait for a plan began.
    """
    loaded = load_target(target, settings)
    on = from_dict(dict(cluster), "cluster")
    chosen = options_from_json(options)
    device = join_as(worker, on)
    work = None
    if worker.rank == 0:
        worker.watchdog.progress("capturing the model")
        program, path = capture_target(loaded, chosen), database_path(chosen.database)
        work = PlanWork(program, loaded, on, chosen, path, began=began)
    measure_together(
        work, device=device, build=loaded.build_optimizer, tell=worker.watchdog.progress
    )
