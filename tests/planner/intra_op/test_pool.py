"""Solutions that are priced as arrays cost what each of them costs by itself."""

from __future__ import annotations

import random

import pytest
from random_suites import seeds
from small_graphs import cluster, mlp, random_graph

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.choices import Restriction
from autoparallel.planner.costs.mesh_prices import ZEROS
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.intra_op.pool import Pool
from autoparallel.planner.stage.stage_model import StageModel
from autoparallel.planner.stage.stage_problem import Solution, StageOptions, StageProblem
from autoparallel.planner.stage.structure import Run, Structure
from autoparallel.planner.stage.terms import HELD_STATES, KEPT

COUNT = 4
MESHES = (Mesh(("dp",), (2,)), Mesh(("tp",), (2,)), Mesh(("dp", "tp"), (2, 2)))


def a_solution(model: StageModel, run: Run, rng: random.Random) -> Solution:
    problem = StageProblem(model, run)
    choices = tuple(rng.randrange(len(each.choices)) for each in problem.decisions)
    return problem.solution(choices)


@pytest.mark.parametrize("seed", seeds(6))
def test_every_run_of_a_family_costs_what_each_solution_says(seed: int) -> None:
    rng = random.Random(seed)
    graph, blocks = mlp(5) if seed % 2 else random_graph(seed, 8, num_blocks=4)
    mesh = MESHES[seed % 3]
    on = cluster(4)
    prices = Prices(mesh, on, tuple(range(mesh.size)), "fp32", "adamw", rules)
    structure = Structure(graph, blocks)
    model = StageModel(structure, prices, Restriction(), on.hosts[0].link)
    size = len(blocks.blocks)
    first = structure.run(0, rng.randint(1, size))
    runs = [structure.run(a, b) for a in range(size) for b in range(a + 1, size + 1)]
    runs = [run for run in runs if run.family == first.family]
    pool = Pool(model, first, ZEROS, None)
    for _ in range(4):
        pool.add(a_solution(model, first, rng))
        for run in runs:
            for number, entry in enumerate(pool.entries.values()):
                for zero in ZEROS:
                    figures = pool.unrecomputed(run)
                    objectives, hidden = pool._objectives(run, figures, COUNT)
                    states = figures[number, zero, HELD_STATES].sum()
                    kept = figures[number, zero, KEPT.start]
                    cost = entry.table.price(run, StageOptions(COUNT, zero))
                    held = cost.memory_bytes
                    total = held["parameters"] + held["gradients"] + held["optimizer"]
                    assert objectives[number, zero] == pytest.approx(cost.objective(COUNT))
                    assert hidden[number, zero] <= objectives[number, zero] * (1 + 1e-9)
                    assert states == pytest.approx(total)
                    assert kept == pytest.approx(held["activations"])
                    transient = entry.table.transient_bytes[zero]
                    assert transient == pytest.approx(held["transient"])
    assert len(pool.entries) > 1
