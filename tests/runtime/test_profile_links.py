"""Transfers and optimizer steps are measured on real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from processes import run_processes
from torch.distributed.distributed_c10d import _world

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.collectives import group_of
from autoparallel.cost_model.profile.case import OpCase, TensorCase, canonical
from autoparallel.cost_model.profile.measure import Budget
from autoparallel.runtime.profile.links import (
    COLLECTIVES,
    OVERLAPPED,
    STATES,
    Links,
    Meshes,
    measure_links,
    neighbours,
    partition_of,
    spread_partition,
)
from autoparallel.runtime.profile.ops import measure_ops, measure_updates

CPU = torch.device("cpu")
SIZES = (1 << 12, 1 << 20)


def links_of_all_kinds() -> list[tuple[str, list[tuple[int, float, int]]]]:
    found = []
    meshes, before = Meshes(CPU), len(_world.pg_map)
    for kind in (*COLLECTIVES, *STATES, *OVERLAPPED, "p2p"):
        for partition in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
            own = measure_links(
                Links(kind, partition, SIZES),
                device=CPU,
                case_seconds=0.005,
                until=lambda: False,
                meshes=meshes,
            )
            found.append((kind, [(t.num_bytes, t.seconds, t.repeats) for t in own]))
    made = len(_world.pg_map) - before
    meshes.close()
    assert made <= 2 * 2, "communicators are made once for each arrangement of ranks"
    assert len(_world.pg_map) == before, "and destroyed"
    return found


@pytest.mark.slow
def test_every_kind_is_measured_in_every_partition_and_all_ranks_know_the_same() -> None:
    answers = run_processes(4, links_of_all_kinds)
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == 2 * (len(COLLECTIVES) + len(STATES) + len(OVERLAPPED) + 1)
    for _, times in answers[0]:
        assert [num_bytes for num_bytes, _, _ in times] == list(SIZES)
        assert all(seconds > 0 and repeats >= 5 for _, seconds, repeats in times)


def links_of_a_part() -> int:
    links, meshes = Links("all_reduce", ((0, 1),), SIZES), Meshes(CPU)
    found = list(
        measure_links(links, device=CPU, case_seconds=0.005, until=lambda: False, meshes=meshes)
    )
    meshes.close()
    return len(found)


def test_ranks_outside_of_the_groups_wait_for_the_others() -> None:
    assert run_processes(3, links_of_a_part) == [2, 2, 2]


def stopped_after_one() -> int:
    asked = []

    def until() -> bool:
        asked.append(0)
        return len(asked) > 1

    links = Links("all_gather", ((0, 1),), (64, 128, 256))
    found = measure_links(links, device=CPU, case_seconds=0.001, until=until, meshes=Meshes(CPU))
    return len(list(found))


def test_rank_0_stops_all_when_the_time_is_up() -> None:
    assert run_processes(2, stopped_after_one) == [1, 1]


def ops_together() -> list[tuple[str, bool, str]]:
    def linear(rows: int, inner: int) -> OpCase:
        tensors = (
            TensorCase((rows, 8), "float32", True),
            TensorCase((4, inner), "float32", True),
        )
        return OpCase("aten.linear.default", tensors, canonical([{"tensor": 0}, {"tensor": 1}], {}))

    cases = [linear(16, 8), linear(16, 9), linear(32, 8)]
    budget = Budget(case_seconds=0.02, min_repeats=2)
    found = measure_ops(cases, device=CPU, budget=budget, until=lambda: False)
    return [(each.case.key(), each.measurement is not None, each.reason) for each in found]


def test_an_op_that_cannot_run_is_told_with_its_reason_and_the_others_are_measured() -> None:
    answers = run_processes(2, ops_together)
    assert answers[0] == answers[1]
    assert [measured for _, measured, _ in answers[0]] == [True, False, True]
    assert "aten.linear.default" in answers[0][1][2]


def updates() -> list[tuple[int, float]]:
    found = measure_updates(
        "adamw", (1 << 10, 1 << 20), device=CPU, case_seconds=0.01, until=lambda: False
    )
    return [(each.num_bytes, each.seconds) for each in found]


def test_the_step_of_a_parameter_is_measured_by_its_size() -> None:
    answers = run_processes(2, updates)
    assert answers[0] == answers[1]
    assert [num_bytes for num_bytes, _ in answers[0]] == [1 << 10, 1 << 20]
    assert all(seconds > 0 for _, seconds in answers[0])


@pytest.mark.parametrize(
    ("partition", "world", "expected"),
    [
        (((0, 1),), 2, ((0, 1),)),
        (((2, 3),), 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (((0, 2), (1, 3)), 8, ((0, 2), (1, 3), (4, 6), (5, 7))),
        (((0, 4),), 8, ((0, 4),)),
    ],
)
def test_a_stages_groups_are_repeated_over_all_ranks(
    partition: tuple[tuple[int, ...], ...], world: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert spread_partition(partition, world) == expected


@pytest.mark.parametrize(
    ("pair", "pairs"),
    [
        ((0, 1), ((0, 1), (2, 6), (3, 7), (4, 5))),
        ((0, 3), ((0, 3), (1, 2), (4, 7), (5, 6))),
        ((3, 4), ((0, 5), (1, 4), (2, 7), (3, 6))),
    ],
)
def test_of_wired_devices_those_are_measured_that_are_joined_alike(
    pair: tuple[int, int], pairs: tuple[tuple[int, int], ...]
) -> None:
    """One link, two links, and none."""
    cluster = parse_cluster("8xV100-16GB")
    group = group_of(cluster, pair)
    assert partition_of(cluster, "p2p", group, ()) == pairs
    own = partition_of(cluster, "all_reduce", group, (pair,))
    assert pair in own
    assert {group_of(cluster, each).intra for each in own} == {group.intra}


def test_of_hosts_with_a_switch_all_neighbours_are_measured() -> None:
    cluster = parse_cluster("2x4xH100")
    group = group_of(cluster, (0, 1))
    assert partition_of(cluster, "p2p", group, ()) == ((0, 1), (2, 3), (4, 5), (6, 7))
    between = group_of(cluster, (0, 4))
    assert partition_of(cluster, "p2p", between, ()) == ((0, 4),)
    two = replace(between, num_pairs=2)
    assert partition_of(cluster, "p2p", two, ()) == ((0, 4), (1, 5))
    every = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert partition_of(cluster, "all_gather", group, ((0, 1),)) == every


def test_neighbours_are_pairs_that_share_no_rank() -> None:
    assert neighbours((3, 3), between_hosts=False) == ((0, 1), (3, 4))
    assert neighbours((3, 3), between_hosts=True) == ((0, 3), (1, 4), (2, 5))
    assert neighbours((1,), between_hosts=False) == ()
