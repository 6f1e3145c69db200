"""Numbers of a rank's program that change while it trains: read anew each time an op runs.

In: programs whose ops compute with stand-ins, numbers that occur nowhere else, and the places that
these stand for. Out: the same programs with calls of ``LiveNumbers`` instead, which hold what the
places are worth now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx

from ...planner.graph import Graph, Node
from .localize import MADE_BY
from .stage_program import StageProgram


@dataclass(eq=False)
class LiveNumbers:
    """``stand_ins`` are the numbers in the programs; ``values`` their worth now."""

    stand_ins: frozenset[float]
    values: dict[float, float] = field(default_factory=dict)
    _readers: dict[float, Callable[[], float]] = field(default_factory=dict)

    def reader(self, stand_in: float) -> Callable[[], float]:
        """Return a function without arguments that gives the number, to be called by programs."""
        if stand_in not in self._readers:
            read = partial(self._value, stand_in)
            read.__name__ = "live_number"  # type: ignore[attr-defined]
            read.__module__ = __name__
            self._readers[stand_in] = read
        return self._readers[stand_in]

    def _value(self, stand_in: float) -> float:
        return self.values[stand_in]

    def in_node(self, node: Node) -> bool:
        """Return whether an op of the graph computes with a stand-in."""
        return any(each in self.stand_ins for each in floats((node.args, dict(node.kwargs))))

    def written(self, node: Node) -> Node:
        """Return an op with the numbers that the stand-ins in it are worth now."""
        return replace(
            node,
            args=self._written(node.args),
            kwargs={key: self._written(each) for key, each in node.kwargs.items()},
        )

    def _written(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._written, value))
        return self.values.get(value, value) if type(value) is float else value


def floats(value: Any) -> Iterator[float]:
    """Return the numbers with a fraction in the arguments of an op."""
    if type(value) is float:
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from floats(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from floats(each)


def make_live(programs: Iterable[StageProgram], graph: Graph, numbers: LiveNumbers) -> bool:
    """Have programs read their numbers; return False where one computes with a stand-in's
    consequence, which no reader can stand for."""
    asked = {node.name for node in graph if node.kind == "op" and numbers.in_node(node)}
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
    for node in [*module.graph.nodes]:
        made_by = node.meta.get(MADE_BY)
        has_some = any(each in numbers.stand_ins for each in floats((node.args, node.kwargs)))
        if made_by is not None and made_by.name in asked and not has_some:
            is_complete = False
        if has_some:
            is_changed = True
            with module.graph.inserting_before(node):
                node.args = _read(module.graph, node.args, numbers)
                node.kwargs = _read(module.graph, node.kwargs, numbers)
    if is_changed:
        module.recompile()
    return is_complete


def _read(graph: fx.Graph, value: Any, numbers: LiveNumbers) -> Any:
    if type(value) is float and value in numbers.stand_ins:
        return graph.call_function(numbers.reader(value))
    if isinstance(value, list | tuple):
        return type(value)(_read(graph, each, numbers) for each in value)
    if isinstance(value, dict):
        return {key: _read(graph, each, numbers) for key, each in value.items()}
    return value
