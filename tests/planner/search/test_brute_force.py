"""The oracle itself: it prices what it tries as ``evaluate`` does, and leaves nothing out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from brute_force import IN_FLIGHT, Best, BruteForce, Way, bound, front, held
from brute_force_modes import MODES
from brute_force_stage import Stage
from random_cases import random_case
from random_suites import seeds
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.cluster import STATE_COLLECTIVES
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.requests.request import Request


@pytest.mark.parametrize("seed", seeds(12))
def test_random_plans_cost_what_evaluate_says(seed: int) -> None:
    """Any cut, mesh, layouts, ZeRO stages and recomputed blocks: seconds and bytes."""
    rng = random.Random(seed)
    case = random_case(seed)
    factor = (0.0, 1.0, 1.25, 4.0)[seed % 4]
    device = replace(
        case.cluster.hosts[0].device,
        issue_seconds=rng.choice((0.0, 1e-6)),
        message_seconds=(0.0, 2e-6)[seed % 2],
        slowdown=dict.fromkeys(STATE_COLLECTIVES, factor) if factor else {},
    )
    hosts = (replace(case.cluster.hosts[0], device=device), *case.cluster.hosts[1:])
    on = replace(case.cluster, hosts=hosts)
    force = BruteForce(case.graph, case.blocks, on, case.request, free=rng.random() < 0.5)
    rows, pipeline = rng.choice(force.rows()), rng.choice(list(force.pipelines()))
    schedule = rng.choice(force.schedules)
    count = case.request.global_batch // rows
    ways, num_bytes, spaces = [], [], []
    halved = schedule not in IN_FLIGHT and len(pipeline) > 1
    for index, stage in enumerate(pipeline):
        way, own = _random_way(force, rows, stage, rng)
        ways.append(way)
        spaces.append(own)
        kept = held(schedule, len(pipeline), count, index)
        if halved:
            halves = own.seconds(way.zero, way.modes, halved=True)[way.which]
            ways[-1] = replace(way, figures=tuple(halves.tolist()))
        num_bytes.append(own.num_bytes(way.zero, way.modes, kept)[way.which])
    beside = [
        own.of_step(way.zero, way.modes, way.which, halved=halved)
        for way, own in zip(ways, spaces, strict=True)
    ]
    seconds = force.simulate(schedule, count, ways, beside)
    assert seconds >= force.simulate(schedule, count, ways) * (1 - 1e-9)
    found = Best(seconds, rows, count, schedule, tuple(ways))
    priced = evaluate(case.graph, case.blocks, found.plan(on, case.request), on)
    assert priced.step_seconds == pytest.approx(seconds, rel=1e-9)
    assert priced.peak_memory_bytes == pytest.approx(max(num_bytes), abs=1.0)
    assert seconds >= bound(ways, count) * (1 - 1e-12)


def _random_way(
    force: BruteForce, rows: int, stage: tuple[int, int, int, int], rng: random.Random
) -> tuple[Way, Stage]:
    start, stop, first, size = stage
    ranks = tuple(range(first, first + size))
    allowed = [mesh for mesh in force.meshes(ranks) if force.splits_rows(rows, mesh)]
    space = force.stage(rows, rng.choice(allowed), ranks, (start, stop))
    zero, modes = rng.choice(space.zeros), tuple(rng.choice(MODES) for _ in space.blocks)
    which = rng.randrange(space.num_assignments)
    figures = tuple(space.seconds(zero, modes)[which].tolist())
    gather = float(space.first_gather(zero, modes)[which])
    return Way(figures, space, ranks, zero, modes, which, gather), space


@pytest.mark.parametrize("seed", seeds(12))
def test_leaving_out_worse_holdings_of_parameters_loses_nothing(seed: int) -> None:
    """The fronts of the whole product and of the reduced one are the same points."""
    case = random_case(seed, mixed=False)
    mesh = Mesh(("tp",), (2,))
    on = cluster(2, bytes_per_second=1e7, flops=1e9)
    prices = Prices(mesh, on, (0, 1), "fp32", "adamw", rules)
    span = (1, min(3, len(case.blocks.blocks)))
    fronts = []
    for reduce in (True, False):
        space = Stage(case.graph, case.blocks, prices, span, reduce=reduce)
        figures = [
            np.column_stack([space.seconds(0, modes), space.num_bytes(0, modes, ((2, 0),))])
            for modes in space.recomputations
        ]
        points = np.concatenate(figures)
        fronts.append({tuple(f"{value:.9e}" for value in points[row]) for row in front(points)})
    assert fronts[0] == fronts[1]


def test_the_front_keeps_exactly_what_nothing_betters() -> None:
    points = np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [2.0, 3.0], [1.0, 3.0], [3.0, 3.0]])
    assert sorted(front(points)) == [0, 1, 2]


def test_a_bound_and_a_simulation_agree_where_one_stage_is_all() -> None:
    """The gathers are part of the end."""
    way = next(_all_ways(BruteForce(*mlp(1), cluster(1), Request(1)), 1, (0, 3, 0, 1)))
    assert bound([replace(way, figures=(1.0, 2.0, 0.0, 0.0, 5.0), gather=1.0)], 3) == 14.0


def test_every_cut_and_tiling_is_there() -> None:
    """Three blocks on 2 ranks: whole, and cut after the first or the second block."""
    graph, blocks = mlp(1)
    force = BruteForce(graph, blocks, cluster(2), Request(4))
    assert sorted(force.pipelines()) == [
        ((0, 1, 0, 1), (1, 3, 1, 1)),
        ((0, 2, 0, 1), (2, 3, 1, 1)),
        ((0, 3, 0, 2),),
    ]
    assert force.rows() == [1, 2, 4]


def test_the_best_is_the_least_of_all_pipelines_one_by_one() -> None:
    """Neither the bound nor the fronts hide a faster plan: every way of every stage simulated."""
    for seed in range(400):
        case = random_case(seed, mixed=False)
        if case.cluster.num_devices == 2 and len(case.blocks.blocks) <= 3:
            break
    request = replace(case.request, global_batch=2)
    force = BruteForce(case.graph, case.blocks, case.cluster, request)
    least = min(
        force.simulate(schedule, 2 // rows, ways)
        for rows, stages, schedule in product(force.rows(), force.pipelines(), force.schedules)
        for ways in product(*(_all_ways(force, rows, stage) for stage in stages))
    )
    found = force.best()
    assert found is not None
    assert found.step_seconds == pytest.approx(least, rel=1e-12)


def _all_ways(force: BruteForce, rows: int, stage: tuple[int, int, int, int]) -> Iterator[Way]:
    start, stop, first, size = stage
    ranks = tuple(range(first, first + size))
    for mesh in force.meshes(ranks):
        if force.splits_rows(rows, mesh):
            space = force.stage(rows, mesh, ranks, (start, stop))
            for zero, modes in product(space.zeros, space.recomputations):
                gathers = space.first_gather(zero, modes).tolist()
                for which, row in enumerate(space.seconds(zero, modes).tolist()):
                    yield Way(tuple(row), space, ranks, zero, modes, which, gathers[which])
