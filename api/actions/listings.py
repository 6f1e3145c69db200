"""Lists of ops with sharding rules, of pipeline schedules, and of the cache's contents."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from autoparallel.actions.terminal import stdout_console
from autoparallel.cache.plan_cache import clear_cache, read_contents
from autoparallel.cost_model.simulator.actions import format_table
from autoparallel.cost_model.simulator.simulator import StageCosts, simulate
from autoparallel.cost_model.simulator.timeline_text import draw_schedule
from autoparallel.options.parse import did_you_mean
from autoparallel.options.results import say, say_json
from autoparallel.planner.errors import UsageError
from autoparallel.planner.ops.catalog import list_rules
from autoparallel.planner.requests.request import FORCED_SCHEDULES
from autoparallel.planner.schedules.check import check_schedule, peak_of_ranks
from autoparallel.planner.schedules.schedules import (
    REGISTERED,
    SCHEDULES,
    ScheduleInfo,
    build_schedule,
    find_schedule,
)
from autoparallel.target.load import load_target
from autoparallel.target.register_op import registered_rules


def ops(*, name: str | None, target: str | None, json: bool) -> None:
    """Print the sharding rules of all ops, or only of ops whose name contains ``name``.

    With ``target`` the rules that the target's file registers are included.
    """
    registered = {}
    if target is not None:
        load_target(target)
        registered = dict(registered_rules())
    rules = list_rules(registered)
    found = [rule for rule in rules if name is None or name.lower() in rule.op.lower()]
    if not found:
        raise UsageError(
            "AP167",
            f"no op with a sharding rule has {name!r} in its name",
            why="an op without a rule is replicated on every rank",
            fix=did_you_mean(name or "", [rule.op for rule in rules])
            or 'give it a rule: @autoparallel.register_op("b s h, h o -> b s o")',
        )
    if json:
        say_json("ops", [asdict(rule) for rule in found])
        return
    _print_table(found, len(rules))


def _print_table(found: list, total: int) -> None:  # type: ignore[type-arg]

    console = stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for header, ratio in (("op", 9), ("annotation", 10), ("shardable dimensions", 11)):
        table.add_column(header, ratio=ratio, overflow="fold")
    table.expand = True
    for rule in found:
        annotation = (
            Text(rule.annotation) if rule.annotation else Text("depends on its arguments", "dim")
        )
        table.add_row(Text(rule.op), annotation, Text(rule.splits))
    console.print(table)
    console.print(Text(f"{len(found)} of {total} ops with a rule", style="dim"))


WIDTH = 80
FORWARD_SECONDS, INPUT_SECONDS, WEIGHT_SECONDS = 1.0, 1.0, 1.0


def schedules(
    *,
    name: str | None,
    target: str | None,
    stages: int,
    microbatches: int,
    chunks: int | None,
    slices: int,
    json: bool,
) -> None:
    """Print the list of pipeline schedules or, with ``name``, the timeline of this schedule.

    ``chunks`` is the number of stages per rank, ``slices`` the number of parts of a sequence.
    """
    if target is not None:
        load_target(target)
    if name is not None:
        _draw(find_schedule(name), stages, microbatches, chunks=chunks, slices=slices, json=json)
        return
    own = REGISTERED if target is not None else {}
    found = [facts(info) for info in (*SCHEDULES.values(), *own.values())]
    if json:
        say_json("schedules", found)
    else:
        say("\n".join(listing(found)))


def facts(info: ScheduleInfo) -> dict[str, Any]:
    """Return the properties of a pipeline schedule as JSON values by name: its name, family, bubble
    and memory formulas, source, and whether it can run or only be simulated."""
    executed = {find_schedule(name).name for name in FORCED_SCHEDULES}
    return {
        "name": info.name,
        "family": info.family,
        "synchronous": info.family != "asynchronous",
        "description": info.description,
        "bubble": info.bubble,
        "memory": info.memory,
        "source": info.source,
        "runs": info.name in executed or not info.trains or info.is_registered,
    }


def listing(found: list[dict[str, Any]]) -> list[str]:
    """Format the properties of schedules, from ``facts``, as lines of at most 80 columns."""
    lines = []
    for each in found:
        runs = "simulate and run" if each["runs"] else "simulate only"
        unlike = "" if each["synchronous"] else " (gradients differ from one device)"
        lines.append(f"{each['name']:<14}{each['family']}{unlike}, {runs}")
        lines.append(f"  {each['description']}")
        if each["bubble"]:
            lines.append(f"  bubble {each['bubble']}; memory {each['memory']}")
        lines += [f"  {each['source']}", ""] if each["source"] else [""]
    return [
        *lines,
        "D ranks, N micro-batches, K stages per rank; F, I, W: seconds of a forward and",
        "of the gradients of inputs and of weights, B = I + W, work = N (F + B).",
        "Memory: activations, in micro-batches of a rank's share of the model.",
        "`autoparallel show schedules NAME --stages 4 --microbatches 8` draws one.",
    ]


def _draw(
    info: ScheduleInfo,
    num_ranks: int,
    num_microbatches: int,
    *,
    chunks: int | None,
    slices: int,
    json: bool,
) -> None:

    per_rank = chunks if chunks is not None else info.chunks[0]
    schedule = build_schedule(
        info.name,
        num_ranks * per_rank,
        num_microbatches,
        num_chunks=per_rank,
        slices=(1,) * slices if slices > 1 else (),
    )
    check_schedule(schedule)
    parts = schedule.num_parts
    whole = INPUT_SECONDS + WEIGHT_SECONDS
    costs = StageCosts(
        [FORWARD_SECONDS] * parts, [whole] * parts, weight_backward_seconds=[WEIGHT_SECONDS] * parts
    )
    timeline = simulate(schedule, costs)
    if json:
        say_json(
            "schedules",
            {
                **facts(info),
                "table": format_table(schedule.table).splitlines(),
                "stage_rank": schedule.stage_rank,
                "parts": schedule.parts or tuple(range(schedule.num_stages)),
                "peak_activations": peak_of_ranks(schedule),
                "bubble_fraction": timeline.bubble_fraction,
            },
        )
        return

    console = stdout_console()
    console.print(f"{info.name}: {info.description}", highlight=False, markup=False)
    for line in draw_schedule(schedule, timeline, WIDTH):
        say(line)
    peaks = peak_of_ranks(schedule)
    say(
        f"\nbubble {float(timeline.bubble_fraction):.1%}; most activations in flight by rank: "
        + " ".join(map(str, peaks))
    )


def cache(*, action: Literal["show", "clear"], json: bool) -> None:
    """Print the number and size of the values in the user's cache, or clear the cache."""
    if action == "clear":
        freed = clear_cache()
        if not json:
            say(f"{freed / 1e6:.1f} MB removed")
            return
    found = read_contents()
    if json:
        say_json("cache", {**asdict(found), "path": str(found.path)})
        return
    say(f"{found.path}  {found.num_bytes / 1e6:.1f} MB")
    if not found.values:
        say("no values")
    for name, number in found.values.items():
        mark = "this version" if name == found.own else "another version, not used"
        say(f"{number:>8,} values of {mark}: {name}")
    for reason in found.faults:
        say(f"fault: {reason}")
