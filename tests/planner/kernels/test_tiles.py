"""Regions of hand-made blocks that can run tile by tile, and the number of their tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from any_tiles import cut_all
from small_graphs import leaf, mlp, op, weight

from autoparallel.planner import ops as rules
from autoparallel.planner.graph.graph import Node, Ref
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.kernels.tiles import MOST_TILES, TiledRegion, last_region

ROWS, WIDTH, INNER = 4, 16, 64
ONE, TWO = Mesh(("dp",), (1,)), Mesh(("dp",), (2,))


def region(nodes: list[Node], names: tuple[str, ...]) -> TiledRegion | None:
    """The last region of ops on rows of a batch that is not known to scale."""
    graph, _ = mlp(1, rows=2)
    found = replace(graph, nodes=tuple(nodes), batch_size=2, batch_dims={})
    return last_region(names, found, rules, ONE)


def layer(*more: Node) -> list[Node]:
    """A product, an activation and a product on two rows, and ``more`` ops."""
    return [
        leaf("x", 2, WIDTH),
        weight("up.weight", INNER, WIDTH),
        weight("down.weight", WIDTH, INNER),
        op("up", "linear.default", (Ref("x"), Ref("up.weight")), 2, INNER),
        op("act", "gelu.default", (Ref("up"),), 2, INNER),
        op("down", "linear.default", (Ref("act"), Ref("down.weight")), 2, WIDTH),
        *more,
    ]


def test_a_layer_is_cut_by_rows_and_its_weights_are_whole() -> None:
    found = region(layer(), ("up", "act", "down"))
    assert found is not None
    assert list(found.strategies) == ["up", "act", "down"]
    assert {ref.name: own.is_shard for ref, own in found.entries.items()} == {
        "x": True,
        "up.weight": False,
        "down.weight": False,
    }
    assert found.sum_bytes == 4 * 2 * INNER * WIDTH


def test_an_op_after_the_region_must_not_read_its_values() -> None:
    """A softmax over the rows, which no slice can compute, reads an inner value."""
    mixed = op("mixed", "softmax.int", (Ref("act"),), 2, INNER)
    mixed = replace(mixed, args=(Ref("act"), 0))
    found = region(layer(mixed), ("up", "act", "down", "mixed"))
    assert found is None


@pytest.mark.parametrize(("dim", "inside"), [(0, False), (1, True)])
def test_a_softmax_is_in_the_region_if_it_is_over_another_dimension(dim: int, inside: bool) -> None:
    last = op("last", "softmax.int", (Ref("down"),), 2, WIDTH)
    found = region(layer(replace(last, args=(Ref("down"), dim))), ("up", "act", "down", "last"))
    assert (found is not None and "last" in found.strategies) == inside


def test_tiles_divide_the_rows_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, blocks = mlp(1, rows=24)
    block = blocks.blocks[1].nodes
    found = last_region(block, graph, rules, ONE)
    assert found is not None
    assert found.num_tiles(ONE, 24, MOST_TILES) == 1  # too few bytes
    cut_all(monkeypatch.setattr)
    assert found.num_tiles(ONE, 24, MOST_TILES) == 8
    assert found.num_tiles(TWO, 24, MOST_TILES) == 4
    assert found.num_tiles(TWO, 24, 2) == 2
    assert found.num_tiles(TWO, 23, MOST_TILES) == 1


def test_tiles_must_save_more_than_the_sums_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_all(monkeypatch.setattr)
    found = region(layer(), ("up", "act", "down"))
    assert found is not None
    assert found.num_tiles(ONE, 8, MOST_TILES) == 8
    monkeypatch.setattr("autoparallel.planner.kernels.tiles.LEAST_RATIO", 1.0)
    assert found.num_tiles(ONE, 8, MOST_TILES) == 1
    assert found.num_tiles(ONE, 1024, MOST_TILES) > 1
