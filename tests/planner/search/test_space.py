"""Where stages may lie: tilings of clusters, small and large."""

from __future__ import annotations

import pytest
from small_graphs import cluster

from autoparallel.planner.inter_op.submesh import submesh_sizes
from autoparallel.planner.inter_op.sweep import Tiling
from autoparallel.planner.search.space import mixed_tiling, tilings, uniform_tiling


def device_of(first: int, size: int) -> int:
    """Return a place for each submesh."""
    return first * 10_000 + size


def firsts(tiling: Tiling) -> list[int]:
    return sorted({move.first_device for move in tiling.moves})


@pytest.mark.parametrize(
    ("num_hosts", "num_devices", "step"),
    [(2, 4, 1), (16, 4, 1), (17, 4, 4), (64, 2, 2), (65, 1, 5), (96, 2, 4), (128, 8, 16)],
)
def test_stages_of_a_mixed_tiling_begin_at_sixty_four_places_at_most(
    num_hosts: int, num_devices: int, step: int
) -> None:
    """At each device of a small cluster; then at hosts, and at as many hosts at once as divide
    them: 65 by 5, 96 by 2, 128 by 2."""
    machines = cluster(num_devices, num_hosts=num_hosts)
    tiling = mixed_tiling(machines, 4, device_of)
    assert firsts(tiling) == list(range(0, machines.num_devices, step))
    assert tiling.end == machines.num_devices // step <= 64
    assert tiling.most == 4
    for move in tiling.moves:
        assert move.num_devices in submesh_sizes(machines, move.first_device)
        assert (move.start, move.stop) == (
            move.first_device // step,
            (move.first_device + move.num_devices) // step,
        )


def test_stages_of_one_size_lie_side_by_side() -> None:
    tiling = uniform_tiling(cluster(4, num_hosts=2), 4, device_of)
    assert tiling is not None
    assert [(move.first_device, move.num_devices) for move in tiling.moves] == [
        (0, 2),
        (2, 2),
        (4, 2),
        (6, 2),
    ]
    assert uniform_tiling(cluster(4, num_hosts=2), 3, device_of) is None
    assert uniform_tiling(cluster(6, num_hosts=2), 3, device_of) is None


def test_a_number_of_stages_has_a_tiling_of_one_size_and_the_mixed_one() -> None:
    """One stage has nothing to mix; 3 stages of one size do not fit 4 devices."""
    found = list(tilings(cluster(4), (1, 2, 3), device_of, mixed=True))
    assert [(tiling.fixed, number) for tiling, number in found] == [
        (True, 1),
        (True, 2),
        (False, 2),
        (False, 3),
    ]
    assert len(list(tilings(cluster(4), (1, 2, 3), device_of, mixed=False))) == 2
