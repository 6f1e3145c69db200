"""Decisions of the solver in a kind of block: merged nodes, with a price per choice.

In: a block, the graph, prices. Out: decisions. A decision is a node with all its strategies,
together with the parameters that only it uses and the views that follow it: ops without work that
read values of this decision only, write no more than they read, and accept every layout of these
values. So a layer of Llama, with 57 ops and 9 parameters, has 44 decisions. Inside a decision only
parameters are converted.

The candidates are a ``DecisionSpace``, made once for all prices; here they are priced, as arrays
over all candidates of a kind, and dominated candidates are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..costs.choices import Restriction, held_layouts, inner_of, input_specs
from ..costs.kept_bytes import RECOMPUTE_MODES
from ..costs.others_beside import seconds_beside
from ..costs.price_cache import find
from ..costs.prices import Prices, sent_again
from ..costs.seconds import Resource, State
from ..graph.graph import Block, Graph, Node
from ..graph.layout import Layout, NodeLayout
from ..ops.attention import ring_axes
from ..requests.pins import PENALTY_SECONDS, num_broken
from .outline import Candidates, DecisionSpace, Ints, decision_space, structure_key
from .outline import Choice as Choice
from .outline import is_own_parameter as is_own_parameter
from .terms import RECOMPUTED, SENT, ChoiceAmounts, Floats

MOST_COMPARED = 1 << 22
"""Maximum number of figures that are compared at once."""


@dataclass(frozen=True)
class Decision:
    """Nodes whose layouts are chosen together. A choice is a layout for each node, with its
    ``amounts``. ``members`` are op nodes in order, then parameters."""

    name: str
    members: tuple[str, ...]
    choices: tuple[Choice, ...]
    amounts: ChoiceAmounts = field(repr=False)


def decide(
    block: Block,
    graph: Graph,
    prices: Prices,
    restriction: Restriction,
    *,
    merge: bool = True,
    parameters: Sequence[str] = (),
) -> tuple[tuple[Decision, ...], ChoiceAmounts]:
    """Return the decisions (nodes whose layouts are chosen together) of a block, without dominated
    choices, and the amounts of all their choices in one array.

    ``merge``: views join the decision whose result they read. ``parameters``: parameters that are
    decided alone, last.
    """
    own = find(
        prices.cache.spaces,
        (merge, structure_key(block, graph, prices, restriction)),
        lambda: decision_space(block, graph, prices, restriction, merge=merge),
    )
    every = _priced(own, block, graph, prices)
    rows = _undominated(own, every)
    candidates, amounts = own.kept(rows), every.part(rows)
    alone = [parameter_decision(graph[name], graph, prices, restriction) for name in parameters]
    if alone:
        candidates += tuple(Candidates(each.members, each.choices) for each in alone)
        amounts = ChoiceAmounts.joined([amounts, *(each.amounts for each in alone)])
    found, start = [], 0
    for each in candidates:
        part = slice(start, start + len(each.choices))
        found.append(Decision(each.members[0], each.members, each.choices, amounts.part(part)))
        start = part.stop
    return tuple(found), amounts


def _priced(own: DecisionSpace, block: Block, graph: Graph, prices: Prices) -> ChoiceAmounts:
    ops, hidden, kept = _op_seconds(own, block, graph, prices)
    number = len(own.broken)
    total = np.zeros((number, len(Resource)))
    for columns in own.rounds:
        total += ops[columns]
    skipped = np.zeros((len(RECOMPUTE_MODES), number, len(RECOMPUTED)))
    for mode, rounds in enumerate(own.skipped_rounds):
        for columns in rounds:
            skipped[mode] += ops[columns][:, RECOMPUTED]
    if not prices.assumptions.keeps_sent:
        skipped[:, :, SENT] = 0.0
        for mode, rounds in enumerate(own.skipped_rounds):
            for columns in rounds:
                skipped[mode, :, SENT] += kept[columns]
    for columns in own.rounds:
        skipped[:, :, SENT] -= hidden[columns]
    seconds = np.repeat(total[None], len(prices.shardings), axis=0)
    states = np.zeros((len(prices.shardings), number, len(State)))
    if own.held_rounds:
        converting, held, held_bytes = _holding_costs(own, graph, prices)
        for holdings in own.held_rounds:
            seconds += converting[holdings]
            seconds += held[:, holdings]
            states += held_bytes[:, holdings]
    if own.broken.any():
        seconds[:, :, Resource.FORWARD_COMPUTE] += own.broken * PENALTY_SECONDS
    return ChoiceAmounts(seconds, states, skipped)


def _op_seconds(
    own: DecisionSpace, block: Block, graph: Graph, prices: Prices
) -> tuple[Floats, Floats, Floats]:
    """Return the ``Seconds`` of each op under each of its sharding strategies, as ``[strategy,
    field]``, and a last row of zeros; the forward seconds of each that other ops hide, which they
    do not where the forward is rerun; and those of messages that are not repeated if the op's
    result is kept."""
    computes = [
        prices.op(graph[name], input_specs(graph[name], graph), layout)
        for name, layout in own.computes
    ]
    found = np.zeros((len(own.computes_as) + 1, len(Resource)))
    found[:-1] = np.array(computes)[own.computes_as]
    hidden, kept = np.zeros((2, len(found)))
    for number, name, strategy in own.inner:
        node = graph[name]
        specs, inner = input_specs(node, graph), inner_of(node, graph, prices, strategy)
        beside = seconds_beside(node, block.nodes, graph, prices)
        found[number] = prices.op(node, specs, strategy.layout, inner, beside)
        if any(beside):
            again = prices.op(node, specs, strategy.layout, inner)
            hidden[number] = again.forward_communication - found[number, RECOMPUTED[SENT]]
        if ring_axes(strategy.layout):
            again = prices.op(node, specs, strategy.layout, sent_again(inner))
            kept[number] = found[number, RECOMPUTED[SENT]] - again.forward_communication
    return found, hidden, kept


def _holding_costs(
    own: DecisionSpace, graph: Graph, prices: Prices
) -> tuple[Floats, Floats, Floats]:
    """Return three arrays of costs of each holding (parameter stored in one layout and used in
    another), zeros last: conversion ``Seconds`` ``[holding, field]``; seconds of states and bytes
    of states ``[zero, holding, field]``."""
    none = len(own.holdings)
    converting = np.zeros((none + 1, len(Resource)))
    converting[:none, [Resource.FORWARD_COMMUNICATION, Resource.BACKWARD_COMMUNICATION]] = [
        prices.conversion(graph[each.parameter].spec, each.held, each.wanted)
        for each in own.holdings
    ]
    costs = [
        [prices.parameter(graph[name].spec, layout, *sharding) for name, layout in own.held]
        for sharding in prices.shardings
    ]
    seconds = np.zeros((len(costs), none + 1, len(Resource)))
    states = np.zeros((len(costs), none + 1, len(State)))
    seconds[:, :none] = np.array([[each for each, _ in row] for row in costs])[:, own.held_as]
    states[:, :none] = np.array([[each for _, each in row] for row in costs])[:, own.held_as]
    return converting, seconds, states


def _undominated(own: DecisionSpace, every: ChoiceAmounts) -> Ints:
    """Return the numbers of the candidate choices that are not dominated. A choice is dominated if
    another, with the same layouts towards other decisions, is no worse in any seconds or bytes."""
    number = len(own.broken)
    is_kept = np.ones(number, dtype=bool)
    if own.alike:
        again = every.rerun_seconds.reshape(number, -1)
        figures = np.column_stack([*every.seconds, *every.states, again])
        figures = figures[:, (figures != figures[:1]).any(axis=0)]
        for groups in own.alike:
            size = groups.shape[1]
            most = max(1, MOST_COMPARED // (size * size * max(figures.shape[1], 1)))
            for start in range(0, len(groups), most):
                some = groups[start : start + most]
                is_kept[some[_is_dominated(figures[some])]] = False
    return np.flatnonzero(is_kept)


def _is_dominated(figures: Floats) -> NDArray[np.bool_]:
    """Return an array ``[group, member]``: whether another member of the group has no larger entry
    in ``figures[group, member]``. Of equal members all but the first are dominated."""
    at_most = np.logical_and.reduce(figures[:, :, None] <= figures[:, None], axis=3)
    earlier = np.triu(np.ones(at_most.shape[1:], dtype=bool), 1)
    better = at_most & (earlier | ~at_most.transpose(0, 2, 1))
    found: NDArray[np.bool_] = np.logical_or.reduce(better, axis=1)
    return found


def parameter_decision(
    node: Node, graph: Graph, prices: Prices, restriction: Restriction
) -> Decision:
    """Return the layout decision, with costs, of a parameter that is read more than once."""
    layouts = held_layouts(node, graph, prices, restriction)
    costs = [
        [prices.parameter(node.spec, layout, *sharding) for layout in layouts]
        for sharding in prices.shardings
    ]
    seconds = np.array([[own for own, _ in each] for each in costs])
    broken = [
        num_broken(layout, restriction.pins.get(node.name, ()), prices.mesh) for layout in layouts
    ]
    seconds[:, :, Resource.FORWARD_COMPUTE] += np.array(broken) * PENALTY_SECONDS
    amounts = ChoiceAmounts(
        seconds,
        np.array([[states for _, states in each] for each in costs]),
        np.repeat(seconds[:1, :, RECOMPUTED], len(RECOMPUTE_MODES), axis=0),
    )
    return Decision(node.name, (node.name,), _held_choices(node.name, layouts, prices), amounts)


def _held_choices(name: str, layouts: tuple[Layout, ...], prices: Prices) -> tuple[Choice, ...]:
    """Return, for each layout, the choice to store parameter ``name`` in it. Cached."""
    return find(
        prices.cache.held_choices,
        (name, layouts),
        lambda: tuple(Choice({name: NodeLayout((), (layout,))}) for layout in layouts),
    )
