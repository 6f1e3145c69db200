"""Exchanges of tokens beside compute: what hides them is chosen where it gains, and priced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np
import pytest

from autoparallel.analysis.sharding import axis_lines
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.dispatch import hidden_seconds
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import RUNTIME, CostAssumptions, system
from autoparallel.planner.costs.choices import Restriction, inner_of, input_specs, node_strategies
from autoparallel.planner.costs.others_beside import seconds_beside
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.costs.seconds import Seconds
from autoparallel.planner.graph.beside import ops_beside
from autoparallel.planner.graph.expert_dims import is_expert_layer
from autoparallel.planner.graph.layout import Mesh, is_halved
from autoparallel.planner.ops.experts import KERNELS
from autoparallel.planner.plan import Plan
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import plan_program
from autoparallel.target.load import load_target

ROWS, SEQ = 32, 2048
WIDE = {
    "hidden_size": 1024,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
TARGET = load_target("hf:tests/zoo/qwen2_moe", WIDE)


@cache
def program() -> Program:
    return capture_target(TARGET, PlanOptions(ROWS, SEQ))


@dataclass(frozen=True)
class Layer:
    """A layer of experts of eight ranks: its price beside the shared experts and without them."""

    beside: Seconds
    alone: Seconds
    exchange_seconds: float
    others: tuple[float, float]


def priced(cluster: str, assumptions: CostAssumptions = RUNTIME, *, halved: bool = False) -> Layer:
    graph = program().graph.with_batch_size(ROWS)
    mesh, on = Mesh(("ep",), (8,)), parse_cluster(cluster)
    prices = Prices(mesh, on, tuple(range(8)), "fp32", "adamw", rules, assumptions=assumptions)
    blocks = program().blocks.blocks
    block, node = next(
        (block, graph[name])
        for block in blocks
        for name in block.nodes
        if is_expert_layer(graph[name])
    )
    found = node_strategies(node, graph, prices, Restriction(split_experts=(0,)))
    strategy = next(each for each in found if is_halved(each.layout) == halved)
    specs, inner = input_specs(node, graph), inner_of(node, graph, prices, strategy)
    others = seconds_beside(node, block.nodes, graph, prices)
    sent_bytes = specs[0].num_bytes * WIDE["num_experts_per_tok"] / 8 / (1 + halved)
    return Layer(
        prices.op(node, specs, strategy.layout, inner, others),
        prices.op(node, specs, strategy.layout, inner),
        prices.collective("all_to_all", sent_bytes, 0),
        others,
    )


def test_the_shared_experts_are_the_ops_beside_the_exchange() -> None:
    graph = program().graph
    for block in program().blocks.blocks:
        for names in ops_beside(block.nodes, graph).values():
            modules = [graph[name].module for name in names]
            assert all(module.split(".")[3] == "mlp" for module in modules)
            found = {module.rpartition("shared_expert.")[2] for module in modules}
            assert found >= {"gate_proj", "act_fn", "up_proj", "down_proj"}


@pytest.mark.parametrize("cluster", ["8xH100", "cpu:8"])
def test_no_layout_computes_the_others_faster_than_their_bound(cluster: str) -> None:
    graph, on = program().graph.with_batch_size(ROWS), parse_cluster(cluster)
    for mesh in (Mesh(("dp",), (8,)), Mesh(("dp", "tp"), (2, 4))):
        prices = Prices(mesh, on, tuple(range(8)), "fp32", "adamw", rules)
        block = next(b for b in program().blocks.blocks if ops_beside(b.nodes, graph))
        ((layer, names),) = ops_beside(block.nodes, graph).items()
        fastest = [0.0, 0.0]
        for name in names:
            found = node_strategies(graph[name], graph, prices, Restriction())
            specs = input_specs(graph[name], graph)
            pairs = [prices.compute(graph[name], specs, each.layout) for each in found]
            fastest = [sum(each) for each in zip(fastest, np.min(pairs, axis=0), strict=True)]
        bound = seconds_beside(graph[layer], block.nodes, graph, prices)
        assert 0.3 * fastest[0] < bound[0] <= fastest[0]
        assert 0.1 * fastest[1] < bound[1] <= fastest[1]


@pytest.mark.parametrize("halved", [False, True])
def test_a_layer_hides_as_much_of_its_exchanges_as_runs_beside_compute(halved: bool) -> None:
    """On H100, where compute is 1.189 times slower meanwhile."""
    found = priced("8xH100", halved=halved)
    parts, share = 1 + halved, 1 - 1 / 1.189
    for way, others in zip(("forward", "backward"), found.others, strict=True):
        compute = getattr(found.alone, f"{way}_compute") / 2
        one, how = found.exchange_seconds, {"slowed_share": share, "halved": halved}
        shown, alone = (
            getattr(each, f"{way}_communication") for each in (found.beside, found.alone)
        )
        hidden = [hidden_seconds(one, compute, one, others=o, **how) for o in (0.0, others)]
        assert alone - shown == pytest.approx(hidden[1] - hidden[0])
        counts = alone + hidden[0] - 2 * parts * one  # a short message, in the forward alone
        assert counts == pytest.approx(0.0, abs=one if way == "forward" else 1e-12)
        assert others > 0
        assert hidden[1] > hidden[0] >= 0


def test_two_halves_launch_more_kernels_and_sum_the_gradients_of_weights() -> None:
    once, halves = (priced("8xH100", halved=halved).alone for halved in (False, True))
    assert halves.forward_compute > once.forward_compute
    assert once.forward_issue < halves.forward_issue < 2 * once.forward_issue
    more = 2 * KERNELS[2][1] - KERNELS[1][1]
    launches = more * parse_cluster("8xH100").hosts[0].device.launch_seconds
    assert halves.backward_compute - once.backward_compute > launches
    assert halves.forward_communication < once.forward_communication


def test_nothing_is_hidden_on_cpus_and_in_other_systems() -> None:
    assert priced("cpu:8").beside == priced("cpu:8").alone
    once, halves = (priced("cpu:8", halved=halved).alone for halved in (False, True))
    assert halves.forward_communication > once.forward_communication
    assert halves.forward_compute >= once.forward_compute
    for name in ("megatron", "torchtitan", "deepspeed"):
        own = priced("8xH100", system(name).assumptions)
        assert own.beside == own.alone
        with pytest.raises(StopIteration):
            priced("8xH100", system(name).assumptions, halved=True)
    unhidden = replace(RUNTIME, slowdown=inf)
    assert priced("8xH100", unhidden).beside == priced("8xH100", unhidden).alone


@cache
def planned(cluster: str) -> Plan:
    options = PlanOptions(ROWS, SEQ, forced=parse_parallel("dp=8,ep=8,zero=1,microbatches=1"))
    return plan_program(program(), TARGET, parse_cluster(cluster), options)


def test_a_plan_sends_halves_where_that_is_faster_and_says_so() -> None:
    (stage,) = planned("8xH100").stages
    assert any(map(is_halved, stage.layouts.values()))
    (line,) = [line for line in axis_lines([stage]) if line.startswith("ep=8")]
    assert "tokens sent to experts in halves, " in line
    assert " of a micro-batch beside compute" in line
    (plain,) = planned("cpu:8").stages
    assert not any(map(is_halved, plain.layouts.values()))
    assert not any("beside compute" in line for line in axis_lines([plain]))
