"""Error of a model that does not fit, with changes under which it does, found by planning again.

In: the error, the cluster, the request, the search. Out: the error with the nearest plan (least
memory): its fullest device and the bytes there; the user's choices; and changes that were tried and
give a plan, with their command lines. Each change gives up one thing: a forced choice, a pin, a
denied feature, the memory limit, or the size of the cluster. For a model whose rows interact (batch
norm) the first change splits the batch: by default all rows of a step are one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.options.progress import Observe, ignore
from autoparallel.options.words import bytes_text
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.plan import Plan, StagePlan
from autoparallel.planner.requests.request import Forced, Request, divisors
from autoparallel.planner.summary import HOST_STATES
from autoparallel.planning.plan_command import IMPLIED, plan_command
from autoparallel.planning.repeated_search import RepeatedSearch, Search

Change = tuple[str, Cluster, Request]
"""Description of a change, and the changed cluster and request to plan for."""

MOST_SECONDS = 20.0
"""Limit in seconds for trying all changes; the time limit of the search also applies."""

ENOUGH = 3
"""Number of changes that an error message names."""

FACTORS = (1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 16.0)
"""Multiples of the memory limit that are tried in turn to find the nearest plan."""

UNLIMITED = 1e6
"""Multiple of the memory limit that stands for no limit."""

EXTRA_SECONDS = 10.0
"""Seconds to search without a memory limit, and extra seconds to search under larger limits."""

MOST_TIMES = 64
"""Largest multiple of the cluster's hosts that is tried to find a plan."""

MICROBATCH_SECONDS = 6.0
"""Time limit of the search with each number of micro-batches; any plan suffices."""


def with_nearest_change(
    error: InfeasibleError,
    cluster: Cluster,
    request: Request,
    search: Search,
    *,
    mixing: str = "",
    observe: Observe = ignore,
) -> InfeasibleError:
    """Return the error, with the smallest changes of request or cluster under which a plan exists.

    ``mixing`` names a module in which rows interact, "" if none. ``observe`` is told of the phase
    "trying changes".
    """
    observe("trying changes", 0, 0)
    runs = RepeatedSearch(search, min(MOST_SECONDS, request.time_limit_seconds), ignores=True)
    found = _more_microbatches(cluster, request, runs, mixing) if mixing else []
    for words, on, asked in changes(cluster, request):
        if runs.left <= 0 or len(found) == ENOUGH:
            break
        plan = runs.run(on, asked)
        if plan is not None:
            found.append(_line(words, plan, on, asked))
    if len(found) < ENOUGH:
        found += _more_devices(cluster, request, runs)
    nearest = _nearest(cluster, request, runs)
    fix = "\n       ".join(["these changes were tried and fit:", *found]) if found else error.fix
    if nearest is None:
        return InfeasibleError(error.code, error.what, why=error.why, where=error.where, fix=fix)
    limit = _limit_bytes(cluster, request)
    peak = nearest.prediction.peak_memory_bytes
    return InfeasibleError(
        error.code,
        f"the model does not fit: the nearest plan needs {bytes_text(peak)}, "
        f"the limit is {bytes_text(limit)}",
        why=f"{_binding(nearest)}{_choices(request)}",
        where=_fullest(nearest)[0],
        fix=fix,
    )


def _nearest(cluster: Cluster, request: Request, runs: RepeatedSearch) -> Plan | None:
    """Return the plan for the smallest multiple of the memory limit that allows a plan, or None.

    Searches under tight limits are quick, since few candidates are left. The search without a limit
    is last and has its own time, so that a plan can be named however long the others took.
    """
    limit = _limit_bytes(cluster, request)
    nearer = runs.anew(max(runs.left, 0.0) + EXTRA_SECONDS)
    for factor in FACTORS:
        if nearer.left <= 0:
            break
        found = nearer.run(cluster, replace(request, memory_limit_bytes=int(limit * factor)))
        if found is not None:
            return found
    unlimited = replace(request, memory_limit_bytes=int(limit * UNLIMITED))
    return runs.anew(EXTRA_SECONDS).run(cluster, unlimited)


def _limit_bytes(cluster: Cluster, request: Request) -> int:
    if request.memory_limit_bytes is not None:
        return request.memory_limit_bytes
    return cluster.usable_memory_bytes


def _fullest(plan: Plan) -> tuple[str, StagePlan]:
    """Return the stage with the highest predicted memory, and before it a text that names it."""
    sizes = [sum(stage.prediction.memory_bytes.values()) for stage in plan.stages]
    index = sizes.index(max(sizes))
    stage = plan.stages[index]
    of = f"stage {index} ({stage.blocks[0].name} to {stage.blocks[-1].name}), "
    return f"{of if len(plan.stages) > 1 else ''}rank {stage.devices[0]}", stage


def _binding(plan: Plan) -> str:
    """Describe the bytes of the fullest device by category, the largest first."""
    found = _fullest(plan)[1].prediction.memory_bytes
    ordered = sorted(found.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in ordered if size)


def _choices(request: Request) -> str:
    """Describe the choices that the user fixed (degrees, pins, …), which may exclude all plans."""
    said = [f"{name}={value}" for name, value in request.forced.decided.items()]
    if request.microbatch_size is not None:
        said.append(f"micro-batches of {request.microbatch_size} samples a rank")
    said += [f"--pin {pin}" for pin in request.pins]
    said += [f"--stage-at {path}" for path in request.stage_at]
    said += [f"--max-tp {request.max_tp}"] if request.max_tp is not None else []
    denied = ", ".join(sorted(request.features.denied - IMPLIED))
    said += [f"denied: {denied}"] if denied else []
    return f"; fixed: {', '.join(said)}" if said else ""


def _line(words: str, plan: Plan, cluster: Cluster, request: Request) -> str:
    """Return a line of text for a change under which ``plan`` exists: the change in ``words``, the
    plan's peak memory, and the command that plans so."""
    figures = f"{bytes_text(plan.prediction.peak_memory_bytes)} on the fullest device"
    if plan.offload != "none" and request.forced.offload is None:
        figures += f", {HOST_STATES[plan.offload]} in host memory"
    command = plan_command(cluster, request)
    return f"{words} ({figures})" + (f": {command}" if command else "")


def changes(cluster: Cluster, request: Request) -> Iterator[Change]:
    """Yield requests without one of the user's restrictions, each described, the mildest first."""
    forced = request.forced
    plain = replace(request, microbatch_size=None)

    def without(name: str, text: str) -> Change:
        names = (name, "etp") if name == "tp" else (name,)
        free = replace(forced, **dict.fromkeys(names))
        return f"without {text}", cluster, replace(request, forced=free)

    if request.microbatch_size is not None or forced.num_microbatches is not None:
        free = replace(plain, forced=replace(forced, num_microbatches=None))
        yield "without a fixed micro-batch size", cluster, free
    if forced.recompute not in (None, "full"):
        yield without("recompute", f"recompute={forced.recompute}")
    if forced.all_reduces:
        free = replace(request, forced=replace(forced, allreduce=None, gradients=None))
        yield f"without {' and '.join(forced.all_reduces)}", cluster, free
    if forced.zero is not None and forced.zero < 3:
        yield without("zero", f"zero={forced.zero}")
    if forced.shard is not None:
        yield without("shard", f"shard={forced.shard}")
    if forced.schedule is not None:
        yield without("schedule", f"schedule={forced.schedule}")
    for name in ("dp", "tp", "pp", "cp", "ep", "etp"):
        if getattr(forced, name) is not None:
            yield without(name, f"{name}={getattr(forced, name)}")
    for pin in request.pins:
        others = tuple(each for each in request.pins if each != pin)
        yield f"without --pin {pin}", cluster, replace(request, pins=others)
    for path in request.stage_at:
        paths = tuple(each for each in request.stage_at if each != path)
        yield f"without --stage-at {path}", cluster, replace(request, stage_at=paths)
    if request.max_tp is not None:
        yield f"without --max-tp {request.max_tp}", cluster, replace(request, max_tp=None)
    for name in sorted(request.features.denied - IMPLIED):
        rest = replace(request.features, denied=request.features.denied - {name})
        yield f"with {name} allowed", cluster, replace(request, features=rest)
    if forced != Forced():
        yield "without any --parallel", cluster, replace(plain, forced=Forced())
    if request.memory_limit_bytes is not None:
        yield (
            "without --memory-limit",
            cluster,
            replace(request, memory_limit_bytes=None),
        )


def _more_microbatches(
    cluster: Cluster, request: Request, runs: RepeatedSearch, mixing: str
) -> list[str]:
    """Double the number of micro-batches until a plan exists; return a line that names the number,
    or nothing. ``mixing`` names the module that mixes samples."""
    forced = request.forced
    if forced.num_microbatches is not None or request.microbatch_size is not None:
        return []
    least = 2
    for count in divisors(request.global_batch):
        if count < least or runs.left <= 0:
            continue
        least = 2 * count
        asked = replace(request, forced=replace(forced, num_microbatches=count))
        plan = runs.anew(min(runs.left, MICROBATCH_SECONDS)).run(cluster, asked)
        if plan is not None:
            words = f"--parallel microbatches={count}, each of which {mixing} then sees for itself"
            return [_line(words, plan, cluster, asked)]
    return []


def _more_devices(cluster: Cluster, request: Request, runs: RepeatedSearch) -> list[str]:
    """Multiply the cluster's hosts until a plan exists; return a line that names it, or nothing."""
    times = 2
    forced = request.forced
    if forced.dp is not None and forced.tp is not None and forced.pp is not None:
        request = replace(request, forced=replace(forced, dp=None))
    while times <= MOST_TIMES:
        if runs.left <= 0:
            break
        larger = replace(cluster, name=f"{times} × {cluster.name}", hosts=cluster.hosts * times)
        found = runs.run(larger, request)
        if found is not None:
            words = f"{larger.num_devices} devices on {len(larger.hosts)} hosts"
            return [_line(words, found, larger, request)]
        times *= 2
    return []
