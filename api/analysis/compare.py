"""Items that ``autoparallel compare`` shows side by side: plans, runs and named baselines.

In: the words of the command line. Out: for each a label with a plan, or with the figures of a run.
A baseline is a common configuration of the first plan's model, batch and cluster, priced as
``simulate`` prices it: ``ddp``, ``fsdp``, ``zero1`` to ``zero3``, ``tp8``, ``pp4``, ``3d``; more
degrees follow a colon (``3d:tp=8,pp=4``, ``fsdp:recompute=full``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from autoparallel.analysis.baselines import NAMED
from autoparallel.analysis.measurement import WARMUP_STEPS, Measurement, checksum, load_measurement
from autoparallel.analysis.plan_model import load_plan_model
from autoparallel.options.parse import did_you_mean, parse_parallel
from autoparallel.options.progress import Observe, ignore
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.plan_files import PLAN, load_plan

if TYPE_CHECKING:
    from autoparallel.cache.plan_cache import Cache

_DEGREE = re.compile(r"(tp|pp|cp|ep)(\d+)")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Metrics of a training run: median step seconds and throughput, rank 0's peak, last loss."""

    num_steps: int
    step_seconds: float
    throughput: float | None
    memory_bytes: int | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class Item:
    """Plan, or metrics of a training run, in a comparison; ``name`` is its label.

    ``measured`` is the measurement stored beside the plan's file, None if there is none.
    """

    name: str
    plan: Plan | None
    run: MeasuredRun | None = None
    measured: Measurement | None = None


def load_items(
    words: Sequence[Plan | str | Path],
    cache: Cache,
    *,
    trust: bool = False,
    observe: Observe = ignore,
) -> tuple[Item, ...]:
    """Load the plans, runs and baselines that ``words`` name, to compare them. Raises UsageError:

    AP353: a word is neither a file nor a baseline. AP354: a baseline is given without a plan.
    AP355: a metrics file has no steps. AP356: fewer than two words. AP155: a baseline is given, but
    the plan's code is not trusted.
    """
    if len(words) < 2:
        raise UsageError(
            "AP356",
            "compare needs at least two plans, runs or baselines",
            fix="for example: autoparallel compare plan.json fsdp",
        )
    made: list[Item | Forced] = [
        _plan_item(word, place)
        if isinstance(word, Plan)
        else _file_item(str(word))
        if Path(word).exists()
        else baseline(str(word))
        for place, word in enumerate(words)
    ]
    files = [item for item in made if isinstance(item, Item)]
    named = [str(w) for w, item in zip(words, made, strict=True) if not isinstance(item, Item)]
    first = next((item for item in files if item.plan is not None), None)
    if not named:
        return tuple(files)
    if first is None or first.plan is None:
        raise UsageError(
            "AP354",
            f"the baseline {named[0]} needs a plan to compare with",
            fix="name a plan file too: its model and cluster are those of the baselines",
        )

    model = load_plan_model(first.plan, first.name, trust=trust, cache=cache, observe=observe)
    found: list[Item] = []
    for word, item in zip(words, made, strict=True):
        observe("baselines", len(found), len(made))
        found.append(item if isinstance(item, Item) else Item(str(word), model.configured(item)))
    observe("baselines", len(made), len(made))
    return tuple(found)


def _plan_item(plan: Plan, place: int) -> Item:
    return Item("plan" if place == 0 else f"plan {place + 1}", plan)


def baseline(word: str) -> Forced:
    """Parse the name of a baseline into its degrees. Raises UsageError AP353 for an unknown name.

    >>> found = baseline("3d:tp=8,pp=4")
    >>> found.tp, found.pp, found.zero
    (8, 4, 1)
    >>> baseline("fsdp").zero, baseline("tp8").tp
    (3, 8)
    """
    name, _, more = word.partition(":")
    name = name.lower()
    given = parse_parallel(more)
    if match := _DEGREE.fullmatch(name):
        own = parse_parallel(f"{match.group(1)}={match.group(2)}")
    elif name in NAMED:
        own = NAMED[name]
    else:
        raise UsageError(
            "AP353",
            f"{word!r} is neither a file nor a baseline",
            fix=did_you_mean(name, tuple(NAMED))
            or f"a plan, a file of run --metrics, or {', '.join(NAMED)}, tpN, ppN; degrees "
            "follow a colon: 3d:tp=8,pp=4",
        )
    if name == "3d" and not (given.tp or given.pp):
        raise UsageError("AP353", "the baseline 3d needs degrees", fix="for example: 3d:tp=8,pp=4")
    return given.over(own)


def _file_item(word: str) -> Item:
    path = Path(word)
    if path.is_dir():
        if not (path / PLAN).exists():
            raise UsageError(
                "AP353",
                f"the folder {word} holds no {PLAN}",
                fix="name a plan, or the file that run --metrics wrote",
            )
        path = path / PLAN
    if path.suffix == ".jsonl" or _is_metrics(path):
        return Item(word, None, read_run(path))
    plan, measured = load_plan(path), load_measurement(path)
    is_of_plan = measured is not None and measured.plan == checksum(plan)
    return Item(word, plan, None, measured if is_of_plan else None)


def _is_metrics(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "step" in first


def read_run(path: Path) -> MeasuredRun:
    """Read the metrics in a ``run --metrics`` file. Raises UsageError AP355 if it has no steps."""
    records: list[dict[str, Any]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("seconds"), int | float):
                records.append(record)
    except (OSError, ValueError) as error:
        raise _no_steps(path, str(error)) from error
    if not records:
        raise _no_steps(path, "no line has the seconds of a step")

    kept = records[WARMUP_STEPS:] or records
    rates = [
        record[name]
        for record in kept
        for name in ("tokens_per_second", "samples_per_second")
        if record.get(name) is not None
    ]
    memory = [record["memory_bytes"] for record in kept if record.get("memory_bytes")]
    return MeasuredRun(
        len(records),
        median(record["seconds"] for record in kept),
        median(rates) if rates else None,
        max(memory) if memory else None,
        records[-1].get("loss"),
    )


def _no_steps(path: Path, why: str) -> UsageError:
    return UsageError(
        "AP355",
        f"{path} is not what run --metrics writes",
        why=why,
        where=str(path),
        fix="autoparallel run plan.json --metrics run.jsonl writes such a file",
    )
