"""Attention within packed documents: where it is split, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from split_attention import CAUSAL, HEADS, SEQ, SIZE, attention, labels, layout_of, strategy

from autoparallel.planner.costs.op_case import op_case
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import BALANCED, RING
from autoparallel.planner.ops import work
from autoparallel.planner.ops.attention_limits import DOCUMENT_LENGTH, unpacked
from autoparallel.planner.ops.experts import BALANCED_ATTENTION, as_run
from autoparallel.planner.ops.work import Work


def packed(window: int = 0, length: int = 0) -> Graph:
    """Causal attention of 4 heads over 16 positions with ids of documents."""
    graph = attention(*CAUSAL)
    ids = Node("ids", "input", outputs=(TensorSpec((1, 1, 1, SEQ), "int64"),))
    kwargs = {"documents": Ref("ids"), **({"window": window} if window else {})}
    kwargs |= {DOCUMENT_LENGTH: length} if length else {}
    path = "autoparallel.scaled_dot_product_attention.default"
    node = replace(graph["op"], op=path, kwargs=kwargs)
    nodes = tuple(node if each.name == "op" else each for each in graph.nodes)
    return Graph((ids, *nodes), Ref("op"), 1)


def part(graph: Graph, rows: int) -> tuple[Node, list[TensorSpec], list[TensorSpec]]:
    """The attention of ``graph`` of ``rows`` of the queries."""
    node = graph["op"]
    specs = [graph.spec(ref) for ref in node.inputs]
    query = replace(specs[0], shape=(1, HEADS, rows, SIZE))
    return node, [query, *specs[1:]], [query]


def pairs(graph: Graph, rows: int = SEQ) -> float:
    """The pairs of a query and a key, of each head, that are priced."""
    found = work(*part(graph, rows))
    assert found.flops_backward == 2.5 * found.flops_forward
    return found.flops_forward / (4 * SIZE * HEADS)


def test_without_lengths_it_costs_what_causal_attention_of_whole_sequences_does() -> None:
    for rows in (SEQ, SEQ // 4):
        assert pairs(packed(), rows) == pairs(attention(*CAUSAL), rows)
    assert pairs(packed()) == SEQ * SEQ / 2


def test_a_window_counts_if_it_is_at_most_half_of_the_positions() -> None:
    assert pairs(packed(window=2)) == SEQ * 4
    assert pairs(packed(window=12)) == SEQ * SEQ / 2


def test_with_a_length_it_costs_what_documents_of_this_length_do() -> None:
    """16 positions are four documents of 4, and a part of 4 positions is one of them. A part of 2
    is the end of one: 2 · 4 pairs, of which half of 2² are not seen."""
    graph = packed(length=4)
    assert pairs(graph) == 4 * 4 * 4 / 2
    assert pairs(graph, 4) == 4 * 4 / 2
    assert pairs(graph, 2) == 2 * 4 - 2


def test_products_are_those_of_the_documents() -> None:
    found = work(*part(packed(length=4), SEQ))
    assert isinstance(found, Work)
    assert found.products_forward == ((4 * HEADS, 4, 4, SIZE),)


def test_it_is_split_as_causal_attention_but_in_no_ring_and_never_unbalanced() -> None:
    found, causal = (labels(graph, 2) for graph in (packed(), attention(*CAUSAL)))
    assert sorted([*found, RING, "q"]) == sorted(causal)
    assert str(strategy(packed(), 2, BALANCED).inputs[3]) == "I"


@pytest.mark.parametrize("length", [0, 4])
def test_balanced_parts_of_known_lengths_are_priced_as_documents(length: int) -> None:
    graph = packed(length=length)
    run = as_run(graph["op"], layout_of(strategy(graph, 2, BALANCED)), (2,))
    assert (run.op == BALANCED_ATTENTION) == (not length)


def test_it_is_measured_as_causal_attention_of_whole_sequences() -> None:
    cases = []
    for graph in (packed(), attention(*CAUSAL)):
        node, inputs, outputs = part(graph, SEQ)
        node, inputs = unpacked(node, inputs)
        cases.append(op_case(node, inputs, outputs, work(node, inputs, outputs)))
    assert cases[0] is not None
    assert cases[0] == cases[1]
    node, inputs, outputs = part(packed(length=4), SEQ)
    found = op_case(node, inputs, outputs, work(node, inputs, outputs))
    assert found is not None
    assert [each.shape for each in found.tensors] == [(4, HEADS, 4, SIZE)] * 3
