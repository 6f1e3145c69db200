"""Meshes with "cp" and "ep": proposed where dp × tp cannot stand for them, and really faster.

The cases are small enough to plan every mesh dp × ep × cp × tp of every number of stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from one_stage import plan
from small_graphs import cluster
from torch import Tensor, nn

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as rules
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.inter_op.submesh import Experts, Proposals, proposals
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.features import features_of
from autoparallel.planner.requests.request import SCHEDULES, Forced, Request, divisors

HOSTS = cluster(2, num_hosts=4, flops=1e10, bytes_per_second=1e9)
"""Four hosts of two devices: "tp" is at most 2; said so, "dp" is left to rows."""


class Layer(nn.Module):
    """A linear layer and attention: (batch, head, position, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + F.scaled_dot_product_attention(y, y, y)


class Attention(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class EvenExperts(nn.Module):
    """Each expert takes its own part of the positions of every row."""

    def __init__(self, number: int, width: int, inner: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.up = nn.Parameter(torch.empty(number, width, inner))
        self.down = nn.Parameter(torch.empty(number, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.linear(x).unflatten(1, (self.up.shape[0], -1)).transpose(0, 1)
        hidden = torch.einsum("ebpw,ewi->ebpi", parts, self.up).relu()
        return torch.einsum("ebpi,eiw->ebpw", hidden, self.down).square().mean()


@cache
def attention(positions: int) -> Program:
    with torch.device("meta"):
        return capture(Attention(16), {"x": torch.empty(2, 2, positions, 16)})


@cache
def experts(number: int, positions: int, inner: int) -> Program:
    with torch.device("meta"):
        return capture(EvenExperts(number, 32, inner), {"x": torch.empty(2, positions, 32)})


def planned(program: Program, where: Cluster, request: Request) -> Plan:
    return plan(program.graph, program.blocks, where, request)


def degrees(found: Plan) -> dict[str, int]:
    (stage,) = found.stages
    return dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True))


def every_mesh(num_devices: int, more: str) -> Iterator[Forced]:
    """Every dp × tp × pp with an axis more, "cp" or "ep"."""
    for sizes in product(divisors(num_devices), repeat=4):
        if prod(sizes) == num_devices:
            dp, tp, pp, other = sizes
            own = Forced(dp=dp, tp=tp, pp=pp, cp=1, ep=1)
            yield replace(own, cp=other) if more == "cp" else replace(own, ep=other)


def best_of(program: Program, where: Cluster, request: Request, more: str) -> float:
    """The step of the best plan over every mesh, each asked for by itself.

    A forced "tp" must split weights; left free on the same devices it is any axis.
    """
    found = []
    for forced in every_mesh(where.num_devices, more):
        assert forced.tp is not None
        if request.max_tp is not None and forced.tp > request.max_tp:
            continue
        for own in dict.fromkeys((forced, replace(forced, tp=None))):
            try:
                done = planned(program, where, replace(request, forced=own))
            except AutoparallelError:
                continue
            found.append(done.prediction.step_seconds)
    return min(found)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_best_mesh_with_cp_is_among_those_proposed(rows: int) -> None:
    """Fewer rows than hosts: with all meshes asked for by themselves nothing is faster."""
    program = attention(512)
    request = Request(rows, time_limit_seconds=600.0, gap=0.0, max_tp=2)
    free = planned(program, HOSTS, request).prediction.step_seconds
    assert free == pytest.approx(best_of(program, HOSTS, request, "cp"), rel=1e-6)


@pytest.mark.slow
def test_three_axes_beat_the_best_plan_of_two() -> None:
    """Two rows of two heads on four hosts of two devices.

    dp = 2 takes the rows and tp = 2 the heads, and 8 devices are only busy with cp = 2 besides:
    with two axes, dp = 2 × cp = 4 gathers 3/4 of two heads' keys and values over the network
    where 1/2 of one head's is enough.
    """
    program, request = attention(512), Request(2, time_limit_seconds=600.0)
    found = planned(program, HOSTS, request)
    assert degrees(found) == {"dp": 2, "cp": 2, "tp": 2}
    for denied in ("3d-mesh", "cp"):
        less = replace(request, features=features_of((), (denied,), SCHEDULES))
        other = planned(program, HOSTS, less).prediction.step_seconds
        assert other > 1.02 * found.prediction.step_seconds, denied


def test_experts_get_an_axis_where_their_gradients_outweigh_tokens() -> None:
    """Two experts of 2·32·4096 weights, 8 rows of 16 positions on four hosts of two devices.

    A step then takes less than half of what it takes with dp = 4 × tp = 2, which sums them over
    the network.
    """
    program = experts(2, 16, 4096)
    request = Request(8, time_limit_seconds=600.0, gap=0.0, max_tp=2)
    found = planned(program, HOSTS, request)
    assert degrees(found) == {"dp": 2, "ep": 2, "tp": 2}
    assert found.prediction.step_seconds == pytest.approx(
        best_of(program, HOSTS, request, "ep"), rel=1e-6
    )
    less = replace(request, features=features_of((), ("3d-mesh",), SCHEDULES))
    other = planned(program, HOSTS, less).prediction.step_seconds
    assert other > 2 * found.prediction.step_seconds


def proposed(program: Program, where: Cluster, rows: int, batch: int) -> list[dict[str, int]]:
    own = proposals(program.graph, where, Request(batch), rules)
    size, host = where.num_devices, where.hosts[0].num_devices
    found = own.meshes(size, host, rows)
    return [dict(zip(mesh.axes, mesh.shape, strict=True)) for mesh in found]


def test_rows_are_split_as_far_as_they_go_before_positions_are() -> None:
    program = attention(1 << 15)
    assert proposed(program, HOSTS, 2, 64) == [
        {"dp": 2, "cp": 4},
        {"dp": 2, "cp": 2, "tp": 2},
    ]
    assert proposed(program, HOSTS, 8, 64) == []
    assert proposed(program, HOSTS, 4, 64) == [{"dp": 4, "cp": 2}]
    assert proposed(program, HOSTS, 1, 64) == [{"cp": 8}, {"cp": 4, "tp": 2}]


def test_short_sequences_are_split_only_where_rows_are_fewer_than_hosts() -> None:
    assert proposed(attention(512), HOSTS, 2, 4) == []
    assert proposed(attention(512), HOSTS, 2, 2) != []
    assert proposed(attention(32), HOSTS, 2, 2) == []


def test_experts_of_which_tokens_are_more_bytes_than_gradients_get_no_axis() -> None:
    """A rank's tokens: 4 · rows/dp · positions · 32 · 4 bytes over ep, of its experts' gradients
    2 · 2 · 2 · 32 · inner · 4 / tp · (1 − 1/ep). With dp = ep = tp = 2 and 8 rows they are
    1,024 · positions and 256 · inner."""
    assert {"dp": 2, "ep": 2, "tp": 2} in proposed(experts(2, 16, 72), HOSTS, 8, 8)
    assert {"dp": 2, "ep": 2, "tp": 2} not in proposed(experts(2, 16, 64), HOSTS, 8, 8)


def test_what_is_forced_is_not_proposed_again() -> None:
    request = Request(2, forced=Forced(cp=1))
    own = Proposals(1 << 15, Experts(4, 1e12, 1.0), HOSTS, request)
    assert all("cp" not in mesh.axes for mesh in own.meshes(8, 2, 8))
    assert any("ep" in mesh.axes for mesh in own.meshes(8, 2, 8))
    none = replace(own, request=replace(request, forced=Forced(cp=1, ep=1)))
    assert list(none.meshes(8, 2, 8)) == []
