"""The least cost of a stage by elimination is a lower bound of the price of any of its layouts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from random_suites import seeds
from small_graphs import cluster, mlp, random_graph

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.choices import Restriction
from autoparallel.planner.costs.mesh_prices import ZEROS
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.integer_programs.ilp import cost, memory_bytes, optimize
from autoparallel.planner.intra_op.families import Family
from autoparallel.planner.intra_op.kind_tables import KindTables, Rates
from autoparallel.planner.kernels.recompute import BLOCK_MODES, is_offloaded
from autoparallel.planner.stage.recompute_policy import uniform_policy
from autoparallel.planner.stage.stage_cost import StageTable
from autoparallel.planner.stage.stage_model import StageModel
from autoparallel.planner.stage.stage_problem import StageOptions, StageProblem
from autoparallel.planner.stage.structure import Structure

COUNT = 4
MESHES = (Mesh(("dp",), (2,)), Mesh(("tp",), (2,)), Mesh(("dp", "tp"), (2, 2)))


def stage_problem(seed: int) -> StageProblem:
    graph, blocks = mlp(5) if seed % 2 else random_graph(seed, 8, num_blocks=4)
    on, mesh = cluster(4, bytes_per_second=(1e8, 1e9, 1e10)[seed % 3]), MESHES[seed % 3]
    prices = Prices(mesh, on, tuple(range(mesh.size)), "fp32", "adamw", rules)
    model = StageModel(Structure(graph, blocks), prices, Restriction(), on.hosts[0].link)
    return StageProblem(model, model.structure.run(0, len(blocks.blocks)))


def family_of(problem: StageProblem) -> Family:
    kinds = {kind: KindTables(problem.model, kind) for kind in problem.run.counts}
    return Family.of(problem.model, problem.run, kinds)


@pytest.mark.parametrize("seed", seeds(12))
def test_no_layouts_cost_less_than_the_bound(seed: int) -> None:
    rng, problem = random.Random(seed), stage_problem(seed)
    counts, family = problem.run.class_counts[0], family_of(problem)
    tables = [
        StageTable(problem, tuple(rng.randrange(len(each.choices)) for each in problem.decisions))
        for _ in range(20)
    ]
    for mode in BLOCK_MODES:
        least = family.solve((problem.run,), Rates(COUNT, ZEROS, mode)).least[0]
        for table in tables:
            for zero in ZEROS:
                setting = StageOptions(COUNT, zero, uniform_policy(mode, counts))
                own = table.price(problem.run, setting).objective(COUNT)
                assert least[zero] <= own * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(6))
def test_elimination_program_and_price_agree(seed: int) -> None:
    """The same terms: the least sum by elimination is the optimum of the integer program, and the
    program's bytes are those of the price."""
    rng, problem = random.Random(seed), stage_problem(seed)
    for mode in BLOCK_MODES:
        least = family_of(problem).solve((problem.run,), Rates(COUNT, ZEROS, mode)).least[0]
        policy = uniform_policy(mode, problem.run.class_counts[0])
        for zero in ZEROS:
            setting = StageOptions(COUNT, zero, policy, in_flight=3, limit_bytes=np.inf)
            program = problem.linearized(setting)
            answer = optimize(replace(program, memory=None))
            assert answer.objective == pytest.approx(least[zero], rel=1e-9)
            choices = tuple(rng.randrange(len(each)) for each in program.costs)
            found = StageTable(problem, choices).price(problem.run, setting)
            assert program.memory is not None
            num_bytes = memory_bytes(program.memory, choices)
            if is_offloaded(mode):  # the program leaves out values of other blocks on their way
                assert num_bytes <= found.total_bytes
            else:
                assert num_bytes == pytest.approx(found.total_bytes)
            assert cost(program, choices) <= found.objective(COUNT) * (1 + 1e-9)
