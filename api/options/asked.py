"""What a user asks of a plan, as the command line and the Python API write it, as PlanOptions.

Both have the same names and take the same texts; ``SearchOptions`` lists them once for Python,
``commands.options.plan_options`` once for the command line, and a test holds them together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, get_args

from autoparallel.cost_model.cluster.tf32 import Tf32
from autoparallel.cost_model.ops.memory import GradientDtype
from autoparallel.options.parse import parse_deadline, parse_parallel, parse_prices, parse_size
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Float32Ops, Precision
from autoparallel.planner.pricing.basis import Mode
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.goal import Goal, Objective
from autoparallel.planner.requests.pins import parse_pin
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, DERIVED_SCHEDULES, SCHEDULES
from autoparallel.planning.plan import PlanOptions

MEASURE_SECONDS = 10.0
"""To measure what a plan for this machine asks for, where nothing is said."""

MEASURE_VARIABLE = "AUTOPARALLEL_MEASURE_SECONDS"
Init = Literal["auto", "sharded", "exact"]
"""How initial values are drawn; see ``passes.initialization.deferred_init``."""

Texts = str | Sequence[str] | None
"""One text or several."""


class SearchOptions(TypedDict, total=False):
    """What a search may be told; each as the option of ``autoparallel plan`` of that name."""

    micro_batch: int | None
    precision: Precision
    float32_ops: Float32Ops
    gradient_dtype: GradientDtype
    tf32: Tf32 | None
    compile: bool | None
    optimizer: str
    memory_limit: str | int | None
    parallel: str | None
    pin: Texts
    stage_at: Texts
    max_tp: int | None
    allow: Texts
    deny: Texts
    objective: Objective
    price: Texts | float | Mapping[str, float]
    deadline: str | None
    gap: float
    tolerance: float
    time_limit: float
    num_candidates: int
    search: str
    solver: str
    processes: int | None
    profile: Mode
    database: str | None
    measure_seconds: float | None


def options_of(global_batch: int, seq: int | None, asked: SearchOptions) -> PlanOptions:
    """The options as values. Raises UsageError (AP111 to AP117, AP173, AP180 to AP189)."""
    limit = asked.get("memory_limit")
    goal = Goal(
        asked.get("objective", "time"),
        parse_prices(asked.get("price")),
        parse_deadline(asked.get("deadline")),
    )
    allow, deny = texts(asked.get("allow")), texts(asked.get("deny"))
    return PlanOptions(
        global_batch=global_batch,
        seq=seq,
        micro_batch=asked.get("micro_batch"),
        precision=asked.get("precision", "fp32"),
        float32_ops=asked.get("float32_ops", "autocast"),
        gradient_dtype=asked.get("gradient_dtype", "master"),
        tf32=asked.get("tf32"),
        compiled=asked.get("compile"),
        optimizer=asked.get("optimizer", "adamw"),
        memory_limit_bytes=parse_size(limit) if isinstance(limit, str) else limit,
        forced=parse_parallel(asked.get("parallel")),
        pins=tuple(parse_pin(text) for text in texts(asked.get("pin"))),
        stage_at=texts(asked.get("stage_at")),
        max_tp=asked.get("max_tp"),
        features=features_of(allow, deny, (*SCHEDULES, *CHUNKED_SCHEDULES, *DERIVED_SCHEDULES)),
        goal=goal,
        gap=asked.get("gap", 0.01),
        tolerance=asked.get("tolerance", 0.02),
        time_limit_seconds=asked.get("time_limit", 60.0),
        num_candidates=asked.get("num_candidates", 5),
        search=asked.get("search", "dp"),
        solver=asked.get("solver", "highs"),
        processes=asked.get("processes") or num_processes(),
        profile=asked.get("profile", "auto"),
        database=asked.get("database"),
        measure_seconds=_measure_seconds(asked.get("measure_seconds")),
    )


def _measure_seconds(asked: float | None) -> float:
    """Seconds to measure before planning: as asked, or as the environment says, or the usual.

    Raises UsageError AP840 where the environment's are no number.
    """
    if asked is not None:
        return asked
    text = os.environ.get(MEASURE_VARIABLE, "")
    try:
        return float(text) if text else MEASURE_SECONDS
    except ValueError:
        raise UsageError(
            "AP840",
            f"{text!r} is not a number of seconds",
            where=f"the environment variable {MEASURE_VARIABLE}",
            fix="0 turns measuring before planning off; the default is 10",
        ) from None


def num_processes() -> int:
    """How many processes search where nothing is said: two, where there are cores for them.

    A rank that torchrun started searches alone: it shares its cores with the others.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 1
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (0,)
    return min(2, len(cores))


def checked_init(init: str) -> Init:
    """``init`` as a value. Raises UsageError AP850 for a text that is none.

    >>> checked_init("exact")
    'exact'
    """
    known: dict[str, Init] = {name: name for name in get_args(Init)}
    if init in known:
        return known[init]
    raise UsageError(
        "AP850",
        f"unknown initialization {init!r}",
        fix="exact (the values of a plain build), sharded (each rank draws its own shards) or auto "
        "(exact where that takes a rank less than 10 s)",
    )


def texts(value: Texts) -> tuple[str, ...]:
    """One text or several as a tuple.

    >>> texts("tp"), texts(["tp", "dp"]), texts(None)
    (('tp',), ('tp', 'dp'), ())
    """
    return (value,) if isinstance(value, str) else tuple(value or ())
