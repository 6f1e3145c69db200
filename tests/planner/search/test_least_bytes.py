"""No way to run a stage needs fewer bytes than what is said of it without looking at ways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from one_stage import plan
from random_cases import random_case
from random_suites import seeds

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.find_plan import run_proposers
from autoparallel.planner.intra_op.intra_op import IntraOp
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.least_bytes import LeastBytes
from autoparallel.planner.stage.stage_problem import context_bytes
from autoparallel.planner.stage.structure import Run


def job_of(seed: int) -> SearchContext:
    case = random_case(seed)
    return SearchContext.of(
        case.graph, case.blocks, case.cluster, case.request, rules=rules, basis=DEFAULT
    )


@pytest.mark.parametrize("seed", seeds(1))
def test_every_solution_of_every_run_needs_as_much(seed: int) -> None:
    job = job_of(seed)
    rows, size = job.request.global_batch, job.cluster.num_devices
    least = LeastBytes(job.tables.at(rows), job.classes)
    for devices in range(1, size + 1):
        for solver in job.solvers.on_submesh(rows, 0, devices):
            bounds = np.maximum(
                least.on(devices, solver.model.prices), least.on_mesh(solver.model, solver.zeros)
            ) + context_bytes(solver.model)
            for number, (start, stop) in enumerate(job.classes.firsts):
                run = job.tables.at(rows).run(start, stop)
                found = solver.best(run, 2, 1)
                while found is not None:  # the next one that holds less, until nothing fits
                    held = found.cost.total_bytes
                    assert held >= bounds[number]
                    limits = replace(solver.limits, memory_bytes=held - 1)
                    found = IntraOp(solver.model, limits, solver.budget).best(run, 2, 1)


@pytest.mark.parametrize("seed", seeds(12))
def test_on_one_device_all_states_are_counted_and_something_of_the_activations(seed: int) -> None:
    """Nothing is cut there, and every block's parameters are held whole."""
    job = job_of(seed)
    rows, number = job.request.global_batch, len(job.structure.blocks.blocks)
    (solver, *_) = job.solvers.on_submesh(rows, 0, 1)
    bound = LeastBytes(job.tables.at(rows), job.classes).on(1, solver.model.prices)
    found = solver.best(job.tables.at(rows).run(0, number), 1, 1)
    assert found is not None
    held = found.cost.memory_bytes
    shared = sum(
        node.spec.numel * 16
        for node in job.structure.graph.nodes
        if node.kind == "parameter" and job.structure.is_shared(node.name)
    )
    states = held["parameters"] + held["gradients"] + held["optimizer"] - shared
    least = bound[job.classes.firsts.index((0, number))]
    assert states < least <= found.cost.total_bytes - context_bytes(solver.model)


def least_held(solver: IntraOp, run: Run) -> float:
    """What the thriftiest way holds that is found when each is forbidden to hold what the one
    before did."""
    held, found = float("inf"), solver.best(run, 2, 1)
    while found is not None:
        held = found.cost.total_bytes
        limits = replace(solver.limits, memory_bytes=held - 1)
        found = IntraOp(solver.model, limits, solver.budget).best(run, 2, 1)
    return held


@pytest.mark.parametrize("seed", seeds(1))
def test_all_devices_together_hold_what_the_whole_model_needs_however_it_is_cut(seed: int) -> None:
    """In one stage on all devices, and in two on every part of them."""
    job = job_of(seed)
    rows, size = job.request.global_batch, job.cluster.num_devices
    structure, number = job.tables.at(rows), len(job.structure.blocks.blocks)

    def held_by(start: int, stop: int, first: int, devices: int) -> float:
        run = structure.run(start, stop)
        solvers = job.solvers.on_submesh(rows, first, devices)
        return min(devices * least_held(each, run) for each in solvers)

    (solver, *_) = job.solvers.on_submesh(rows, 0, 1)
    total = LeastBytes(structure, job.classes).total(solver.model.prices)
    states = sum(node.spec.numel * 16 for node in structure.graph.parameters)
    assert states <= total <= held_by(0, number, 0, size)
    for cut in range(1, number):
        for devices in range(1, size):
            first = held_by(0, cut, 0, devices)
            assert total <= first + held_by(cut, number, devices, size - devices)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_model_larger_than_all_devices_is_refused_before_a_table_is_made(seed: int) -> None:
    case = random_case(seed)
    states = sum(node.spec.numel * 16 for node in case.graph.parameters)
    limit = states // case.cluster.num_devices - 1
    job = SearchContext.of(
        case.graph,
        case.blocks,
        case.cluster,
        replace(case.request, memory_limit_bytes=limit),
        rules=rules,
        basis=DEFAULT,
    )
    with pytest.raises(InfeasibleError, match="AP301"):
        run_proposers(job)
    assert not job.known.solvers


@pytest.mark.parametrize("seed", seeds(6))
def test_where_nothing_can_fit_no_stage_is_solved_and_the_error_is_the_same(seed: int) -> None:
    case = random_case(seed)
    with pytest.raises(InfeasibleError, match="AP301"):
        plan(case.graph, case.blocks, case.cluster, replace(case.request, memory_limit_bytes=10))
