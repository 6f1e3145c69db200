"""Hand-written configurations of a model with experts: what is held, computed and sent."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autoparallel.cost_model.shorthand import parse_cluster
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import (
    Configuration,
    ConfigurationPricer,
    PricedStep,
)
from autoparallel.planner.errors import UsageError
from autoparallel.planner.expert_dims import FIRST_WEIGHT, is_expert_layer
from autoparallel.planner.layout import INVARIANT, NodeLayout, local_shape, shard
from autoparallel.planner.pricing.basis import Basis, CostAssumptions
from autoparallel.planner.pricing.choices import input_specs
from autoparallel.planner.rules.dispatch import as_received
from autoparallel.planner.rules.saved import expert_pairs
from autoparallel.planning import PlanOptions, capture_target
from autoparallel.targets import load_target

ROWS = 8


@cache
def program() -> Program:
    return capture_target(load_target("hf:tests/models/mixtral", {}), PlanOptions(ROWS, 32))


def priced(assumptions: CostAssumptions, **options: Any) -> PricedStep:
    own = program()
    asked = Configuration(microbatch_size=ROWS, **{"dp": 4, "zero": 1, **options})
    pricer = ConfigurationPricer(own.graph, own.blocks, Basis(assumptions=assumptions))
    return pricer.price(parse_cluster(f"1x{asked.num_devices}xH100"), asked)


def expert_bytes() -> int:
    return sum(node.spec.num_bytes for node in program().graph.parameters if "experts" in node.name)


GATHER = CostAssumptions()
SENT = CostAssumptions(dispatcher="alltoall")


@pytest.mark.parametrize("assumptions", [GATHER, SENT])
@pytest.mark.parametrize("ep", [2, 4])
def test_each_rank_holds_its_own_experts(assumptions: CostAssumptions, ep: int) -> None:
    whole = priced(assumptions, ep=1, zero=0).memory_bytes[0]["parameters"]
    split = priced(assumptions, ep=ep, zero=0).memory_bytes[0]["parameters"]
    assert whole - split == pytest.approx(expert_bytes() * (1 - 1 / ep))


def test_a_rank_computes_as_many_pairs_whether_tokens_are_sent_or_not() -> None:
    graph = program().graph
    node = next(filter(is_expert_layer, graph.nodes))
    inputs = input_specs(node, graph)
    split, whole = (shard(0),), (INVARIANT,)
    sent = NodeLayout((split,) * len(inputs), (split,))
    alone = NodeLayout((*(split,) * FIRST_WEIGHT, *(whole,) * 2), (split,))
    pairs = []
    for layout in (sent, alone):
        local = [
            replace(spec, shape=local_shape(spec.shape, own, (4,)))
            for spec, own in zip(inputs, layout.inputs, strict=True)
        ]
        pairs.append(expert_pairs(as_received(node, layout, (4,)), local))
    assert pairs == [inputs[1].numel // 4] * 2


def test_sent_tokens_take_time_in_both_directions() -> None:
    whole, sent = (priced(SENT, ep=ep).stages[0].seconds for ep in (1, 4))
    assert sent.forward_communication > whole.forward_communication
    assert sent.backward_communication > whole.backward_communication


def test_imbalance_lengthens_experts_and_what_is_sent_to_them() -> None:
    even, uneven = (
        priced(CostAssumptions(dispatcher="alltoall", imbalance=of), ep=4).stages[0].seconds
        for of in (1.0, 1.5)
    )
    assert uneven.backward_communication == pytest.approx(1.5 * even.backward_communication)
    assert uneven.forward_compute > even.forward_compute


def test_experts_of_data_parallel_ranks_are_summed_over_the_others() -> None:
    """Of 4 ranks that hold 2 halves of the experts twice, the pairs sum these."""
    joint = CostAssumptions(dispatcher="alltoall", joint_states=True)
    half, whole = (priced(joint, ep=ep, zero=1).memory_bytes[0]["optimizer"] for ep in (2, 1))
    assert half == pytest.approx(whole)  # a quarter of the states on each rank, in either case


def test_data_parallel_ranks_that_cannot_share_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="AP127"):
        priced(SENT, dp=4, ep=3)
    with pytest.raises(UsageError, match="ep= one of 1, 2, 4"):
        priced(SENT, dp=8, ep=8)
