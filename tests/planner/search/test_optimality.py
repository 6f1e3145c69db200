"""Plans keep what they promise: their bound and their gap.

Brute force finds the best plan of each small random case. The planner searches these cases in
the same way as real models.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest
from brute_force_shares import Shared
from marks import slow
from random_cases import Case, random_case, where_compute_counts
from solved_cases import SAME, Solved, assert_is_near, best_of_all, found_plan, with_limit

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.memory import Offload
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.plan import Recompute
from autoparallel.planner.requests.features import OFFERED_MODES, Features
from autoparallel.planner.requests.request import Forced

NUM_CASES = 200
SAMPLE = (1, 7, 10, 15, 17)
"""Cases that are no slow tests, of every sort, whose brute force is quick."""

SEEDS = [
    *SAMPLE,
    *(
        pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(NUM_CASES)
        if seed not in SAMPLE
    ),
]

EVEN = [seed for seed in range(40) if random_case(seed, mixed=False).cluster.num_devices % 2 == 0]
"""Cases whose devices can share the batch."""

MOST_MISSED, WORST_MISS, MEAN_MISS = 0.25, 0.15, 0.01
"""Of the cases without the best plan: how many of all there may be, how much longer than the best
one their steps may take, and how much longer all steps may take on average."""

KNOWN_MISSES = {88: 0.22, 120: 0.18}
"""By seed, misses that are worse: the best plans of both have one micro-batch under ZB-H1."""

MISSES_ON_GPUS = {8: 0.64, 13: 0.27, 27: 0.28, 37: 0.2}
"""By seed, misses with states in host memory; on GPUs three of them miss without these too."""


@cache
def solved(seed: int) -> Solved:
    """A case and its plan; the best plan of all that are no slower."""
    case = with_limit(random_case(seed))
    found = found_plan(case)
    below = math.inf if found is None else found.prediction.step_seconds * (1 + 1e-6)
    return Solved(case, found, best_of_all(case, below=below))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_near_the_best_and_no_plan_is_below_its_bound(seed: int) -> None:
    assert_is_near(solved(seed), KNOWN_MISSES.get(seed, WORST_MISS))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_costs_what_it_says_and_fits(seed: int) -> None:
    own = solved(seed)
    if own.found is not None:
        limit = own.case.request.memory_limit_bytes
        priced = evaluate(own.case.graph, own.case.blocks, own.found, own.case.cluster)
        assert priced.step_seconds == pytest.approx(own.seconds, rel=SAME)
        assert limit is None or priced.peak_memory_bytes <= limit


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 32))])
def test_of_offloaded_and_recomputed_blocks_a_plan_is_near_the_best(seed: int) -> None:
    """Every mode is offered, and copies to the host take about as long as the compute of a block,
    longer or shorter."""
    case = with_rate(random_case(seed, mixed=False), random.Random(seed).choice((1e7, 1e8, 1e9)))
    modes = (*OFFERED_MODES[1:],) if len(case.blocks.blocks) > 3 else OFFERED_MODES
    features = Features(changes=frozenset(modes))
    case = replace(
        case,
        request=replace(case.request, features=features),
        memory_share=case.memory_share or 0.6,
    )
    case = with_limit(case)
    found = found_plan(case)
    below = math.inf if found is None else found.prediction.step_seconds * (1 + 1e-6)
    own = Solved(case, found, best_of_all(case, below=below))
    assert_is_near(own, WORST_MISS)


@pytest.mark.parametrize("states", ["gradients", "parameters"])
@pytest.mark.parametrize("seed", [*EVEN[:3], *map(slow, EVEN[3:])])
def test_with_states_in_host_memory_a_plan_is_near_the_best(seed: int, states: Offload) -> None:
    """Their copies, and in every third case those of activations, take about as long as the
    compute of a block, longer or shorter."""
    case = with_rate(random_case(seed, mixed=False), random.Random(seed).choice((1e7, 1e8, 1e9)))
    mode: Recompute | None = "none-offloaded" if seed % 3 == 0 else None
    forced = Forced(offload=states, recompute=mode)
    request = replace(case.request, offload=states, forced=forced)
    case = replace(case, cluster=on_gpus(case.cluster), request=request)
    found = found_plan(case)
    assert found is not None
    below = found.prediction.step_seconds * (1 + 1e-6)
    worst = MISSES_ON_GPUS.get(seed, WORST_MISS)
    assert_is_near(Solved(case, found, best_of_all(case, below=below)), worst)
    if states == "parameters":
        assert all(stage.zero == 3 for stage in found.stages)


def on_gpus(cluster: Cluster) -> Cluster:
    """The cluster with devices of a kind whose memory is not the host's."""
    hosts = (replace(host, device=replace(host.device, kind="cuda")) for host in cluster.hosts)
    return replace(cluster, hosts=tuple(hosts))


def with_rate(case: Case, rate: float) -> Case:
    """The case with this rate of its hosts' links."""
    hosts = tuple(
        replace(host, device=replace(host.device, host_link_bytes_per_second=rate))
        for host in case.cluster.hosts
    )
    return replace(case, cluster=replace(case.cluster, hosts=hosts))


def test_few_plans_are_not_the_best_and_none_by_much() -> None:
    """What the bound leaves open is far more than what is missed."""
    known = [own for own in map(solved, SAMPLE) if own.best is not None]
    missed = [max(own.seconds / own.best.step_seconds - 1, 0.0) for own in known if own.best]
    assert len(known) > len(SAMPLE) // 2
    assert sum(miss > SAME for miss in missed) <= MOST_MISSED * len(missed)
    assert max(missed) <= WORST_MISS
    assert mean(missed) <= MEAN_MISS


@pytest.mark.parametrize(
    ("seed", "shares"),
    [
        (20, (1, 3)),
        pytest.param(12, (1, 1, 6), marks=pytest.mark.slow),
        pytest.param(24, (3, 5), marks=pytest.mark.slow),
        pytest.param(38, (1, 3), marks=pytest.mark.slow),
    ],
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
    sample = [random_case(seed) for seed in SAMPLE]
    assert {case.cluster.num_devices for case in sample} == {1, 2, 3, 4}
    assert {(case.is_mixed, case.memory_share is None) for case in sample} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }
    assert any(_shares_weights(case) for case in sample)
    cases = [random_case(seed) for seed in range(NUM_CASES)]
    assert sum(case.is_mixed for case in cases) >= 50
    assert sum(case.memory_share is not None for case in cases) >= 100
    assert {case.cluster.num_devices for case in cases} == {1, 2, 3, 4}
    assert {len(case.blocks.blocks) for case in cases} == {2, 3, 4, 5}
    assert sum(_shares_weights(case) for case in cases) >= 30


def _shares_weights(case: Case) -> bool:
    graph = case.graph
    return any(len(graph.users[node.name]) > 1 for node in graph.parameters)
