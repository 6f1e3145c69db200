"""Blocks that begin stages."""

from __future__ import annotations

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request


def planned(*paths: str, forced: Forced | None = None, devices: int = 4) -> Plan:
    graph, blocks = mlp(4, rows=4, width=24, inner=48)
    request = Request(4, forced=forced or Forced(), stage_at=paths)
    return plan(graph, blocks, cluster(devices), request)


def begins(found: Plan) -> list[str]:
    return [stage.blocks[0].name for stage in found.stages]


@pytest.mark.parametrize(
    "paths",
    [
        ("in",),
        ("layers.1", "layers.3"),
        pytest.param(("layers.1",), marks=pytest.mark.slow),
        pytest.param(("layers.2",), marks=pytest.mark.slow),
    ],
)
def test_stages_begin_where_asked(paths: tuple[str, ...]) -> None:
    assert set(paths) <= set(begins(planned(*paths)))


def test_with_as_many_stages_as_are_begun_the_cut_is_that_one() -> None:
    assert begins(planned("layers.3", forced=Forced(pp=2), devices=2)) == ["in", "layers.3"]


def test_the_best_of_all_cuts_is_the_free_one_and_none_is_faster() -> None:
    forced = Forced(pp=2, schedule="1f1b", num_microbatches=4)
    free = planned(forced=forced, devices=2)
    own = free.prediction.step_seconds
    names = ["layers.0", "layers.1", "layers.2", "layers.3", "out"]
    every = {
        name: planned(name, forced=forced, devices=2).prediction.step_seconds for name in names
    }
    assert min(every.values()) == pytest.approx(own, rel=1e-6)
    assert every[begins(free)[1]] == pytest.approx(own, rel=1e-6)


@pytest.mark.parametrize(
    ("paths", "forced", "code", "says"),
    [
        (("layers.9",), Forced(), "AP181", "layers."),
        (("layers.1", "layers.2"), Forced(pp=2), "AP183", "3 stages"),
        (("layers.0", "layers.1", "layers.2", "layers.3"), Forced(), "AP183", "5 stages"),
    ],
)
def test_what_cannot_be_is_told(
    paths: tuple[str, ...], forced: Forced, code: str, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        planned(*paths, forced=forced)
    assert caught.value.code == code
    assert says in str(caught.value)
