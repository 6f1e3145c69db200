"""Integer programs to compare solvers on: random tables, random graphs, and real models.

Half of them have a memory limit between the least that any layouts need and what the fastest
take, so that the limit binds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np
from schedule_cases import Models
from small_graphs import cluster, mlp, random_graph

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.choices import Restriction
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.graph.layout import Mesh
from autoparallel.planner.integer_programs.ilp import (
    Alternative,
    Coupling,
    Memory,
    Problem,
    SharedBytes,
    Side,
    memory_bytes,
    optimize,
)
from autoparallel.planner.stage.recompute_policy import NO_RECOMPUTE, uniform_policy
from autoparallel.planner.stage.stage_model import StageModel
from autoparallel.planner.stage.stage_problem import StageOptions, StageProblem
from autoparallel.planner.stage.structure import Structure

MODELS = Models(
    {
        "gpt": (
            "examples/gpt.py",
            {"d_model": 1024, "n_head": 8, "n_layer": 2, "seq": 512, "vocab": 4096},
        ),
        "skip": ("tests/models/long_skip.py", {"width": 1024}),
    },
    sequences={"gpt": 512},
)


LINES = Mesh(("tp",), (2,)), Mesh(("tp",), (4,)), Mesh(("dp",), (2,))
PLANES = (Mesh(("dp", "tp"), (2, 2)),)


@dataclass(frozen=True)
class Case:
    """A program to build; ``share`` is where the limit lies between least and fastest."""

    name: str
    problem: Callable[[], Problem]
    share: float | None
    is_quick: bool = False
    """Whether all sessions of tests solve it, or only those that have time."""

    def made(self) -> Problem:
        problem = self.problem()
        return problem if self.share is None else tightened(problem, self.share)


def tightened(problem: Problem, share: float) -> Problem:
    """The problem with a limit that binds, if time and memory are at odds at all."""
    assert problem.memory is not None
    free = replace(problem, memory=replace(problem.memory, limit=np.inf))
    fastest = memory_bytes(problem.memory, optimize(replace(free, memory=None)).choices)
    costs = tuple(np.zeros(len(own)) for own in problem.costs)
    thrifty = Problem(costs, memory=free.memory, memory_weight=1e-6)
    least = memory_bytes(problem.memory, optimize(thrifty).choices)
    return replace(problem, memory=replace(problem.memory, limit=least + share * (fastest - least)))


def stage_problem(
    graph: Graph, blocks: Blocks, mesh: Mesh, on: Cluster, *, merge: bool = True
) -> StageProblem:
    prices = Prices(mesh, on, tuple(range(mesh.size)), "fp32", "adamw", rules)
    model = StageModel(
        Structure(graph, blocks), prices, Restriction(), on.hosts[0].link, merge=merge
    )
    return StageProblem(model, model.structure.run(0, len(blocks.blocks)))


def random_problem(rng: random.Random, *, with_memory: bool) -> Problem:
    sizes = [rng.randint(2, 4) for _ in range(5)]
    costs = tuple(np.array([rng.uniform(0, 5) for _ in range(size)]) for size in sizes)

    def side(decision: int, num_classes: int) -> Side:
        return Side(
            decision, np.array([rng.randrange(num_classes) for _ in range(sizes[decision])])
        )

    couplings = []
    for _ in range(5):
        members = rng.sample(range(5), rng.randint(2, 4))
        rows, columns = rng.randint(2, 3), rng.randint(2, 3)
        matrix = np.array(
            [[rng.choice((0.0, rng.uniform(0, 4))) for _ in range(columns)] for _ in range(rows)]
        )
        consumers = tuple(side(member, columns) for member in members[1:])
        couplings.append(Coupling(side(members[0], rows), consumers, matrix))
    memory = _random_memory(rng, sizes) if with_memory else None
    return Problem(costs, tuple(couplings), memory)


def _random_memory(rng: random.Random, sizes: list[int]) -> Memory:
    linear = tuple(np.array([rng.uniform(0, 9e6) for _ in range(size)]) for size in sizes)
    holders = tuple(
        Side(d, np.array([rng.randrange(-1, 2) for _ in range(sizes[d])])) for d in (0, 1, 3)
    )
    shared = SharedBytes(holders, np.array([3e6, 8e6]))
    peaks = tuple(Alternative(((d, linear[d] * 2),)) for d in range(len(sizes)))
    memory = Memory(0.0, 1e6, linear, (shared,), (peaks,))
    totals = sorted(
        memory_bytes(memory, choices) for choices in product(*(range(size) for size in sizes))
    )
    limit = totals[len(totals) // 5]
    return Memory(limit, memory.constant, linear, (shared,), (peaks,))


def _of_tables(seed: int) -> Problem:
    return random_problem(random.Random(seed), with_memory=True)


def _of_random_graph(seed: int) -> Problem:
    graph, blocks = random_graph(seed, 5, num_blocks=2)
    problem = _of_graph(seed, graph, blocks)
    assert problem.memory is not None
    return replace(problem, memory=_enlarged(problem.memory, 1e5))


def _enlarged(memory: Memory, factor: float) -> Memory:
    """Bytes as of a model of a size that there is: the toys' limits would bind by single bytes."""

    def shared(each: SharedBytes) -> SharedBytes:
        return replace(each, num_bytes=each.num_bytes * factor)

    def alternative(each: Alternative) -> Alternative:
        linear = tuple((at, sizes * factor) for at, sizes in each.linear)
        return Alternative(linear, tuple(map(shared, each.shared)))

    return Memory(
        memory.limit,
        memory.constant,
        tuple(sizes * factor for sizes in memory.linear),
        tuple(map(shared, memory.shared)),
        tuple(tuple(map(alternative, peak)) for peak in memory.peaks),
    )


def _of_model(seed: int, model: str, meshes: tuple[Mesh, ...] = LINES) -> Problem:
    return _of_graph(seed, *_captured(model), meshes)


def _of_mlp(seed: int) -> Problem:
    return _of_graph(seed, *mlp(3, rows=256, width=1024, inner=4096))


@cache
def _captured(model: str) -> tuple[Graph, Blocks]:
    _, program = MODELS.captured(model)
    return program.graph, program.blocks


def _of_graph(seed: int, graph: Graph, blocks: Blocks, meshes: tuple[Mesh, ...] = LINES) -> Problem:
    """The whole model as a stage on a mesh, under some ZeRO stage and recomputation."""
    rng = random.Random(seed)
    mesh = rng.choice(meshes)
    on = cluster(4, bytes_per_second=rng.choice((1e8, 1e9)), flops=rng.choice((1e10, 1e11)))
    own = stage_problem(graph, blocks, mesh, on)
    policy = rng.choice((NO_RECOMPUTE, uniform_policy("full", own.run.class_counts[0])))
    zero = rng.choice((0, 1, 3)) if "dp" in mesh.axes else 0
    setting = StageOptions(rng.choice((1, 4)), zero, policy, rng.choice((1, 3)), limit_bytes=np.inf)
    return own.linearized(setting)


QUICK = 4
"""So many cases of each kind are quick: two without a limit, one with each limit."""


def _cases(
    kinds: Mapping[str, tuple[int, Callable[[int], Problem]]], quick: int = 0
) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{name} {seed}",
            partial(make, seed),
            (0.2, 0.6)[seed // 2 % 2] if seed % 2 else None,
            seed < quick,
        )
        for name, (number, make) in kinds.items()
        for seed in range(number)
    )


CASES = _cases(
    {
        "tables": (20, _of_tables),
        "random graph": (20, _of_random_graph),
        "mlp": (8, _of_mlp),
        "gpt": (10, partial(_of_model, model="gpt")),
        "skip": (6, partial(_of_model, model="skip")),
    },
    QUICK,
)

LARGE_CASES = _cases(
    {
        f"{name} on a plane": (4, partial(_of_model, model=name, meshes=PLANES))
        for name in ("gpt", "skip")
    }
)
"""On meshes of two axes, where strategies are many."""
