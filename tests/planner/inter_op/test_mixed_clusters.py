"""Random small cases on clusters whose hosts differ: what must not change, or not get worse."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from one_stage import plan
from random_cases import Case, random_case

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.errors import InfeasibleError

SAME = 1e-9
QUICK = (6,)
"""Hosts of two devices and one with a limit of memory."""

SEEDS = tuple(
    seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(40)
)


def seconds(case: Case, cluster: Cluster) -> float:
    try:
        found = plan(case.graph, case.blocks, cluster, case.request)
    except InfeasibleError:
        return math.inf
    return found.prediction.step_seconds


@cache
def limited(seed: int) -> Case:
    """The case with the memory that it says, as a share of what the free plan takes."""
    case = random_case(seed, mixed=True)
    if case.memory_share is None:
        return case
    free = plan(case.graph, case.blocks, case.cluster, case.request)
    return case.limited(int(case.memory_share * free.prediction.peak_memory_bytes))


@cache
def given_seconds(seed: int) -> float:
    case = limited(seed)
    return seconds(case, case.cluster)


def with_faster_host(cluster: Cluster, index: int, factor: float) -> Cluster:
    host = cluster.hosts[index]
    device = replace(
        host.device,
        memory_bytes_per_second=host.device.memory_bytes_per_second * factor,
        peak_flops={name: peak * factor for name, peak in host.device.peak_flops.items()},
    )
    hosts = list(cluster.hosts)
    hosts[index] = replace(host, device=device)
    return replace(cluster, hosts=tuple(hosts))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_hosts_in_the_file_does_not_matter(seed: int) -> None:
    case = limited(seed)
    turned = replace(case.cluster, hosts=case.cluster.hosts[::-1])
    found, other = given_seconds(seed), seconds(case, turned)
    assert found == other or found == pytest.approx(other, rel=SAME)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_faster_host_never_slows_a_plan_down(seed: int, index: int) -> None:
    case = limited(seed)
    before = given_seconds(seed)
    for factor in (1.5, 8.0):
        after = seconds(case, with_faster_host(case.cluster, index, factor))
        assert after <= before * (1 + SAME)
        before = after


def test_a_plan_that_fits_is_found_however_fast_a_host_is() -> None:
    """Of the fast host's stage, layouts that fit take thousands of times its compute to send."""
    case = limited(19)
    assert seconds(case, with_faster_host(case.cluster, 1, 8.0)) < math.inf
