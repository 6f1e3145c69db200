"""A run of blocks has the edges of its blocks, whichever way they are found."""

from __future__ import annotations

from collections import Counter

import pytest
from random_suites import seeds
from small_graphs import mlp, random_graph

from autoparallel.planner.graph.graph import Ref
from autoparallel.planner.stage.structure import Edge, Run, Structure, Use


def edges_one_by_one(structure: Structure, start: int, stop: int) -> list[tuple[Edge, ...]]:
    """By block, from the definition: what the run makes, what it receives first by which use."""
    graph, template = structure.graph, structure.blocks.template
    received: dict[Ref, Use] = {}
    read: set[Ref] = set()
    found = []
    for at in range(start, stop):
        own = []
        for ref, uses in structure.outside[at]:
            again = ref in read
            read.add(ref)
            if graph[ref.name].kind == "parameter":
                own.append(Edge("parameter", structure.parameter_key(ref.name), 0, uses))
            elif structure.position[ref.name] >= start:
                own.append(Edge("block", template[ref.name], ref.index, uses, None, again))
            else:
                first = received.setdefault(ref, uses[0])
                own.append(Edge("received", template[ref.name], ref.index, uses, first, again))
        found.append(tuple(own))
    return found


@pytest.mark.parametrize("seed", seeds(12))
def test_the_edges_of_every_run_are_those_of_its_blocks(seed: int) -> None:
    graph, blocks = mlp(6) if seed == 0 else random_graph(seed, 9, num_blocks=5)
    structure = Structure(graph, blocks)
    size = len(blocks.blocks)
    for start in range(size):
        for stop in range(start + 1, size + 1):
            run = structure.run(start, stop)
            expected = edges_one_by_one(structure, start, stop)
            assert list(run.edges_of) == expected
            assert run.edges == Counter(edge for edges in expected for edge in edges)
            check_classes(run)


def check_classes(run: Run) -> None:
    classes, of_block = run.classes
    own = list(zip(run.kinds, run.edges_of, strict=True))
    assert [(classes[n].kind, classes[n].edges) for n in of_block] == own
    assert [each.count for each in classes] == [of_block.count(n) for n in range(len(classes))]
    assert len({(each.kind, each.edges) for each in classes}) == len(classes)


def test_another_batch_has_the_same_runs_and_its_own_bytes() -> None:
    graph, blocks = mlp(4)
    structure = Structure(graph, blocks)
    other = structure.at_batch(4 * graph.batch_size)
    run = structure.run(0, len(blocks.blocks))
    assert other.run(0, len(blocks.blocks)) is run
    for each in (structure, other):
        sizes = [spec.num_bytes for name in run.leaves for spec in each.graph[name].outputs]
        assert each.leaf_bytes(run, 1) == sum(sizes) == sum(each.leaf_bytes_of_blocks(1))
        assert all(each.graph.batch_dims[name] for name in run.leaves)
        assert 4 * each.leaf_bytes(run, 4) == sum(sizes)
    assert other.leaf_bytes(run, 1) > structure.leaf_bytes(run, 1) > 0
    assert other.readers == Structure(other.graph, blocks).readers
