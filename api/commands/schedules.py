"""``autoparallel schedules``: the pipeline schedules, listed, or one drawn as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.commands.options import JsonOption, print_json, stdout_console

if TYPE_CHECKING:
    from autoparallel.planner.schedules.schedules import ScheduleInfo

NameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="the schedule to draw; default: list all")
]
StagesOption = Annotated[int, typer.Option("--stages", min=1, help="number of pipeline ranks")]
MicrobatchesOption = Annotated[int, typer.Option("--microbatches", min=1, help="micro-batches")]
ChunksOption = Annotated[
    int | None,
    typer.Option(
        "--chunks", min=1, help="stages per rank; default: the fewest that the schedule takes"
    ),
]
SlicesOption = Annotated[
    int, typer.Option("--slices", min=1, help="equal slices of a sequence, for terapipe")
]

WIDTH = 80
FORWARD_SECONDS, INPUT_SECONDS, WEIGHT_SECONDS = 1.0, 1.0, 1.0


def schedules(
    name: NameArgument = None,
    stages: StagesOption = 4,
    microbatches: MicrobatchesOption = 8,
    chunks: ChunksOption = None,
    slices: SlicesOption = 1,
    json: JsonOption = False,
) -> None:
    """List the pipeline schedules, or draw the timeline of one.

    In the drawing a forward, an input gradient and a weight gradient take equal time, a whole
    backward takes twice that, and messages take no time.
    """
    from autoparallel.planner.schedules.schedules import SCHEDULES, find_schedule

    if name is not None:
        _draw(find_schedule(name), stages, microbatches, chunks=chunks, slices=slices, json=json)
        return
    found = [facts(info) for info in SCHEDULES.values()]
    if json:
        print_json(found)
    else:
        typer.echo("\n".join(listing(found)))


def facts(info: ScheduleInfo) -> dict[str, Any]:
    """What there is to say about a schedule."""
    from autoparallel.planner.requests.request import FORCED_SCHEDULES
    from autoparallel.planner.schedules.schedules import find_schedule

    executed = {find_schedule(name).name for name in FORCED_SCHEDULES}
    return {
        "name": info.name,
        "family": info.family,
        "synchronous": info.family != "asynchronous",
        "description": info.description,
        "bubble": info.bubble,
        "memory": info.memory,
        "source": info.source,
        "runs": info.name in executed or not info.trains,
    }


def listing(found: list[dict[str, Any]]) -> list[str]:
    """The list as lines of at most 80 columns."""
    lines = []
    for each in found:
        runs = "simulate and run" if each["runs"] else "simulate only"
        unlike = "" if each["synchronous"] else " (gradients differ from one device)"
        lines.append(f"{each['name']:<14}{each['family']}{unlike}, {runs}")
        lines.append(f"  {each['description']}")
        lines.append(f"  bubble {each['bubble']}; memory {each['memory']}")
        lines += [f"  {each['source']}", ""] if each["source"] else [""]
    return [
        *lines,
        "D ranks, N micro-batches, K stages per rank; F, I, W: seconds of a forward and",
        "of the gradients of inputs and of weights, B = I + W, work = N (F + B).",
        "Memory: activations, in micro-batches of a rank's share of the model.",
        "`autoparallel schedules NAME --stages 4 --microbatches 8` draws one.",
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
    from autoparallel.cost_model.simulator.actions import format_table
    from autoparallel.cost_model.simulator.simulator import StageCosts, simulate
    from autoparallel.planner.schedules.check import check_schedule, peak_of_ranks
    from autoparallel.planner.schedules.schedules import build_schedule

    per_rank = chunks if chunks is not None else info.chunks[0]
    schedule = build_schedule(
        info.name, num_ranks * per_rank, num_microbatches, num_chunks=per_rank,
        slices=(1,) * slices if slices > 1 else (),
    )  # fmt: skip
    check_schedule(schedule)
    parts = schedule.num_parts
    whole = INPUT_SECONDS + WEIGHT_SECONDS
    costs = StageCosts(
        [FORWARD_SECONDS] * parts, [whole] * parts, weight_backward_seconds=[WEIGHT_SECONDS] * parts
    )
    timeline = simulate(schedule, costs)
    if json:
        print_json({
            **facts(info),
            "table": format_table(schedule.table).splitlines(),
            "stage_rank": schedule.stage_rank,
            "parts": schedule.parts or tuple(range(schedule.num_stages)),
            "peak_activations": peak_of_ranks(schedule),
            "bubble_fraction": timeline.bubble_fraction,
        })  # fmt: skip
        return
    from autoparallel.cost_model.simulator.timeline_text import draw_schedule

    console = stdout_console()
    console.print(f"{info.name}: {info.description}", highlight=False, markup=False)
    for line in draw_schedule(schedule, timeline, WIDTH):
        typer.echo(line)
    peaks = peak_of_ranks(schedule)
    typer.echo(
        f"\nbubble {float(timeline.bubble_fraction):.1%}; most activations in flight by rank: "
        + " ".join(map(str, peaks))
    )
