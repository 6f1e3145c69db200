"""What a plan uses that another system may lack."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from exported_plans import BATCH, NUM_DEVICES, SYSTEMS, case, system_of, written

from autoparallel.planner.graph.layout import REPLICATE, Mesh, NodeLayout, shard
from autoparallel.planner.plan import GradientSum, Plan, Recompute, ServerPlan
from autoparallel.planner.requests.features import OFFERED_MODES
from autoparallel.systems.features import FEATURES, features_of


def names(plan: Plan) -> set[str]:
    return {feature.name for feature in features_of(plan)}


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("one dp axis", set()),
        ("fsdp", {"zero3", "full"}),
        ("3d", {"tp", "sp", "pp", "1f1b", "zero1"}),
        ("interleaved", {"pp", "interleaved"}),
        ("zero bubble", {"pp", "zb-h2"}),
        pytest.param("experts", {"ep"}, marks=pytest.mark.slow),
        ("cp", {"cp", "zero3"}),
        ("uneven stages", {"pp", "1f1b", "uneven-stages", "zero1"}),
        ("some layers", {"full", "mixed-recompute", "zero1"}),
        ("offload", {"offload", "zero1"}),
        ("offloaded gradients", {"offload-gradients", "zero2"}),
        ("offloaded parameters", {"offload-parameters", "zero3"}),
        ("half gradients", {"compute-gradients", "zero1"}),
    ],
)
def test_a_plan_uses_what_its_configuration_says(name: str, used: set[str]) -> None:
    assert names(case(name)) - {"weight-layouts"} == used


def changes() -> dict[str, Plan]:
    """A plan for each feature that no configuration has."""
    plan, staged = case("one dp axis"), case("1f1b")
    model, stage = plan.model, plan.stages[0]
    first, *rest = staged.stages
    sums = (GradientSum(0, 0, 8, ("dp",), "ring"),)

    def with_model(**fields: object) -> Plan:
        return replace(plan, model=replace(model, **fields))

    def with_mode(mode: Recompute) -> Plan:
        blocks = tuple(replace(block, recompute=mode) for block in stage.blocks)
        return replace(plan, stages=(replace(stage, blocks=blocks),))

    return {
        "mixed-zero": replace(staged, stages=(replace(first, zero=0), *rest)),
        "mixed-stages": replace(staged, stages=(replace(first, mesh=Mesh(("tp",), (2,))), *rest)),
        "branches": replace(staged, stages=(replace(first, devices=(0, 1, 2)), *rest)),
        "device-order": replace(
            staged, stages=(replace(first, devices=first.devices[::-1]), *rest)
        ),
        "uneven-shares": replace(plan, stages=(replace(stage, shares=(1, 3)),)),
        "gradient-sums": replace(plan, stages=(replace(stage, gradient_sums=sums),)),
        "gradient-order": replace(plan, gradient_order="priority"),
        "servers": replace(plan, servers=ServerPlan((0, 1), (2, 3), (1, 1))),
        "compile": replace(plan, compiled=True),
        "tiles": replace(plan, tiles=4),
        **{mode: with_mode(mode) for mode in OFFERED_MODES},
        "lora": with_model(settings={"lora": "r=8,alpha=16"}),
        "fp16": with_model(precision="fp16"),
        "fp8": with_model(precision="fp8"),
        "fp64": with_model(precision="fp64"),
        "adam": with_model(optimizer="adam"),
        "sgd": with_model(optimizer="sgd"),
        "sgd-momentum": with_model(optimizer="sgd-momentum"),
        **{
            schedule: replace(staged, schedule=schedule)
            for schedule in (
                "gpipe",
                "eager-1f1b",
                "zb-h1",
                "chimera",
                "terapipe",
                "pipedream",
                "pipedream-2bw",
                "ampnet",
            )
        },
    }


@pytest.mark.parametrize(
    "name",
    [
        "mixed-zero",
        "mixed-stages",
        "branches",
        "device-order",
        "uneven-shares",
        "gradient-sums",
        "gradient-order",
        "servers",
        "compile",
        "tiles",
        *OFFERED_MODES,
        "lora",
        "fp16",
        "fp8",
        "fp64",
        "adam",
        "sgd",
        "sgd-momentum",
        "gpipe",
        "eager-1f1b",
        "zb-h1",
        "chimera",
        "terapipe",
        "pipedream",
        "pipedream-2bw",
        "ampnet",
    ],
)
def test_what_a_configuration_does_not_have_is_found_too(name: str) -> None:
    plan = changes()[name]
    assert name in names(plan)
    assert name in FEATURES
    assert name not in names(case("one dp axis"))


def test_a_weight_that_is_split_otherwise_is_named_with_its_axis() -> None:
    plan = case("one dp axis")
    stage = plan.stages[0]
    weight = "model.layers.0.mlp.down_proj.weight"
    layouts = {**stage.layouts, weight: NodeLayout((), ((shard(0),),))}
    found = features_of(replace(plan, stages=(replace(stage, layouts=layouts),)))
    assert [each.text for each in found] == [
        f"layouts of single weights: {weight} split along dimension 0 over dp"
    ]


@pytest.mark.parametrize(
    ("weight", "placement", "is_odd"),
    [
        ("q_proj", shard(0), False),
        ("q_proj", shard(1), True),
        ("q_proj", REPLICATE, True),
        ("o_proj", shard(1), False),
        ("o_proj", shard(0), True),
    ],
)
def test_column_and_row_splits_over_tp_are_usual(
    weight: str, placement: object, is_odd: bool
) -> None:
    """Megatron-LM splits queries by output (dimension 0 of out × in) and the output projection by
    input."""
    plan = case("tp")
    stage = plan.stages[0]
    name = f"model.layers.0.self_attn.{weight}.weight"
    kept = {
        other: layout
        for other, layout in stage.layouts.items()
        if "." not in other or other.endswith("norm.weight")
    }
    usual = {"model.layers.0.mlp.up_proj.weight": NodeLayout((), ((shard(0),),))}
    layouts = {**kept, **usual, name: NodeLayout((), ((placement,),))}
    found = names(replace(plan, stages=(replace(stage, layouts=layouts),)))
    assert ("weight-layouts" in found) == is_odd


QUICK = ("torchtitan", "megatron", "deepspeed")
"""The other two write what DeepSpeed reads, or FSDP's options."""


@pytest.mark.parametrize(
    "system",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SYSTEMS],
)
def test_a_system_writes_what_no_configuration_has_and_lists_it(
    system: str, tmp_path: Path
) -> None:
    limits = system_of(system).limits
    for name, plan in changes().items():
        facts = written(plan, system, tmp_path / name).facts
        degrees = facts["degrees"]
        assert math.prod(degrees.values()) == NUM_DEVICES, name
        assert facts["microbatch_size"] * facts["num_microbatches"] == BATCH, name
        here = {each["here"] for each in facts["differences"]}
        assert name not in limits or limits[name] in here, name
