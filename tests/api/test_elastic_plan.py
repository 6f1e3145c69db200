"""The plan for the hosts that are there: the run's own, or one for fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import WorkerError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.plan_files import load_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.process import Worker, current_worker
from autoparallel.target.load import load_target
from autoparallel.target.target import Target
from autoparallel.training.elastic_plan import plan_for_ranks

MODEL = Path(__file__).parents[1] / "support" / "dropout_model.py"
LIMITS = {"time_limit_seconds": 20.0, "profile": "analytic"}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(str(MODEL))


@pytest.fixture(scope="module")
def plan(target: Target) -> Plan:
    options = PlanOptions(global_batch=12, profile="analytic", forced=Forced(dp=4))
    return make_plan(target, "4x1xcpu", options)


def ranks(number: int) -> Worker:
    return current_worker({"RANK": "0", "WORLD_SIZE": str(number)}, 60.0)


def test_all_ranks_keep_the_plan(plan: Plan, target: Target) -> None:
    assert plan_for_ranks(plan, target, ranks(4), LIMITS, None) is plan


def test_fewer_ranks_get_a_plan_of_the_same_model_and_batch(
    plan: Plan, target: Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    found = plan_for_ranks(plan, target, ranks(3), LIMITS, str(folder))
    assert found.cluster.num_devices == 3
    assert found.model == plan.model
    assert "planning for the hosts that are there: 3x1xcpu" in capfd.readouterr().err
    assert load_plan(folder / "plan-3.json").cluster == found.cluster
    again = plan_for_ranks(plan, target, ranks(3), LIMITS, str(folder))
    assert again.stages == found.stages
    assert "planning" not in capfd.readouterr().err


def test_where_no_plan_is_found_the_error_says_why(plan: Plan, target: Target) -> None:
    with pytest.raises(WorkerError, match="AP824") as caught:
        plan_for_ranks(plan, target, ranks(3), {**LIMITS, "time_limit_seconds": 0.0}, None)
    assert caught.value.what == "there is no plan for the 3 ranks that are left"
    assert "12 samples" in caught.value.why
