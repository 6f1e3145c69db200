"""TeraPipe beside tensor parallelism: slices that the layouts divide."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from capture_models import gpt_batch, small_gpt

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.find_plan import plan
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Request

DEGREES = "dp=2,tp=2,pp=2,microbatches=4"


@cache
def program() -> Program:
    return capture(small_gpt(), gpt_batch())


def planned(parallel: str) -> Plan:
    graph, blocks = program().graph, program().blocks
    request = Request(8, forced=parse_parallel(parallel))
    return plan(graph, blocks, parse_cluster("cpu:8"), request)


def splits_positions(found: Plan) -> bool:
    """Whether some layout splits dimension 1 of a value, which counts positions, over tp."""
    outputs = [
        layout for stage in found.stages for own in stage.layouts.values() for layout in own.inputs
    ]
    return any(place.is_shard and place.dim == 1 for layout in outputs for place in layout[1:])


@pytest.mark.slow
def test_slices_are_looked_at_that_layouts_of_positions_divide() -> None:
    assert planned(DEGREES).prediction.step_seconds > 0
    found = planned(f"{DEGREES},schedule=terapipe")
    assert splits_positions(found)
    assert sum(found.slices) == 16
    assert all(length % 2 == 0 for length in found.slices)
    own = evaluate(program().graph, program().blocks, found, found.cluster)
    assert own.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-6)


@pytest.mark.slow
def test_slices_of_one_position_take_layouts_that_split_none() -> None:
    found = planned(f"{DEGREES},schedule=terapipe,slices=16")
    assert found.slices == (1,) * 16
    own = evaluate(program().graph, program().blocks, found, found.cluster)
    assert own.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-6)


def test_slices_that_the_layouts_do_not_divide_are_refused() -> None:
    pricer = ConfigurationPricer(program().graph, program().blocks)
    own = Configuration(
        tp=2,
        pp=2,
        microbatch_size=2,
        num_microbatches=4,
        schedule="terapipe",
        num_slices=16,
        sequence_parallel=True,
    )
    with pytest.raises(UsageError, match="cannot be divided over tp=2") as raised:
        pricer.price(parse_cluster("cpu:4"), own)
    assert raised.value.code == "AP549"
    assert pricer.price(parse_cluster("cpu:4"), replace(own, num_slices=8)).step_seconds > 0
