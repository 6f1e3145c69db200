"""Stages of any sizes in a deep model: cut between groups of blocks, then near there."""

from __future__ import annotations

import pytest
from small_graphs import cluster, mlp

from autoparallel.planner import rules
from autoparallel.planner.pricing.basis import DEFAULT
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search import quests as search_quests
from autoparallel.planner.search.job import Job
from autoparallel.planner.search.quests import Quest
from autoparallel.planner.search.space import mixed_tiling

LAYERS = 12


def quest() -> Quest:
    graph, blocks = mlp(LAYERS)
    job = Job.of(graph, blocks, cluster(4), Request(8), rules=rules, basis=DEFAULT)
    costs = job.costs(1)
    return Quest(1, costs, mixed_tiling(job.cluster, 4, costs.place), (2, 3, 4))


@pytest.mark.parametrize("at", [(0, 1, 2, 3), (0, 1, 3, 4, 9, 12), (0, 12)])
def test_a_band_of_cuts_has_the_class_between_any_two_cuts(at: tuple[int, ...]) -> None:
    runs = quest().costs.runs
    last = runs.classes.num_blocks
    at = (*(cut for cut in at if cut < last), last)
    band = runs.cuts(at).band
    assert band.shape == (len(at), len(at) - 1)
    for first, start in enumerate(at):
        for steps in range(len(at) - 1):
            none = len(runs.classes.firsts)
            end = first + steps + 1
            wanted = runs.classes.numbers[start, at[end]] if end < len(at) else none
            assert band[first, steps] == wanted


def test_the_width_is_of_the_longest_run_within_the_blocks() -> None:
    runs = quest().costs.runs
    at = (0, 1, 2, 6, runs.classes.num_blocks)
    pairs = [(a, b) for a in range(len(at)) for b in range(a + 1, len(at))]
    for num_blocks in range(runs.classes.num_blocks + 1):
        steps = [b - a for a, b in pairs if at[b] - at[a] <= num_blocks]
        assert runs.cuts(at).width(num_blocks) == max(steps, default=0)


@pytest.mark.parametrize("most", [5, 7])
def test_cuts_between_groups_end_near_the_best_of_all(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, coarse = quest(), quest()
    exact.look(float("inf"))
    monkeypatch.setattr(search_quests, "MOST_CUTS", most)
    coarse.look(float("inf"))
    assert exact.estimate * (1 - 2e-3) <= coarse.estimate <= exact.estimate * 1.02
    assert coarse._best is not None
    stages = coarse._best.stages
    assert [s.stop for s in stages] == [*(s.start for s in stages[1:]), exact.num_blocks]
    assert coarse._known_seconds(stages) == pytest.approx(coarse._best.seconds)
