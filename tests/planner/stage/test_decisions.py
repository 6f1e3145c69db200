"""Decisions: what is made once for many meshes and batches is what each alone would make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from random_cases import random_case

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.costs.choices import inner_collectives, input_specs
from autoparallel.planner.costs.kept_bytes import RECOMPUTE_MODES, Replay, replay
from autoparallel.planner.costs.mesh_prices import ZEROS
from autoparallel.planner.costs.prices import Prices, Seconds
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.graph.layout import NodeLayout
from autoparallel.planner.intra_op.intra_op import IntraOp
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.stage.decisions import Decision, decide

SEEDS = (1, 4, 10, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 7)))
"""Of every number of devices but three, on one host or two, alike or not."""


def solvers(seed: int) -> Iterator[IntraOp]:
    """The solvers of every submesh and batch of a random case, of one cache."""
    case = random_case(seed)
    job = SearchContext.of(
        case.graph, case.blocks, case.cluster, case.request, rules=rules, basis=DEFAULT
    )
    batch, size = case.request.global_batch, case.cluster.num_devices
    for rows in (rows for rows in range(1, batch + 1) if batch % rows == 0):
        for number in range(1, size + 1):
            yield from job.solvers.on_submesh(rows, size - number, number)


def alone(own: Prices) -> Prices:
    """The same prices with a cache of their own."""
    return Prices(own.mesh, own.cluster, own.ranks, own.precision, own.optimizer, own.rules)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mesh_has_the_decisions_that_it_has_without_the_others(seed: int) -> None:
    for solver in solvers(seed):
        model = solver.model
        for block in model.structure.blocks.kinds.values():
            given = block, model.structure.graph
            shared, _ = decide(*given, model.prices, model.restriction)
            own, _ = decide(*given, alone(model.prices), model.restriction)
            assert [each.members for each in shared] == [each.members for each in own]
            for one, other in zip(shared, own, strict=True):
                assert one.choices == other.choices
                for figures in ("seconds", "states", "skipped_seconds"):
                    assert np.array_equal(
                        getattr(one.amounts, figures), getattr(other.amounts, figures)
                    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_choice_costs_the_sum_of_its_members(seed: int) -> None:
    for solver in solvers(seed):
        model = solver.model
        graph, prices = model.structure.graph, model.prices
        for block in model.structure.blocks.kinds.values():
            for decision in decide(block, graph, prices, model.restriction)[0]:
                for number, choice in enumerate(decision.choices):
                    for zero in ZEROS:
                        given = decision, choice.layouts, graph, prices
                        expected = summed(*given, zero, replay(block, graph, prices))
                        found = {
                            "seconds": decision.amounts.seconds[zero, number],
                            "states": decision.amounts.states[zero, number],
                            "skipped_seconds": decision.amounts.skipped_seconds[:, number],
                        }
                        for name, figures in expected.items():
                            assert found[name] == pytest.approx(figures, rel=1e-12, abs=1e-30)


def summed(
    decision: Decision,
    layouts: Mapping[str, NodeLayout],
    graph: Graph,
    prices: Prices,
    zero: int,
    again: Replay,
) -> dict[str, Any]:
    """Seconds and bytes of a choice, member by member."""
    seconds, states, skipped = Seconds(), np.zeros(4), np.zeros((2, 3))
    for name in decision.members:
        node, layout = graph[name], layouts[name]
        if node.kind == "parameter":
            own, held = prices.parameter(node.spec, layout.outputs[0], zero)
            seconds, states = seconds.plus(own), states + held
            continue
        inner = inner_collectives(node, graph, prices, layout)
        own = prices.op(node, input_specs(node, graph), layout, inner)
        seconds = seconds.plus(own)
        for number, mode in enumerate(RECOMPUTE_MODES):
            if name in again.skipped[mode]:
                skipped[number] += own.forward_compute, own.forward_issue, 0.0
        for ref, wanted in zip(node.inputs, layout.inputs, strict=True):
            if ref.name in layouts and graph[ref.name].kind == "parameter":
                source = layouts[ref.name].outputs[0]
                forward, backward = prices.conversion(graph.spec(ref), source, wanted)
                seconds = seconds.plus(
                    Seconds(forward_communication=forward, backward_communication=backward)
                )
    return {"seconds": seconds, "states": states, "skipped_seconds": skipped}


def figures(decision: Decision, number: int) -> np.ndarray:
    amounts = decision.amounts
    own = amounts.seconds[:, number].ravel(), amounts.states[:, number].ravel()
    again = amounts.seconds[0, number, [0, 13, 1]] - amounts.skipped_seconds[:, number]
    return np.array([*own[0], *own[1], *again.ravel()])


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_is_left_that_another_equals_outside_and_betters(seed: int) -> None:
    for solver in solvers(seed):
        model = solver.model
        graph = model.structure.graph
        for block in model.structure.blocks.kinds.values():
            for decision in decide(block, graph, model.prices, model.restriction)[0]:
                looks: dict[object, list[np.ndarray]] = {}
                inside = set(decision.members)
                for number, choice in enumerate(decision.choices):
                    look = tuple(
                        (layout.inputs, layout.outputs)
                        for name, layout in choice.layouts.items()
                        if name == graph.loss.name
                        or not inside.issuperset(graph.users[name])
                        or not inside.issuperset(ref.name for ref in graph[name].inputs)
                    )
                    looks.setdefault(look, []).append(figures(decision, number))
                for same in looks.values():
                    for at, one in enumerate(same):
                        rest = same[:at] + same[at + 1 :]
                        assert not any((other <= one).all() for other in rest)
