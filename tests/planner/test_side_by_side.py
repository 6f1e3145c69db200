"""Solutions priced side by side cost what each of them costs by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from small_graphs import cluster, mlp, random_graph

from autoparallel.planner import rules
from autoparallel.planner.intra_op.side_by_side import SideBySide
from autoparallel.planner.layout import Mesh
from autoparallel.planner.pricing.assembly import Assembly, Setting
from autoparallel.planner.pricing.choices import Restriction
from autoparallel.planner.pricing.prices import Prices
from autoparallel.planner.pricing.stage_cost import Figures
from autoparallel.planner.pricing.stage_model import StageModel
from autoparallel.planner.pricing.structure import Run, Structure

COUNT = 4
MESHES = (Mesh(("dp",), (2,)), Mesh(("tp",), (2,)), Mesh(("dp", "tp"), (2, 2)))


def a_solution(model: StageModel, run: Run, rng: random.Random) -> Figures:
    assembly = Assembly(model, run)
    choices = tuple(rng.randrange(len(each.choices)) for each in assembly.decisions)
    return Figures(assembly, choices)


@pytest.mark.parametrize("seed", range(12))
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
    together = SideBySide()
    alone = []
    for _ in range(4):
        alone.append(a_solution(model, first, rng))
        together.add(alone[-1])
        for run in runs:
            found = together.unrecomputed(run)
            for number, figures in enumerate(alone):
                for zero in range(4):
                    own = figures.price(run, Setting(COUNT, zero))
                    both = found.microbatch_seconds + found.step_seconds / COUNT
                    held = own.memory_bytes
                    states = held["parameters"] + held["gradients"] + held["optimizer"]
                    assert both[number, zero] == pytest.approx(own.objective(COUNT))
                    assert found.states_bytes[number, zero] == pytest.approx(states)
                    assert found.kept_bytes[number] == pytest.approx(held["activations"])
                    assert found.transient_bytes[number, zero] == pytest.approx(held["transient"])
    assert len(np.unique([figures.choices for figures in alone], axis=0)) > 1
