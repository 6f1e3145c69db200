"""Tables of a report: stages, sharding, memory, seconds, collectives, alternatives.

Each function takes a plan and returns a renderable, and its title if the title has figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from autoparallel.analysis.facts import (
    StageRow,
    busiest_rank,
    candidate_rows,
    fullest_rank,
    merged_communication,
    rank_seconds,
    stage_rows,
)
from autoparallel.analysis.sharding import (
    KindSplit,
    axis_lines,
    folded_names,
    mesh_splits,
    stored_text,
)
from autoparallel.options.words import bytes_text, names_text, ranks_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import mesh_text, sharding_text
from autoparallel.report.printing import WIDTH, bars, list_table, plain_table

SHORT_ALTERNATIVES, SHORT_CATEGORIES = 3, 3

STAGE_TITLES = ("", "blocks", "ranks", "mesh", "ZeRO", "forward", "backward", "memory")
BLOCKS, ZERO, FIRST_FIGURE = 1, 4, 4
"""Indices of columns in ``STAGE_TITLES``; right-aligned columns begin at ``FIRST_FIGURE``."""


def stages(plan: Plan, *, limit: int) -> RenderableType:
    """Return a row per stage: its blocks, its devices, and the seconds of a micro-batch.

    If there are more than ``limit`` stages, the first, slowest, fullest and last are shown.
    """
    every = stage_rows(plan)
    shown = [every[index] for index in shown_stages(every, limit)]
    shardings = {(row["zero"], row["shard_degree"]) for row in every}
    has_zero = len(shardings) > 1  # the headline has it if equal
    rows = [STAGE_TITLES, *map(_stage_cells, shown)]
    sides = ["left"] * FIRST_FIGURE + ["right"] * (len(STAGE_TITLES) - FIRST_FIGURE)
    columns = list(zip(sides, *rows, strict=True))
    if not has_zero:
        del columns[ZERO]
    table = plain_table(*((title, side) for side, title, *_ in columns))
    widths = [max(map(len, cells)) for _, *cells in columns]
    name = max(len(block) for row in shown for block in row["blocks"])
    if sum(widths) - widths[BLOCKS] + name + 2 * len(widths) <= WIDTH - 2:
        table.columns[BLOCKS].min_width = name
    for cells in zip(*(cells for _, _, *cells in columns), strict=True):
        table.add_row(*cells)
    left = len(every) - len(shown)
    if not left:
        return table
    return Group(table, Text(f"and {left} stages between them (--stages shows all)", style="dim"))


def shown_stages(rows: Sequence[StageRow], limit: int) -> list[int]:
    """Return the indices of at most ``limit`` stages: first, slowest, fullest and last."""
    every = range(len(rows))
    if len(every) <= limit:
        return list(every)
    slowest = max(every, key=lambda at: rows[at]["forward_seconds"] + rows[at]["backward_seconds"])
    fullest = max(every, key=lambda at: rows[at]["memory_bytes"])
    return sorted({*every[: max(1, limit - 3)], slowest, fullest, every[-1]})


def _stage_cells(row: StageRow) -> tuple[str, ...]:
    return (
        str(row["stage"]),
        names_text(row["blocks"]),
        ranks_text(row["ranks"]),
        row["mesh"],
        sharding_text(row["zero"], row["shard_degree"]),
        seconds_text(row["forward_seconds"]),
        seconds_text(row["backward_seconds"]),
        bytes_text(row["memory_bytes"]),
    )


def splits(plan: Plan) -> RenderableType:
    """Return, for each mesh of the plan, the purposes of its axes and the layouts of parameters."""
    parts: list[RenderableType] = []
    for mesh, members, kinds in mesh_splits(plan):
        if len(members) < len(plan.stages):
            noun = "stage" if len(members) == 1 else "stages"
            parts.append(
                Text(f"{noun} {ranks_text(tuple(members))}: {mesh_text(mesh)}", style="cyan")
            )
        lines = [*axis_lines(list(members.values())), stored_text(members.values())]
        parts.extend(Text(line, style="dim") for line in lines if line)
        for kind in kinds:
            count = f"  ×{len(kind.blocks)}" if len(kind.blocks) > 1 else ""
            name = names_text(kind.blocks) or "shared"
            parts.append(Text.assemble((name, "bold"), count))
            parts.append(Padding(_groups(kind), (0, 0, 0, 2), expand=False))
    return Group(*parts)


def _groups(kind: KindSplit) -> RenderableType:
    table = list_table("left", "left")
    table.columns[0].no_wrap = True
    for text, names in kind.groups.items():
        table.add_row(text, ", ".join(folded_names(names)))
    return table


MEMORY_STYLES = {
    "parameters": "blue",
    "gradients": "magenta",
    "optimizer": "cyan",
    "activations": "yellow",
}


def memory(plan: Plan, *, is_short: bool = False) -> tuple[str, RenderableType]:
    """Return the memory of the fullest rank against its limit: with a bar per category, or if short
    with the largest categories in a line."""
    rank = fullest_rank(plan)
    where = f", {stages_text(rank.stages)}" if plan.has_pipeline else ""
    sizes = of_text(rank.total_bytes, rank.limit_bytes)
    title = f"Peak memory (rank {rank.device}{where}): {sizes}"
    if not is_short:
        return title, bars(rank.parts, bytes_text, MEMORY_STYLES)
    found = sorted(rank.parts.items(), key=lambda each: -each[1])
    shown = [f"{name} {bytes_text(size)}" for name, size in found[:SHORT_CATEGORIES]]
    rest = sum(size for _, size in found[SHORT_CATEGORIES:])
    return title, Text(", ".join([*shown, *([f"rest {bytes_text(rest)}"] if rest else [])]))


def of_text(used: float, limit: float) -> str:
    """Return a size in bytes and its limit as text, with the unit only once if both have the same.

    >>> of_text(55 * 2**30, 72 * 2**30)
    '55.0 of 72.0 GiB'
    """
    first, second = bytes_text(used), bytes_text(limit)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first} of {second}"


def stages_text(stages: Sequence[int]) -> str:
    """Name stages by number; of more than three the first two and the last.

    >>> stages_text((1,)), stages_text((0, 2)), stages_text((1, 5, 9, 13))
    ('stage 1', 'stages 0 and 2', 'stages 1, 5, … 13')
    """
    if len(stages) > 3:
        return f"stages {stages[0]}, {stages[1]}, … {stages[-1]}"
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


def time(plan: Plan, *, least: float = 0.0) -> tuple[str, RenderableType]:
    """Return the parts of the step's time on the busiest rank. Parts below the share ``least`` are
    summed as "rest"."""
    stages = busiest_rank(plan)
    values = rank_seconds(plan, stages)
    small = [name for name in values if values[name] < least * plan.prediction.step_seconds]
    if len(small) > 1:
        values["rest"] = sum(values.pop(name) for name in small)
    where = f" of the slowest rank ({stages_text(stages)})" if plan.has_pipeline else ""
    title = f"Step time{where}: {seconds_text(plan.prediction.step_seconds)}"
    styles = {"compute": "green", "waiting for other stages": "red"}
    return title, bars(values, seconds_text, styles)


def communications(plan: Plan) -> RenderableType:
    """Return the seconds of the stages' collectives in a step, hidden and exposed."""
    names, figures = ("stages", "collectives", "beside"), ("total", "hidden", "exposed")
    table = plain_table(*((name, "left") for name in names), *((name, "right") for name in figures))
    for members, each in merged_communication(plan):
        seconds = (each.seconds, each.hidden_seconds, each.exposed_seconds)
        table.add_row(ranks_text(members), each.what, each.beside, *map(seconds_text, seconds))
    return table if table.row_count else Text("none within the stages")


def alternatives(plan: Plan, *, all_of_them: bool) -> tuple[str, RenderableType]:
    """Return the title and a table of a plan's best alternatives with their slowdowns;
    ``all_of_them`` lists every alternative, with its main difference."""
    table = plain_table(
        ("configuration (micro-batches × size)", "left"),
        ("step", "right"),
        ("", "right"),
        ("memory", "right"),
    )
    best = plan.prediction.step_seconds
    others = candidate_rows(plan, merged=True)[1:]
    shown = others if all_of_them else others[:SHORT_ALTERNATIVES]
    for other in shown:
        step, held = other["step_seconds"], other["memory_bytes"]
        slower = step / best - 1 if best and step else 0.0
        table.add_row(
            other["configuration"],
            seconds_text(step) if step else "—",
            f"{100 * slower:+.1f} %" if step else "",
            bytes_text(held) if held else "—",
        )
        if all_of_them:
            table.add_row(Text(f"  {other['reason']}", style="dim"), "", "", "")
    some = f" ({len(shown)} of {len(others)}, --candidates shows all)"
    return "Alternatives" + (some if len(shown) < len(others) else ""), table
