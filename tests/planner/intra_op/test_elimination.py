"""Elimination finds what trying everything finds, alone and with steps of other problems."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from random_cases import random_case
from random_suites import seeds

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.intra_op.elimination import (
    Eliminated,
    Factor,
    Floats,
    Memo,
    eliminate,
    find_order,
)
from autoparallel.planner.intra_op.kind_tables import KindTables, Rates
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.stage.terms import PlacedTerm, Term

SIZES = (2, 3, 2, 4, 2)
SCOPES = ((0, 1), (1, 2), (3, 1), (2, 4), (0,), (3,), (4, 2, 0))
KEPT = (2,)


def factors(generator: np.random.Generator, batch: tuple[int, int]) -> list[Factor]:
    """A factor per scope; each differs along the axes of the batch or not."""
    found = []
    for scope in SCOPES:
        own = tuple(size if generator.random() < 0.5 else 1 for size in batch)
        shape = (*own, *(SIZES[variable] for variable in scope))
        found.append(Factor(scope, generator.random(shape)))
    return found


def value(own: list[Factor], at: tuple[int, int], values: tuple[int, ...]) -> float:
    total = 0.0
    for factor in own:
        row, column = (min(n, size - 1) for n, size in zip(at, factor.table.shape, strict=False))
        total += float(factor.table[(row, column, *(values[v] for v in factor.scope))])
    return total


def check(found: Eliminated, own: list[Factor], batch: tuple[int, int]) -> None:
    """Of each problem, in one row, the least for each value of what is kept, and a way to it."""
    for problem, (row, column) in enumerate(product(*map(range, batch))):
        for kept in range(SIZES[KEPT[0]]):
            tried = [
                value(own, (row, column), values)
                for values in product(*map(range, SIZES))
                if values[KEPT[0]] == kept
            ]
            assert found.table[0, problem, kept] == pytest.approx(min(tried))
            zero, at = np.array([0]), np.array([problem])
            chosen = found.complete(zero, at, np.array([[kept]]))[0].tolist()
            assert chosen[KEPT[0]] == kept
            assert value(own, (row, column), tuple(chosen)) == pytest.approx(min(tried))


@pytest.mark.parametrize("seed", seeds(6))
def test_problems_of_a_grid_and_with_steps_in_common_are_solved(seed: int) -> None:
    generator, memo = np.random.default_rng(seed), Memo()
    order = find_order(SIZES, SCOPES, KEPT)
    common = [memo.note(each) for each in factors(generator, (1, 1))[:-1]]
    known = 0
    for batch in ((2, 3), (1, 1), (3, 1), (1, 4)):
        own = [*common, factors(generator, batch)[-1]]
        found = eliminate(SIZES, own, order, KEPT, memo).in_a_row(*batch)
        check(found, own, batch)
        assert not known or len(memo.steps) == known  # the same steps, none made again
        known = len(memo.steps)
    assert known


def test_several_uses_cost_each_distinct_target_once() -> None:
    generator = np.random.default_rng(0)
    matrix = generator.random((3, 4))
    classes = [generator.integers(0, 4, 5) for _ in range(3)]
    source = np.array([2, 0, 1])
    # the first and the last use are of one variable
    term = Term(None, (), matrix[..., None], np.eye(1))
    placed = PlacedTerm(term, (7, source), ((3, classes[0]), (5, classes[1]), (3, classes[2])))
    assert placed.scope == (7, 3, 5)
    table = placed.table(np.ones(1))
    for at, first, second in np.ndindex(table.shape):
        wanted = {classes[0][first], classes[1][second], classes[2][first]}
        assert table[at, first, second] == pytest.approx(
            sum(matrix[source[at], each] for each in wanted)
        )


def alone(table: Floats, problem: int) -> Floats:
    found: Floats = table[0, min(problem, table.shape[1] - 1)]
    return found


@pytest.mark.parametrize("seed", seeds(4))
def test_a_batch_of_rates_is_solved_as_each_of_them_alone(seed: int) -> None:
    """ZeRO stages and prices of a byte, as a grid and not, recomputed or not."""
    case = random_case(seed)
    job = SearchContext.of(
        case.graph, case.blocks, case.cluster, case.request, rules=rules, basis=DEFAULT
    )
    rows, size = case.request.global_batch, case.cluster.num_devices
    grid = ((0, 0, 3, 3), (1e-9, 1e-8, 1e-9, 1e-8))
    ragged = ((0, 1, 3, 3), (1e-9, 1e-8, 1e-10, 1e-8))
    for solver in job.solvers.on_submesh(rows, 0, size):
        for kind in solver.model.structure.blocks.kinds:
            batched = KindTables(solver.model, kind)
            for (zeros, prices), mode in product((grid, ragged), ("none", "selective", "full")):
                saved = tuple(2 * each for each in prices)
                found = batched.solve(Rates(4, zeros, mode, prices, saved))
                for problem, zero in enumerate(zeros):
                    own = (prices[problem],), (saved[problem],)
                    single = KindTables(solver.model, kind).solve(Rates(4, (zero,), mode, *own))
                    assert alone(found.table, problem) == pytest.approx(
                        alone(single.table, 0), rel=1e-12
                    )
