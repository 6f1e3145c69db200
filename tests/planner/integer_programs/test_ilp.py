"""The integer program: against optima derived by hand and against every assignment."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product
from math import prod

import numpy as np
import pytest
from random_suites import seeds
from small_graphs import cluster, mlp, random_graph
from solver_programs import random_problem, stage_problem

from autoparallel.planner.graph.layout import Mesh, NodeLayout, format_layout
from autoparallel.planner.integer_programs.ilp import (
    Memory,
    Problem,
    cost,
    memory_bytes,
    optimize,
)
from autoparallel.planner.stage.stage_problem import StageOptions, StageProblem
from autoparallel.planner.stage.terms import merge_classes


def chosen(found: StageProblem, choices: tuple[int, ...]) -> dict[str, NodeLayout]:
    layouts: dict[str, NodeLayout] = {}
    for decision, choice in zip(found.decisions, choices, strict=True):
        layouts.update(decision.choices[choice].layouts)
    return layouts


def brute_force(problem: Problem) -> float:
    return min(
        cost(problem, choices)
        for choices in product(*(range(len(own)) for own in problem.costs))
        if problem.memory is None
        or memory_bytes(problem.memory, choices) <= problem.memory.limit + 1e-6
    )


def test_megatron_is_found_for_an_mlp() -> None:
    """Column then row: derived by hand.

    One layer x + down(gelu(up(x))) of b = 64 rows, width w = 256, inner 4w, on two devices,
    with compute that dwarfs everything. Running up split on its columns and down on its rows
    halves both matmuls. Between them lies the 4w-wide value, split along its width, which gelu
    takes as it is: no communication. What is left is one all-reduce of the b·w output forward
    (P→I, Megatron's g) and one of the input's gradient backward (I→R, f), or the same bytes as
    reduce-scatter and all-gather. Splitting the rows instead moves no activation, but sums the
    gradients of 8w² weights: 16 times the bytes. Splitting columns both times gathers 4w-wide
    values. So the weights are split S(0) for up and S(1) for down.
    """
    graph, blocks = mlp(1, rows=64, width=256, inner=1024)
    found = stage_problem(graph, blocks, Mesh(("tp",), (2,)), cluster(flops=1e11))
    answer = optimize(found.linearized(StageOptions()))
    layouts = chosen(found, answer.choices)
    text = {
        name: [format_layout(each) for each in layout.outputs] for name, layout in layouts.items()
    }
    assert text["layers.0.up.weight"] == ["S(0)"]
    assert text["layers.0.down.weight"] == ["S(1)"]
    assert text["layers.0.up"] == ["S(1)"]
    assert text["gelu.0"] == ["S(1)"]
    assert text["layers.0.down"] == ["P"]
    assert answer.status == "optimal"
    assert answer.gap <= 1e-9


def test_rows_are_split_where_the_batch_is_large() -> None:
    """With 16384 rows of width 16 the activations outweigh the weights: data parallel.

    The weight may be held in parts, which gathering it and scattering its gradient costs no more
    than summing that.
    """
    graph, blocks = mlp(1, rows=16384, width=16, inner=64)
    found = stage_problem(graph, blocks, Mesh(("tp",), (2,)), cluster(flops=1e11))
    layouts = chosen(found, optimize(found.linearized(StageOptions())).choices)
    assert format_layout(layouts["layers.0.up"].outputs[0]) == "S(0)"
    assert format_layout(layouts["layers.0.up"].inputs[1]) == "R"


@pytest.mark.parametrize("seed", seeds(12))
def test_it_equals_every_assignment_of_a_random_graph(seed: int) -> None:
    rng = random.Random(1000 + seed)
    is_plane = seed % 3 == 2
    mesh = Mesh(("dp", "tp"), (2, 2)) if is_plane else Mesh((rng.choice(("dp", "tp")),), (2,))
    on = cluster(4, bytes_per_second=rng.choice((1e6, 1e8, 1e10)), flops=rng.choice((1e7, 1e9)))
    num_ops = 1 if is_plane else rng.choice((2, 3, 4))
    while True:
        graph, blocks = random_graph(seed, num_ops, num_blocks=rng.choice((1, 2)))
        found = stage_problem(graph, blocks, mesh, on, merge=rng.random() < 0.5)
        setting = StageOptions(
            rng.choice((1, 4)), rng.choice((0, 1, 3)) if "dp" in mesh.axes else 0
        )
        problem = found.linearized(setting)
        if prod(len(own) for own in problem.costs) <= 20_000 or num_ops == 1:
            break
        num_ops -= 1
    answer = optimize(problem)
    assert answer.objective == pytest.approx(brute_force(problem), rel=1e-9)
    assert answer.bound <= answer.objective * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(12))
def test_it_equals_every_assignment_of_random_tables(seed: int) -> None:
    """Dense random costs, conversions shared by up to three consumers, memory that binds."""
    problem = random_problem(random.Random(seed), with_memory=seed % 2 == 1)
    assert optimize(problem).objective == pytest.approx(brute_force(problem), rel=1e-7, abs=1e-9)


def test_it_tells_by_how_much_nothing_fits() -> None:
    costs = (np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    linear = (np.array([8e6, 5e6]), np.array([7e6, 6e6]))
    answer = optimize(Problem(costs, (), Memory(4e6, 0.0, linear)))
    assert answer.choices == (1, 1)
    assert answer.excess_bytes == pytest.approx(7e6)


def test_merged_nodes_are_fewer_and_cost_the_same_here() -> None:
    """Taking a producer's layout as it comes restricts the choice; on these graphs it is free."""
    fewer = 0
    for seed in range(60):
        graph, blocks = random_graph(seed, 5)
        on = cluster(4, flops=1e8, bytes_per_second=1e8)
        merged = stage_problem(graph, blocks, Mesh(("tp",), (2,)), on)
        apart = stage_problem(graph, blocks, Mesh(("tp",), (2,)), on, merge=False)
        objectives = [
            optimize(each.linearized(StageOptions())).objective for each in (merged, apart)
        ]
        assert objectives[0] == pytest.approx(objectives[1], rel=1e-9)
        fewer += len(merged.decisions) < len(apart.decisions)
    assert fewer >= 5


def test_the_same_arguments_give_the_same_choices() -> None:
    graph, blocks = mlp(2)
    answers = [
        optimize(
            stage_problem(graph, blocks, Mesh(("tp",), (2,)), cluster()).linearized(StageOptions())
        )
        for _ in range(2)
    ]
    assert answers[0].choices == answers[1].choices


def test_the_solver_prints_nothing() -> None:
    """A new interpreter, as HiGHS prints its banner once per process, and past ``sys.stdout``."""
    code = """
import numpy as np
from autoparallel.planner.integer_programs.ilp import Problem, optimize

assert optimize(Problem((np.array([2.0, 1.0]),))).choices == (1,)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_equal_rows_and_columns_become_classes() -> None:
    forward = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [2.0, 0.0, 0.0]])
    both = forward, 2 * forward
    rows, columns, entries = merge_classes(both, merge_columns=True)
    assert rows.tolist() == [0, 0, 1]
    assert columns.tolist() == [0, 1, 1]
    assert entries.tolist() == [[[0.0, 0.0], [1.0, 2.0]], [[2.0, 4.0], [0.0, 0.0]]]
    _, apart, _ = merge_classes(both, merge_columns=False)
    assert apart.tolist() == [0, 1, 2]
