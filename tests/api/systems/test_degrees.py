"""The configuration that a plan is nearest to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exported_plans import BATCH, CASES, NUM_DEVICES, case, configured, plan_of
from marks import slow

from autoparallel.planner.graph.layout import Mesh, NodeLayout, shard
from autoparallel.planner.plan import Plan, ServerPlan
from autoparallel.systems.degrees import axis_roles, configuration_of, layers_of

NAMES = [slow(name) if name == "experts" else name for name in CASES]
"""Experts need another model."""


@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_a_configuration_is_nearest_to_it(name: str) -> None:
    choices = dict(CASES[name][1])
    assert configuration_of(case(name)) == configured(**choices)


@pytest.mark.parametrize("name", NAMES)
def test_degrees_and_batches_multiply(name: str) -> None:
    own = configuration_of(case(name))
    assert own.num_devices == NUM_DEVICES
    assert own.rank_rows * own.dp * own.num_microbatches == BATCH


@pytest.mark.slow
@pytest.mark.parametrize("ep", [4, 2])
def test_experts_are_counted_over_all_ranks_that_hold_different_ones(ep: int) -> None:
    """Tokens are sent over four ranks, or over two whose tensor-parallel ranks sum outputs."""
    choices = {"dp": 2, "tp": 2, "pp": 2, "layers": (4, 4), "sequence_parallel": ep == 4}
    own = configuration_of(plan_of(configured(ep=ep, **choices), "mixtral"))
    assert (own.ep, own.etp, own.data_ep) == (4, 1, 2)


def split_on(plan: Plan, dim: int) -> Plan:
    """A plan of one stage whose axis "tp" of eight splits dimension ``dim`` of every op."""
    stage = plan.stages[0]
    layouts = {
        name: NodeLayout(
            tuple((shard(dim),) for _ in layout.inputs), ((shard(dim),),), layout.labels
        )
        if layout.inputs
        else layout
        for name, layout in stage.layouts.items()
    }
    return replace(plan, stages=(replace(stage, mesh=Mesh(("tp",), (8,)), layouts=layouts),))


def test_an_axis_named_tp_that_splits_samples_is_data_parallel() -> None:
    """Of an axis on which no weight is split, ops decide: dimension 0 is samples, 1 positions."""
    plan = case("one dp axis")
    by_samples, by_positions = split_on(plan, 0), split_on(plan, 1)
    assert axis_roles(by_samples, by_samples.stages[0]).dp == 8
    assert axis_roles(by_positions, by_positions.stages[0]).cp == 8
    assert axis_roles(case("tp"), case("tp").stages[0]).tp == 8


def test_two_axes_that_split_samples_multiply() -> None:
    plan = split_on(case("one dp axis"), 0)
    (stage,) = plan.stages
    layouts = {
        name: NodeLayout(
            tuple(layout * 2 for layout in node.inputs),
            tuple(layout * 2 for layout in node.outputs),
            node.labels * 2,
        )
        for name, node in stage.layouts.items()
    }
    both = replace(stage, mesh=Mesh(("dp", "tp"), (2, 4)), layouts=layouts)
    assert axis_roles(replace(plan, stages=(both,)), both).dp == 8


def test_stages_of_other_meshes_become_one_mesh_with_as_many_devices() -> None:
    """Six devices and two: four each, and the micro-batches still divide."""
    plan = case("1f1b")
    first, *_, last = plan.stages
    mixed = replace(
        plan,
        stages=(
            replace(first, devices=tuple(range(6)), mesh=Mesh(("dp",), (6,))),
            replace(last, devices=(6, 7), mesh=Mesh(("dp",), (2,))),
        ),
    )
    own = configuration_of(mixed)
    assert (own.pp, own.num_devices) == (2, NUM_DEVICES)
    assert own.microbatch_size * own.num_microbatches == BATCH
    assert own.microbatch_size % own.dp == 0


def test_three_ranks_on_eight_devices_become_a_number_that_divides_them() -> None:
    plan = case("1f1b")
    devices = ((0, 1, 2), (3, 4, 5), (6, 7))
    stages = tuple(
        replace(stage, devices=own, mesh=Mesh(("dp",), (len(own),)))
        for stage, own in zip(plan.stages, devices, strict=False)
    )
    own = configuration_of(replace(plan, stages=stages))
    assert (own.pp, own.num_devices) == (2, NUM_DEVICES)
    assert own.layers is None


def test_parameter_servers_become_data_parallelism() -> None:
    plan = case("one dp axis")
    workers, servers = tuple(range(6)), (6, 7)
    served = replace(
        plan,
        stages=(replace(plan.stages[0], devices=workers, mesh=Mesh(("dp",), (6,))),),
        servers=ServerPlan(workers, servers, (1,) * 6),
    )
    own = configuration_of(served)
    assert (own.dp, own.zero, own.num_devices) == (NUM_DEVICES, 0, NUM_DEVICES)


def test_layers_are_the_blocks_of_the_longest_numbered_list() -> None:
    plan = plan_of(configured(dp=8))
    names = [block.name for block in layers_of(plan, plan.stages[0])]
    assert names == [f"model.layers.{index}" for index in range(8)]
