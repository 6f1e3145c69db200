"""What fits in memory takes no less than its bounds: of runs, of blocks, of pipelines."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from random_cases import random_case
from small_graphs import cluster, leaf, mlp, op, weight

from autoparallel.planner import rules
from autoparallel.planner.arranged.chunk_bound import _ranks, chunk_bound
from autoparallel.planner.arranged.chunks import plan
from autoparallel.planner.graph import Block, Blocks, Graph, Ref
from autoparallel.planner.intra_op.block_prices import HELD, block_prices
from autoparallel.planner.pricing.basis import DEFAULT
from autoparallel.planner.requests.options import microbatch_rows
from autoparallel.planner.requests.request import CHUNKED_SCHEDULES, Forced, Request
from autoparallel.planner.schedules.held import splits
from autoparallel.planner.schedules.rank_held import rank_held
from autoparallel.planner.search.bound import step_bound
from autoparallel.planner.search.costs import Costs
from autoparallel.planner.search.job import Job
from autoparallel.planner.search.memory_bounds import BlockCounts, Priced, mixes, rounded
from autoparallel.planner.search.search import ranked
from autoparallel.planner.search.space import uniform_tiling

SAME = 1 + 1e-9
SLOW = cluster(4, bytes_per_second=1e6, flops=1e6)


def job_of(case: object) -> Job:
    return Job.of(
        case.graph, case.blocks, case.cluster, case.request, rules=rules, basis=DEFAULT
    )  # fmt: skip


def places(job: Job, costs: Costs) -> None:
    """Makes the places of stages of one size."""
    for number in range(1, job.cluster.num_devices + 1):
        uniform_tiling(job.cluster, number, costs.place)


@pytest.mark.parametrize("seed", range(8))
def test_no_stage_that_fits_takes_less_than_its_blocks(seed: int) -> None:
    """Of every class on every mesh the exact best is known; memory is made tight for it."""
    rng = random.Random(seed)
    case = random_case(seed, mixed=False)
    job = job_of(case)
    rows = rng.choice(microbatch_rows(job.structure.graph, case.request, case.cluster))
    costs = job.costs(rows)
    places(job, costs)
    checked = 0
    for place in costs.places:
        for mesh in place.meshes:
            free = mesh.solver.best(costs.runs.run(0), costs.runs.count, 2)
            if free is not None and rng.random() < 0.8:
                most = sum(free.cost.memory_bytes.values()) * rng.uniform(0.4, 2.5)
                mesh.solver.limits = replace(mesh.solver.limits, memory_bytes=most)
            mesh.solver.answers.clear()
            mesh.__dict__.pop("excess_bytes", None)
            priced = Priced(costs.runs)
            for held in (1, 2, 3, 5):
                least = priced.least(mesh, costs.runs.count, held)
                for number in rng.sample(range(len(least)), min(4, len(least))):
                    found = mesh.solver.best(costs.runs.run(number), costs.runs.count, held)
                    if found is not None:
                        own = found.objective - sum(found.cost.receive_seconds)
                        assert least[number] <= own * SAME
                        checked += 1
    assert checked


def test_where_memory_binds_the_bound_is_above_that_without() -> None:
    """With no more than the best holds with everything recomputed."""
    graph, blocks = mlp(16, rows=256)
    asked = Request(256, forced=Forced(pp=4, schedule="1f1b", num_microbatches=8))
    every = [replace(asked, forced=replace(asked.forced, recompute=m)) for m in ("full", "none")]
    least, most = (ranked(graph, blocks, SLOW, own)[1][0].peak_bytes for own in every)
    assert least < most
    tight = replace(asked, memory_limit_bytes=int(least))
    job, found = ranked(graph, blocks, SLOW, tight)
    best = found[0].step_seconds
    bound = step_bound(job, (32,), (4,), best, 0.0)
    roomy = Job.of(graph, blocks, SLOW, asked, rules=rules, basis=DEFAULT)
    assert step_bound(roomy, (32,), (4,), best, 0.0) < bound <= best * SAME


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("schedule", CHUNKED_SCHEDULES)
def test_no_plan_of_chunks_that_fits_is_below_its_bound(schedule: str, share: float) -> None:
    """Between what it holds with everything recomputed and with nothing."""
    graph, blocks = mlp(8, rows=256)
    forced = Forced(pp=4, schedule=schedule, chunks=2, num_microbatches=8)
    peaks = [
        plan(graph, blocks, SLOW, Request(256, forced=replace(forced, recompute=mode)))
        for mode in ("full", "none")
    ]
    least, most = (each.prediction.peak_memory_bytes for each in peaks)
    limit = int(least + share * (most - least))
    own = plan(graph, blocks, SLOW, Request(256, forced=forced, memory_limit_bytes=limit))
    asked = Request(256, forced=Forced(pp=4, num_microbatches=8), memory_limit_bytes=limit)
    job = Job.of(graph, blocks, SLOW, asked, rules=rules, basis=DEFAULT)
    bound = chunk_bound(job, (4,), 2, (schedule,))
    assert bound <= own.prediction.step_seconds * SAME
    free = replace(asked, memory_limit_bytes=2 * most)
    roomy = Job.of(graph, blocks, SLOW, free, rules=rules, basis=DEFAULT)
    without = chunk_bound(roomy, (4,), 2, (schedule,))
    assert without <= bound * SAME
    if share == 0 and not splits(schedule):  # else weights' gradients hold most of the rest
        assert without * 1.01 < bound


@pytest.mark.parametrize("seed", range(8))
def test_the_least_of_a_block_between_known_prices_is_bounded(seed: int) -> None:
    """By interpolation in the price of states, of as many micro-batches in flight as none is
    solved for."""
    rng = random.Random(seed)
    case = random_case(seed, mixed=False)
    job = job_of(case)
    costs = job.costs(max(microbatch_rows(case.graph, case.request, case.cluster)))
    places(job, costs)
    mesh = rng.choice([mesh for place in costs.places for mesh in place.meshes])
    solver, blocks = mesh.solver, BlockCounts(costs.runs)
    prices = block_prices(
        solver.model, solver.zeros, solver.modes, costs.runs.count, blocks.neighbours
    )
    held = np.array([1.0, 3.0, 6.0, 17.0, 40.0, 100.0])
    for own in prices.alone.values():
        for least in own.values():
            found = prices.at(least, held)
            assert (np.diff(found, axis=1) >= -1e-12).all()
            known = least[1:].reshape(len(HELD), -1)
            assert found[0, 1:] == pytest.approx(known[0])
            assert found[2, 1:] == pytest.approx(known[1])
            assert found[4:, 1:] == pytest.approx(np.stack([known[2]] * 2))


def test_every_mix_of_ways_to_recompute_is_there_once() -> None:
    every, again = mixes(4, ("none", "selective", "full"))
    assert len({tuple(row) for row in every.tolist()}) == len(every) == 15
    assert (every.sum(axis=1) == 4).all()
    assert ((every[:, 2] > 0) == (again > 0)).all()


def test_no_more_are_held_than_are_in_flight() -> None:
    for held in range(1, 600):
        assert rounded(held) <= held < rounded(held) * 1.125 + 1


def test_a_forced_schedule_that_cannot_be_has_no_bound() -> None:
    """Of three stages per rank there is no V; of two there is."""
    graph, blocks = mlp(12, rows=8)
    job = Job.of(graph, blocks, SLOW, Request(8), rules=rules, basis=DEFAULT)
    (ranks,) = (_ranks(job, rows, 4) for rows in (1,))
    assert ranks is not None
    assert ranks.step_seconds("zbv", 3) == float("inf") > ranks.step_seconds("zbv", 2) > 0


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("schedule", CHUNKED_SCHEDULES)
def test_wherever_blocks_are_their_least_is_no_more_than_at_their_places(
    schedule: str, number: int
) -> None:
    """And nearly as much where they are alike: without memory at most the ends differ."""
    graph, blocks = mlp(8, rows=256)
    job = Job.of(graph, blocks, SLOW, Request(256), rules=rules, basis=DEFAULT)
    ranks = _ranks(job, 32, number)
    held = rank_held(schedule, number, 2, 8)
    assert ranks is not None
    assert held is not None
    rng = random.Random(number)
    for waits in ([0.0] * len(held), [float(rng.randrange(4)) for _ in held]):
        exact = ranks.of_places(held, waits, ranks.computed)
        apart = ranks.of_kinds(held, waits, ranks.computed)
        assert (apart <= exact * SAME).all()
        assert apart[0] >= (0.95 if not any(waits) else 0.7) * exact[0]


def test_blocks_that_compute_nothing_are_bounded_too() -> None:
    """As many of a view alone as of any other kind."""
    nodes = [
        leaf("x", 8, 4, 4),
        op("flat", "view.default", (Ref("x"), [8, 16]), 8, 16),
        weight("w", 16, 16),
        op("linear", "linear.default", (Ref("flat"), Ref("w")), 8, 16),
        op("loss", "mean.default", (Ref("linear"),)),
    ]
    blocks = Blocks(
        (
            Block("flat", "flat", ("flat",), ()),
            Block("linear", "linear", ("linear",), ("w",)),
            Block("out", "out", ("loss",), ()),
            )
    )  # fmt: skip
    graph = Graph(tuple(nodes), Ref("loss"), 8)
    job = Job.of(graph, blocks, SLOW, Request(8), rules=rules, basis=DEFAULT)
    ranks = _ranks(job, 8, 1)
    assert ranks is not None
    assert ranks.grid[0] == 0
    assert np.isfinite(ranks.work_seconds())
