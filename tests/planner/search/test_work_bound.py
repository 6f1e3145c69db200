"""What ops take at their peaks, spread over all devices, is below every plan's step."""

from __future__ import annotations

import pytest
import torch
from one_stage import ranked
from random_cases import random_case
from random_suites import seeds
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT, Basis
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.requests.options import microbatch_rows
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.bound import work_bound
from autoparallel.planner.search.context import SearchContext
from examples.gpt import GPT, example_batch

SAME = 1 + 1e-9


@pytest.mark.parametrize("seed", seeds(2))
def test_no_plan_takes_less_than_its_ops_at_their_peaks(seed: int) -> None:
    """The plan is the best there is: the small space was gone through."""
    case = random_case(seed)
    job, found = ranked(case.graph, case.blocks, case.cluster, case.request)
    rows = microbatch_rows(job.structure.graph, case.request, case.cluster)
    assert 0 < work_bound(job, rows) <= found[0].step_seconds * SAME


def captured_gpt() -> tuple[Graph, Blocks]:
    with torch.device("meta"):
        model = GPT(n_layer=2, d_model=512, n_head=8, seq=256, vocab=1000, tied=False)
    program = capture(model, example_batch(8, 256), dtype="bfloat16")
    return program.graph, program.blocks


@pytest.mark.parametrize("name", ["8xH100", "2x4xV100-16GB"])
def test_no_layout_on_any_mesh_computes_a_gpt_in_less(name: str) -> None:
    """Each op in the layout in which it is fastest, of every mesh's own tables."""
    graph, blocks = captured_gpt()
    on = parse_cluster(name)
    job = SearchContext.of(
        graph, blocks, on, Request(8, precision="bf16"), rules=rules, basis=DEFAULT
    )
    for rows in (1, 8):
        count = job.num_microbatches(rows)
        for size in (1, 2, 4, 8):
            for solver in job.solvers.on_submesh(rows, 0, size):
                least = sum(
                    float(decision.amounts.seconds[:, :, [0, 2]].sum(axis=2).min())
                    for block in blocks.blocks
                    for decision in solver.model.kind(block.kind).decisions
                )
                assert work_bound(job, (1, 8)) <= count * least * size / on.num_devices * SAME


def test_devices_of_one_op_share_its_work() -> None:
    graph, blocks = mlp(3, rows=16)
    found = []
    for number in (1, 2):
        on = cluster(number)
        job = SearchContext.of(graph, blocks, on, Request(16), rules=rules, basis=DEFAULT)
        found.append(work_bound(job, (16,)))
    assert found[0] == pytest.approx(2 * found[1])


def test_measured_times_have_no_such_bound() -> None:
    graph, blocks = mlp(1, rows=4)
    basis = Basis(only="measured")
    job = SearchContext.of(graph, blocks, cluster(2), Request(4), rules=rules, basis=basis)
    assert work_bound(job, (4,)) == 0.0
