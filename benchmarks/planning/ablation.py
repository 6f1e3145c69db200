"""What each part of the search is worth: each switched off alone.

``python benchmarks/planning/ablation.py [--zoo] [--clusters A,B] [--json FILE] [NAME ...]``.
Without ``--zoo`` the names are planning cases (``cases.py``); with it, architectures of
``tests/zoo`` with the sizes of their configuration classes in transformers, 256 samples, bf16, on
each of the clusters. A case is captured once; every variant is planned in a fork of that process,
one at a time, at ``--tolerance 0``. Prints the step's change and the processor time relative to
the whole search's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planning.cases import BY_NAME, CASES, Case

if TYPE_CHECKING:
    from autoparallel.planner.plan import Plan

ROOT = Path(__file__).resolve().parents[2]

DENIED = {
    "stages of different sizes": ("mixed-stages",),
    "meshes with cp and ep": ("cp", "ep"),
    "zero-bubble schedules": ("zb-h1", "zb-h2", "zbv", "dualpipev"),
    "interleaved schedules": ("interleaved", "bfs"),
    "selective recomputation": ("selective",),
}
"""Parts that are options; the others are the proposers of ``planner.find_plan``."""

TIME_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Row:
    """A variant of a case: its step, and the processor seconds of its search."""

    case: str
    part: str
    step_seconds: float
    cpu_seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--zoo", action="store_true", help="architectures of tests/zoo")
    parser.add_argument("--clusters", default="8xA100-40GB,8x8xA100-40GB", help="of --zoo")
    parser.add_argument("--json", metavar="FILE", help="write the rows to a file")
    asked = parser.parse_args(arguments)
    cases = _zoo(asked.names, asked.clusters.split(",")) if asked.zoo else _planning(asked.names)
    rows: list[Row] = []
    for case in cases:
        rows += measured(case)
        if asked.json:
            Path(asked.json).write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    return 0


def _planning(names: Sequence[str]) -> list[Case]:
    return [BY_NAME[name] for name in names] if names else list(CASES)


def _zoo(names: Sequence[str], clusters: Sequence[str]) -> Iterator[Case]:
    folders = sorted((ROOT / "tests" / "zoo").glob("*/config.json"))
    for path in folders:
        name = path.parent.name
        if names and name not in names:
            continue
        own = json.loads(path.read_text())
        config = {key: own[key] for key in ("model_type", "architectures") if key in own}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            for cluster in clusters:
                yield Case(f"{name} {cluster}", f"hf:{folder}", cluster, 256, seq=512)


def measured(case: Case) -> list[Row]:
    """The whole search and every variant of a case, printed as they are found."""
    try:
        plan_with = _prepared(case)
    except Exception as error:  # noqa: BLE001 - a model of the zoo may not be for this
        print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
        return []
    rows: list[Row] = []
    for part, options in _variants():
        found = _in_fork(lambda options=options: plan_with(**options))
        if found is None:
            print(f"{case.name:<34}{part:<34} no plan", flush=True)
            if not rows:
                return []
            continue
        rows.append(Row(case.name, part, *found))
        whole = rows[0]
        change = 100 * (rows[-1].step_seconds / whole.step_seconds - 1)
        share = rows[-1].cpu_seconds / whole.cpu_seconds
        print(f"{case.name:<34}{part:<34}{change:>+8.2f} %{share:>7.2f}", flush=True)
    return rows


def _variants() -> Iterator[tuple[str, Mapping[str, Any]]]:
    from autoparallel.planner.find_plan import PROPOSERS

    yield "whole search", {}
    for proposer in PROPOSERS[1:]:
        yield proposer.__name__, {"without": proposer}
    for part, denied in DENIED.items():
        yield part, {"denied": denied}


def _prepared(case: Case) -> Callable[..., Plan]:
    """A function that plans the case without a proposer, or without some features."""
    from autoparallel.options.plan_options import plan_options
    from autoparallel.planner.find_plan import PROPOSERS, SearchMethod, plan
    from autoparallel.planner.requests.features import Features
    from autoparallel.planning.capture import capture_target
    from autoparallel.planning.plan import find_cluster, priced, request_of
    from autoparallel.target.load import load_target

    target = load_target(case.target, dict(case.settings))
    options = plan_options(
        global_batch=case.global_batch,
        seq=case.seq,
        micro_batch=None,
        precision=case.precision,
        optimizer="adamw",
        memory_limit=None,
        parallel=case.parallel,
        profile="analytic",
        time_limit=TIME_LIMIT_SECONDS,
        tolerance=0.0,
    )
    program = capture_target(target, options)
    cluster = find_cluster(case.cluster)
    graph, basis = priced(program, target, cluster, options)
    request = request_of(program, target, options)

    def plan_with(without: object = None, denied: Sequence[str] = ()) -> Plan:
        proposers = tuple(each for each in PROPOSERS if each is not without)
        features = Features(request.features.denied | set(denied))
        return plan(
            graph,
            program.blocks,
            cluster,
            replace(request, features=features),
            basis=basis,
            method=SearchMethod(proposers),
        )

    return plan_with


def _in_fork(make: Callable[[], Plan]) -> tuple[float, float] | None:
    """The step of a plan and the processor seconds of making it; None where there is none."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        began = time.process_time()
        with os.fdopen(write, "w") as pipe:
            try:
                found = [make().prediction.step_seconds, time.process_time() - began]
            except Exception as error:  # noqa: BLE001 - told by the parent
                found = [f"{type(error).__name__}: {error}"]
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found = json.loads(text) if text else ["the process ended"]
    if len(found) == 1:
        print(f"  {found[0][:200]}", flush=True)
        return None
    return found[0], found[1]


if __name__ == "__main__":
    sys.exit(main())
