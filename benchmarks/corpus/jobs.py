"""One request: plan a case, and price plans of it again by the planner's own ``evaluate``."""

from __future__ import annotations

import hashlib
import resource
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoparallel.cache.captures import CAPTURE
from autoparallel.cache.plan_cache import MISSING, Cache
from autoparallel.cache.store import SqliteStore
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.options.plan_options import PlanOptions, plan_options
from autoparallel.planner.costs.whole_block import whole_blocks
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.evaluate.evaluate import Evaluator
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import basis_for, find_cluster, priced_graph
from autoparallel.planning.tf32 import with_choice
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

CAPTURES = Path(__file__).resolve().parents[2] / "build" / "corpus" / "captures.sqlite"
MOST_BYTES = 2**30

FIXED = {"time_limit": 3600.0, "measure_seconds": 0.0, "profile": "analytic"}
"""Options of every case: no search comes near its limit of time, so that no plan depends on how
busy the machine is, and none on what its user measured."""


class CaptureCache(Cache):
    """Keeps captured models alone: every plan has to be searched for."""

    def get(self, what: str, codec: Any, *parts: object) -> Any:
        return super().get(what, codec, *parts) if what == CAPTURE else MISSING

    def put(self, value: Any, what: str, codec: Any, *parts: object) -> None:
        if what == CAPTURE:
            super().put(value, what, codec, *parts)


@dataclass(frozen=True)
class Job:
    """A case as the planner takes it."""

    target: Target
    cluster: str
    options: PlanOptions

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Job:
        """The job of a case's fields."""
        options = plan_options(case["global_batch"], case["seq"], **{**FIXED, **case["options"]})
        return cls(load_target(case["target"], case["settings"]), case["cluster"], options)


def answer(request: Mapping[str, Any], sources: Sequence[Path]) -> dict[str, Any]:
    """What a request comes to: ``case``, whether to ``plan`` it, other ``plans`` to price.

    ``found``: the plan's text, or the ``code`` of the error, and what finding it took; ``priced``:
    what ``evaluate`` says of the found plan, if there is one, and of the others. ``failure`` is the
    traceback of an error that is none of ours.
    """
    try:
        return _answered(request, sources)
    except Exception:  # noqa: BLE001 - one case that fails must not end the others
        return {"failure": traceback.format_exc()}


def _answered(request: Mapping[str, Any], sources: Sequence[Path]) -> dict[str, Any]:
    with capture_cache(sources) as cache:
        found = planned(request["case"], cache) if request["plan"] else {}
        texts = [found["plan"]] if found.get("plan") else []
        texts += request["plans"]
        return {"found": found, "priced": priced(request["case"], texts, cache) if texts else []}


def planned(case: Mapping[str, Any], cache: Cache) -> dict[str, Any]:
    """The plan of a case, or the code of the error; seconds without those of the capture."""
    began, began_cpu = time.perf_counter(), time.process_time()

    def observe(what: str, done: int, total: int) -> None:
        nonlocal began, began_cpu
        if what == "capture" and done == total:
            began, began_cpu = time.perf_counter(), time.process_time()

    try:
        job = Job.of(case)
        plan = make_plan(job.target, job.cluster, job.options, observe, cache)
        outcome = {"plan": dumps(plan)}
    except AutoparallelError as error:
        outcome = {"code": error.code, "what": str(error)}
    return {
        **outcome,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - began_cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def priced(
    case: Mapping[str, Any], texts: Sequence[str], cache: Cache
) -> list[dict[str, float | str]]:
    """The seconds and bytes of each plan as ``evaluate`` finds them here."""
    job = Job.of(case)
    program = capture_target(job.target, job.options, cache=cache)
    cluster = with_choice(find_cluster(job.cluster), job.options.tf32)
    graph = priced_graph(program, compiled=job.options.compiled)
    basis = basis_for(cluster, job.options, job.target)
    if not job.options.compiled:
        basis = whole_blocks(graph, program.blocks, cluster, basis, precision=job.options.precision)
    evaluator = Evaluator(graph, program.blocks, basis=basis)
    return [_priced(evaluator, loads(text), cluster) for text in texts]


def _priced(evaluator: Evaluator, plan: Plan, cluster: Cluster) -> dict[str, float | str]:
    """``predicted_seconds`` are the plan's own. A plan may be for a part of the cluster."""
    is_whole = plan.cluster.num_devices == cluster.num_devices
    try:
        found = evaluator.evaluation(plan, cluster if is_whole else plan.cluster)
    except AutoparallelError as error:
        return {"failure": str(error)}
    return {
        "step_seconds": found.step_seconds,
        "peak_bytes": found.peak_memory_bytes,
        "predicted_seconds": plan.prediction.step_seconds,
    }


@contextmanager
def capture_cache(sources: Sequence[Path]) -> Iterator[Cache]:
    """Captured models, kept for as long as none of the ``sources`` changes."""
    made = hashlib.sha256(torch.__version__.encode())
    for file in sources:
        made.update(file.read_bytes())
    CAPTURES.parent.mkdir(parents=True, exist_ok=True)
    shelf = SqliteStore(CAPTURES, made.hexdigest(), MOST_BYTES)
    try:
        yield CaptureCache(shelf, made.hexdigest())
    finally:
        shelf.close()
