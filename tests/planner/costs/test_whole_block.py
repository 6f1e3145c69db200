"""Ops of a block add up to what the block took in one piece, where that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from one_stage import plan
from small_graphs import cluster, mlp

from autoparallel.cost_model.cluster.tf32 import with_tf32
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import Profile
from autoparallel.cost_model.profile.records import Measurement
from autoparallel.planner.configured.profiling_targets import asked_cases
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.costs.precision import with_precision
from autoparallel.planner.costs.whole_block import (
    BLOCK_OP,
    block_case,
    seconds_by_ops,
    whole_blocks,
)
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, Request

HERE = Environment("toy", "", "2.13.0", 1)
GRAPH, BLOCKS = mlp(3, rows=8)
LAYER = BLOCKS.kinds["layer"]
ON = cluster(1)
REQUEST = Request(8, forced=Forced(num_microbatches=1, recompute="none"))


def ops_profile(rows: int = 8) -> Profile:
    """Every op on one device: 1 ms forward, 2 ms backward."""
    graph = GRAPH.with_batch_size(rows) if rows != 8 else GRAPH
    wanted = asked_cases(graph, BLOCKS, ON, Request(rows, forced=REQUEST.forced))
    return Profile(HERE, {op.case: Measurement(1e-3, 2e-3, 9, 0.0) for op in wanted.ops})


def with_block(profile: Profile, forward: float, backward: float) -> Profile:
    """The layer besides, in one piece."""
    case = block_case(GRAPH, LAYER)
    return replace(profile, ops={**profile.ops, case: Measurement(forward, backward, 9, 0.0)})


def composed(profile: Profile) -> Basis:
    return whole_blocks(GRAPH, BLOCKS, ON, Basis(profile), precision="fp32")


def planned(basis: Basis) -> Plan:
    return plan(GRAPH, BLOCKS, ON, REQUEST, basis=basis)


def test_a_block_costs_what_it_took_in_one_piece() -> None:
    bare = ops_profile()
    by_ops = seconds_by_ops(GRAPH, LAYER, ON, bare)
    assert by_ops == pytest.approx((4e-3, 8e-3))  # up, gelu, down, add
    slow = composed(with_block(bare, 6e-3, 16e-3))
    first, second = (planned(basis).stages[0].prediction for basis in (Basis(bare), slow))
    more = {name: second.seconds[name] - first.seconds[name] for name in ("forward", "backward")}
    assert more == pytest.approx({"forward": 3 * 2e-3, "backward": 3 * 8e-3})


def test_blocks_of_another_kind_keep_the_times_of_their_ops() -> None:
    basis = composed(with_block(ops_profile(), 6e-3, 16e-3))
    assert basis.profile is not None
    assert set(basis.profile.factors) == {
        name for block in BLOCKS.blocks if block.kind == "layer" for name in block.nodes
    }
    for found in basis.profile.factors.values():
        assert found[:2] == pytest.approx((1.5, 2.0))


def test_a_profile_without_blocks_is_left_as_it_is() -> None:
    basis = Basis(ops_profile())
    assert whole_blocks(GRAPH, BLOCKS, ON, basis, precision="fp32") is basis


def test_without_a_profile_nothing_is_looked_for() -> None:
    basis = Basis(ops_profile(), mode="analytic")
    assert whole_blocks(GRAPH, BLOCKS, ON, basis, precision="fp32") is basis


def test_the_check_walks_with_the_same_factors() -> None:
    basis = composed(with_block(ops_profile(), 6e-3, 16e-3))
    found = planned(basis)
    assert evaluate(GRAPH, BLOCKS, found, ON, basis=basis).step_seconds == pytest.approx(
        found.prediction.step_seconds
    )


def test_a_block_measured_in_full_float32_is_not_one_in_tf32() -> None:
    full, of_convolutions, fast = (
        block_case(GRAPH, LAYER, tf32) for tf32 in ((), ("conv",), ("conv", "matmul"))
    )
    assert full == of_convolutions != fast  # A layer has matmuls, no convolution.
    assert fast.tf32 == ("matmul",)
    host = ON.hosts[0]
    peaks = {**host.device.peak_flops, "tfloat32": 1e13}
    device = replace(host.device, kind="cuda", peak_flops=peaks)
    on = with_tf32(replace(ON, hosts=(replace(host, device=device),)), ("conv", "matmul"))
    for known, is_used in ((full, False), (fast, True)):
        profile = Profile(HERE, {known: Measurement(1e-3, 2e-3, 9, 0.0)})
        found = whole_blocks(GRAPH, BLOCKS, on, Basis(profile), precision="fp32").profile
        assert found is not None
        assert set(LAYER.nodes).issubset(found.factors) == is_used


def test_a_block_measured_in_bf16_is_not_one_in_8_bits() -> None:
    cases = [block_case(with_precision(GRAPH, p), LAYER) for p in ("bf16", "fp8")]
    assert cases[0].tensors == cases[1].tensors
    assert cases[0] != cases[1]


def test_equal_blocks_are_one_case_and_others_are_not() -> None:
    layers = [block_case(GRAPH, block) for block in BLOCKS.blocks if block.kind == "layer"]
    assert len(layers) == 3
    assert len(set(layers)) == 1
    assert layers[0].op == BLOCK_OP
    wider, wider_blocks = mlp(3, rows=8, inner=128)
    assert block_case(wider, wider_blocks.kinds["layer"]).arguments != layers[0].arguments
    assert block_case(GRAPH, BLOCKS.kinds["in"]) not in layers
