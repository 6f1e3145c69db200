"""The planner's answer is the best there is: against every plan of random small cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
from brute_force import Best, BruteForce
from brute_force_shares import Shared, best_shared
from random_cases import Case, random_case

from autoparallel.cost_model.cluster import Device, Link
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.evaluate import evaluate
from autoparallel.planner.plan import Plan
from autoparallel.planner.search.free_axes import WORTH_IT
from autoparallel.planner.search.search import plan
from autoparallel.planner.strategy import NodeLayout

NUM_CASES = 200
SAMPLE = 40
"""Cases that are no slow tests."""

SEEDS = [
    *range(SAMPLE),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(SAMPLE, NUM_CASES)),
]
SAME = 1e-9
"""Relative: two steps within this are equal."""


def found_plan(case: Case) -> Plan | None:
    """The planner's answer, None if it says that nothing fits."""
    try:
        return plan(case.graph, case.blocks, case.cluster, case.request)
    except InfeasibleError:
        return None


def with_limit(case: Case) -> Case:
    """The case with the memory that it says, as a share of what the free plan takes."""
    if case.memory_share is None:
        return case
    free = found_plan(case)
    assert free is not None
    return case.limited(int(case.memory_share * free.prediction.peak_memory_bytes))


def best_of_all(case: Case, *, below: float = math.inf, free: bool = False) -> Best | Shared | None:
    """The fastest plan, of unequal shares of the batch too where devices differ."""
    force = BruteForce(case.graph, case.blocks, case.cluster, case.request, free=free)
    even = force.best(below)
    if not case.is_mixed:
        return even
    return best_shared(force, below if even is None else even.step_seconds) or even


@dataclass(frozen=True)
class Solved:
    """A case, the planner's answer, and the best plan no slower than that."""

    case: Case
    found: Plan | None
    best: Best | Shared | None

    @property
    def seconds(self) -> float:
        return math.inf if self.found is None else self.found.prediction.step_seconds


@cache
def solved(seed: int) -> Solved:
    case = with_limit(random_case(seed))
    found = found_plan(case)
    below = math.inf if found is None else found.prediction.step_seconds * (1 + 1e-6)
    return Solved(case, found, best_of_all(case, below=below))


def assert_is_the_best(own: Solved) -> None:
    if own.found is None:
        assert own.best is None, own.best.summary
    elif own.best is None:
        assert_is_outside(own.case, own.found)
    else:
        assert own.seconds <= own.best.step_seconds * (1 + SAME), own.best.summary
        assert own.seconds >= own.best.step_seconds * (1 - SAME), "better than every plan"


def assert_is_outside(case: Case, found: Plan) -> None:
    """It uses "dp" for more than the batch, which the search does where that is worth it."""
    inside = best_of_all(case)
    seconds = found.prediction.step_seconds
    assert inside is None or seconds < inside.step_seconds * (1 - WORTH_IT)
    assert any(
        layout.outputs[0][0].is_shard
        for stage in found.stages
        for name, layout in stage.layouts.items()
        if stage.mesh.axes[0] == "dp" and case.graph[name].kind == "parameter"
    ) or any(not splits_batch(case, stage.layouts) for stage in found.stages)


def splits_batch(case: Case, layouts: Mapping[str, NodeLayout]) -> bool:
    """Whether every value that counts the batch is made and read split along it on axis 0."""
    dims = case.graph.batch_dims
    pairs = [
        pair
        for name, layout in layouts.items()
        if case.graph[name].kind == "op"
        for pair in (
            *zip(dims[name], layout.outputs, strict=True),
            *((dims[ref.name][ref.index], held)
              for ref, held in zip(case.graph[name].inputs, layout.inputs, strict=True)),
        )
    ]  # fmt: skip
    return all(dim is None or str(held[0]) == f"S({dim})" for dim, held in pairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_is_the_fastest_there_is(seed: int) -> None:
    assert_is_the_best(solved(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_costs_what_it_says_and_fits(seed: int) -> None:
    own = solved(seed)
    if own.found is not None:
        case, limit = own.case, own.case.request.memory_limit_bytes
        priced = evaluate(case.graph, case.blocks, own.found, case.cluster)
        assert priced.step_seconds == pytest.approx(own.seconds, rel=SAME)
        assert limit is None or priced.peak_memory_bytes <= limit


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gap_is_never_smaller_than_it_is(seed: int) -> None:
    """No plan is further below the planner's than its gap allows."""
    own = solved(seed)
    if own.found is not None and own.best is not None:
        assert own.best.step_seconds >= own.seconds * (1 - own.found.solver.gap) * (1 - SAME)


@pytest.mark.parametrize("seed", [57, 101])
def test_a_plan_outside_of_the_space_is_the_fastest_where_dp_may_do_anything(seed: int) -> None:
    """On few enough devices and layouts to try those of the free axes too."""
    own = solved(seed)
    assert own.found is not None
    assert own.best is None
    best = best_of_all(own.case, below=own.seconds * (1 + 1e-6), free=True)
    assert best is not None
    assert own.seconds == pytest.approx(best.step_seconds, rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_CASES, 5 * NUM_CASES))
def test_the_plan_is_the_fastest_of_many_more(seed: int) -> None:
    assert_is_the_best(solved(seed))


def where_compute_counts(case: Case) -> Case:
    """Links a thousand times as fast, devices a hundredth, so that it is worth sharing out."""

    def quick(link: Link) -> Link:
        bandwidth = link.bytes_per_second * 1000
        return replace(link, bytes_per_second=bandwidth, alpha_seconds=link.alpha_seconds / 1000)

    def slow(device: Device) -> Device:
        peaks = {name: peak / 100 for name, peak in device.peak_flops.items()}
        return replace(device, peak_flops=peaks, memory_bytes_per_second=1e12)

    hosts = tuple(
        replace(each, link=quick(each.link), device=slow(each.device))
        for each in case.cluster.hosts
    )
    links = quick(case.cluster.inter_link)
    return replace(case, cluster=replace(case.cluster, hosts=hosts, inter_link=links))


@pytest.mark.parametrize(
    ("seed", "shares"), [(15, (3, 1)), (20, (1, 3)), (24, (3, 5)), (38, (1, 3)), (12, (1, 1, 6))]
)
def test_a_plan_with_unequal_shares_is_the_fastest_there_is(
    seed: int, shares: tuple[int, ...]
) -> None:
    """Of random cases, some of whose memory binds, some with "tp" that splits no odd rows."""
    case = with_limit(where_compute_counts(random_case(seed, mixed=True)))
    found, best = found_plan(case), best_of_all(case)
    assert found is not None
    assert isinstance(best, Shared), best
    assert found.prediction.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    assert found.stages[0].shares == shares
    priced = evaluate(case.graph, case.blocks, found, case.cluster)
    assert priced.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)


def test_the_cases_are_of_every_sort() -> None:
    """Devices that differ, memory that binds, uneven hosts, shared weights, 2 to 5 blocks."""
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    assert sum(case.is_mixed for case in cases) >= 50
    assert sum(case.memory_share is not None for case in cases) >= 100
    assert {case.cluster.num_devices for case in cases} == {1, 2, 3, 4}
    assert {len(case.blocks.blocks) for case in cases} == {2, 3, 4, 5}
    assert sum(_shares_weights(case) for case in cases) >= 30


def _shares_weights(case: Case) -> bool:
    graph = case.graph
    return any(len(graph.users[node.name]) > 1 for node in graph.parameters)
