"""Small models of the zoo with pp=2 under every schedule, on two devices, held to one device.

``python benchmarks/gpu/schedules.py OUTPUT.jsonl --cluster local MODEL ...``. Writes a line of JSON
per model and schedule as it is known: whether the losses, gradients and weights of two steps equal
one device's, or why there is no plan, or the last lines of what failed. All run in one start of two
processes; where a case ends them, the cases after it run in new ones. Exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.schedules.catalogue import SCHEDULES
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target
from autoparallel.training.worker import verify

NUM_RANKS = 2
CASE_SECONDS = 60.0
"""How long a case may make no progress."""
NUM_LINES = 12
SETTINGS = {"gpt.py": {"d_model": 16, "n_head": 2, "n_layer": 8, "seq": 16, "vocab": 32}}
"""Of models by file; this one takes every schedule: its weights are not tied, and it is causal."""


def schedules() -> Iterator[str]:
    """Every schedule that trains, as ``--parallel`` takes it with two ranks."""
    for info in SCHEDULES.values():
        if info.trains:
            least, most = info.chunks
            chunks = f",chunks={max(2, least)}" if most > 1 else ""
            slices = ",slices=2" if info.name == "terapipe" else ""
            yield f"pp={NUM_RANKS},microbatches=4,schedule={info.name}{chunks}{slices}"


def verify_plans(worker: Worker, *, plans: dict[str, str], output: str) -> None:
    """On a rank: each plan file in turn; rank 0 writes what came out, by the plan's name."""
    for name, path in plans.items():
        found = verify(worker, plan_path=path, dtype="fp64", seed=0)
        if worker.rank == 0:
            worst = max(found["worst"].values(), default=None)
            record(
                output,
                name,
                passed=found["passed"],
                compared=found["num_compared"],
                worst=worst,
                failures=found["failures"][:3],
            )


def record(output: str, name: str, **what: Any) -> None:
    """Appends what became of a case, and prints it in a line."""
    with Path(output).open("a") as file:
        file.write(json.dumps({"case": name, **what}) + "\n")
    print(name, "passed" if what["passed"] else what.get("error", "differs"), flush=True)


def make_plans(
    models: Sequence[str], wanted: Sequence[str], cluster: str, folder: Path, output: str
) -> dict[str, str]:
    """Plan files by model and schedule; a plan that cannot be is recorded, and is no failure."""
    plans: dict[str, str] = {}
    for model in models:
        target = load_target(model, SETTINGS.get(Path(model).name, {}))
        seq = 16 if target.takes_seq else None
        for parallel in wanted:
            name, path = f"{Path(model).name} {parallel}", folder / f"{len(plans)}.json"
            options = PlanOptions(global_batch=16, seq=seq, forced=parse_parallel(parallel))
            try:
                save_plan(make_plan(target, cluster, options), path)
            except AutoparallelError as error:
                record(output, name, passed=True, error=f"no plan: {error.what}")
            else:
                plans[name] = str(path)
    return plans


def run(plans: dict[str, str], output: str) -> None:
    """All cases; the first one without an answer after a failure is what failed."""
    while plans:
        error = ""
        try:
            launch(
                "benchmarks.gpu.schedules:verify_plans",
                {"plans": plans, "output": output},
                num_processes=NUM_RANKS,
                timeout_seconds=CASE_SECONDS,
            )
        except AutoparallelError as failure:
            error = str(failure)
        done = {each["case"] for each in read(output)}
        plans = {name: path for name, path in plans.items() if name not in done}
        if plans and error:
            name = next(iter(plans))
            record(output, name, passed=False, error="\n".join(error.splitlines()[-NUM_LINES:]))
            del plans[name]


def read(output: str) -> list[dict[str, Any]]:
    """What is recorded so far."""
    path = Path(output)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(arguments: Sequence[str]) -> int:
    """Plans and runs every case. Returns 0 if all passed, and 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("output")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--cluster", default="local")
    parser.add_argument("--schedules", help="names, by commas; all without it")
    given = parser.parse_args(arguments)
    wanted = list(schedules())
    if given.schedules is not None:
        names = given.schedules.split(",")
        wanted = [each for each in wanted if parse_parallel(each).schedule in names]
    Path(given.output).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run(
            make_plans(given.models, wanted, given.cluster, Path(folder), given.output),
            given.output,
        )
    found = read(given.output)
    return 0 if found and all(each["passed"] for each in found) else 1


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # for the processes that it starts
    sys.exit(main(sys.argv[1:]))
