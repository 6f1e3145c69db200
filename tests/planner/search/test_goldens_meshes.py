"""Where published systems put context and expert parallelism, the free search does too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from one_stage import plan

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.layout import Placement, conversion_steps, shard
from autoparallel.planner.plan import StagePlan
from autoparallel.planner.requests.features import Features
from autoparallel.planner.requests.request import Forced, Request
from examples.gpt import GPT
from examples.gpt import example_batch as gpt_batch
from examples.gshard_moe import build_model, example_batch


@cache
def gpt(seq: int) -> Program:
    with torch.device("meta"):
        model = GPT(n_layer=2, d_model=2048, n_head=16, seq=seq, vocab=32768, tied=False)
    return capture(model, gpt_batch(2, seq), dtype="bfloat16")


@cache
def moe(inner: int, num_experts: int) -> Program:
    with torch.device("meta"):
        model = build_model(
            n_layer=1,
            d_model=512,
            n_head=8,
            d_ff=inner,
            n_expert=num_experts,
            capacity=16,
            vocab=1024,
            seq=64,
        )
    return capture(model, example_batch(2, 64), dtype="bfloat16")


ALL_FEATURES = Features()


def one_stage(
    program: Program, cluster: str, rows: int, features: Features = ALL_FEATURES
) -> StagePlan:
    """Axes do what they are for, as ``max_tp`` says."""
    request = Request(
        rows,
        precision="bf16",
        forced=Forced(pp=1, num_microbatches=1, zero=0, recompute="none"),
        time_limit_seconds=300.0,
        max_tp=8,
        features=features,
    )
    found = plan(program.graph, program.blocks, parse_cluster(cluster), request)
    (stage,) = found.stages
    return stage


def sizes(stage: StagePlan) -> dict[str, int]:
    return dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True))


def test_one_long_sequence_is_split_by_positions_across_hosts() -> None:
    """As Llama 3 at 131,072 positions (arXiv:2407.21783, section 3.3.2): rows are used up, and
    tp would cross hosts. Queries stay split, keys and values are gathered."""
    stage = one_stage(gpt(32768), "4x4xH100", 1, Features(frozenset({"ring", "ulysses"})))
    for query, key, value in attention_on_cp(stage):
        assert query == shard(2)
        assert {key.kind, value.kind} <= {"R", "I"}


def test_one_long_sequence_across_hosts_is_attended_by_heads_if_there_are_enough() -> None:
    """A rank of n sends 1/n of queries, keys, values and results, and gathers nothing."""
    stage = one_stage(gpt(32768), "4x4xH100", 1)
    for placements in attention_on_cp(stage):
        assert set(placements) == {shard(1)}


def attention_on_cp(stage: StagePlan) -> list[list[Placement]]:
    """Placements of queries, keys and values on the axis "cp" of at least four ranks."""
    assert "dp" not in sizes(stage)
    assert sizes(stage)["cp"] >= 4
    axis = stage.mesh.axes.index("cp")
    graph = gpt(32768).graph
    found = [
        [each[axis] for each in layout.inputs[:3]]
        for name, layout in stage.layouts.items()
        if graph[name].op.startswith("aten.scaled_dot_product_attention")
    ]
    assert found
    return found


def test_rows_that_are_left_are_split_before_positions() -> None:
    stage = one_stage(gpt(32768), "4x4xH100", 2)
    assert sizes(stage)["dp"] == 2
    assert sizes(stage)["cp"] >= 2


@pytest.mark.slow
def test_many_wide_experts_lie_across_hosts_and_tokens_travel() -> None:
    """GShard (arXiv:2006.16668, section 3.3): experts one per device, tokens by all-to-all."""
    stage = one_stage(moe(8192, 8), "2x4xA100-80GB", 8)
    assert sizes(stage)["ep"] == 8
    axis = stage.mesh.axes.index("ep")
    assert stage.layouts["layers.0.feed_forward.up"].outputs[0][axis] == shard(0)
    steps = [
        step
        for maker, user, position in (("einsum_2", "einsum_3", 0), ("einsum_4", "einsum_5", 1))
        for step in conversion_steps(
            stage.layouts[maker].outputs[0], stage.layouts[user].inputs[position]
        )
        if step.axis == axis
    ]
    assert [step.collectives for step in steps] == [("all_to_all", "all_to_all")] * 2


def test_few_narrow_experts_stay_with_every_rank() -> None:
    stage = one_stage(moe(64, 8), "2x4xA100-80GB", 32)
    assert "ep" not in sizes(stage)
