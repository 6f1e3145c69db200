"""The planner's best plan is the best of all of them, with an axis "cp" too.

Brute force tries every mesh dp × cp × tp, every layout on each ("dp" for rows, "cp" for positions,
"tp" free), ZeRO stage, recomputation and micro-batch of one attention on a cluster whose hosts have
two devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from brute_force import BruteForce
from one_stage import plan
from small_graphs import cluster, leaf, op, weight, with_batch

from autoparallel.planner.graph.graph import Block, Blocks, Graph, Ref
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.inter_op.submesh import mesh_of
from autoparallel.planner.requests.request import Request, divisors

SAME = 1e-9

POSITIONS = dict.fromkeys("xya", (1, 2))
"""Dimensions, besides rows, that ops keep of the input: its heads too count as positions."""

CASES = (
    # positions, rows, hosts, bytes per second: mesh
    (512, 1, 2, 1e8, {"cp": 2, "tp": 2}),
    (512, 2, 4, 1e8, {"dp": 2, "cp": 2, "tp": 2}),
    pytest.param(512, 2, 4, 1e10, {"dp": 2, "cp": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param(2048, 2, 4, 1e8, {"dp": 2, "cp": 2, "tp": 2}, marks=pytest.mark.slow),
    (512, 3, 4, 1e8, {"cp": 4, "tp": 2}),
)


def attention(positions: int) -> tuple[Graph, Blocks]:
    """One block: a linear layer, attention of two heads to itself, the mean."""
    shape = (2, 2, positions, 8)
    value = Ref("y")
    nodes = (
        leaf("x", *shape),
        weight("w", 8, 8),
        op("y", "linear.default", (Ref("x"), Ref("w")), *shape),
        op("a", "scaled_dot_product_attention.default", (value, value, value), *shape),
        op("loss", "mean.default", (Ref("a"),)),
    )
    graph = with_batch(Graph(nodes, Ref("loss"), 2))
    return graph, Blocks((Block("all", "all", ("y", "a", "loss"), ("w",)),))


@dataclass
class EveryMesh(BruteForce):
    """With three axes."""

    def meshes(self, ranks: Sequence[int]) -> list[Mesh]:
        number, host = len(ranks), self.cluster.hosts[0].num_devices
        return [
            mesh_of(dp, tp, number // dp // tp)
            for dp in divisors(number)
            for tp in divisors(number // dp)
            if host % tp == 0
        ]


@pytest.mark.parametrize(("positions", "rows", "hosts", "rate", "mesh"), CASES)
def test_no_mesh_of_three_axes_is_better_than_the_planners(
    positions: int, rows: int, hosts: int, rate: float, mesh: dict[str, int]
) -> None:
    graph, blocks = attention(positions)
    where = cluster(2, num_hosts=hosts, flops=1e10, bytes_per_second=rate)
    request = Request(rows, time_limit_seconds=600.0, gap=0.0)
    found = plan(graph, blocks, where, request)
    best = EveryMesh(graph, blocks, where, request, positions=POSITIONS).best()
    assert best is not None
    assert found.prediction.step_seconds == pytest.approx(best.step_seconds, rel=SAME)
    (stage,) = found.stages
    assert dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True)) == mesh
    assert best.plan(where, request).stages[0].mesh == stage.mesh
