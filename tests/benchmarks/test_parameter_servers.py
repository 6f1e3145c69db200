"""The benchmark of parameter servers: its page is that of its results, and its runs are real."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import run_processes

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.plan_file import dumps
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import plan_program
from autoparallel.target.load import load_target
from autoparallel.target.target import Target
from benchmarks.parameter_servers.emulation import Training, train
from benchmarks.parameter_servers.page import (
    CHOOSING_SEED,
    Run,
    Throughput,
    best_rates,
    plot,
    tables,
)

HERE = Path(__file__).parents[2] / "benchmarks" / "parameter_servers"
BATCH = 24


def run_of(name: str, rate: float, seed: int, losses: list[float]) -> Run:
    """Losses a second apart."""
    return Run("one slow", name, rate, seed, [3, 1], list(enumerate(losses)))


def test_the_page_and_its_plot_are_those_of_the_results() -> None:
    found = json.loads((HERE / "results.json").read_text())
    throughput = [Throughput(**row) for row in found["throughput"]]
    runs = [Run(**row) for row in found["convergence"]]
    page = (HERE / "README.md").read_text()
    assert "\n".join(tables(throughput, runs)) in page
    assert (HERE / "README.svg").read_text() == plot(runs)


def test_times_to_the_target_are_medians_of_seeds_without_the_one_that_chose_rates() -> None:
    """By hand: the target of 1.2 after 1, 2 and 3 seconds; 1.0 at the end in the median."""
    runs = [
        run_of("asp", 0.1, 0, [2.0, 1.1, 1.0, 0.9]),
        run_of("asp", 0.1, 1, [2.0, 1.5, 1.2, 1.0]),
        run_of("asp", 0.1, 2, [2.0, 1.5, 1.4, 1.1]),
        run_of("asp", 0.1, CHOOSING_SEED, [1.0] * 4),
        run_of("bsp", 0.1, 0, [2.0] * 4),
    ]
    page = "\n".join(tables([Throughput(500, "r", "bsp", 2.0, 1.9, [])], runs))
    assert "| 500 Mbit/s | r | bsp | 2.000 | 1.900 | -5.0% |" in page
    assert "| one slow | asp | 0.1 | 3, 1 | 2.0 s | 1.0 s to 3.0 s | 1.000 |" in page
    assert "| one slow | bsp | 0.1 | 3, 1 | never | never to never | 2.000 |" in page
    assert plot(runs).count("<polyline") == 4


def test_the_rate_is_that_of_the_run_that_reached_the_target_first_or_ended_lowest() -> None:
    tried = [
        run_of("bsp", 0.1, 9, [2.0, 1.9]),
        run_of("bsp", 0.2, 9, [2.0, 1.7]),
        run_of("asp", 0.1, 9, [2.0, 1.1, 1.1]),
        run_of("asp", 0.2, 9, [2.0, 1.5, 1.0]),
    ]
    assert best_rates(tried) == {"bsp": 0.2, "asp": 0.1}


@cache
def classifier() -> tuple[Any, Target]:
    target = load_target(str(HERE / "classifier.py"), {})
    return capture_target(target, PlanOptions(global_batch=BATCH)), target


def on_rank(plan: str, seconds: float) -> Any:
    """So many seconds of training, in which worker 1 sleeps ten times as long as the others."""
    program, target = classifier()
    job = Training(program, target, plan, 0.2, 0, "one slow", 0.005, 10.0, seconds)
    return train(dist.get_rank(), job)


@pytest.mark.parametrize("consistency", ["asp", pytest.param("bsp", marks=pytest.mark.slow)])
def test_only_asp_lets_the_fast_worker_make_more_iterations(consistency: str) -> None:
    program, target = classifier()
    options = PlanOptions(
        global_batch=BATCH,
        profile="analytic",
        optimizer="sgd",
        forced=parse_parallel(f"servers=1,microbatches=2,consistency={consistency}"),
    )
    plan = plan_program(program, target, parse_cluster("cpu:3"), options)
    for seconds in (1.0, 4.0, 16.0):  # a busy machine may leave a worker without an iteration
        times, curve = run_processes(3, on_rank, dumps(plan), seconds, timeout_seconds=60)[0]
        if len(times) == 2:
            break
    fast, slow = times
    if consistency == "bsp":
        assert abs(len(fast) - len(slow)) <= 1
    else:
        assert len(fast) > len(slow) + 1
    assert curve[0][1] == pytest.approx(2.3, abs=0.1)  # ln 10: nothing learnt
    assert curve[-1][0] > curve[0][0]
