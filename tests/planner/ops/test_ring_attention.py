"""Ring attention and attention by heads on an axis of positions: offers, prices, choice, plan."""

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
from autoparallel.cost_model.collectives.dispatch import ring_seconds
from autoparallel.cost_model.profile.arguments import build_call
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.ops import halo, ring  # noqa: F401 - they register ops
from autoparallel.planner.costs.choices import (
    Restriction,
    inner_collectives,
    input_specs,
    node_strategies,
)
from autoparallel.planner.costs.kept_bytes import saved_parts, working_bytes
from autoparallel.planner.costs.op_case import op_case
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Graph, Ref
from autoparallel.planner.graph.layout import (
    BALANCED,
    HALO,
    OF_GROUPS,
    RING,
    Mesh,
    NodeLayout,
    combine,
    keeps_groups,
    shard,
)
from autoparallel.planner.ops import work
from autoparallel.planner.ops.attention import BALANCED_RING, HALO_ATTENTION, RING_ATTENTION
from autoparallel.planner.ops.experts import as_run
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import Forced, Request
from examples.gpt import GPT, example_batch

ROW = HEADS * SIZE * 4
"""Bytes of one position of queries, keys, values or results."""


@pytest.mark.parametrize(
    "graph",
    [
        attention(Ref("mask")),
        attention(*CAUSAL, keys=2 * SEQ),
        attention(*CAUSAL, seq=2),
        attention(None, 0.1, True),
        attention(*CAUSAL, window=4),
    ],
    ids=["masked", "keys of another length", "one position on a rank", "dropout", "window"],
)
def test_other_attention_has_no_ring(graph: Graph) -> None:
    assert RING not in labels(graph, 2)


def test_attention_of_one_head_without_a_dimension_for_it_has_no_ring() -> None:
    graph = attention(*CAUSAL)
    flat = tuple(
        replace(node, outputs=tuple(replace(each, shape=(SEQ, SIZE)) for each in node.outputs))
        for node in graph
        if node.name != "mask"
    )
    assert RING not in labels(Graph(flat, Ref("op"), 1), 2)


def test_queries_keys_values_and_results_are_split_along_positions() -> None:
    for graph in (attention(*CAUSAL), attention()):
        own = strategy(graph, 2, RING)
        assert own.inputs == (shard(2),) * 3
        assert own.outputs == (shard(2),)


def test_a_message_has_one_ranks_keys_and_values() -> None:
    """Of 16 positions a rank of four has four, and swaps two of queries, results, and keys with
    values."""
    found = strategy(attention(), 4, RING).collectives
    assert [(each.kind, each.num_bytes, each.backward) for each in found] == [
        ("ring", 8 * ROW, False),
        ("ring", 8 * ROW, True),
    ]
    found = strategy(attention(*CAUSAL), 4, RING).collectives
    forward = [(each.kind, each.num_bytes) for each in found if not each.backward]
    assert forward == [("swap", 2 * ROW), ("swap", 2 * ROW), ("swap", 4 * ROW), ("ring", 8 * ROW)]
    assert sum(each.backward for each in found) == 4


@pytest.mark.parametrize(("window", "parts"), [(4, [3]), (6, [4, 1]), (99, [4, 4, 4])])
def test_with_a_window_a_rank_receives_its_halo(window: int, parts: list[int]) -> None:
    """Of 16 positions a rank of four has four. The messages follow each other, and compute waits;
    backward as many bytes return."""
    graph, prices = attention(*CAUSAL, window=window), prices_on((4,))
    own = strategy(graph, 4, HALO)
    assert own.inputs == (shard(2),) * 3
    assert own.outputs == (shard(2),)
    for backward in (False, True):
        sent = [each for each in own.collectives if each.backward == backward]
        assert [(each.kind, each.num_bytes) for each in sent] == [
            ("halo", 2 * part * ROW) for part in parts
        ]
    seconds = sum(1e-6 + 2 * part * ROW * 1e-9 for part in parts)
    found = priced(graph, layout_of(own), prices)
    assert found.forward_communication == pytest.approx(seconds, rel=1e-12)
    assert found.backward_communication == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("window", "seen", "before"), [(2, 4, 1), (4, 7, 3), (6, 9, 5)])
def test_attention_with_a_halo_is_priced_by_the_keys_that_it_multiplies(
    window: int, seen: int, before: int
) -> None:
    """Four queries of a rank: in chunks each is multiplied with two windows of keys, else with
    those of the rank and its halo. It keeps the statistics, a mask, and keys and values behind the
    halo."""
    graph, prices = attention(*CAUSAL, window=window), prices_on((4,))
    layout = layout_of(strategy(graph, 4, HALO))
    node, inputs, outputs = local(graph, layout, prices)
    found = work(node, inputs, outputs)
    assert node.op == HALO_ATTENTION
    assert found.flops_forward == HEADS * 4 * seen * 2 * (SIZE + SIZE)
    case = op_case(node, inputs, outputs, found)
    assert case is not None
    call = build_call(case, "cpu")
    args, kwargs = call.prepare()
    assert call.op(*args, **kwargs).shape == (1, HEADS, 4, SIZE)
    parts = dict(saved_parts(graph["op"], layout, graph, prices))
    assert "k:0" not in parts
    joined = 2 * (4 + before) * ROW
    is_chunked = window == 2
    copies = 4 * ROW if is_chunked else 0
    masks = 2 * (2 + 1) + 2 * 4 if is_chunked else 4 * (4 + before)
    assert parts["op:extra"] == joined + copies + 4 * masks + 4 * HEADS * 4
    assert working_bytes(graph["op"], layout, graph, prices) == 4 * 4 * ROW + 2 * joined


def test_no_other_axis_splits_positions_beside_a_ring() -> None:
    graph, sizes = attention(*CAUSAL), (2, 2)
    own, heads = strategy(graph, 2, RING), strategy(graph, 2, "b1")
    assert keeps_groups((own, heads), sizes)
    for label in ("q", BALANCED, RING):
        assert not keeps_groups((own, strategy(graph, 2, label)), sizes)
        assert not keeps_groups((strategy(graph, 2, label), own), sizes)


def priced(graph: Graph, layout: NodeLayout, prices: Prices) -> tuple[float, ...]:
    inner = inner_collectives(graph["op"], graph, prices, layout)
    return prices.op(graph["op"], input_specs(graph["op"], graph), layout, inner)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rest", [(), CAUSAL], ids=["full", "causal"])
def test_it_is_priced_as_an_equal_share_of_all_pairs(size: int, rest: tuple[object, ...]) -> None:
    graph, prices = attention(*rest), prices_on((size,))
    layout = layout_of(strategy(graph, size, RING))
    node, inputs, outputs = local(graph, layout, prices)
    found = work(node, inputs, outputs)
    seen = HEADS * SEQ * SEQ / (2 if rest else 1)
    assert found.flops_forward == seen / size * 2 * (SIZE + SIZE)
    assert found.flops_backward == 2.5 * found.flops_forward
    assert len(found.products_forward) == size
    assert found.kernels_forward % size == 0


def local(graph: Graph, layout: NodeLayout, prices: Prices):  # type: ignore[no-untyped-def]
    """The node as a rank runs it, and the specs of its parts."""
    node = as_run(graph["op"], layout, prices.mesh.shape)
    specs = zip(input_specs(graph["op"], graph), layout.inputs, strict=True)
    inputs = tuple(prices.local(spec, held) for spec, held in specs)
    return node, inputs, (prices.local(graph["op"].spec, layout.outputs[0]),)


@pytest.mark.parametrize("size", [2, 4])
def test_messages_are_hidden_by_the_steps_as_far_as_these_take(size: int) -> None:
    """At 1 GB/s after 1 µs, and between hosts at 0.1 GB/s after 10 µs. A rank of n has 16 / n
    positions, and sends keys and values."""
    graph = attention()
    layout = layout_of(strategy(graph, size, RING))
    num_bytes = 2 * SEQ // size * ROW
    for own, message in (
        (cluster(size), 1e-6 + num_bytes * 1e-9),
        (cluster(1, num_hosts=size), 1e-5 + num_bytes * 1e-8),
    ):
        prices = prices_on((size,), own)
        found = priced(graph, layout, prices)
        step = found.forward_compute / size, found.backward_compute / size
        lost = prices._slowed_share("all_to_all")
        once = max(message - step[0], lost * message)
        assert found.forward_communication == pytest.approx((size - 1) * once, rel=1e-12)
        one, two = (max(k * message - step[1], lost * k * message) for k in (1, 2))
        backward = one + message if size == 2 else 3 * one + (size - 3) * two + message
        assert found.backward_communication == pytest.approx(backward, rel=1e-12)


def test_a_ring_whose_messages_are_hidden_costs_the_last_one_alone() -> None:
    own = ring_seconds(1.0, 5.0, 8, slowed_share=0.0, backward=False)
    assert own == 0.0
    assert ring_seconds(1.0, 5.0, 8, slowed_share=0.0, backward=True) == 1.0
    assert ring_seconds(1.0, 5.0, 8, slowed_share=0.1, backward=False) == pytest.approx(0.7)


@pytest.mark.parametrize("num_ranks", range(2, 8))
def test_the_seconds_of_a_ring_are_those_of_its_steps_one_by_one(num_ranks: int) -> None:
    """Each step of c seconds runs beside its messages, one after the other on one link."""
    message, step = 3.0, 2.0
    forward = [message] * (num_ranks - 1) + [0.0]
    assert sum(max(step, each) for each in forward) - num_ranks * step == ring_seconds(
        message, step, num_ranks, slowed_share=0.0, backward=False
    )
    sums = [message if at >= 2 else 0.0 for at in range(num_ranks)]
    both = [one + two for one, two in zip(forward, sums, strict=True)]
    assert sum(max(step, each) for each in both) - num_ranks * step + message == ring_seconds(
        message, step, num_ranks, slowed_share=0.0, backward=True
    )


def test_keys_of_a_group_are_sent_alone() -> None:
    """Two heads of keys: four ranks split the heads of queries, and each reads one head of keys,
    which it sends to the rank with the other positions of the same head."""
    graph = grouped(key_heads=2)
    mesh = Mesh(("cp", "tp"), (2, 4))
    prices = replace(prices_on((8,)), mesh=mesh)
    layout = combine((strategy(graph, 2, RING), strategy(graph, 4, OF_GROUPS)))
    key = graph.spec(graph["op"].inputs[1])
    assert prices._parts_of_keys(key, layout, 0) == 2
    alone = combine((strategy(graph, 2, RING), strategy(graph, 4, "I")))
    assert prices._parts_of_keys(key, alone, 0) == 1


def grouped(key_heads: int) -> Graph:
    graph = attention(*CAUSAL, key_heads=key_heads)
    return Graph(
        tuple(
            replace(node, kwargs={"enable_gqa": True}) if node.name == "op" else node
            for node in graph
        ),
        Ref("op"),
        1,
    )


def test_it_keeps_parts_of_keys_and_the_statistics() -> None:
    """Four positions of a rank of four: with causality the tensors after the swap in place of the
    inputs and the result; 4 bytes per head and position of statistics."""
    for rest in ((), CAUSAL):
        graph, prices = attention(*rest), prices_on((4,))
        layout = layout_of(strategy(graph, 4, RING))
        parts = dict(saved_parts(graph["op"], layout, graph, prices))
        assert sum(parts.values()) == 4 * 4 * ROW + 4 * HEADS * 4
        assert ("k:0" in parts) == (not rest)


def test_it_holds_two_parts_under_way_and_no_whole_keys() -> None:
    """Inputs and result, twice keys and values and twice their gradients, and a sum of gradients of
    queries: far below whole keys if there are many ranks."""
    graph, prices = attention(), prices_on((4,))
    layout = layout_of(strategy(graph, 4, RING))
    assert working_bytes(graph["op"], layout, graph, prices) == (4 + 4 * 2 + 1) * 4 * ROW


def test_it_is_measured_as_the_steps_of_one_rank() -> None:
    for rest, op in (((), RING_ATTENTION), (CAUSAL, BALANCED_RING)):
        graph, prices = attention(*rest), prices_on((4,))
        layout = layout_of(strategy(graph, 4, RING))
        node, inputs, outputs = local(graph, layout, prices)
        case = op_case(node, inputs, outputs, work(node, inputs, outputs))
        assert case is not None
        assert case.op == op
        call = build_call(case, "cpu")
        args, kwargs = call.prepare()
        assert call.op(*args, **kwargs).shape == (1, HEADS, SEQ // 4, SIZE)


def planned(bytes_per_second: float, **options: object) -> Plan:
    """A GPT of long sequences on four devices, its positions split."""
    with torch.device("meta"):
        model = GPT(n_layer=2, d_model=64, n_head=4, seq=4096, vocab=64, tied=False)
    own = capture(model, example_batch(1, 4096), dtype="float32")
    toys = cluster(4, bytes_per_second=bytes_per_second, flops=1e11)
    link = Link("wire", 1e-6, bytes_per_second)
    toys = replace(toys, hosts=(Host(toys.hosts[0].device, 4, link),))
    request = Request(global_batch=1, precision="fp32", forced=Forced(cp=4), **options)  # type: ignore[arg-type]
    return plan(own.graph, own.blocks, toys, request)


@pytest.mark.parametrize(
    ("allow", "found"),
    [(["gather"], {BALANCED, "q"}), (["ring"], {RING}), (["ulysses"], {"b1"})],
    ids=("gather", "ring", "ulysses"),
)
def test_features_choose_the_way_of_attention_on_an_axis_of_positions(
    allow: list[str], found: set[str]
) -> None:
    own = planned(1e9, features=features_of(allow, [], ("1f1b",)))
    assert attention_labels(own) <= found
    assert attention_labels(loads(dumps(own))) == attention_labels(own)


def test_the_fastest_way_is_chosen_by_price() -> None:
    """Attention by heads sends a third less than the swaps and messages of a ring, if keys have as
    many heads as queries, and each way is at most as fast as the plan with a choice."""
    every = planned(1e9)
    for name in ("gather", "ring", "ulysses"):
        one = planned(1e9, features=features_of([name], [], ("1f1b",)))
        assert every.prediction.step_seconds <= one.prediction.step_seconds * (1 + 1e-9)
    denied = planned(1e9, features=features_of([], ["ulysses"], ("1f1b",)))
    assert attention_labels(denied) != attention_labels(every)


def test_a_ring_is_offered_on_an_axis_of_positions_alone() -> None:
    with torch.device("meta"):
        model = GPT(n_layer=1, d_model=64, n_head=4, seq=256, vocab=64, tied=False)
    own = capture(model, example_batch(2, 256), dtype="float32")
    (name,) = [node.name for node in own.graph if node.name.startswith("scaled_dot")]
    node, prices = own.graph[name], prices_on((2,))
    ways = {
        positions: {
            way.layout.labels[0]
            for way in node_strategies(
                node, own.graph, prices, Restriction(split_positions=positions)
            )
        }
        for positions in ((), (0,))
    }
    assert RING not in ways[()]
    assert ways[0,] == {"q", BALANCED, RING, "b1"}
