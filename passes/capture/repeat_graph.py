"""Expansion of a graph with ops that stand for equal layers to the graph of all layers.

In: a lowered graph in which the captured layers lie between marks and the others are ops
``autoparallel.repeat`` (``repeat_calls``). Out: the graph in which the nodes of a captured layer
with an equivalent call replace each such op, with its own parameters, numbers and path: node by
node equal to a capture of every layer.

Two conditions are checked here, with ``RepeatError`` otherwise: captured layers with equivalent
calls are equal node by node, and values enter and leave them by arguments and results alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ...planner.graph.graph import Graph, Node, OpRule, Ref, TensorSpec, map_refs
from ..initialization.deferred_init import named_tensors
from ..ops.names import Names
from ..ops.random_ops import DROPOUT, UNIFORM
from .lower import in_order
from .repeat_calls import MARK, REPEATS, Call, RepeatError

_LEAVES = ("parameter", "buffer", "constant")


@dataclass(frozen=True, slots=True)
class _Slot:
    """Placeholder in the arguments of a layer's nodes for a value that differs between equal
    layers; ``at`` is its index in ``_Body.values``."""

    at: int


@dataclass(frozen=True, slots=True)
class _Step:
    """Node of a layer without its name and inputs, which differ between equal layers. ``module`` is
    the path of its module: relative to the layer if ``is_inner``, else absolute."""

    base: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]
    module: str
    is_inner: bool
    source: str
    rule: OpRule | None


@dataclass(frozen=True, slots=True)
class _Body:
    """Nodes of a captured layer (``steps``), in a form that is equal for equal layers. ``values``
    describes each value that differs: ``("given", i)`` is the call's i-th argument, ``("own",
    name)`` a parameter or buffer, ``("made", step, index)`` an output of a step, ``("outside",
    ref)`` another value. ``results`` are the values that the call makes, ``updates`` the new values
    of buffers; ``pattern`` has equal numbers for arguments that are the same value."""

    steps: tuple[_Step, ...]
    values: tuple[tuple[Any, ...], ...]
    results: tuple[_Slot, ...]
    updates: tuple[tuple[str, _Slot], ...]
    pattern: tuple[int, ...]


@dataclass
class _Place:
    """Location of a captured layer's call in the graph: the values ``given`` to it and ``made`` by
    it, and the range ``span`` of its nodes' positions."""

    call: Call
    given: list[Ref]
    made: list[Ref]
    span: range


def expand(
    graph: Graph, calls: Sequence[Call], model: nn.Module, bases: Mapping[str, str]
) -> Graph:
    """Return the graph in which each op that replaces a layer's call is expanded to that layer's
    nodes, copied from an equal captured layer. ``bases`` maps op nodes' names to names without
    numbers."""
    nodes = graph.nodes
    places = _places(nodes, calls)
    _check_ways(graph, places)
    bodies: dict[Any, _Body] = {}
    for number, place in places.items():
        body = _Coding(graph, place, bases).body()
        if bodies.setdefault(calls[number].key, body) != body:
            raise RepeatError(f"{place.call.path} differs from the layers like it")
    _check_used(graph, bodies, calls, places)
    return _Writing(graph, bodies, bases, places, calls).run(model)


def _places(nodes: Sequence[Node], calls: Sequence[Call]) -> dict[int, _Place]:
    """Return for each captured call (by its index in ``calls``) its location among ``nodes``."""
    entered: dict[int, tuple[int, list[Ref]]] = {}
    places: dict[int, _Place] = {}
    for position, node in enumerate(nodes):
        if node.op != MARK:
            continue
        refs, number, is_entry = node.args
        if is_entry:
            entered[number] = position, refs
        elif calls[number].result is not None:
            start, given = entered[number]
            places[number] = _Place(calls[number], given, refs, range(start + 1, position))
    for place in places.values():
        if any(nodes[at].op in (MARK, *REPEATS) for at in place.span):
            raise RepeatError(f"{place.call.path} runs other alike layers")
    return places


def _check_ways(graph: Graph, places: Mapping[int, _Place]) -> None:
    """Raise ``RepeatError`` if a node outside of a captured layer uses a value from inside that is
    not part of the layer's result."""
    owner = {graph.nodes[at].name: n for n, place in places.items() for at in place.span}
    made = {n: set(place.made) for n, place in places.items()}

    def check(ref: Ref, user: int | None) -> None:
        number = owner.get(ref.name)
        if number is not None and number != user and ref not in made[number]:
            raise RepeatError(f"{ref.name} leaves {places[number].call.path} unseen")

    for node in graph.nodes:
        if node.op != MARK:
            for ref in node.inputs:
                check(ref, owner.get(node.name))
    check(graph.loss, None)
    for name, ref in graph.updates.items():
        number = owner.get(ref.name)
        is_own = number is not None and name.startswith(f"{places[number].call.path}.")
        check(ref, number if is_own else None)


def _check_used(
    graph: Graph,
    bodies: Mapping[Any, _Body],
    calls: Sequence[Call],
    places: Mapping[int, _Place],
) -> None:
    """Raise ``RepeatError`` if no node uses some result of a layer: a capture of all layers would
    then lack the nodes that compute it, while the expanded graph has them."""
    used = {ref for node in graph.nodes if node.op != MARK for ref in node.inputs}
    used |= {graph.loss, *graph.updates.values()}
    inside: dict[Any, set[_Slot]] = {}
    for key, body in bodies.items():
        inside[key] = {slot for _, slot in body.updates}
        for step in body.steps:
            _each_slot((step.args, tuple(step.kwargs.values())), inside[key])
    named = {node.args[1]: node for node in graph.nodes if node.op in REPEATS}
    for number, call in enumerate(calls):
        if number in places:
            refs = places[number].made
        elif number in named:
            refs = [Ref(named[number].name, at) for at in range(len(named[number].outputs))]
        else:
            if not call.is_captured:
                raise RepeatError(f"{call.path} is not used")
            continue
        slots = bodies[call.key].results
        found = inside[call.key]
        if any(r not in used and s not in found for r, s in zip(refs, slots, strict=True)):
            raise RepeatError(f"a result of {call.path} is not used")


def _each_slot(value: Any, found: set[_Slot]) -> None:
    if isinstance(value, _Slot):
        found.add(value)
    elif isinstance(value, tuple | list):
        for item in value:
            _each_slot(item, found)


@dataclass
class _Coding:
    """Encoder of the nodes of one captured layer in a form that is equal for equal layers."""

    graph: Graph
    place: _Place
    bases: Mapping[str, str]
    slots: dict[tuple[Any, ...], _Slot] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def body(self) -> _Body:
        nodes = [self.graph.nodes[at] for at in self.place.span]
        self.steps = {node.name: number for number, node in enumerate(nodes)}
        steps = tuple(self._step(node) for node in nodes)
        results = tuple(self._coded(ref) for ref in self.place.made)
        prefix = f"{self.place.call.path}."
        updates = tuple(
            (name.removeprefix(prefix), self._coded(ref))
            for name, ref in self.graph.updates.items()
            if name.startswith(prefix)
        )
        given = self.place.given
        pattern = tuple(given.index(ref) for ref in given)
        return _Body(steps, tuple(self.slots), results, updates, pattern)

    def _step(self, node: Node) -> _Step:
        path = self.place.call.path
        is_inner = node.module == path or node.module.startswith(f"{path}.")
        kwargs = dict(node.kwargs)
        if node.op in (DROPOUT, UNIFORM):
            kwargs["number"] -= self.place.call.first_draw
        return _Step(
            self.bases[node.name],
            node.op,
            map_refs(node.args, self._coded),
            map_refs(kwargs, self._coded),
            node.outputs,
            node.module[len(path) :] if is_inner else node.module,
            is_inner,
            node.source,
            node.rule,
        )

    def _coded(self, ref: Ref) -> _Slot:
        value = self._value(ref)
        return self.slots.setdefault(value, _Slot(len(self.slots)))

    def _value(self, ref: Ref) -> tuple[Any, ...]:
        if ref.name in self.steps:
            return "made", self.steps[ref.name], ref.index
        prefix = f"{self.place.call.path}."
        is_own = ref.name.startswith(prefix)
        if ref in self.place.given:
            if self.graph[ref.name].kind in _LEAVES:
                return "outside", ref
            return "given", self.place.given.index(ref)
        if is_own:
            return "own", ref.name.removeprefix(prefix)
        if self.graph[ref.name].kind in ("parameter", "buffer"):
            return "outside", ref
        raise RepeatError(f"{ref.name} enters {self.place.call.path} unseen")


@dataclass
class _Writing:
    """Writer of the expanded graph, in which all layers have nodes: it adds them in order, with new
    numbers."""

    graph: Graph
    bodies: Mapping[Any, _Body]
    bases: Mapping[str, str]
    places: Mapping[int, _Place]
    calls: Sequence[Call]
    nodes: list[Node] = field(default_factory=list)
    updates: dict[str, Ref] = field(default_factory=dict)
    renamed: dict[Ref, Ref] = field(default_factory=dict)

    def run(self, model: nn.Module) -> Graph:
        leaves = [node for node in self.graph.nodes if node.name not in self.bases]
        self.nodes = _all_leaves(leaves, self.calls, model)
        names = Names({node.name for node in self.nodes})
        for node in self.graph.nodes:
            if node.op in REPEATS:
                self._repeat(node, self.calls[node.args[1]], names)
            elif node.op != MARK and node.name in self.bases:
                self._copy(node, names.next(self.bases[node.name]))
        self.updates |= {name: self._now(ref) for name, ref in self.graph.updates.items()}
        return replace(
            self.graph,
            nodes=tuple(self.nodes),
            loss=self._now(self.graph.loss),
            updates=in_order(self.updates, self.nodes),
        )

    def _now(self, ref: Ref) -> Ref:
        return self.renamed.get(ref, ref)

    def _copy(self, node: Node, name: str) -> None:
        """Copy a node of the graph under its new name."""
        if name != node.name:
            for index in range(len(node.outputs)):
                self.renamed[Ref(node.name, index)] = Ref(name, index)
        args, kwargs = map_refs((node.args, dict(node.kwargs)), self._now)
        self.nodes.append(replace(node, name=name, args=args, kwargs=kwargs))

    def _repeat(self, node: Node, call: Call, names: Names) -> None:
        """Add the nodes of the layer that ``call`` called, in place of ``node``, the op that
        replaced the call."""
        body, path = self.bodies[call.key], call.path
        others, same = iter(node.args[0]), self.places[call.like].given
        given = [
            self._now(ref if is_same else next(others))
            for ref, is_same in zip(same, call.same, strict=True)
        ]
        if tuple(given.index(ref) for ref in given) != body.pattern:
            raise RepeatError(f"{path} is given the same value twice")
        made = [names.next(step.base) for step in body.steps]
        values = [self._value(value, path, given, made) for value in body.values]
        for step, name in zip(body.steps, made, strict=True):
            kwargs = _filled(step.kwargs, values)
            if step.op in (DROPOUT, UNIFORM):
                kwargs["number"] += call.first_draw
            module = path + step.module if step.is_inner else step.module
            self.nodes.append(
                Node(
                    name,
                    "op",
                    step.op,
                    _filled(step.args, values),
                    kwargs,
                    step.outputs,
                    module,
                    step.source,
                    step.rule,
                )
            )
        for index, slot in enumerate(body.results):
            self.renamed[Ref(node.name, index)] = values[slot.at]
        for name, slot in body.updates:
            self.updates[f"{path}.{name}"] = values[slot.at]

    def _value(
        self, value: tuple[Any, ...], path: str, given: Sequence[Ref], made: Sequence[str]
    ) -> Ref:
        what, at = value[:2]
        if what == "own":
            return Ref(f"{path}.{at}")
        if what == "made":
            return Ref(made[at], value[2])
        ref: Ref = given[at] if what == "given" else at
        return ref


def _all_leaves(leaves: Sequence[Node], calls: Sequence[Call], model: nn.Module) -> list[Node]:
    """Return nodes for the parameters and buffers of every layer in the model's order, then the
    other nodes of ``leaves`` (inputs and constants)."""
    held = {node.name: node for node in leaves}
    by_path: dict[str, list[Node]] = {calls[c.like].path: [] for c in calls if not c.is_captured}
    for node in leaves:
        for path in _prefixes(node.name):
            if path in by_path:
                by_path[path].append(node)
    for call in calls:
        if not call.is_captured:
            like = calls[call.like].path
            for node in by_path[like]:
                name = call.path + node.name[len(like) :]
                held.setdefault(name, replace(node, name=name))
    ordered = {name: held[name] for name, _ in named_tensors(model) if name in held}
    return [*ordered.values(), *(node for name, node in held.items() if name not in ordered)]


def _prefixes(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _filled(value: Any, values: Sequence[Ref]) -> Any:
    """Return a node's arguments with each ``_Slot`` replaced by its value in one particular
    layer."""
    kind = type(value)
    if kind is _Slot:
        return values[value.at]
    if kind is tuple:
        return tuple([_filled(item, values) for item in value])
    if kind is list:
        return [_filled(item, values) for item in value]
    if kind is dict:
        return {key: _filled(item, values) for key, item in value.items()}
    return value
