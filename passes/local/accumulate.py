"""Counts over the whole batch that the micro-batches of a step share.

In: the graph at micro-batch size and the nodes of a stage. Out: a ``Counting``, whose program takes
one micro-batch's inputs and returns the targets of the stage's class losses and the values of
totals (``Graph.accumulation``). Both depend on the batch and on counted random numbers alone, so a
step can run it on every micro-batch before the first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ...planner.graph.graph import Graph, Node, Ref
from ...planner.graph.layout import Mesh
from ...planner.ops.catalog import ignored_class
from ..ops.collectives import Alone, Rank
from ..ops.local_loss import count_targets
from ..ops.random_ops import Draws
from ..programs.constants import ancestors
from .localize import (
    BlockInterface,
    count_key,
    localize_block,
    reference_layouts,
    total_key,
    value_key,
)


@dataclass(frozen=True, slots=True)
class Counted:
    """Classification loss whose mean divides by the number of targets that are not ignored. ``key``
    is the key of that count; ``target`` and ``weight`` are the outputs of the counting program from
    which it is computed."""

    key: str
    target: str
    weight: str | None
    ignore_index: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Counting:
    """Program that counts over all rows of a step, run before the first forward. For one
    micro-batch ``program(*inputs)`` returns ``outputs`` (None: the inputs themselves), from which
    the divisors of the ``losses`` and the ``totals`` (sums over all micro-batches; key: output) are
    computed. ``inputs`` are nodes of the batch, of constants, then of buffers. Random ops use the
    state ``draws``, shared with the stage's forwards."""

    program: fx.GraphModule | None
    inputs: tuple[Node, ...]
    outputs: tuple[str, ...]
    losses: tuple[Counted, ...]
    totals: Mapping[str, str]
    num_microbatches: int
    draws: Draws

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the constants and buffers that the program reads."""
        return tuple(node.name for node in self.inputs if node.kind != "input")

    def evaluate(
        self, value_of: Callable[[Node, int], Tensor], first: int = 0
    ) -> dict[str, Tensor]:
        """Return each count (divisor of a loss) and total by key, over ``num_microbatches`` from
        number ``first`` on. ``value_of(input, microbatch)`` gives the inputs. A count is the mean
        over micro-batches, as a step's loss is their mean; a total is their sum."""
        counts: dict[str, Tensor] = {}
        with torch.no_grad():
            for microbatch in range(first, first + self.num_microbatches):
                read = {node.name: value_of(node, microbatch) for node in self.inputs}
                values = read
                if self.program is not None:
                    with self.draws.repeated(self.draws.key, microbatch):
                        results = self.program(*read.values())
                    values = dict(zip(self.outputs, results, strict=True))
                for key, value in self._of_microbatch(values).items():
                    counts[key] = counts[key] + value if key in counts else value
        if self.num_microbatches == 1:
            return counts
        return {
            key: (
                total // self.num_microbatches
                if not total.is_floating_point()
                else total / self.num_microbatches
            )
            for key, total in counts.items()
        }

    def _of_microbatch(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {key: values[output] for key, output in self.totals.items()}
        for loss in self.losses:
            weight = None if loss.weight is None else values[loss.weight]
            dtype = torch.float64 if loss.dtype == "float64" else torch.float32
            found[loss.key] = count_targets(values[loss.target], weight, loss.ignore_index, dtype)
        return found


def counts_used(graph: Graph, nodes: Iterable[str], *, totals: bool = True) -> tuple[str, ...]:
    """Return the keys of the values over all rows of a step that these ops need: divisors of losses
    and, with ``totals``, sums over micro-batches."""
    found: dict[str, None] = {}
    for name in nodes:
        if name in graph.accumulation.counted:
            found[count_key(name)] = None
        for ref in graph[name].inputs:
            if totals and ref in graph.accumulation.totals:
                found[total_key(ref)] = None
    return tuple(found)


def counted_inputs(graph: Graph, nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the batch inputs from which the divisors of losses and the sums over all micro-batches
    that these op nodes need are computed."""
    refs = _counted_refs(graph, set(counts_used(graph, nodes)))
    needed = ancestors(graph, (ref.name for ref in refs))
    return tuple(node.name for node in graph.inputs if node.name in needed)


def _counted_refs(graph: Graph, keys: set[str]) -> tuple[Ref, ...]:
    """Return the values from which the divisors of losses and the sums over all micro-batches with
    these ``keys`` are computed."""
    totals = [ref for ref in graph.accumulation.totals if total_key(ref) in keys]
    counted = [graph[name] for name in graph.accumulation.counted if count_key(name) in keys]
    return tuple(dict.fromkeys((*totals, *(ref for node in counted for ref in node.inputs[1:]))))


def build_counting(
    graph: Graph, keys: Iterable[str], num_microbatches: int, draws: Draws
) -> Counting | None:
    """Build the program for the counts (divisors of losses) and totals with these ``keys``, over
    ``num_microbatches``; None if there are no keys."""
    wanted = set(keys)
    if not wanted:
        return None
    counted = [graph[n] for n in graph.accumulation.counted if count_key(n) in wanted]
    totals = {total_key(r): r for r in graph.accumulation.totals if total_key(r) in wanted}
    outputs = _counted_refs(graph, wanted)
    needed = ancestors(graph, (ref.name for ref in outputs))
    order = [node for node in graph if node.name in needed]
    operations = {node.name for node in order if node.kind == "op"}
    read = {r.name for name in operations for r in graph[name].inputs} | {r.name for r in outputs}
    leaves = tuple(node for node in order if node.kind != "op" and node.name in read)
    layouts = reference_layouts(graph, 1)
    whole = layouts[graph.loss.name].outputs[0]
    interface = BlockInterface(
        tuple(node.name for node in order if node.kind == "op"),
        {node.name: whole for node in leaves},
        {},
        {value_key(ref): whole for ref in outputs},
    )
    alone = Rank(Mesh(("whole",), (1,)), (0,), Alone(), draws)
    program = localize_block(
        graph, interface, layouts=layouts, rank=alone, num_microbatches=num_microbatches
    )
    return Counting(
        program if operations else None,
        leaves,
        tuple(value_key(ref) for ref in outputs),
        tuple(_counted(graph, node) for node in counted),
        {key: value_key(ref) for key, ref in totals.items()},
        num_microbatches,
        draws,
    )


def _counted(graph: Graph, node: Node) -> Counted:
    weight = value_key(node.inputs[2]) if len(node.inputs) > 2 else None
    ignored = ignored_class(node)
    target, dtype = value_key(node.inputs[1]), graph.spec(Ref(node.name)).dtype
    return Counted(count_key(node.name), target, weight, ignored, dtype)
