"""What the interpreter prepares of a row, against the row itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from autoparallel.cost_model.simulator.actions import COMPUTE, REDUCE, SENDS
from autoparallel.planner.schedules.schedules import build_schedule
from autoparallel.runtime.step.pipeline import Prepared, prepare

NAMES = {"1f1b": 4, "gpipe": 4, "zb-h1": 4, "zbv": 8, "dualpipev": 8, "chimera": 4, "pipedream": 4}


def rows(name: str) -> Iterator[tuple[frozenset[int], Sequence[Prepared]]]:
    """The stages of each of four ranks and its actions, of a schedule of 8 micro-batches."""
    schedule = build_schedule(name, NAMES[name], 8, num_chunks=NAMES[name] // 4)
    for rank in range(4):
        stages = frozenset(schedule.stages(rank))
        yield stages, prepare(schedule, stages)


@pytest.mark.parametrize("name", NAMES)
def test_each_send_of_a_row_follows_one_action_that_makes_what_it_sends(name: str) -> None:
    for _, row in rows(name):
        made = [p.key for p in row if p.is_sent]
        sent = [p.key for p in row if p.action.kind in SENDS]
        assert sorted(made) == sorted(sent)
        assert len(set(made)) == len(made)
        assert all(p.action.kind in COMPUTE for p in row if p.is_sent)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_of_a_stage_is_what_gives_its_weights_gradients_last(name: str) -> None:
    """Every REDUCE is preceded, in its stage, by exactly one last backward since the one before."""
    for stages, row in rows(name):
        for stage in stages:
            own = [
                p for p in row if p.action.stage == stage and p.action.kind in ("B", "W", REDUCE)
            ]
            before = [own[at - 1] for at, p in enumerate(own) if p.action.kind == REDUCE]
            assert [p for p in own if p.is_last and p.action.kind != REDUCE] == before
        reduces = [p for p in row if p.action.kind == REDUCE]
        assert [p.is_last for p in reduces] == [False] * (len(reduces) - 1) + [True]


def test_a_rank_without_stages_has_an_empty_row() -> None:
    assert prepare(build_schedule("1f1b", 4, 8), frozenset()) == ()
