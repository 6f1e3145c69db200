"""The truth of asynchronous schedules, held to rules worked out by hand and to the tables."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.cost_model.simulator.actions import (
    BACKWARD,
    FORWARD,
    versions_held,
    weight_versions,
)
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.verify.reference import UpdateRule, run_replay

LEARNING_RATE = 0.1
ROWS = (1.0, -2.0, 0.5, 3.0)
SIZES = [(stages, count) for stages in (2, 3, 4, 6) for count in (1, 2, 4, 8, 12, 24)]


class Product(nn.Module):
    """``b * (a * x)``, ``a`` of the first stage and ``b`` of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b * (self.a * x)


def replayed(weights: str, num_updates: int) -> tuple[float, float]:
    rule = UpdateRule(weights, num_updates, 2, {"a": 0, "b": 1})
    batch = {"x": torch.tensor(ROWS, dtype=torch.float64)}
    parts = len(ROWS) // num_updates
    found = run_replay(
        Product(),
        [batch],
        rule,
        loss=lambda model, part: model(part["x"]).mean(),
        build_optimizer=lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
        split=lambda whole: [{"x": x} for x in whole["x"].split(parts)],
    )
    return float(found.weights["a"]), float(found.weights["b"])


def by_hand(weights: str) -> tuple[float, float]:
    """Of loss b a x: the first stage has gradient b x, the second a x, at these weights.

    The first stage runs one forward ahead, so its forward has the weights before the last
    update; the second has no other between its forward and its backward.
    """
    a, b = [2.0, 2.0], [3.0]
    for x in ROWS:
        newest, older = a[-1], a[-2]
        a.append(newest - LEARNING_RATE * b[-1] * x)
        b.append(b[-1] - LEARNING_RATE * older * x)
    return a[-1], b[-1]


def test_the_replay_of_a_product_is_the_rule_worked_out_by_hand() -> None:
    assert replayed("stashed", 4) == pytest.approx(by_hand("stashed"), rel=1e-14)


def test_a_newest_backward_differs_where_it_reads_the_weights() -> None:
    """Of loss (a x)^2 / 2, one op squared: forward a_f x, backward (a_f x) x, whatever a is then;
    of a a x / 2 the backward reads the newest a itself.
    """

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.a * self.a * x / 2

    def run(weights: str) -> float:
        batch = {"x": torch.tensor(ROWS, dtype=torch.float64)}
        found = run_replay(
            Square(),
            [batch],
            UpdateRule(weights, 4, 2, {"a": 0}),
            loss=lambda model, part: model(part["x"]).mean(),
            build_optimizer=lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
            split=lambda whole: [{"x": x} for x in whole["x"].split(1)],
        )
        return float(found.weights["a"])

    newest, stashed = 2.0, [2.0, 2.0]
    for x in ROWS:
        newest -= LEARNING_RATE * newest * x
        stashed.append(stashed[-1] - LEARNING_RATE * stashed[-2] * x)
    assert run("latest") == pytest.approx(newest, rel=1e-14)
    assert run("stashed") == pytest.approx(stashed[-1], rel=1e-14)


def test_two_buffered_versions_are_one_update_late() -> None:
    """W(t+1) = W(t) - lr grad f(W(t-1)), of groups of two rows."""
    a, b = [2.0, 2.0], [3.0, 3.0]
    for x in (sum(ROWS[:2]) / 2, sum(ROWS[2:]) / 2):
        older = a[-2], b[-2]
        a.append(a[-1] - LEARNING_RATE * older[1] * x)
        b.append(b[-1] - LEARNING_RATE * older[0] * x)
    assert replayed("double-buffered", 2) == pytest.approx((a[-1], b[-1]), rel=1e-14)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "ampnet"])
@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_the_tables_use_the_versions_of_the_rule(name: str, stages: int, count: int) -> None:
    schedule = build_schedule(name, stages, count)
    names = {str(stage): stage for stage in range(stages)}
    rule = UpdateRule(schedule.weights, count // schedule.per_update, stages, names)
    for action, version in weight_versions(schedule).items():
        of = {FORWARD: rule.forward_version, BACKWARD: rule.backward_version}[action.kind]
        assert version == of(str(action.stage), action.microbatch // schedule.per_update)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_stages_hold_as_many_versions_as_published(stages: int, count: int) -> None:
    """PipeDream S - s once the pipeline is full, PipeDream-2BW two, AMPNet one."""
    for name, most in (("pipedream", None), ("pipedream-2bw", 2), ("ampnet", 1)):
        schedule = build_schedule(name, stages, count)
        updates = count // schedule.per_update
        for stage in range(stages):
            published = min(stages - stage if most is None else most, updates)
            if most is None and count < 2 * (stages - stage) - 2:
                assert versions_held(schedule, stage) <= published
            else:
                assert versions_held(schedule, stage) == published
