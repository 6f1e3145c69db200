"""Numbers of a rank's program that change during training: read whenever an op runs.

In: programs whose ops compute with stand-ins, numbers that occur nowhere else, and the places of
these numbers. Out: the same programs with calls of ``LiveNumbers`` instead, which hold the present
numbers of the places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from ...planner.graph.graph import Graph
from .localize import MADE_BY
from .stage_program import StageProgram


@dataclass(eq=False)
class LiveNumbers:
    """Python numbers of a model that change during training. Programs contain unique numbers, the
    ``stand_ins``, in their place; ``values`` maps each stand-in to the number to compute with
    now."""

    stand_ins: frozenset[float]
    values: dict[float, float] = field(default_factory=dict)
    _readers: dict[float, Callable[[], float]] = field(default_factory=dict)

    def reader(self, stand_in: float) -> Callable[[], float]:
        """Return a function without arguments that programs call in place of ``stand_in``; it
        returns the present number."""
        if stand_in not in self._readers:
            read = partial(self._value, stand_in)
            read.__name__ = "live_number"  # type: ignore[attr-defined]
            read.__module__ = __name__
            self._readers[stand_in] = read
        return self._readers[stand_in]

    def _value(self, stand_in: float) -> float:
        return self.values[stand_in]


def _has_some(arguments: Any, numbers: LiveNumbers) -> bool:
    """Return whether any argument of an op is a stand-in (unique number) of ``numbers``."""
    return any(type(each) is float and each in numbers.stand_ins for each in tree_leaves(arguments))


def make_live(programs: Iterable[StageProgram], graph: Graph, numbers: LiveNumbers) -> bool:
    """Replace stand-ins (unique numbers that represent changing numbers) in programs by calls that
    read the present numbers. Return False if a program computes with a number derived from a
    stand-in, which cannot be replaced."""
    asked = {
        node.name
        for node in graph
        if node.kind == "op" and _has_some((node.args, dict(node.kwargs)), numbers)
    }
    is_complete = True
    for program in programs:
        modules = [block.module for block in program.blocks]
        if program.counting is not None and program.counting.program is not None:
            modules.append(program.counting.program)
        for module in modules:
            is_complete &= _make_live(module, asked, numbers)
    return is_complete


def _make_live(module: fx.GraphModule, asked: set[str], numbers: LiveNumbers) -> bool:
    is_changed, is_complete = False, True

    def read(value: Any) -> Any:
        is_stand_in = type(value) is float and value in numbers.stand_ins
        return module.graph.call_function(numbers.reader(value)) if is_stand_in else value

    for node in [*module.graph.nodes]:
        made_by = node.meta.get(MADE_BY)
        has_some = _has_some((node.args, dict(node.kwargs)), numbers)
        if made_by is not None and made_by.name in asked and not has_some:
            is_complete = False
        if has_some:
            is_changed = True
            with module.graph.inserting_before(node):
                node.args = map_aggregate(node.args, read)
                node.kwargs = map_aggregate(node.kwargs, read)
    if is_changed:
        module.recompile()
    return is_complete
