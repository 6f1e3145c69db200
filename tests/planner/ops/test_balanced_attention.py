"""Balanced causal attention: where it is offered, what it costs, and when the planner takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from one_stage import plan
from small_graphs import cluster
from split_attention import (
    CAUSAL,
    HEADS,
    SEQ,
    SIZE,
    attention,
    attention_labels,
    labels,
    layout_of,
    prices_on,
    strategy,
)

from autoparallel.cost_model.cluster.cluster import Host, Link
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.compute import work_seconds
from autoparallel.cost_model.profile.arguments import build_call
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.ops import lower_right  # noqa: F401 - registers the op
from autoparallel.planner.costs.choices import (
    Restriction,
    inner_collectives,
    input_specs,
    node_strategies,
)
from autoparallel.planner.costs.kept_bytes import saved_parts
from autoparallel.planner.costs.op_case import op_case
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Graph, Ref, TensorSpec
from autoparallel.planner.graph.layout import (
    BALANCED,
    AxisStrategy,
    NodeLayout,
    shard,
)
from autoparallel.planner.ops import work
from autoparallel.planner.ops.experts import BALANCED_ATTENTION, as_run
from autoparallel.planner.ops.saved import saved_extra_bytes
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Forced, Request
from examples.gpt import GPT, example_batch


def test_it_is_offered_beside_the_plain_split_with_the_same_placements() -> None:
    graph = attention(*CAUSAL)
    plain, balanced = strategy(graph, 2, "q"), strategy(graph, 2, BALANCED)
    assert (plain.inputs, plain.outputs) == (balanced.inputs, balanced.outputs)
    assert not plain.collectives


@pytest.mark.parametrize(
    "graph",
    [
        attention(),
        attention(Ref("mask")),
        attention(None, 0.0, False),
        attention(*CAUSAL, keys=2 * SEQ),
        attention(*CAUSAL, seq=2),
    ],
    ids=["full", "masked", "not causal", "keys of another length", "one position on a rank"],
)
def test_other_attention_has_no_balanced_strategy(graph: Graph) -> None:
    assert "q" in labels(graph, 2)
    assert BALANCED not in labels(graph, 2)


def test_half_of_the_queries_and_of_the_results_are_swapped_in_both_directions() -> None:
    """4 heads of 16 positions of 8 float32: 2,048 bytes, of which a rank of two swaps a quarter.

    Of five positions on each of three ranks two are swapped, 2/15.
    """
    found = [
        [(each.kind, each.num_bytes, each.backward) for each in own.collectives]
        for own in (
            strategy(attention(*CAUSAL), 2, BALANCED),
            strategy(attention(*CAUSAL, seq=15, key_heads=2), 3, BALANCED),
        )
    ]
    both = (False, False, True, True)
    assert found[0] == [("swap", 512, direction) for direction in both]
    assert found[1] == [("swap", HEADS * 2 * SIZE * 4, direction) for direction in both]


def pairs_of(graph: Graph, layout: NodeLayout, sizes: tuple[int, ...], prices: Prices) -> float:
    """The pairs of a query and a key that the busiest rank is priced for."""
    inputs = [
        prices.local(s, held)
        for s, held in zip(input_specs(graph["op"], graph), layout.inputs, strict=True)
    ]
    outputs = [prices.local(graph["op"].spec, layout.outputs[0])]
    found = work(as_run(graph["op"], layout, sizes), inputs, outputs)
    assert found.flops_backward == 2.5 * found.flops_forward
    return found.flops_forward / (2 * (SIZE + SIZE))


@pytest.mark.parametrize("size", [2, 4])
def test_it_is_priced_as_an_equal_share_of_all_pairs(size: int) -> None:
    """16² / 2 pairs of a head are seen, of which each rank has 1 / n; the last one of contiguous
    parts has (2n - 1) / n²."""
    graph, prices = attention(*CAUSAL), prices_on((size,))
    seen = HEADS * SEQ * SEQ / 2
    found = {
        label: pairs_of(graph, layout_of(strategy(graph, size, label)), (size,), prices)
        for label in ("q", BALANCED)
    }
    assert found["q"] == seen * (2 * size - 1) / size**2
    assert found[BALANCED] == seen / size


def test_positions_on_two_axes_may_be_balanced_on_one_or_both() -> None:
    """Four ranks of four positions. Balanced on the outer axis alone, the busiest are at the end
    of the inner one: they keep positions 4 and 5 and take 14 and 15, or the reverse.

    The pairs up to the diagonal, of which half counts: 2 · 6 - 2 and 2 · 16 - 2.
    """
    graph, prices, sizes = attention(*CAUSAL), prices_on((2, 2)), (2, 2)
    plain, balanced = (strategy(graph, 2, label) for label in ("q", BALANCED))

    def pairs(*strategies: AxisStrategy) -> float:
        return pairs_of(graph, layout_of(*strategies), sizes, prices) / HEADS

    assert pairs(plain, plain) == 4 * 16 - 8
    assert pairs(balanced, plain) == (2 * 6 - 2) + (2 * 16 - 2)
    assert pairs(plain, balanced) == (2 * 10 - 2) + (2 * 16 - 2)
    assert pairs(balanced, balanced) == 16 * 16 / 2 / 4


def test_a_swap_takes_what_its_message_takes() -> None:
    """512 bytes at 1 GB/s after 1 µs; between hosts at 0.1 GB/s after 10 µs."""
    graph = attention(*CAUSAL)
    layout = layout_of(strategy(graph, 2, BALANCED))
    for own, message in ((cluster(2), 1e-6 + 512e-9), (cluster(1, num_hosts=2), 1e-5 + 5120e-9)):
        prices = prices_on((2,), own)
        inner = inner_collectives(graph["op"], graph, prices, layout)
        found = prices.op(graph["op"], input_specs(graph["op"], graph), layout, inner)
        assert found.forward_communication == pytest.approx(2 * message, rel=1e-12)
        assert found.backward_communication == pytest.approx(2 * message, rel=1e-12)


def test_what_it_copies_is_counted() -> None:
    """On a rank of two 1,024 bytes of queries and of results, 2,048 of keys and of values.

    Forward queries, keys, values and results go through memory once; half of the queries and of
    the results is read and written to be sent, and all results to be joined. At 1e11 bytes/s.
    """
    graph, prices = attention(*CAUSAL), prices_on((2,))
    layout = layout_of(strategy(graph, 2, BALANCED))
    forward, _ = prices.compute(graph["op"], input_specs(graph["op"], graph), layout)
    moved = (1024 + 2 * 2048 + 1024) + (1024 + 1024) + 2 * 1024
    assert forward == pytest.approx(moved / 1e11, rel=1e-12)


def test_both_ways_are_offered_to_the_solver_with_their_own_collectives() -> None:
    graph, prices = attention(*CAUSAL), prices_on((2,))
    offered = node_strategies(graph["op"], graph, prices, Restriction())
    queries = [way for way in offered if way.layout.inputs[0] == (shard(2),)]
    assert [(way.layout.labels, way.num_inner) for way in queries] == [
        (("q",), 0),
        ((BALANCED,), 4),
    ]
    for way in queries:
        inner = inner_collectives(graph["op"], graph, prices, way.layout)
        assert len(inner) == way.num_inner


def test_a_gpu_launches_and_fills_two_kernels_of_attention() -> None:
    """Rows of both halves: 64 keys for the first half and 128 for the second."""
    device = parse_cluster("1xA100-80GB").hosts[0].device
    graph = attention(*CAUSAL, seq=128)
    layout, prices = layout_of(strategy(graph, 2, BALANCED)), prices_on((2,))
    node = as_run(graph["op"], layout, (2,))
    assert node.args[3] == [32, 128]
    inputs = [
        prices.local(s, held)
        for s, held in zip(input_specs(graph["op"], graph), layout.inputs, strict=True)
    ]
    found = work(node, inputs, inputs[:1])
    assert found.products_forward == ((HEADS, 32, 32, SIZE), (HEADS, 32, 128, SIZE))
    plain = work(graph["op"], inputs, inputs[:1])
    assert work_seconds(device, found, "float32") > work_seconds(device, plain, "float32")


def test_it_keeps_half_of_the_queries_and_its_results_twice() -> None:
    """A rank has 2 · 256 float32 of queries and results: half of it, and all of it, more."""
    graph, prices = attention(*CAUSAL), prices_on((2,))
    kept = {
        label: sum(
            size
            for _, size in saved_parts(
                graph["op"], layout_of(strategy(graph, 2, label)), graph, prices
            )
        )
        for label in ("q", BALANCED)
    }
    local = HEADS * SEQ // 2 * SIZE * 4
    assert kept[BALANCED] - kept["q"] == local // 2 + local


@pytest.mark.parametrize("label", ["q", BALANCED])
def test_heads_of_groups_are_copied_in_32_bits_alone(label: str) -> None:
    """Keys and values have half as many heads as queries: their copies have one for each."""
    graph = attention(*CAUSAL)
    node = as_run(graph["op"], layout_of(strategy(graph, 2, label)), (2,))
    copied = {}
    for dtype in ("float32", "bfloat16"):
        rows, keys = (
            TensorSpec((1, heads, length, SIZE), dtype, requires_grad=True)
            for heads, length in ((HEADS, SEQ // 2), (HEADS // 2, SEQ))
        )
        grouped, alone = (
            saved_extra_bytes(replace(node, kwargs=kwargs), (rows, keys, keys), (rows,))
            for kwargs in ({"enable_gqa": True}, {})
        )
        copied[dtype] = grouped - alone
    assert copied == {"float32": 2 * HEADS * SEQ * SIZE * 4, "bfloat16": 0}


def test_attention_of_a_later_slice_is_not_taken_for_balanced() -> None:
    """Its node has a mask in place of the flag, and the layout's label is still there."""
    layout = layout_of(strategy(attention(*CAUSAL), 2, BALANCED))
    sliced = attention(Ref("mask"), 0.0, False)["op"]
    assert as_run(sliced, layout, (2,)) is sliced


def test_it_is_measured_as_the_call_of_the_first_rank() -> None:
    graph, prices = attention(*CAUSAL), prices_on((2,))
    layout = layout_of(strategy(graph, 2, BALANCED))
    inputs = [
        prices.local(s, held)
        for s, held in zip(input_specs(graph["op"], graph), layout.inputs, strict=True)
    ]
    node = as_run(graph["op"], layout, (2,))
    case = op_case(node, inputs, inputs[:1], work(node, inputs, inputs[:1]))
    assert case is not None
    assert case.op == BALANCED_ATTENTION
    assert case.arguments == '[[{"tensor":0},{"tensor":1},{"tensor":2},[4,16]],{}]'
    call = build_call(case, "cpu")
    args, kwargs = call.prepare()
    assert call.op(*args, **kwargs).shape == (1, HEADS, SEQ // 2, SIZE)


def planned(bytes_per_second: float) -> Plan:
    """A GPT of long sequences on two devices, its positions split and keys gathered."""
    with torch.device("meta"):
        model = GPT(n_layer=2, d_model=64, n_head=4, seq=2048, vocab=64, tied=False)
    own = capture(model, example_batch(2, 2048), dtype="float32")
    toys = cluster(2, bytes_per_second=bytes_per_second, flops=1e11)
    link = Link("wire", 1e-6, bytes_per_second)
    toys = replace(toys, hosts=(Host(toys.hosts[0].device, 2, link),))
    features = Features(frozenset({"ring", "ulysses"}))
    request = Request(global_batch=2, precision="fp32", forced=Forced(cp=2), features=features)
    return plan(own.graph, own.blocks, toys, request)


def test_the_planner_balances_where_a_link_is_fast_and_not_where_it_is_slow() -> None:
    """Saved per row, head and layer: 2048²/8 pairs of 64 FLOPs, 3.5 times in both directions, and
    512 · 16 float32 are sent four times: equal at about 0.11 GB/s for 1e11 FLOP/s."""
    fast, slow = planned(1e10), planned(1e7)
    assert attention_labels(fast) == {BALANCED}
    assert attention_labels(slow) == {"q"}
    assert attention_labels(loads(dumps(fast))) == {BALANCED}
