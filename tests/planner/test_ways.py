"""Ways of stages: each costs what the stage solver says, and none that may win is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_cases import random_case

from autoparallel.planner import rules
from autoparallel.planner.inter_op.ways import MeshWays, Points
from autoparallel.planner.intra_op.intra_op import IntraOp
from autoparallel.planner.pricing.basis import DEFAULT
from autoparallel.planner.pricing.structure import Run
from autoparallel.planner.search.job import Job

COUNT = 4


def stages(seed: int, issue_seconds: float = 0.0) -> list[tuple[IntraOp, Run]]:
    """The meshes of the first and of the last devices, with the first and the last runs."""
    case = random_case(seed)
    hosts = [
        replace(host, device=replace(host.device, issue_seconds=issue_seconds))
        for host in case.cluster.hosts
    ]
    on = replace(case.cluster, hosts=tuple(hosts))
    job = Job.of(case.graph, case.blocks, on, case.request, rules=rules, basis=DEFAULT)
    rows, size, number = (
        case.request.global_batch,
        case.cluster.num_devices,
        len(case.blocks.blocks),
    )
    structure = job.at(rows)
    found = [(solver, structure.run(0, number)) for solver in job.solvers_on(rows, 0, size)]
    if size > 1:
        for solver in job.solvers_on(rows, size - 1, 1):
            found.append((solver, structure.run(number // 2, number)))
    return found


def points(solver: IntraOp, run: Run, limit: float, held: int = 2) -> list[Points]:
    return MeshWays(solver).points(run, ((held, 0),), limit)


@pytest.mark.parametrize("seed", range(10))
def test_a_way_costs_what_the_stage_solver_prices_it_at(seed: int) -> None:
    for solver, run in stages(seed):
        free = points(solver, run, float("inf"))
        limit = max(own.answer(0, COUNT, ((2, 0),)).cost.total_bytes for own in free) * 0.7
        for own in [*free, *points(solver, run, limit)]:
            for way in range(0, len(own.seconds), 1 + len(own.seconds) // 5):
                cost = own.answer(way, COUNT, ((2, 0),)).cost
                expected = (
                    cost.forward_seconds, cost.backward_seconds, *cost.receive_seconds,
                    cost.step_seconds,
                )  # fmt: skip
                assert own.seconds[way] == pytest.approx(np.array(expected), rel=1e-9)


@pytest.mark.parametrize("issue_seconds", [0.0, 1e-6, 1e-5])
@pytest.mark.parametrize("seed", range(10))
def test_a_way_in_halves_costs_what_the_stage_solver_prices_it_at(
    seed: int, issue_seconds: float
) -> None:
    """Of both halves, where either the device or the host may bind."""
    held = ((2, 0), (1, 2))
    for solver, run in stages(seed, issue_seconds):
        for own in MeshWays(solver).points(run, held, float("inf")):
            for way in range(0, len(own.seconds), 1 + len(own.seconds) // 5):
                cost = own.answer(way, COUNT, held).cost
                assert cost.late_seconds is not None
                expected = (
                    cost.forward_seconds, cost.backward_seconds - cost.late_seconds,
                    *cost.receive_seconds, cost.step_seconds, cost.late_seconds,
                )  # fmt: skip
                assert own.seconds[way] == pytest.approx(np.array(expected), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("seed", range(10))
def test_with_a_limit_every_way_fits_and_a_way_on_the_limit_does(seed: int) -> None:
    for solver, run in stages(seed):
        free = points(solver, run, float("inf"))
        least = min(
            own.answer(way, COUNT, ((2, 0),)).cost.total_bytes
            for own in free for way in range(len(own.seconds))
        )  # fmt: skip
        found = points(solver, run, least)
        held = [
            own.answer(way, COUNT, ((2, 0),)).cost.total_bytes
            for own in found for way in range(len(own.seconds))
        ]  # fmt: skip
        assert held
        assert max(held) <= least * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_with_a_bar_no_way_below_it_is_missing(seed: int) -> None:
    """Work alone: both passes of all micro-batches, and the end of the step."""

    def quick(found: list[Points], bar: float) -> dict[int, list[list[float]]]:
        """By ZeRO stage the ways that take no longer."""
        works = [(own, own.seconds @ (COUNT, COUNT, 0, 0, 1)) for own in found]
        kept = {own.zero: sorted(own.seconds[work <= bar].tolist()) for own, work in works}
        return {zero: ways for zero, ways in kept.items() if ways}

    for solver, run in stages(seed):
        held = ((2, 0),)
        free = MeshWays(solver).points(run, held, float("inf"))
        works = np.concatenate([own.seconds @ (COUNT, COUNT, 0, 0, 1) for own in free])
        for bar in (0.5 * works.min(), *np.quantile(works, (0.0, 0.3, 0.8))):
            found = MeshWays(solver).points(run, held, float("inf"), (COUNT, float(bar)))
            assert quick(found, float(bar)) == quick(free, float(bar))
        assert not MeshWays(solver).points(run, held, float("inf"), (COUNT, 0.0))
