"""What collectives of states are priced as is what they send, over the rate of the links."""

from __future__ import annotations

import pytest
from small_graphs import cluster

from autoparallel.cost_model.ops.memory import GradientDtype, StateOptions, sent_bytes
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import CostAssumptions
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import REPLICATE, Mesh

RATE = 1e9
SPEC = TensorSpec((1 << 12, 1 << 12), "bfloat16", requires_grad=True)


@pytest.mark.parametrize("gradients", ["master", "compute"])
@pytest.mark.parametrize("zero", range(4))
def test_the_priced_seconds_are_those_of_the_bytes_sent(
    zero: int, gradients: GradientDtype
) -> None:
    prices = Prices(
        Mesh(("dp",), (4,)),
        cluster(4, bytes_per_second=RATE),
        (0, 1, 2, 3),
        "bf16",
        "adamw",
        rules,
        assumptions=CostAssumptions(copies_states=False),
        states=StateOptions(gradients),
    )
    found, _ = prices.parameter(SPEC, (REPLICATE,), zero)
    once = found.parameter_gather + found.gradient_sync
    each = found.forward_states + found.backward_states
    for count in (1, 8):
        expected = sent_bytes(SPEC.numel, prices.policy, zero, 4, count) / RATE
        assert once + count * each == pytest.approx(expected, rel=1e-3)
