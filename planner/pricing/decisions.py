"""What the solver decides in one kind of block: nodes, merged, with a price per choice.

In: a block, the graph, prices. Out: decisions. A decision is a node with every way to run
it, together with the parameters that only it uses and with the views that follow it: an op
without work that alone reads values of one decision, makes nothing larger than what it reads,
and can take every layout of them as it comes, takes it as it comes. So a layer of Llama, 57
ops and 9 parameters, has 44 decisions. Nothing inside a decision is converted but its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add

import numpy as np
from numpy.typing import NDArray

from ..graph import Block, Graph, Node, Ref
from ..layout import Layout
from ..requests.pins import PENALTY_SECONDS, breaks
from ..strategy import NodeLayout
from .choices import Restriction, Way, held_for, held_layouts, input_specs, ways
from .prices import Prices, Seconds, StateBytes
from .recompute import is_kept

ZEROS = (0, 1, 2, 3)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a decision: the layouts of its members, seconds and state bytes per ZeRO.

    ``kept_seconds``: the part of the forward, of device and host, that selective recomputation
    does not run again.
    """

    layouts: Mapping[str, NodeLayout]
    seconds: tuple[Seconds, ...]
    states: tuple[StateBytes, ...]
    kept_seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Decision:
    """Nodes that are decided together. ``members`` are op nodes in order, then parameters.

    ``seconds[zero, choice]`` and ``states[zero, choice]`` hold the fields of ``Seconds`` and
    ``StateBytes``; ``kept_seconds[choice]`` those of ``Choice``.
    """

    name: str
    members: tuple[str, ...]
    choices: tuple[Choice, ...]
    seconds: Floats = field(init=False)
    states: Floats = field(init=False)
    kept_seconds: Floats = field(init=False)

    def __post_init__(self) -> None:
        seconds = np.array([choice.seconds for choice in self.choices])
        states = np.array([choice.states for choice in self.choices])
        object.__setattr__(self, "seconds", seconds.swapaxes(0, 1))
        object.__setattr__(self, "states", states.swapaxes(0, 1))
        kept = np.array([choice.kept_seconds for choice in self.choices])
        object.__setattr__(self, "kept_seconds", kept)


@dataclass(slots=True)
class _Draft:
    members: list[str]
    options: list[dict[str, Way]]


def is_own_parameter(ref: Ref, node: Node, graph: Graph) -> bool:
    """Whether a parameter is used by this node alone, and once."""
    return (
        graph[ref.name].kind == "parameter"
        and graph.users[ref.name] == (node.name,)
        and sum(other.name == ref.name for other in node.inputs) == 1
    )


def decide(
    block: Block,
    graph: Graph,
    prices: Prices,
    restriction: Restriction,
    *,
    merge: bool = True,
) -> tuple[Decision, ...]:
    """The decisions of a block, in order of their first nodes."""
    drafts: list[_Draft] = []
    home: dict[str, int] = {}
    own = [
        name
        for name in block.nodes
        for ref in graph[name].inputs
        if is_own_parameter(ref, graph[name], graph)
    ]
    for name in block.nodes:
        node = graph[name]
        options = ways(node, graph, prices, restriction)
        leader = _followed(node, graph, home, prices) if merge and name not in own else None
        if leader is not None and _follow(drafts[leader], node, options, home, leader):
            continue
        home[name] = len(drafts)
        drafts.append(_Draft([name], [{name: way} for way in options]))
    return tuple(_finish(draft, graph, prices, restriction) for draft in drafts)


def _followed(node: Node, graph: Graph, home: Mapping[str, int], prices: Prices) -> int | None:
    """The decision that a node may follow, if it is a view and reads one decision only."""
    read = [ref for ref in node.inputs if graph[ref.name].kind not in ("constant", "buffer")]
    if not read or any(ref.name not in home or not _read_once(ref, graph) for ref in read):
        return None
    leaders = {home[ref.name] for ref in read}
    num_bytes = sum(spec.num_bytes for spec in node.outputs)
    if len(leaders) != 1 or num_bytes > max(graph.spec(ref).num_bytes for ref in read):
        return None
    work = prices.rules.work(node, input_specs(node, graph), node.outputs)
    return leaders.pop() if not work.flops_forward and not work.bytes_forward else None


def _read_once(ref: Ref, graph: Graph) -> bool:
    """Whether one node reads a value; others might share a conversion that comes before it."""
    return sum(ref in graph[user].inputs for user in graph.users[ref.name]) == 1


def _follow(
    draft: _Draft, node: Node, options: Sequence[Way], home: dict[str, int], leader: int
) -> bool:
    """Adds a node to a decision if every choice of it has a way to go on."""
    extended: list[dict[str, Way]] = []
    refs = node.inputs
    for option in draft.options:
        matching = [
            way
            for way in options
            if all(
                home.get(ref.name) != leader or option[ref.name].layout.outputs[ref.index] == layout
                for ref, layout in zip(refs, way.layout.inputs, strict=True)
            )
        ]
        if not matching:
            return False
        extended += [{**option, node.name: way} for way in matching]
    if len(extended) > 2 * len(draft.options) + 8:
        return False
    home[node.name] = leader
    draft.members.append(node.name)
    draft.options = extended
    return True


def _finish(
    draft: _Draft,
    graph: Graph,
    prices: Prices,
    restriction: Restriction,
) -> Decision:
    parameters = [
        (name, position, ref)
        for name in draft.members
        for position, ref in enumerate(graph[name].inputs)
        if is_own_parameter(ref, graph[name], graph)
    ]
    held = {
        ref.name: _held(graph[ref.name], held_layouts(graph[ref.name], prices, restriction), prices)
        for _, _, ref in parameters
    }
    run = {id(way): prices.op(graph[name], input_specs(graph[name], graph), way.layout, way.inner)
           for option in draft.options for name, way in option.items()}  # fmt: skip
    choices: list[Choice] = []
    for option in draft.options:
        base = {name: way.layout for name, way in option.items()}
        seconds = Seconds()
        for way in option.values():
            seconds = seconds.plus(run[id(way)])
        zeros = len(ZEROS)
        kept = _kept_seconds([run[id(way)] for name, way in option.items() if is_kept(graph[name])])
        partial = [Choice(base, (seconds,) * zeros, (StateBytes(),) * zeros, kept)]
        for name, position, ref in parameters:
            wanted = base[name].inputs[position]
            partial = [
                _with_parameter(choice, graph[ref.name], layout, wanted, prices, held[ref.name])
                for choice in partial
                for layout in held_for(wanted, tuple(held[ref.name]))
            ]
        choices += partial
    members = (*draft.members, *(ref.name for _, _, ref in parameters))
    choices = [_penalized(choice, prices, restriction) for choice in choices]
    return Decision(draft.members[0], members, prune(choices, _exposed(members, graph)))


def _kept_seconds(own: Sequence[Seconds]) -> tuple[float, float]:
    """Of ops that selective recomputation keeps: the forward's seconds of device and host."""
    return sum(each.forward_compute for each in own), sum(each.forward_issue for each in own)


Held = Mapping[Layout, tuple[tuple[Seconds, StateBytes], ...]]
"""For each layout a parameter may be held in, what that costs at every ZeRO stage."""


def _held(node: Node, layouts: Sequence[Layout], prices: Prices) -> Held:
    return {
        layout: tuple(prices.parameter(node.spec, layout, zero) for zero in ZEROS)
        for layout in layouts
    }


def _with_parameter(
    choice: Choice, node: Node, layout: Layout, wanted: Layout, prices: Prices, costs: Held
) -> Choice:
    forward, backward = prices.conversion(node.spec, layout, wanted)
    converting = Seconds(forward_communication=forward, backward_communication=backward)
    held = costs[layout]
    return Choice(
        {**choice.layouts, node.name: NodeLayout((), (layout,))},
        tuple(
            own.plus(converting).plus(seconds)
            for own, (seconds, _) in zip(choice.seconds, held, strict=True)
        ),
        tuple(
            StateBytes(*map(add, own, states))
            for own, (_, states) in zip(choice.states, held, strict=True)
        ),
        choice.kept_seconds,
    )


def parameter_decision(node: Node, prices: Prices, restriction: Restriction) -> Decision:
    """The decision of a parameter that has several uses."""
    choices = []
    held = _held(node, held_layouts(node, prices, restriction), prices)
    for layout, costs in held.items():
        seconds, states = tuple(s for s, _ in costs), tuple(b for _, b in costs)
        choices.append(Choice({node.name: NodeLayout((), (layout,))}, seconds, states))
    choices = [_penalized(choice, prices, restriction) for choice in choices]
    return Decision(node.name, (node.name,), tuple(choices))


def _penalized(choice: Choice, prices: Prices, restriction: Restriction) -> Choice:
    """A choice that breaks pins, at a price that no plan pays which has another."""
    count = sum(
        breaks(layout.outputs[0], restriction.pins[name], prices.mesh)
        for name, layout in choice.layouts.items()
        if name in restriction.pins
    )
    if not count:
        return choice
    more = Seconds(forward_compute=count * PENALTY_SECONDS)
    return replace(choice, seconds=tuple(own.plus(more) for own in choice.seconds))


def _exposed(members: Sequence[str], graph: Graph) -> tuple[str, ...]:
    """The members whose layouts others see: they are read outside, read from outside."""
    inside = set(members)
    found = []
    for name in members:
        node = graph[name]
        read_outside = any(user not in inside for user in graph.users[name])
        reads_outside = any(ref.name not in inside for ref in node.inputs)
        if read_outside or reads_outside or name == graph.loss.name:
            found.append(name)
    return tuple(found)


def prune(choices: Sequence[Choice], exposed: Sequence[str]) -> tuple[Choice, ...]:
    """The choices without those that another equals outside and betters in every figure."""
    groups: dict[object, list[int]] = {}
    for index, choice in enumerate(choices):
        key = tuple((choice.layouts[name].inputs, choice.layouts[name].outputs) for name in exposed)
        groups.setdefault(key, []).append(index)
    figures = np.array(
        [np.ravel((*choice.seconds,)).tolist() + np.ravel((*choice.states,)).tolist()
         + [choice.seconds[0].forward_compute - choice.kept_seconds[0]]
         for choice in choices]
    )  # fmt: skip
    kept: list[int] = []
    for members in groups.values():
        kept += _undominated(members, figures)
    return tuple(choices[index] for index in sorted(kept))


def _undominated(members: Sequence[int], figures: Floats) -> list[int]:
    kept: list[int] = []
    for index in members:
        if any((figures[other] <= figures[index]).all() for other in kept):
            continue
        kept = [other for other in kept if not (figures[index] <= figures[other]).all()]
        kept.append(index)
    return kept
