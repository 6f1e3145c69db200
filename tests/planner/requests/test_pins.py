"""Pins: what the user fixes is in the plan, and the plan is the best of those that have it."""

from __future__ import annotations

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.graph.layout import format_layout
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.pins import PENALTY_SECONDS, parse_pin
from autoparallel.planner.requests.request import Forced, Request


def planned(*pins: str, forced: Forced | None = None, num_devices: int = 2) -> Plan:
    graph, blocks = mlp(3, rows=8, width=24, inner=48)
    request = Request(8, forced=forced or Forced(), pins=tuple(parse_pin(pin) for pin in pins))
    found = plan(graph, blocks, cluster(num_devices), request)
    assert evaluate(graph, blocks, found, found.cluster).step_seconds == pytest.approx(
        found.prediction.step_seconds, rel=1e-6
    )
    return found


def layout(found: Plan, name: str) -> str:
    """How the stage that holds a node has it, under its own name or the first layer's."""
    template = name.replace("layers.1", "layers.0").replace("layers.2", "layers.0")
    for stage in found.stages:
        if any(name.startswith(f"{block.name}.") for block in stage.blocks):
            return format_layout((stage.layouts.get(name) or stage.layouts[template]).outputs[0])
    raise KeyError(name)


@pytest.mark.parametrize("placement", ["S(0)", "S(1)", "R"])
def test_a_pinned_weight_is_held_as_pinned_in_every_layer(placement: str) -> None:
    found = planned(f"layers.*.up.weight={placement}@tp", forced=Forced(tp=1 + (placement != "R")))
    if placement != "R":
        assert [stage.mesh.axes for stage in found.stages] == [("tp",)]
        assert {layout(found, f"layers.{i}.up.weight") for i in range(3)} == {placement}


def test_what_is_the_optimum_anyway_costs_nothing_when_pinned() -> None:
    free = planned(forced=Forced(tp=2))
    own = layout(free, "layers.0.up.weight")
    pinned = planned(f"layers.*.up.weight={own}@tp", forced=Forced(tp=2))
    assert pinned.prediction.step_seconds == pytest.approx(free.prediction.step_seconds)


def test_a_pin_is_never_faster_than_free_and_the_best_pin_is_as_fast() -> None:
    """Over all three ways to hold the weights of "up" the fastest is the free optimum."""
    forced = Forced(dp=1, pp=1)
    free = planned(forced=forced).prediction.step_seconds
    every = [
        planned(f"layers.*.up.weight={placement}@tp", forced=forced).prediction.step_seconds
        for placement in ("S(0)", "S(1)", "R")
    ]
    assert min(every) == pytest.approx(free, rel=1e-6)
    assert all(seconds >= free * (1 - 1e-9) for seconds in every)


def test_one_layer_can_be_pinned_alone() -> None:
    found = planned("layers.1.up.weight=S(1)@tp", forced=Forced(dp=1, pp=1))
    free = planned(forced=Forced(dp=1, pp=1))
    assert layout(found, "layers.1.up.weight") == "S(1)"
    assert layout(found, "layers.2.up.weight") == layout(free, "layers.2.up.weight") != "S(1)"
    assert {block.kind for stage in found.stages for block in stage.blocks} == {
        block.kind for stage in free.stages for block in stage.blocks
    }


def test_a_value_can_be_pinned_where_it_is_made() -> None:
    found = planned("gelu.*=S(1)@tp", forced=Forced(dp=1, pp=1))
    assert format_layout(found.stages[0].layouts["gelu.0"].outputs[0]) == "S(1)"


def test_a_split_pin_keeps_meshes_without_its_axis_away() -> None:
    """Free, the batch is split; the pin needs an axis "tp" in the stages that it concerns."""
    found = planned("layers.*.down.weight=S(1)@tp", num_devices=4)
    for stage in found.stages:
        if any(block.name.startswith("layers") for block in stage.blocks):
            assert "tp" in stage.mesh.axes
    assert all(each.step_seconds < PENALTY_SECONDS for each in found.alternatives)


@pytest.mark.parametrize(
    ("pin", "code", "says"),
    [
        ("layers.*.up.weight", "AP180", "PATH=LAYOUT@AXIS"),
        ("layers.*.up.weight=S0@tp", "AP180", "'S0' is not a layout"),
        ("layers.*.up.weight=S(0)@xp", "AP182", "dp, ep, cp, tp"),
        ("layers.*.upp.weight=S(0)@tp", "AP181", "layers.*.up.weight"),
        ("layers.*.up.weight=S(2)@tp", "AP183", "the last is S(1)"),
        ("layers.*.up.weight=P@tp", "AP183", "sharded or replicated"),
    ],
)
def test_a_pin_that_means_nothing_is_named(pin: str, code: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(pin)
    assert caught.value.code == code
    assert says in str(caught.value)
    assert "layers" in str(caught.value)


def test_two_pins_that_contradict_each_other_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        planned("layers.*.up.weight=S(0)@tp", "layers.1.up.weight=S(1)@tp")
    assert caught.value.code == "AP183"
    assert "layers.1.up.weight=S(1)@tp" in str(caught.value)


def test_a_pin_that_no_mesh_can_meet_is_named() -> None:
    """24 rows cannot be split over 5 ranks; and parameters are not split over "dp"."""
    with pytest.raises(UsageError) as caught:
        planned("stem.weight=S(0)@tp", forced=Forced(tp=5), num_devices=5)
    assert caught.value.code == "AP184"
    assert "stem.weight=S(0)@tp" in str(caught.value)
    with pytest.raises(UsageError, match="AP184"):
        planned("stem.weight=S(0)@dp", forced=Forced(dp=2))
