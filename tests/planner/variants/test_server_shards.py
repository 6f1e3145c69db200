"""Shards of parameter servers: complete, and balanced by bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from random_suites import seeds

from autoparallel.planner.variants.parameter_servers import (
    LEAST_ELEMENTS,
    PIECES,
    elements_of,
    shards_of,
)


def loads(sizes: dict[str, int], servers: int) -> list[int]:
    return [
        sum(shard.size for shard in shards_of(sizes, servers) if shard.server == server)
        for server in range(servers)
    ]


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_every_element_is_on_one_server(servers: int, seed: int) -> None:
    draws = random.Random(seed)
    sizes = {f"p{index}": int(10 ** draws.uniform(0, 6)) for index in range(20)}
    shards = shards_of(sizes, servers)
    for name, size in sizes.items():
        own = [shard for shard in shards if shard.parameter == name]
        assert (own[0].start, own[-1].stop) == (0, size)
        assert all(first.stop == second.start for first, second in pairwise(own))
    assert all(0 <= shard.server < servers for shard in shards)


@pytest.mark.parametrize("servers", [2, 3, 4, 8])
def test_servers_hold_the_same_bytes_within_four_percent(servers: int) -> None:
    """One layer with nine tenths of the model, as an embedding or a head may be."""
    sizes = {"head.weight": 9_000_000, **{f"layers.{i}.weight": 100_000 for i in range(10)}}
    found = loads(sizes, servers)
    assert sum(found) == sum(sizes.values())
    assert max(found) <= 1.04 * min(found)


@pytest.mark.parametrize("seed", seeds(4))
def test_the_fullest_server_is_at_most_a_piece_above_the_emptiest(seed: int) -> None:
    draws = random.Random(seed)
    sizes = {f"p{index}": draws.randrange(1, 200_000) for index in range(40)}
    found = loads(sizes, 4)
    piece = max(LEAST_ELEMENTS, sum(sizes.values()) // 4 // PIECES)
    assert max(found) - min(found) <= piece


def test_blocks_know_what_each_server_holds_of_them() -> None:
    sizes = {"a.weight": 50_000, "a.bias": 10, "b.weight": 50_000}
    held = elements_of(shards_of(sizes, 2), {"a.weight": 0, "a.bias": 0, "b.weight": 3}, 2)
    assert {block: sum(row) for block, row in held.items()} == {0: 50_010, 3: 50_000}
