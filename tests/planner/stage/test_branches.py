"""Which stages need which, which branches a model has, and the pipelines that use them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from random_suites import seeds
from small_graphs import cluster, op, weight, with_batch

from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref
from autoparallel.planner.inter_op.branches_search import BOUND_STEP, branch_pipelines
from autoparallel.planner.inter_op.inter_op import Floats, StageChoice, Table
from autoparallel.planner.stage.branches import (
    Section,
    StagePlacement,
    find_sections,
    parallel_sections,
    reduce_edges,
    stage_depths,
    stage_edges,
)
from autoparallel.planner.stage.structure import Structure

ROWS, WIDTH = 4, 8


def fork(*, lengths: tuple[int, ...] = (2, 2)) -> Structure:
    """A stem, arms of so many linear layers each, and what joins them: one block each."""
    nodes = [Node("x", "input", outputs=(op("x", "", (), ROWS, WIDTH).spec,))]
    blocks: list[Block] = []

    def add(name: str, path: str, *args: Ref, shape: tuple[int, ...] = (ROWS, WIDTH)) -> Ref:
        parameters = (f"{name}.weight",) if path == "linear.default" else ()
        nodes.extend(weight(each, WIDTH, WIDTH) for each in parameters)
        refs = (*args, *(Ref(each) for each in parameters))
        nodes.append(op(name, path, refs, *shape))
        blocks.append(Block(name, name, (name,), parameters))
        return Ref(name)

    stem = add("stem", "linear.default", Ref("x"))
    ends = []
    for arm, length in enumerate(lengths):
        value = stem
        for layer in range(length):
            value = add(f"arm{arm}.{layer}", "linear.default", value)
        ends.append(value)
    joined = ends[0]
    for index, end in enumerate(ends[1:]):
        joined = add(f"join{index}", "add.Tensor", joined, end)
    nodes.append(op("loss", "mean.default", (joined,)))
    blocks[-1] = Block("join", "join", (*blocks[-1].nodes, "loss"), ())
    graph = with_batch(Graph(tuple(nodes), Ref("loss"), ROWS))
    return Structure(graph, Blocks(tuple(blocks)))


def test_layers_in_a_row_have_no_branches() -> None:
    assert parallel_sections([(0, 1), (1, 2), (2, 3), (0, 3)], [1] * 4) == ()
    assert find_sections(fork(lengths=(3, 0))) == ()


def test_arms_between_a_stem_and_a_join_are_branches() -> None:
    structure = fork(lengths=(2, 1))
    assert find_sections(structure) == (Section((1, 3, 4)),)
    assert find_sections(structure)[0].branches == ((1, 3), (3, 4))


def test_three_arms_are_three_branches() -> None:
    assert find_sections(fork(lengths=(2, 2, 2)))[0].bounds == (1, 3, 5, 7)


def test_two_towers_need_no_stem() -> None:
    edges = [(0, 1), (1, 4), (2, 3), (3, 4)]
    assert parallel_sections(edges, [1] * 5) == (Section((0, 2, 4)),)


def test_sections_one_after_the_other_are_all_found() -> None:
    """Two wide modules: 0 → {1, 2} → 3 → {4, 5} → 6."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)]
    assert parallel_sections(edges, [1] * 7) == (Section((1, 2, 3)), Section((4, 5, 6)))


def test_what_has_few_ops_beside_the_rest_is_no_branch() -> None:
    edges = [(0, 1), (1, 2), (2, 4), (3, 4)]
    assert parallel_sections(edges, [10, 10, 10, 5, 1]) == (Section((0, 3, 4)),)
    assert parallel_sections(edges, [100, 100, 100, 5, 1]) == ()


def test_stages_cut_at_branches_do_not_need_each_other() -> None:
    structure = fork(lengths=(2, 2))
    assert stage_edges(structure, [0, 1, 3, 5]) == (
        (0, 1, 1.0),
        (0, 2, 1.0),
        (1, 3, 0.5),
        (2, 3, 0.5),
    )
    assert stage_edges(structure, [0, 2, 4]) is None


def test_an_edge_over_a_slower_link_than_the_one_before_takes_longer() -> None:
    """Stages 0 and 1 on one host, 2 and 3 on the next: 3 is beside 2, and far from 1."""
    on = cluster(2, num_hosts=2, bytes_per_second=1e9)
    places = StagePlacement(on, tuple((rank, rank) for rank in range(4)))
    assert stage_edges(fork(lengths=(2, 2)), [0, 1, 3, 5], places) == (
        (0, 1, 1.0),
        (0, 2, 1.0),
        (1, 3, 0.5 * 10),
        (2, 3, 0.5),
    )


def test_an_edge_that_others_imply_is_none() -> None:
    """Stage 3 reads of the stem too: by way of the arms it waits for it anyway."""
    assert reduce_edges([(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)], 4) == (
        (0, 1),
        (0, 2),
        (1, 3),
        (2, 3),
    )


def test_depth_is_the_longest_way_to_the_end() -> None:
    """0 → 1 → 2 → 4 and 3 → 4: stage 3 is one before the end, stage 0 three before it."""
    edges = tuple((s, t, 1.0) for s, t in ((0, 1), (1, 2), (2, 4), (3, 4)))
    assert stage_depths(edges, 5) == (4, 3, 2, 2, 1)


def random_table(rng: random.Random, num_blocks: int, num_devices: int) -> Table:
    """Costs that grow with the stages to come, as those that memory binds do."""
    base = {
        (first, size): rng.uniform(0.5, 2.0) / size
        for first in range(num_devices)
        for size in range(1, num_devices + 1)
    }
    blocks = [rng.uniform(0.2, 2.0) for _ in range(num_blocks)]

    def costs(left: int, first: int, size: int) -> Floats:
        found = np.full((num_blocks + 1, num_blocks + 1), np.inf)
        for start, stop in combinations(range(num_blocks + 1), 2):
            found[start, stop] = sum(blocks[start:stop]) * base[first, size] * (1 + 0.1 * left)
        return found

    return Table(num_blocks, num_devices, lambda first: (1, 2), costs)


def runs(start: int, stop: int, first: int, end: int) -> Iterator[list[StageChoice]]:
    """Every row of stages for these blocks on these devices."""
    if start == stop and first == end:
        yield []
    for middle, size in product(range(start + 1, stop + 1), (1, 2)):
        if first + size <= end:
            for rest in runs(middle, stop, first + size, end):
                yield [StageChoice(start, middle, first, size), *rest]


def every_seconds(table: Table, section: Section, count: int) -> Iterator[float]:
    """T of every way to give branches devices of their own."""
    ranges = [(0, section.start), *section.branches, (section.stop, table.num_blocks)]
    for cuts in combinations(range(table.num_devices + 1), len(ranges) - 1):
        devices = list(zip((0, *cuts), (*cuts, table.num_devices), strict=True))
        ways = [list(runs(*blocks, *own)) for blocks, own in zip(ranges, devices, strict=True)]
        for lead, *branches, last in product(*ways):
            if all(branches) and last:
                yield seconds_of(table, lead, branches, last, count)


def seconds_of(
    table: Table,
    lead: list[StageChoice],
    branches: list[list[StageChoice]],
    last: list[StageChoice],
    count: int,
) -> float:
    def costs(row: list[StageChoice], after: int) -> list[float]:
        return [
            float(table.costs(after + len(row) - i, s.first_device, s.num_devices)[s.start, s.stop])
            for i, s in enumerate(row)
        ]

    deepest = max(len(branch) for branch in branches)
    own = [costs(branch, len(last)) for branch in branches]
    ends = [*costs(lead, len(last) + deepest), *costs(last, 0)]
    slowest = max([*ends, *(cost for branch in own for cost in branch)])
    return sum(ends) + max(map(sum, own)) + (count - 1) * slowest


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("count", [1, 6])
def test_branch_pipelines_equal_every_cut_and_split_of_devices(seed: int, count: int) -> None:
    rng = random.Random(seed)
    section = rng.choice([Section((0, 2, 4)), Section((1, 2, 4)), Section((1, 2, 3, 4))])
    fewest = len(section.branches) + 1 + (section.start > 0)
    table = random_table(rng, 5, rng.randint(fewest, 5))
    least = min(every_seconds(table, section, count))
    found = branch_pipelines(table, section, count)[0]
    covered = [block for s in found.stages for block in range(s.start, s.stop)]
    assert covered == list(range(5))
    assert found.seconds >= least * (1 - 1e-12)
    assert found.seconds <= least * (1 + 1e-12 if count == 1 else BOUND_STEP)


def test_equal_towers_on_a_device_each_take_as_long_as_one() -> None:
    """Towers of 2 s and a head of 1 s, one device each: 2 + 1 s, where in a row 2 + 2 + 1."""
    seconds = np.array([2.0, 2.0, 1.0])

    def costs(left: int, first: int, size: int) -> Floats:
        found = np.full((4, 4), np.inf)
        for start, stop in combinations(range(4), 2):
            found[start, stop] = seconds[start:stop].sum()
        return found

    table = Table(3, 3, lambda first: (1,), costs)
    best = branch_pipelines(table, Section((0, 1, 2)), 1)[0]
    assert best.seconds == 3.0
    assert best.stages == tuple(StageChoice(i, i + 1, i, 1) for i in range(3))
    assert branch_pipelines(table, Section((0, 1, 2)), 5)[0].seconds == 3 + 4 * 2
