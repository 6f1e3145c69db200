"""What searches share changes no plan, whatever was searched before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_cases import random_case

from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.find_plan import COARSE, SearchMethod, plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.search.problem import SharedTables


@pytest.mark.parametrize(
    ("seed", "method"),
    [
        (1, COARSE),
        pytest.param(3, COARSE, marks=pytest.mark.slow),
        pytest.param(0, COARSE, marks=pytest.mark.slow),
        pytest.param(2, COARSE, marks=pytest.mark.slow),
        pytest.param(0, SearchMethod(), marks=pytest.mark.slow),
    ],
)
def test_plans_are_the_same_with_the_tables_of_other_clusters_and_limits(
    seed: int, method: SearchMethod
) -> None:
    case = random_case(seed)
    fast = replace(
        case.cluster,
        hosts=tuple(
            replace(
                host,
                device=replace(
                    host.device,
                    peak_flops={name: 3 * rate for name, rate in host.device.peak_flops.items()},
                ),
            )
            for host in case.cluster.hosts
        ),
    )

    def found(cluster, limit_bytes: int | None, tables: SharedTables | None) -> Plan | None:
        request = replace(case.request, memory_limit_bytes=limit_bytes)
        own = replace(method, tables=tables)
        try:
            made = plan(case.graph, case.blocks, cluster, request, method=own)
        except InfeasibleError:
            return None
        return replace(made, solver=replace(made.solver, seconds={}, num_problems=0))

    first = found(case.cluster, None, None)
    assert first is not None
    less = round(0.8 * first.prediction.peak_memory_bytes)
    asked = [(case.cluster, None), (fast, None), (case.cluster, less), (case.cluster, None)]
    shared = SharedTables()
    assert [found(*each, shared) for each in asked] == [found(*each, None) for each in asked]
