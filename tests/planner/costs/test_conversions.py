"""Conversions between lists of layouts cost what each pair costs by itself."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autoparallel.cost_model.cluster.cluster_file import load_cluster
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.conversions import conversion_seconds
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, PARTIAL, REPLICATE, Mesh, shard

PLACEMENTS = (shard(0), shard(1), REPLICATE, INVARIANT, PARTIAL)
MESHES = (Mesh(("dp",), (4,)), Mesh(("dp", "tp"), (2, 4)), Mesh(("dp", "cp", "tp"), (2, 2, 2)))


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.shape))
def test_a_matrix_holds_what_each_pair_costs(mesh: Mesh, requires_grad: bool) -> None:
    cluster = load_cluster('hosts = [{num_devices = 8, device = "H100"}]')
    asked = Prices(mesh, cluster, tuple(range(mesh.size)), "bf16", "adamw", rules)
    pairwise = Prices(mesh, cluster, tuple(range(mesh.size)), "bf16", "adamw", rules)
    spec = TensorSpec((64, 128), "bfloat16", requires_grad)
    layouts = list(product(PLACEMENTS, repeat=len(mesh.shape)))
    generator = np.random.default_rng(0)
    for _ in range(6):
        sources, targets = (
            [layouts[at] for at in generator.choice(len(layouts), min(9, len(layouts)), False)]
            for _ in range(2)
        )
        forward, backward = conversion_seconds(asked, spec, sources, targets)
        for (row, source), (column, target) in product(enumerate(sources), enumerate(targets)):
            found = forward[row, column], backward[row, column]
            assert found == pairwise.conversion(spec, source, target)
