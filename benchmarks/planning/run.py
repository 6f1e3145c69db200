"""How long planning takes, by phase, and how it grows with layers and GPUs.

``python benchmarks/planning/run.py [--growth] [--warm] [--json FILE] [--timeout S] [NAME ...]``.
Each row is planned in a process of its own, one at a time, with an empty cache, as
``autoparallel plan`` would: from loading the target to the plan. ``--warm`` plans it twice more
with what the first left: the same, and for twice the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planning.cases import BY_NAME, CASES, GROWTH, Case

PHASES = {
    "load": ("load",),
    "capture": ("capture",),
    "pricing": ("costs",),
    "solving": ("ilp",),
    "search": ("dp", "bound"),
    "simulation": ("simulator",),
    "memory": ("memory",),
}
"""The columns, and the plan's phases in each; ``search`` has the dynamic programs."""

TIME_LIMIT_SECONDS = 60.0
"""The search's own limit, as of the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if asked.worker:
        print(json.dumps(planned(BY_NAME[asked.worker], asked.times, asked.time_limit)))
        return 0
    names = asked.names or [case.name for case in (GROWTH if asked.growth else CASES)]
    rows = []
    print(heading(), flush=True)
    for name in names:
        for row in measured(BY_NAME[name], asked):
            rows.append(row)
            print(line(row), flush=True)
            if asked.json:
                Path(asked.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--growth", action="store_true", help="over layers and GPUs")
    parser.add_argument("--warm", action="store_true", help="again, with what the first left")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a row")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_SECONDS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    return parser


def measured(case: Case, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row, or three, each from a fresh process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for how, times in (("cold", 1), ("again", 1), ("twice the batch", 2))[
            : 3 if asked.warm else 1
        ]:
            rows.append(
                {
                    "name": case.name,
                    "cluster": case.cluster,
                    "how": how,
                    "wanted_seconds": case.wanted_seconds,
                    **_in_process(case, times, folder, asked),
                }
            )
    return rows


def _in_process(
    case: Case, times: int, folder: str, asked: argparse.Namespace
) -> Mapping[str, Any]:
    command = [sys.executable, __file__, "--worker", case.name, "--times", str(times)]
    command += ["--time-limit", str(asked.time_limit)]
    environment = {**os.environ, "AUTOPARALLEL_CACHE": folder}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=asked.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"not done in {asked.timeout:.0f} s"}
    if done.returncode:
        return {"failure": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned(case: Case, times: int, time_limit_seconds: float) -> dict[str, Any]:
    """Plans a case here: seconds by phase, peak memory, and what was found."""
    began = time.perf_counter()
    from autoparallel.options.collection import rare_collections

    with rare_collections():  # as the command does
        return _planned(case, times, time_limit_seconds, began)


def _planned(case: Case, times: int, time_limit_seconds: float, began: float) -> dict[str, Any]:
    from autoparallel.cache.plan_cache import plan_cache
    from autoparallel.options.plan_options import plan_options
    from autoparallel.profiling.measured_plan import make_plan
    from autoparallel.target.load import load_target

    target = load_target(case.target, dict(case.settings))
    options = plan_options(
        global_batch=case.global_batch * times,
        seq=case.seq,
        micro_batch=None,
        precision=case.precision,
        optimizer="adamw",
        memory_limit=None,
        parallel=case.parallel,
        time_limit=time_limit_seconds,
    )
    load_seconds = time.perf_counter() - began
    with plan_cache() as cache:
        found = make_plan(target, case.cluster, options, cache=cache.values)
    total_seconds = time.perf_counter() - began
    phases = {"load": load_seconds, **found.solver.seconds}
    if found.solver.is_reused:  # the other seconds are those of the search that made the plan
        phases = {name: phases[name] for name in ("load", "capture", "memory")}
    stages = [
        " ".join(f"{axis}={size}" for axis, size in zip(s.mesh.axes, s.mesh.shape, strict=True))
        for s in found.stages
    ]
    return {
        "seconds": total_seconds,
        "phases": {name: sum(phases.get(own, 0.0) for own in of) for name, of in PHASES.items()},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_seconds": found.prediction.step_seconds,
        "mfu": found.prediction.model_flops_utilization,
        "gap": found.solver.gap,
        "layouts_gap": found.solver.layouts_gap,
        "stages": stages,
        "reused": cache.report(),
    }


def heading() -> str:
    phases = " ".join(f"{name:>10}" for name in PHASES)
    return f"{'case':<18}{'cluster':<16}{'':<16}{'wanted':>7}{'seconds':>9} {phases}{'memory':>9}"


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    wanted = row["wanted_seconds"]
    start = f"{row['name']:<18}{row['cluster']:<16}{row['how']:<16}"
    start += f"{'' if wanted is None else f'{wanted:.0f}':>7}"
    if "failure" in row:
        return f"{start}  {row['failure']}"
    phases = " ".join(f"{row['phases'][name]:>10.1f}" for name in PHASES)
    return f"{start}{row['seconds']:>9.1f} {phases}{row['peak_bytes'] / 1e9:>6.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
