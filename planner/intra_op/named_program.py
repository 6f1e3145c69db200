"""Integer program for readers and other solvers: readable names, fixed units, a hard memory limit.

In: a problem and its decisions. Out: a program in microseconds and megabytes with a name for every
column. A choice is called ``OP__NUMBER__INPUTS_to_OUTPUTS``: the op (or parameter) in the first of
the equal blocks that share it, the number of its strategy, and the layouts of its inputs and
outputs, with ``.`` between mesh axes and ``_`` between tensors.

Unlike in the program that the search solves, the memory limit is hard, and constant costs are a
column with the value 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..graph.layout import Layout, NodeLayout
from ..integer_programs.ilp import Problem, build, scaled
from ..integer_programs.program import Floats, Group, Program
from ..stage.decisions import Decision
from .pulp_solver import pulp_problem

MICROSECONDS = 1e6
"""Microseconds per second. Costs in microseconds are well above the tolerances of solvers."""

LONGEST = 100
"""Maximum length of a name that PuLP writes."""


@dataclass(frozen=True, slots=True)
class NamedProgram:
    """A linear program with column names, and the layout decisions that binary columns make."""

    title: str
    program: Program
    names: tuple[str, ...]
    decisions: tuple[Decision, ...]

    def as_pulp(self) -> Any:
        """Build a ``pulp.LpProblem``. Raises MachineError AP402 if PuLP is not installed."""
        return pulp_problem(self.program, self.title, self.names)

    def cost(self, values: Floats) -> float:
        """Return the objective in microseconds if the columns have ``values``."""
        return float(np.concatenate(self.program.costs) @ values)


def named_program(title: str, problem: Problem, decisions: Sequence[Decision]) -> NamedProgram:
    """Convert a problem in seconds to a program in microseconds with named columns."""
    program = build(scaled(problem, MICROSECONDS), can_exceed=False)
    if problem.constant:
        fixed = program.columns(np.array([problem.constant * MICROSECONDS]), "constant")
        program.row(fixed, np.ones(1), 1.0, 1.0)
    names: list[str] = []
    for number, group in enumerate(program.groups):
        names += _names(group, number, decisions)
    return NamedProgram(title, program, tuple(map(_short, names, range(len(names)))), (*decisions,))


def _names(group: Group, number: int, decisions: Sequence[Decision]) -> list[str]:
    """Return the names of a group of the program's columns. ``number``: index of the group."""
    if group.kind == "choice":
        (own,) = (decisions[each] for each in group.decisions)
        return [
            f"{legal(own.name)}__{index}__{strategy_text(choice.layouts[own.name])}"
            for index, choice in enumerate(own.choices)
        ]
    of = "__".join(legal(decisions[each].name) for each in dict.fromkeys(group.decisions))
    whole = "__".join(part for part in (f"{group.kind}_{number}", of) if part)
    if len(group.columns) == 1:
        return [whole]
    return [f"{whole}__{index}" for index in range(len(group.columns))]


def strategy_text(layout: NodeLayout) -> str:
    """Return the input and output layouts of an op as a name that LP and MPS files allow.

    >>> from ..graph.layout import PARTIAL, shard
    >>> strategy_text(NodeLayout(((shard(1),), (shard(0),)), ((PARTIAL,),)))
    'S1_S0_to_P'
    """
    inputs, outputs = ("_".join(map(_layout_text, own)) for own in (layout.inputs, layout.outputs))
    return f"{inputs}_to_{outputs}" if inputs else outputs


def _layout_text(layout: Layout) -> str:
    return legal(".".join(str(each).replace("(", "").replace(")", "") for each in layout))


def legal(name: str) -> str:
    """Replace the characters of a name that LP and MPS files do not allow.

    >>> legal("layers/0 up-proj")
    'layers_0_up_proj'
    """
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)


def _short(name: str, number: int) -> str:
    """Shorten a name to ``LONGEST`` characters; the column's number keeps it unique."""
    if len(name) <= LONGEST:
        return name
    end = f"__column{number}"
    return name[: LONGEST - len(end)] + end
