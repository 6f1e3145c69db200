"""What is asked of a plan: one list of options for every command and for Python."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from typing import Any

import pytest

from autoparallel import actions
from autoparallel.__main__ import app, show
from autoparallel.commands.machine import profile
from autoparallel.commands.planning import plan
from autoparallel.commands.training import run, verify
from autoparallel.options.option import parameters
from autoparallel.options.parse import parse_deadline, parse_prices
from autoparallel.options.plan_options import (
    PlanOptions,
    SearchOptions,
    plan_options,
    without_servers,
)
from autoparallel.planner.errors import UsageError
from autoparallel.planner.requests.goal import Deadline, Goal
from autoparallel.planner.requests.pins import parse_pin
from autoparallel.planner.requests.request import Forced
from autoparallel.profiling.start import options_from_json, options_to_json


def names(function: object) -> set[str]:
    assert callable(function)
    return set(inspect.signature(function).parameters)


def test_every_command_that_plans_takes_the_same_options() -> None:
    shared = set(parameters(PlanOptions))
    assert shared <= names(plan)
    assert shared <= names(run)
    assert shared - {"precision", "float32_ops", "tf32"} <= names(verify)
    alone = {"profile", "measure_seconds", "objective", "price", "deadline"}
    assert shared - alone <= names(profile)


@pytest.mark.parametrize(
    "declaration", [each.callback for each in (*app.registered_commands, *show.registered_commands)]
)
def test_a_command_passes_what_its_action_takes(declaration: Any) -> None:
    """A declaration has no body, so type checkers do not compare it with its action."""
    modules = (each.name for each in pkgutil.iter_modules(actions.__path__))
    owners = [importlib.import_module(f"autoparallel.actions.{name}") for name in modules]
    taken = [
        names(getattr(owner, declaration.__name__))
        for owner in owners
        if getattr(owner, declaration.__name__, None) is not None
        and getattr(owner, declaration.__name__).__module__ == owner.__name__
    ]
    assert taken == [names(declaration.__wrapped__)]


def test_python_takes_the_options_of_the_command_line() -> None:
    assert set(SearchOptions.__annotations__) == set(parameters(PlanOptions)) - {
        "global_batch",
        "seq",
    }


def test_texts_become_values() -> None:
    found = plan_options(
        16,
        pin="layers.*.up.weight=S(0)@tp",
        stage_at=["layers.1"],
        max_tp=4,
        deny=["pp,zero3", "gpipe"],
        parallel="dp=2",
        memory_limit="2GB",
        objective="devices",
        deadline="2h/100steps",
        price={"H100": 2.0},
        gap=0.1,
    )
    assert found.pins == (parse_pin("layers.*.up.weight=S(0)@tp"),)
    assert (found.stage_at, found.max_tp, found.gap) == (("layers.1",), 4, 0.1)
    assert found.features.denied == {"pp", "zero3", "gpipe"}
    assert (found.forced, found.memory_limit_bytes) == (Forced(dp=2), 2 * 10**9)
    assert found.goal == Goal("devices", {"H100": 2.0}, Deadline(7200.0, 100.0, "steps"))


def test_options_reach_another_process_as_json() -> None:
    found = plan_options(
        8, 4, pin="*.up=S(0)@tp", parallel="dp=2", deny="pp", price=2.0, deadline="2h/100steps"
    )
    assert options_from_json(json.loads(json.dumps(options_to_json(found)))) == found
    sliced = plan_options(parallel="schedule=terapipe,slices=auto")
    assert options_from_json(json.loads(json.dumps(options_to_json(sliced)))) == sliced


def test_servers_are_denied_unless_their_number_is_fixed() -> None:
    allowed = plan_options(allow=["servers,asp"])
    assert allowed.features.allows_change("servers")
    assert not without_servers(allowed).features.allows_change("servers")
    assert without_servers(allowed).features.allows_change("asp")
    fixed = plan_options(parallel="servers=1")
    assert without_servers(fixed) == fixed


def test_deadlines_and_prices_are_read() -> None:
    assert parse_deadline("800ms/step") == Deadline(0.8, 1.0, "steps")
    assert parse_deadline("1d/1e9tokens") == Deadline(86400.0, 1e9, "tokens")
    assert parse_prices("H100=2.5,1") == {"H100": 2.5, "": 1.0}


@pytest.mark.parametrize("text", ["", "1h", "1h/steps of", "0s/step", "1y/step", "h/3steps"])
def test_a_wrong_deadline_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="AP189"):
        parse_deadline(text)


@pytest.mark.parametrize("text", ["cheap", "-1", "H100=", "inf", "H100=1,H100=2"])
def test_a_wrong_price_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="AP188"):
        parse_prices(text)


def test_the_fewest_devices_need_a_deadline_and_objectives_are_known() -> None:
    with pytest.raises(UsageError, match="AP189"):
        plan_options(8, objective="devices")
    with pytest.raises(UsageError, match="AP188"):
        plan_options(8, objective="fame")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="AP187"):
        plan_options(8, gap=1.5)
