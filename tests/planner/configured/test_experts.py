"""Hand-written configurations of a model with experts: what is held, computed and sent."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as rules
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.costs.basis import Basis, CostAssumptions
from autoparallel.planner.costs.choices import (
    expert_strategies,
    inner_collectives,
    input_specs,
)
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.expert_dims import FIRST_WEIGHT, is_expert_layer, router_nodes
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.graph.layout import (
    INVARIANT,
    REPLICATE,
    SLICED,
    NodeLayout,
    local_shape,
    shard,
)
from autoparallel.planner.inter_op.submesh import experts_of, mesh_of, restriction
from autoparallel.planner.ops.experts import as_received
from autoparallel.planner.ops.products import expert_pairs
from autoparallel.planner.requests.options import check_degrees
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.capture import capture_target
from autoparallel.target.load import load_target

ROWS = 8


@cache
def program() -> Program:
    return capture_target(load_target("hf:tests/models/mixtral", {}), PlanOptions(ROWS, 32))


def rows_graph() -> Graph:
    """The graph at the rows of the micro-batches that are priced."""
    return program().graph.with_batch_size(ROWS)


def priced(assumptions: CostAssumptions, **options: Any) -> PricedStep:
    own = program()
    asked = Configuration(microbatch_size=ROWS, **{"dp": 4, "zero": 1, **options})
    pricer = ConfigurationPricer(own.graph, own.blocks, Basis(assumptions=assumptions))
    return pricer.price(parse_cluster(f"1x{asked.num_devices}xH100"), asked)


def expert_bytes() -> int:
    return sum(node.spec.num_bytes for node in program().graph.parameters if "experts" in node.name)


GATHER = CostAssumptions()
SENT = CostAssumptions(dispatcher="alltoall")


@pytest.mark.parametrize("assumptions", [GATHER, SENT])
@pytest.mark.parametrize("ep", [2, 4])
def test_each_rank_holds_its_own_experts(assumptions: CostAssumptions, ep: int) -> None:
    whole = priced(assumptions, ep=1, zero=0).memory_bytes[0]["parameters"]
    split = priced(assumptions, ep=ep, zero=0).memory_bytes[0]["parameters"]
    assert whole - split == pytest.approx(expert_bytes() * (1 - 1 / ep))


def test_a_rank_computes_as_many_pairs_whether_tokens_are_sent_or_not() -> None:
    graph = rows_graph()
    node = next(filter(is_expert_layer, graph.nodes))
    inputs = input_specs(node, graph)
    split, whole = (shard(0),), (INVARIANT,)
    sent = NodeLayout((split,) * len(inputs), (split,))
    alone = NodeLayout((*(split,) * FIRST_WEIGHT, *(whole,) * 2), (split,))
    pairs = []
    for layout in (sent, alone):
        local = [
            replace(spec, shape=local_shape(spec.shape, own, (4,)))
            for spec, own in zip(inputs, layout.inputs, strict=True)
        ]
        pairs.append(expert_pairs(as_received(node, layout, (4,)), local))
    assert pairs == [inputs[1].numel // 4] * 2


def test_sent_tokens_take_time_in_both_directions() -> None:
    whole, sent = (priced(SENT, ep=ep).stages[0].seconds for ep in (1, 4))
    assert sent.forward_communication > whole.forward_communication
    assert sent.backward_communication > whole.backward_communication


def test_imbalance_lengthens_experts_and_what_is_sent_to_them() -> None:
    even, uneven = (
        priced(CostAssumptions(dispatcher="alltoall", imbalance=of), ep=4).stages[0].seconds
        for of in (1.0, 1.5)
    )
    assert uneven.backward_communication == pytest.approx(1.5 * even.backward_communication)
    assert uneven.forward_compute > even.forward_compute


def test_experts_of_data_parallel_ranks_are_summed_over_the_others() -> None:
    """Of 4 ranks that hold 2 halves of the experts twice, the pairs sum these."""
    half, whole = (priced(SENT, ep=ep, zero=1).memory_bytes[0]["optimizer"] for ep in (2, 1))
    assert half == pytest.approx(whole)  # a quarter of the states on each rank, in either case


def test_data_parallel_ranks_that_cannot_share_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="AP127"):
        priced(SENT, dp=4, ep=3)
    with pytest.raises(UsageError, match="ep= one of 1, 2, 4"):
        priced(SENT, dp=8, ep=8)
    with pytest.raises(UsageError, match="ep=4 spreads experts over cp=2 ranks too"):
        priced(GATHER, dp=1, tp=2, cp=2, ep=4)


@pytest.mark.parametrize(
    ("degrees", "folded", "data_ep"),
    [
        ({"dp": 8, "ep": 4}, (), 4),
        ({"dp": 8, "tp": 2, "ep": 4}, (), 4),
        ({"dp": 4, "tp": 2, "ep": 8}, ("tp",), 4),
        ({"dp": 8, "tp": 2, "ep": 4, "etp": 1}, ("tp",), 2),
        ({"dp": 8, "tp": 4, "cp": 2, "ep": 8, "etp": 1}, ("tp", "cp"), 1),
        ({"dp": 8, "tp": 4, "cp": 2, "ep": 8, "etp": 4}, ("cp",), 4),
        ({"dp": 4, "tp": 8, "ep": 2, "etp": 1}, (), 2),
    ],
)
def test_expert_ranks_are_tensor_parallel_then_context_then_data_parallel_ones(
    degrees: dict[str, int], folded: tuple[str, ...], data_ep: int
) -> None:
    own = Configuration(**degrees)  # type: ignore[arg-type]
    assert (own.folded, own.data_ep) == (folded, data_ep)
    assert own.mesh.size == own.dp * own.tp * own.cp


FOLDS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True},
    {"dp": 2, "cp": 2, "ep": 4},
)


@pytest.mark.parametrize("fold", FOLDS)
def test_folded_experts_are_held_and_computed_as_on_data_parallel_ranks(
    fold: dict[str, Any],
) -> None:
    """Of four ranks each has a quarter of the experts, or of each of a half of them."""
    pricer = ConfigurationPricer(rows_graph(), program().blocks, Basis(assumptions=SENT))
    pairs, weights = [], []
    for degrees in ({"dp": 4, "ep": 4}, fold):
        own = Configuration(microbatch_size=ROWS, **degrees)
        stage = pricer.plan(parse_cluster("1x4xH100"), own).stages[0]
        node = next(filter(is_expert_layer, pricer.graph.nodes))
        layout = stage.layouts[node.name]
        local = [
            replace(spec, shape=local_shape(spec.shape, each, own.mesh.shape))
            for spec, each in zip(input_specs(node, pricer.graph), layout.inputs, strict=True)
        ]
        pairs.append(expert_pairs(as_received(node, layout, own.mesh.shape), local))
        weights.append([local[at].numel for at in range(FIRST_WEIGHT, len(local))])
        held = stage.layouts[node.inputs[FIRST_WEIGHT].name].outputs[0]
        assert held == layout.inputs[FIRST_WEIGHT]
    whole = fold.get("etp", 1) == 1
    assert pairs[1] == pairs[0] * (1 if whole else 2)  # of half of each expert twice as many
    assert weights[0] == weights[1]


def test_a_router_sees_a_ranks_own_tokens_with_whole_weights() -> None:
    graph = program().graph
    found = router_nodes(graph)
    layer = next(filter(is_expert_layer, graph.nodes))
    topk = graph[layer.inputs[1].name]
    assert topk.name in found
    assert layer.name not in found
    assert not any("self_attn" in graph[name].module for name in found)
    assert not found.intersection(ref.name for ref in layer.inputs[FIRST_WEIGHT:])
    (gate,) = {name for name in found if graph[name].kind == "parameter" and "layers.0" in name}
    assert "gate" in gate
    own = Configuration(microbatch_size=ROWS, **FOLDS[0])
    pricer = ConfigurationPricer(graph, program().blocks, Basis(assumptions=SENT))
    stage = pricer.plan(parse_cluster("1x4xH100"), own).stages[0]
    assert stage.layouts[gate].outputs[0][-1] == REPLICATE
    assert stage.layouts[topk.name].outputs[0][-1] == shard(1)
    assert stage.layouts[layer.name].outputs[0] == (shard(0), shard(1))


@pytest.mark.parametrize("fold", [FOLDS[0], FOLDS[2]])
def test_tokens_are_sent_over_all_folded_axes_at_once(fold: dict[str, Any]) -> None:
    """One message over four ranks of a host, whatever the axes of the mesh."""
    graph, cluster = rows_graph(), parse_cluster("1x4xH100")
    pricer = ConfigurationPricer(graph, program().blocks, Basis(assumptions=SENT))
    node = next(filter(is_expert_layer, graph.nodes))
    sent = []
    for degrees in ({"dp": 4, "ep": 4}, fold):
        own = Configuration(microbatch_size=ROWS, **degrees)
        layout = pricer.plan(cluster, own).stages[0].layouts[node.name]
        prices = Prices(
            own.mesh, cluster, tuple(range(4)), "fp32", "adamw", rules, assumptions=SENT
        )
        inner = inner_collectives(node, graph, prices, layout)
        seconds = prices.op(node, input_specs(node, graph), layout, inner)
        sent.append((seconds.forward_communication, seconds.backward_communication))
    assert sent[0] == sent[1]
    assert all(sent[0])


def test_ranks_exchange_columns_unless_slices_have_those_of_both_halves() -> None:
    """The halves are gate and up; both directions take longer."""
    plain, cut = (
        priced(replace(SENT, plain_slices=cuts), **FOLDS[1]).stages[0].seconds
        for cuts in (False, True)
    )
    assert plain.forward_communication > cut.forward_communication
    assert plain.backward_communication > cut.backward_communication
    assert plain.forward_compute == cut.forward_compute


def labels_on(size: int, forced: Forced) -> set[str]:
    """Labels of the strategies of a layer of four experts on an axis "tp"."""
    graph, mesh = rows_graph(), mesh_of(1, size)
    cluster = parse_cluster(f"1x{size}xH100")
    ranks = tuple(range(size))
    prices = Prices(mesh, cluster, ranks, "fp32", "adamw", rules, assumptions=SENT)
    node = next(filter(is_expert_layer, graph.nodes))
    found = expert_strategies(node, graph, 0, prices, restriction(mesh, forced))
    return {each.label for each in found}


def test_experts_are_sliced_where_they_are_too_few_or_the_user_wants_it() -> None:
    assert SLICED not in labels_on(4, Forced())
    assert SLICED in labels_on(8, Forced())
    assert SLICED not in labels_on(8, Forced(ep=1, tp=8))
    assert labels_on(4, Forced(tp=4, etp=4)) == {SLICED}


@pytest.mark.parametrize(
    ("forced", "what"),
    [
        (Forced(tp=4, etp=2), "etp=2 beside tp=4"),
        (Forced(etp=2), "etp=2 beside tp=1"),
        (Forced(tp=7, etp=7), "etp=7 cannot split the experts of model.layers.0.mlp"),
    ],
)
def test_ranks_that_cannot_slice_experts_are_refused(forced: Forced, what: str) -> None:
    cluster = parse_cluster(f"cpu:{forced.tp or 2}")
    with pytest.raises(UsageError, match=f"AP127.*{what}"):
        check_degrees(forced, cluster, rows_graph())


def test_a_token_is_exchanged_once_for_each_expert_that_it_visits() -> None:
    """Mixtral sends a token of width 32 to 2 experts in each of 2 layers."""
    graph = program().graph
    found = experts_of(graph, lambda node: rules.axis_strategies(node, graph, 2), gradient_bytes=4)
    assert found is not None
    assert found.exchanged == 2 * 2 * 32 * 32 * 4  # of 32 positions, in float32
