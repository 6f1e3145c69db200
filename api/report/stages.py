"""The table of a plan's stages, as long as a page allows."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autoparallel.options.words import bytes_text, names_text, ranks_text, seconds_text
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import mesh_text
from autoparallel.report.printing import WIDTH, plain_table

LEFT = ("", "blocks", "ranks", "mesh")
BLOCKS, ZERO = 1, 4
"""Indices of columns."""


def stages(plan: Plan, *, limit: int) -> RenderableType:
    """Return a row per stage: its blocks, their place, and the seconds of a micro-batch.

    Of more than ``limit`` stages the first, the slowest, the fullest and the last are shown.
    """
    shown = shown_stages(plan, limit)
    is_same = len({stage.zero for stage in plan.stages}) == 1  # the headline has it if equal
    titles = ["", "blocks", "ranks", "mesh", "ZeRO", "forward", "backward", "memory"]
    rows = [_row(plan, index) for index in shown]
    if is_same:
        titles, rows = _without(titles), [_without(row) for row in rows]
    sides = ["left" if title in LEFT else "right" for title in titles]
    table = plain_table(*zip(titles, sides, strict=True))
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    name = max(len(block.name) for index in shown for block in plan.stages[index].blocks)
    if sum(widths) - widths[BLOCKS] + name + 2 * len(widths) <= WIDTH - 2:
        table.columns[BLOCKS].min_width = name
    for row in rows:
        table.add_row(*row)
    left = len(plan.stages) - len(shown)
    if not left:
        return table
    return Group(table, Text(f"and {left} stages between them (--stages shows all)", style="dim"))


def shown_stages(plan: Plan, limit: int) -> list[int]:
    """Return the numbers of the stages to show."""
    every = range(len(plan.stages))
    if len(every) <= limit:
        return list(every)
    parts = [stage.prediction for stage in plan.stages]
    passes = [own.seconds.get("forward", 0.0) + own.seconds.get("backward", 0.0) for own in parts]
    held = [sum(own.memory_bytes.values()) for own in parts]
    slowest, fullest = passes.index(max(passes)), held.index(max(held))
    return sorted({*every[: max(1, limit - 3)], slowest, fullest, every[-1]})


def _row(plan: Plan, index: int) -> list[str]:
    stage = plan.stages[index]
    seconds = stage.prediction.seconds
    return [
        str(index),
        names_text([block.name for block in stage.blocks]),
        ranks_text(stage.devices),
        mesh_text(stage.mesh),
        str(stage.zero),
        seconds_text(seconds.get("forward", 0.0)),
        seconds_text(seconds.get("backward", 0.0)),
        bytes_text(sum(stage.prediction.memory_bytes.values())),
    ]


def _without(row: Sequence[str]) -> list[str]:
    """Remove the column of ZeRO."""
    return [*row[:ZERO], *row[ZERO + 1 :]]
