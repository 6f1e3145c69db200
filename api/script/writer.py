"""State of writing a function of a script: its text so far, names, and errors.

``calls`` writes calls of this package's functions, ``blocks`` all other calls.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from autoparallel.passes.local.localize import MADE_BY
from autoparallel.passes.local.stage_program import BlockProgram, StageProgram
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.graph import Graph, Node
from autoparallel.planner.graph.layout import Layout
from autoparallel.script.expressions import Expression

MOVES = {
    ("S", "R"): "all_gather",
    ("S", "I"): "all_gather_same",
    ("S", "P"): "pad",
    ("R", "S"): "take_part",
    ("I", "S"): "take_part_same",
    ("R", "P"): "as_term",
    ("I", "P"): "as_term_same",
    ("R", "I"): "divide_gradient",
    ("I", "R"): "sum_gradient",
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce_both",
    ("P", "S"): "reduce_scatter",
}
"""Script function for each change of placement, such as ("S", "R"): shard to replicate."""

RESERVED = frozenset(
    {*MOVES.values(), "all_to_all", "dropout", "uniform", "w", "mesh", "draw", "torch", "F", "x"}
).union(dir(builtins), keyword.kwlist)
"""Names that a script's function must not give to its values."""


@dataclass(slots=True)
class Writer:
    """State of writing a block's function: ``values`` maps graph nodes to their expressions,
    ``lines`` are written already."""

    program: BlockProgram
    stage: StageProgram
    graph: Graph
    layout_of: Callable[[str], Layout | None]
    path: str
    first_number: int
    values: dict[fx.Node, Expression] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    uses: set[str] = field(default_factory=set)
    weights: list[str] = field(default_factory=list)
    part: str = ""

    def unique(self, name: str) -> str:
        """Return ``name`` as a Python identifier, with a number appended if already used."""
        name = re.sub(r"\W", "_", name).strip("_") or "value"
        if name[0].isdigit():
            name = f"part_{name}"
        count = self.names.get(name, 1 if name in RESERVED else 0)
        self.names[name] = count + 1
        return f"{name}_{count + 1}" if count else name


def unwritable(writer: Writer, node: fx.Node, why: str) -> PlanError:
    source = node.meta.get(MADE_BY)
    where = source.source or source.module if isinstance(source, Node) else ""
    return PlanError(
        "AP367",
        f"{node.name} of block {writer.program.name} cannot be written as plain PyTorch",
        why=why,
        where=where,
        fix="train with autoparallel run, or plan without this op",
    )
