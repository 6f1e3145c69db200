"""Stages of any sizes in a deep model: cut between groups of blocks, then near there."""

from __future__ import annotations

import pytest
from small_graphs import cluster, mlp

from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import DEFAULT
from autoparallel.planner.inter_op.inter_op import PipelineSearch
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search import branch_and_bound
from autoparallel.planner.search.bound import work_bound
from autoparallel.planner.search.branch_and_bound import (
    TOLERANCE,
    PipelineProposal,
    SearchNode,
    best_first,
)
from autoparallel.planner.search.context import SearchContext
from autoparallel.planner.search.space import mixed_tiling, uniform_tiling

LAYERS = 12


def node() -> SearchNode:
    graph, blocks = mlp(LAYERS)
    job = SearchContext.of(graph, blocks, cluster(4), Request(8), rules=rules, basis=DEFAULT)
    costs = job.solvers.costs(1)
    return SearchNode(1, costs, mixed_tiling(job.cluster, 4, costs.place), (2, 3, 4))


@pytest.mark.parametrize("at", [(0, 1, 2, 3), (0, 1, 3, 4, 9, 12), (0, 12)])
def test_a_band_of_cuts_has_the_class_between_any_two_cuts(at: tuple[int, ...]) -> None:
    runs = node().costs.runs
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
    runs = node().costs.runs
    at = (0, 1, 2, 6, runs.classes.num_blocks)
    pairs = [(a, b) for a in range(len(at)) for b in range(a + 1, len(at))]
    for num_blocks in range(runs.classes.num_blocks + 1):
        steps = [b - a for a, b in pairs if at[b] - at[a] <= num_blocks]
        assert runs.cuts(at).width(num_blocks) == max(steps, default=0)


@pytest.mark.parametrize("most", [5, 7])
def test_cuts_between_groups_end_near_the_best_of_all(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, coarse = node(), node()
    exact.look(float("inf"))
    monkeypatch.setattr(branch_and_bound, "MOST_CUTS", most)
    coarse.look(float("inf"))
    assert exact.estimate * (1 - 2e-3) <= coarse.estimate <= exact.estimate * 1.02
    assert coarse._best is not None
    stages = coarse._best.stages
    assert [s.stop for s in stages] == [*(s.start for s in stages[1:]), exact.num_blocks]
    assert coarse._known_seconds(stages) == pytest.approx(coarse._best.seconds)


def uniform_quests() -> list[SearchNode]:
    """One for each number of stages and micro-batch size, with the bound that takes no time."""
    graph, blocks = mlp(LAYERS)
    job = SearchContext.of(graph, blocks, cluster(4), Request(8), rules=rules, basis=DEFAULT)
    found = []
    for rows in (4, 2, 1):
        costs, count = job.solvers.costs(rows), job.num_microbatches(rows)
        work = work_bound(job, (rows,)) / count
        for number in (1, 2, 4):
            tiling = uniform_tiling(job.cluster, number, costs.place)
            assert tiling is not None
            least = work * (count + number - 1) * (1 - TOLERANCE)
            found.append(SearchNode(rows, costs, tiling, (number,), least))
    return found


def followed(nodes: list[SearchNode], most: int) -> list[PipelineProposal]:
    return list(best_first(nodes, lambda estimate, found: len(found) >= most))


def test_quests_that_are_looked_at_in_their_turn_give_the_same_drafts() -> None:
    late, before = uniform_quests(), uniform_quests()
    least = [each.estimate for each in late]
    for each in before:
        each.look(float("inf"))
    assert all(0 < own <= each.estimate for own, each in zip(least, before, strict=True))
    assert followed(late, 4) == followed(before, 4)


def test_a_quest_whose_turn_does_not_come_is_not_looked_at() -> None:
    nodes = uniform_quests()
    nodes[-1].estimate = 1e9
    followed(nodes, 2)
    assert [each.is_looked_at for each in nodes][-1] is False
    assert any(each.is_looked_at for each in nodes)


def test_the_best_of_several_numbers_of_stages_is_the_best_of_each() -> None:
    own = node()
    costs, numbers = own.costs, (2, 3, 4)
    every = costs.runs.every

    def search() -> PipelineSearch:
        return PipelineSearch(own.tiling, every, costs.seconds)

    found = search().best_of(numbers)
    each = [best for number in numbers if (best := search().best(number)) is not None]
    assert found is not None
    assert found.seconds == pytest.approx(min(best.seconds for best in each), rel=1e-12)
    under = found.seconds * (1 - 1e-9)
    assert PipelineSearch(own.tiling, every, costs.seconds, cutoff=under).best_of(numbers) is None
