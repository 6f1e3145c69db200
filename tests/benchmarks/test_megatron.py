"""The layouts of the published runs are Megatron-LM's, found by the solver and not written down."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.graph.layout import conversion_steps
from benchmarks.validation.models import Shape
from benchmarks.validation.pricing import Pricer

TP, ROWS, SEQ, HIDDEN = 4, 2, 128, 1024
SHAPES = (
    Shape("gpt", HIDDEN, 16, 16, 4 * HIDDEN, 4, SEQ, 5120, "unfused", 0.1),
    Shape("gpt", HIDDEN, 16, 16, 4 * HIDDEN, 4, SEQ, 5120, "flash"),
    Shape("llama", HIDDEN, 16, 8, 3584, 4, SEQ, 5120, "flash"),
    Shape("llama", HIDDEN, 16, 8, 3584, 4, SEQ, 5120, "flash", fused=True),
    Shape("nemotron", HIDDEN, 16, 8, 4 * HIDDEN, 4, SEQ, 5120, "flash", fused=True),
)
LARGE = Shape("gpt", 8192, 64, 64, 4 * 8192, 4, 2048, 51200, "unfused", 0.1)

each_shape = pytest.mark.parametrize(
    "shape",
    [*SHAPES, pytest.param(LARGE, marks=pytest.mark.slow)],
    ids=lambda shape: f"{shape.family}-{shape.attention}-{shape.fused}-{shape.hidden}",
)


def residual_bytes(shape: Shape) -> int:
    return ROWS * shape.seq * shape.hidden * 2


@cache
def program(shape: Shape) -> Program:
    return Pricer().program(shape)


def layer_collectives(
    shape: Shape, *, sequence_parallel: bool
) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    """Forward and backward, the (collective, bytes) of an inner layer on the tensor ranks."""
    own = program(shape)
    asked = Configuration(
        tp=TP, microbatch_size=ROWS, precision="bf16", sequence_parallel=sequence_parallel
    )
    priced = ConfigurationPricer(own.graph, own.blocks)
    priced.price(parse_cluster(f"{TP}xA100-80GB"), asked)
    (solver,) = priced.solvers.values()
    (answer,) = (answer for answer in solver.answers.values() if answer is not None)
    model, table = solver.model, answer.table
    edges = [*model.kind("layers").edges, *table.problem.run.edges_of[2]]
    forward: Counter[tuple[str, int]] = Counter()
    backward: Counter[tuple[str, int]] = Counter()
    for edge in edges:
        options, targets = model.source(edge), model.targets(edge)
        source = options.layouts[options.of_choice[table.choice(edge.name)]]
        wanted = {
            int(column[table.choice(use.node)])
            for use, column in zip(edge.uses, targets.columns, strict=True)
        }
        for each in wanted:
            for step in conversion_steps(source, targets.layouts[each]):
                for direction, kind in zip((forward, backward), step.collectives, strict=True):
                    if kind is not None:
                        direction[kind, model.spec(edge).num_bytes] += 1
    return forward, backward


@each_shape
def test_tensor_parallelism_is_two_all_reduces_per_layer_each_way(shape: Shape) -> None:
    """Shoeybi et al. 2019, section 3: f and g around attention and around the MLP."""
    forward, backward = layer_collectives(shape, sequence_parallel=False)
    assert forward == {("all_reduce", residual_bytes(shape)): 2}
    assert backward == {("all_reduce", residual_bytes(shape)): 2}


@each_shape
def test_sequence_parallelism_gathers_and_scatters_in_their_place(shape: Shape) -> None:
    """Korthikanti et al. 2022, section 4.2.2: the same bytes, as two halves of an all-reduce."""
    size = residual_bytes(shape)
    expected = {("all_gather", size): 2, ("reduce_scatter", size): 2}
    forward, backward = layer_collectives(shape, sequence_parallel=True)
    assert forward == expected
    assert backward == expected
