"""Backwards in two halves: no half gets longer by a faster device or host."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from brute_force import Best, BruteForce, Way
from random_cases import Case, random_case
from random_suites import seeds
from torch import Tensor, nn

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.kept_bytes import storages
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.plan import Plan

SPLIT = ("zb-h1", "zb-h2")
FACTORS = (1.3, 5.0, 20.0)
ISSUES = (1e-7, 1e-6, 1e-5)


def with_device(cluster: Cluster, *, faster: float, issue_seconds: float) -> Cluster:
    """With as many times the peak, and so long to issue a kernel."""
    hosts = []
    for host in cluster.hosts:
        peaks = {name: peak * faster for name, peak in host.device.peak_flops.items()}
        device = replace(host.device, peak_flops=peaks, issue_seconds=issue_seconds)
        hosts.append(replace(host, device=device))
    return replace(cluster, hosts=tuple(hosts))


def random_plan(case: Case, rng: random.Random) -> Plan | None:
    """Any cut, layouts, ZeRO stages and recomputed blocks of two stages that split backwards."""
    force = BruteForce(case.graph, case.blocks, case.cluster, case.request)
    pipelines = [each for each in force.pipelines() if len(each) == 2]
    if not pipelines:
        return None
    rows, ways = rng.choice(force.rows()), []
    for start, stop, first, size in rng.choice(pipelines):
        ranks = tuple(range(first, first + size))
        allowed = [mesh for mesh in force.meshes(ranks) if force.splits_rows(rows, mesh)]
        space = force.stage(rows, rng.choice(allowed), ranks, (start, stop))
        which = rng.randrange(space.num_assignments)
        modes = rng.choice(space.recomputations)
        ways.append(Way((), space, ranks, rng.choice(space.zeros), modes, which))
    count = case.request.global_batch // rows
    best = Best(0.0, rows, count, rng.choice(SPLIT), tuple(ways))
    return best.plan(case.cluster, case.request)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_plan_in_halves_is_no_slower_on_faster_devices_or_hosts(seed: int) -> None:
    """Of two stages: in longer ones a message that comes sooner may be in another's way."""
    rng, case = random.Random(seed), random_case(seed)
    plan = random_plan(case, rng)
    if plan is None:
        return

    def seconds(faster: float, issue_seconds: float) -> float:
        on = with_device(case.cluster, faster=faster, issue_seconds=issue_seconds)
        return evaluate(case.graph, case.blocks, plan, on).step_seconds

    for issue in ISSUES:
        before = seconds(1.0, issue)
        assert all(seconds(factor, issue) <= before * (1 + 1e-12) for factor in FACTORS)
        assert seconds(1.0, issue / 2) <= before * (1 + 1e-12)


class Turned(nn.Module):
    """Of one row the transposed tensor is contiguous, so that its copy is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1).contiguous()).transpose(0, 1).mean()


def test_what_shares_memory_is_known_for_each_micro_batch_size() -> None:
    rows = torch.empty(2, 3, 4)
    graph = capture(Turned(), {"x": rows}).graph
    prices = Prices(Mesh(("dp",), (1,)), parse_cluster("cpu:1"), (0,), "fp32", "adamw", rules)
    by_size = {size: storages(graph.with_batch_size(size), prices) for size in (1, 2, 4)}
    assert by_size[1] != by_size[2] == by_size[4]
    assert by_size == {size: rules.storage_of(graph.with_batch_size(size)) for size in (1, 2, 4)}
