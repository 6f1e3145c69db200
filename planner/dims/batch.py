"""Find the dimension of every tensor that counts the batch.

In: a graph captured at a small batch size b. Out: per node and output the dimension that scales
with b. A virtual mesh axis of b ranks is laid over the graph, the inputs split on their first
dimension, and the split is carried through the op rules with no conversion: a value that comes out
as ``S(d)`` counts the batch in dimension d. The loss must come out as a partial sum, so each row of
the batch enters it by its own share; a model that mixes rows in any other way has no batch
dimension to scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..graph.graph import Accumulation, Graph, Node, Ref
from ..graph.layout import PARTIAL, AxisStrategy, Placement, shard
from ..ops.annotation import FLOATS
from ..ops.case import Case, argument, packet
from ..ops.catalog import has_classes, signature_of, spec_of
from ..ops.strategies import derive, op_form, op_strategies

BatchDims = dict[str, tuple[int | None, ...]]
_Labels = dict[Ref, Placement]

BATCH_NORMS = ("batch_norm", "_native_batch_norm_legit_functional")
_MEAN = 1
_SHIFTS = ("add", "sub", "rsub")
"""Ops that add a number to a tensor, or subtract one from the other."""
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def find_batch(
    graph: Graph,
) -> tuple[Mapping[str, tuple[int | None, ...]], Accumulation] | None:
    """Return, by node, the batch dimension of each output (None without one), and the rules by
    which the losses of micro-batches add up to the batch's; None for both if the batch cannot be
    followed: rows are mixed before the loss, or ``batch_size`` is below 2.

    Inputs whose first dimension is ``graph.batch_size`` are taken as batched. A constant gets a
    batch dimension only if its rows along it are provably equal, so that repeating a row gives it
    any batch size.

    A sum over rows that depends on no parameter (a count) may be used like a value without rows: it
    becomes one of ``Accumulation.totals``. So may any other, but then rows meet in its users, which
    become ``Accumulation.mixing``.
    """
    if graph.batch_size < 2:
        return None
    propagation = _Propagation(graph)
    labels = propagation.run()
    if labels is None or labels.get(graph.loss) != PARTIAL:
        return None
    dims = {node.name: _dims(node, labels) for node in graph}
    return dims, _accumulation(graph, labels, propagation)


def of_one_row(graph: Graph) -> Accumulation:
    """Return the rules of a graph with one row, which is one micro-batch: a class loss divides by
    its own targets."""
    counted = tuple(
        node.name
        for node in graph
        if node.kind == "op"
        and (has_classes(node) and _has_classes(graph, node) and is_mean(node))
        and all(is_data(graph, ref) for ref in node.inputs[1:])
    )
    return Accumulation(counted=counted)


def meeting(graph: Graph) -> Node | None:
    """Return the first node in which rows meet; None if there is none, or the graph has one row."""
    if graph.batch_dims or graph.batch_size < 2:
        return next(map(graph.__getitem__, graph.accumulation.mixing), None)
    propagation = _Propagation(graph)
    return propagation.stuck if propagation.run() is None else None


def meeting_text(node: Node) -> str:
    """Describe a node in which rows meet: op, module and the user's line."""
    place = f" of {node.module}" if node.module else ""
    line = f" ({node.source.rpartition('/')[2]})" if node.source else ""
    name = packet(node.op) or node.op
    return f"samples meet in {'batch norm' if name in BATCH_NORMS else name}{place}{line}"


def rows_apart(graph: Graph) -> BatchDims:
    """Return the batch dimensions of all nodes before rows are mixed, as in a contrastive loss.

    Nodes that depend on several rows are left out: any of their dimensions may be split.
    """
    propagation = _Propagation(graph)
    met = propagation.run_apart() if graph.batch_size > 1 else set(graph.by_name)
    return {node.name: _dims(node, propagation.labels) for node in graph if node.name not in met}


def _dims(node: Node, labels: _Labels) -> tuple[int | None, ...]:
    """Return the batch dimension of each output of ``node``; None for outputs without one."""
    own = [labels.get(Ref(node.name, index)) for index in range(len(node.outputs))]
    return tuple(each.dim if each is not None and each.is_shard else None for each in own)


def _accumulation(graph: Graph, labels: _Labels, propagation: _Propagation) -> Accumulation:
    sums: list[str] = []
    counted: list[str] = []
    mixing = [*propagation.meetings]
    for node in graph:
        if node.kind != "op":
            continue
        is_reduced = labels.get(Ref(node.name)) == PARTIAL
        name = packet(node.op)
        if not is_reduced and name not in BATCH_NORMS:
            continue
        held = [label for ref in node.inputs if (label := labels.get(ref)) and label.is_shard]
        if held and is_reduced and not is_mean(node):
            sums.append(node.name)
        elif held and is_reduced and has_classes(node) and _has_classes(graph, node):
            group = counted if all(is_data(graph, ref) for ref in node.inputs[1:]) else mixing
            group.append(node.name)
        elif held and name in BATCH_NORMS and argument(node, 5, "training"):
            mixing.append(node.name)
    totals = tuple(propagation.totals)
    changing = {n: ref for n, ref in graph.updates.items() if not is_steady(graph, ref)}
    means = [name for name, ref in changing.items() if labels.get(ref) == PARTIAL]
    equal = [name for name, ref in changing.items() if is_steady(graph, ref, totals)]
    if mixing or {*changing} > {*means, *equal}:
        # Micro-batches run as steps of their own, of which only sums in the loss add up.
        sums = _added(graph, sums, propagation.used_whole)
        counted, totals, means, equal = [], (), [], []
        mixing += [ref.name for ref in changing.values()]
    of_all = tuple(name for name in changing if name in (*means, *equal))
    return Accumulation(tuple(sums), tuple(counted), totals, tuple(dict.fromkeys(mixing)), of_all)


def _added(graph: Graph, sums: Collection[str], whole: Collection[Ref]) -> list[str]:
    """Return those of the ``sums`` over samples that add up in the loss: no node uses them whole,
    as values of all samples (``whole``), or divides them by another sum, such as the number of
    targets."""
    graph = replace(graph, updates={})
    inner = {node.name for ref in whole for node in _sources(graph, ref)}
    ratios = (
        node
        for node in graph
        if packet(node.op) == "div"
        and any(each.name in sums for by in node.inputs[1:] for each in _sources(graph, by))
    )
    found = _sources(graph, graph.loss, tuple(Ref(node.name) for node in ratios))
    return [node.name for node in found if node.name in sums and node.name not in inner]


def is_mean(node: Node) -> bool:
    """Return whether a reduction divides by the number of elements that it reduces."""
    loss = spec_of(node).loss
    if loss is None:
        return packet(node.op) == "mean"
    return bool(argument(node, loss.reduction, "reduction", _MEAN) == _MEAN)


def _has_classes(graph: Graph, node: Node) -> bool:
    """Return whether a loss has class indices as targets, of which some may be ignored."""
    return graph.spec(node.inputs[1]).dtype not in FLOATS


def is_data(graph: Graph, ref: Ref) -> bool:
    """Return whether a value has no gradient and depends only on the batch, constants and random
    numbers drawn by counter (``counter_dropout``)."""
    return not any(
        node.kind == "parameter"
        or node.name in graph.updates
        or any(spec.requires_grad for spec in node.outputs)
        for node in _sources(graph, ref)
    )


def is_steady(graph: Graph, ref: Ref, totals: tuple[Ref, ...] = ()) -> bool:
    """Return whether a buffer's new value is the same in every micro-batch of a step (a counter, a
    power iteration): it depends on parameters, constants, ``totals`` and other such buffers
    alone."""
    return not any(
        node.kind == "input" or spec_of(node).is_counted for node in _sources(graph, ref, totals)
    )


def _sources(graph: Graph, ref: Ref, totals: tuple[Ref, ...] = ()) -> Iterator[Node]:
    """Yield the nodes that a value depends on, also through new values of buffers, but not through
    ``totals``."""
    pending, seen = [ref.name], {total.name for total in totals}
    while pending:
        node = graph[pending.pop()]
        if node.name in seen:
            continue
        seen.add(node.name)
        yield node
        if node.name in graph.updates:
            pending.append(graph.updates[node.name].name)
        pending.extend(source.name for source in node.inputs)


class _Propagation:
    """Propagation of the batch dimension through a graph, as if a mesh axis split the batch.
    ``labels``: placement of each value on this axis; values without a label are equal for all
    rows. ``totals``: sums of data that are used whole; ``meetings``: nodes that use others whole,
    so that rows meet there; ``stuck``: the node at which a ``run`` without a result ends."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.labels: _Labels = {}
        self.totals: dict[Ref, None] = {}
        self.meetings: dict[str, None] = {}
        self.stuck: Node | None = None
        self._met: set[Ref] = set()
        self._forms: dict[str, int] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._strategies: list[tuple[AxisStrategy, ...]] = []
        self._candidates: dict[tuple[Any, ...], list[AxisStrategy]] = {}
        self._verdicts: dict[tuple[Any, ...], bool] = {}
        self._equal_rows: dict[tuple[Ref, int], bool] = {}

    @property
    def used_whole(self) -> set[Ref]:
        """Sums over rows that some node uses whole."""
        return {*self.totals, *self._met}

    def run(self) -> _Labels | None:
        operations = [node for node in self.graph if node.kind == "op"]
        self._start()
        position = 0
        while position < len(operations):
            node = operations[position]
            if self._advance(node):
                position += 1
            elif self._add_total(node) or self._add_meeting(node):
                self._start()
                position = 0
            else:
                self.stuck = node
                return None
        self.stuck = next((node for node in operations if not self._holds(node)), None)
        return self.labels if self.stuck is None else None

    def run_apart(self) -> set[str]:
        """Find the placements of all nodes that mix no rows; return the names of the others."""
        operations = [node for node in self.graph if node.kind == "op"]
        met: set[str] = set()
        self._start()
        for node in operations:
            if any(ref.name in met for ref in node.inputs) or not self._advance(node):
                met.add(node.name)
        for node in operations:
            if any(ref.name in met for ref in node.inputs) or not self._holds(node):
                met.add(node.name)
        return met

    def _start(self) -> None:
        self.labels = {
            Ref(node.name): shard(0)
            for node in self.graph.inputs
            if node.spec.shape[:1] == (self.graph.batch_size,)
        }

    def _used(self, ref: Ref) -> Placement | None:
        """Return the placement of ``ref`` for its readers; None for a sum that is used whole."""
        return None if ref in self.totals or ref in self._met else self.labels.get(ref)

    def _add_total(self, node: Node) -> bool:
        """Record an input of ``node`` that is a sum of data over rows as a total over the whole
        batch; return whether there is one."""
        for ref in node.inputs:
            if self._used(ref) == PARTIAL and is_data(self.graph, ref):
                self.totals[ref] = None
                return True
        return False

    def _add_meeting(self, node: Node) -> bool:
        """Let ``node`` and all others use one of its inputs whole that is a sum over rows, best one
        without a gradient; return whether there is one."""
        partial = [ref for ref in node.inputs if self._used(ref) == PARTIAL]
        for ref in sorted(partial, key=lambda ref: self.graph.spec(ref).requires_grad)[:1]:
            self._met.add(ref)
            self.meetings[node.name] = None
        return bool(partial)

    def strategies(self, node: Node) -> tuple[AxisStrategy, ...]:
        return self._strategies[self._form(node)]

    def _form(self, node: Node) -> int:
        """Return a number that is equal for nodes with equal strategies."""
        number = self._forms.get(node.name)
        if number is None:
            found = len(self._strategies)
            number = self._numbers.setdefault(op_form(node, self.graph), found)
            self._forms[node.name] = number
            if number == found:
                offered = op_strategies(node, self.graph, self.graph.batch_size)
                self._strategies.append((*offered, *_passing(node, self.graph)))
        return number

    def _advance(self, node: Node) -> bool:
        """Add the placements of a node's outputs, given its inputs'; return False if none fit."""
        refs = node.inputs
        held = [self._used(ref) for ref in refs]
        if not any(held) or (node.outputs and Ref(node.name) in self.labels):
            return True
        key = (self._form(node), *held)
        if key not in self._candidates:
            candidates = [each for each in self.strategies(node) if _continues(each, held)]
            self._candidates[key] = sorted(candidates, key=lambda each: _num_demands(each, held))
        for strategy in self._candidates[key]:
            found: _Labels = {}
            if self._demand_inputs(refs, strategy, found):
                self.labels |= found
                self._label(node, strategy, self.labels)
                return True
        return False

    def _label(self, node: Node, strategy: AxisStrategy, labels: _Labels) -> None:
        for index, placement in enumerate(strategy.outputs):
            if placement.is_shard or placement == PARTIAL:
                labels[Ref(node.name, index)] = placement

    def _demand_inputs(self, refs: tuple[Ref, ...], strategy: AxisStrategy, found: _Labels) -> bool:
        """Return whether every input that ``strategy`` splits has the needed label or can get it;
        labels to add are put into ``found``."""
        return all(
            self._demand(ref, placement, found)
            for ref, placement in zip(refs, strategy.inputs, strict=True)
            if placement.is_shard
        )

    def _demand(self, ref: Ref, placement: Placement, found: _Labels) -> bool:
        """Return whether ``ref`` has the label ``placement`` or can get it; labels to add are put
        into ``found``."""
        whole = ref in self.totals or ref in self._met
        held = None if whole else self.labels.get(ref, found.get(ref))
        if held is not None:
            return held == placement
        node = self.graph[ref.name]
        if node.kind == "constant":
            if self.has_equal_rows(ref, placement.dim):
                found[ref] = placement
                return True
            return False
        if node.kind != "op":
            return False
        for strategy in self.strategies(node):
            attempt = dict(found)
            if strategy.outputs[ref.index] == placement and self._demand_inputs(
                node.inputs, strategy, attempt
            ):
                found |= attempt
                self._label(node, strategy, found)
                return True
        return False

    def _holds(self, node: Node) -> bool:
        """Return whether some strategy agrees with the labels of the node's inputs and outputs."""
        held = [self._used(ref) for ref in node.inputs]
        made = [self.labels.get(Ref(node.name, index)) for index in range(len(node.outputs))]
        if not any(held) and not any(made):
            return True
        key = (self._form(node), *held, *made)
        if key not in self._verdicts:
            self._verdicts[key] = any(
                all(_agrees(p, label) for p, label in zip(s.inputs, held, strict=True))
                and all(_equals(p, label) for p, label in zip(s.outputs, made, strict=True))
                for s in self.strategies(node)
            )
        return self._verdicts[key]

    def has_equal_rows(self, ref: Ref, dim: int) -> bool:
        """Return whether a constant's ``batch_size`` parts along ``dim`` are provably equal."""
        key = (ref, dim)
        if key not in self._equal_rows:
            self._equal_rows[key] = self._prove_equal_rows(ref, dim)
        return self._equal_rows[key]

    def _prove_equal_rows(self, ref: Ref, dim: int) -> bool:
        """Return whether a constant is filled, repeated, or made of values with equal rows."""
        node = self.graph[ref.name]
        if node.kind != "constant" or not node.op:
            return False
        if spec_of(node).form == "fill" or self._repeats(node, dim):
            return True
        return any(
            strategy.outputs[ref.index] == shard(dim)
            and all(
                self.has_equal_rows(source, placement.dim) or self._looks_up_equal_rows(node, at)
                for at, (source, placement) in enumerate(
                    zip(node.inputs, strategy.inputs, strict=True)
                )
                if placement.is_shard
            )
            for strategy in self.strategies(node)
        )

    def _repeats(self, node: Node, dim: int) -> bool:
        """Return whether an op repeats its input along ``dim``, a whole number of times per row."""
        if spec_of(node).form != "repeat":
            return False
        missing = len(node.spec.shape) - len(node.args[1])
        times = node.args[1][dim - missing] if dim >= missing else 1
        return isinstance(times, int) and times % self.graph.batch_size == 0

    def _looks_up_equal_rows(self, node: Node, position: int) -> bool:
        """Return whether input ``position`` of an ``index`` op selects among equal rows, so that
        its values do not matter."""
        if packet(node.op) != "index" or position == 0:
            return False
        indexed = [dim for dim, item in enumerate(node.args[1]) if isinstance(item, Ref)]
        source = node.inputs[0]
        dim = indexed[position - 1]
        is_row = self.graph.spec(source).shape[dim] == self.graph.batch_size
        return is_row and self.has_equal_rows(source, dim)


def _passing(node: Node, graph: Graph) -> Iterator[AxisStrategy]:
    """Yield strategies under which an op of a partial sum over rows makes a partial sum, beside
    those for meshes: it adds a number to the sum, or the sum is of integers."""
    specs = tuple(graph.spec(ref) for ref in node.inputs)
    if len(specs) == 1 and packet(node.op) in _SHIFTS:
        yield AxisStrategy("P", (PARTIAL,), (PARTIAL,))
    are_counts = [spec.dtype in INTEGERS for spec in specs]
    if not any(are_counts) or not (all(are_counts) or node.spec.dtype in FLOATS):
        return
    as_floats, results = (
        tuple(replace(spec, dtype="float64") for spec in each) for each in (specs, node.outputs)
    )
    signature = signature_of(Case(node, specs, node.outputs))
    leaves = [False] * len(specs)
    for strategy in derive(signature, as_floats, results, axis_size=1, leaves=leaves):
        if PARTIAL in strategy.inputs and not any(each.is_shard for each in strategy.inputs):
            yield strategy


def _continues(strategy: AxisStrategy, held: list[Placement | None]) -> bool:
    return all(
        label is None or placement == label
        for placement, label in zip(strategy.inputs, held, strict=True)
    )


def _num_demands(strategy: AxisStrategy, held: list[Placement | None]) -> int:
    return sum(
        placement.is_shard and label is None
        for placement, label in zip(strategy.inputs, held, strict=True)
    )


def _agrees(placement: Placement, label: Placement | None) -> bool:
    return not placement.is_shard if label is None else placement == label


def _equals(placement: Placement, label: Placement | None) -> bool:
    return placement.kind in "RI" if label is None else placement == label
