"""The copies around ZeRO's collectives, by hand."""

import pytest

from autoparallel.cost_model.resolve import resolve_cluster
from autoparallel.planner import rules
from autoparallel.planner.graph import TensorSpec
from autoparallel.planner.layout import INVARIANT, Mesh
from autoparallel.planner.pricing.prices import Prices

NUMEL = 1 << 20
SHARE = 1 - 1 / 1.189
"""Of compute, beside collectives."""


@pytest.mark.parametrize(
    ("zero", "forward", "backward"), [(0, 0, 0), (1, 0, 0), (2, 0, 6), (3, 4, 10)]
)
def test_compute_pays_for_copies_out_of_and_into_buffers(
    zero: int, forward: int, backward: int
) -> None:
    """bf16: 2 bytes read and written as gathered; 2 read and 4 written into what is reduced.

    With S of collectives and c of copies, S + c are of states, which slow compute by a·S + c.
    """
    cluster = resolve_cluster("8xH100")
    prices = Prices(Mesh(("dp",), (8,)), cluster, tuple(range(8)), "bf16", "adamw", rules)
    spec = TensorSpec((NUMEL,), "bfloat16", True)
    seconds, _ = prices.parameter(spec, (INVARIANT,), zero)
    rate = prices.device.memory_bytes_per_second * prices.device.efficiency["copy"]
    copied = (
        (seconds.forward_slowed - SHARE * seconds.forward_states) / (1 - SHARE),
        (seconds.backward_slowed - SHARE * seconds.backward_states) / (1 - SHARE),
    )
    assert copied == pytest.approx((forward * NUMEL / rate, backward * NUMEL / rate), abs=1e-12)
