"""The winner's layouts proven: gaps that memory leaves open are closed, or better ways found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.find_plan import search
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search import layout_gap
from autoparallel.planner.search.layout_gap import tighten_gap
from examples.gpt import GPT, example_batch


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model = GPT(n_layer=8, d_model=1024, n_head=16, seq=512, vocab=2048, tied=False)
    return capture(model, example_batch(2, 512), dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "limit", "forced"),
    [
        ("4xV100-16GB", 1.5e9, Forced(pp=1)),
        pytest.param(
            "2xV100-16GB", 2.2e9, Forced(pp=1, num_microbatches=4), marks=pytest.mark.slow
        ),
        ("2xV100-16GB", 2.0e9, Forced(pp=2, num_microbatches=8)),
    ],
)
def test_the_winners_gap_is_narrowed_to_what_is_asked_for(
    program: Program,
    cluster: str,
    limit: float,
    forced: Forced,
) -> None:
    on = parse_cluster(cluster)
    request = Request(32, precision="bf16", memory_limit_bytes=int(limit), forced=forced)
    found = search(program.graph, program.blocks, on, request)
    before = found.pool.ranked()[0]
    after = tighten_gap(found.context, before)
    assert before.layouts_gap > request.gap >= after.layouts_gap
    assert after.step_seconds <= before.step_seconds
    assert after.peak_bytes <= limit
    plan = found.best_plan()
    assert plan.solver.layouts_gap == min(after.layouts_gap, plan.solver.gap)
    priced = evaluate(program.graph, program.blocks, plan, on)
    assert priced.step_seconds == pytest.approx(after.step_seconds, rel=1e-9)


def test_a_gap_that_is_allowed_is_left_alone(program: Program) -> None:
    request = Request(
        32,
        precision="bf16",
        memory_limit_bytes=int(2.2e9),
        gap=0.5,
        forced=Forced(pp=1, num_microbatches=4),
    )
    found = search(program.graph, program.blocks, parse_cluster("2xV100-16GB"), request)
    best = found.pool.ranked()[0]
    assert tighten_gap(found.context, best) is best


def test_ctrl_c_leaves_the_winner(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = Forced(pp=1, num_microbatches=4)
    request = Request(32, precision="bf16", memory_limit_bytes=int(2.2e9), gap=0.5, forced=forced)
    found = search(program.graph, program.blocks, parse_cluster("2xV100-16GB"), request)
    asked, best = replace(found.context, request=replace(request, gap=0.0)), found.pool.ranked()[0]
    assert best.layouts_gap > 0

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layout_gap, "candidate", interrupted)
    assert tighten_gap(asked, best) is best
    assert asked.budget.stopped == "Ctrl-C"
