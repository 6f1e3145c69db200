"""The copies around ZeRO's collectives, by hand."""

from dataclasses import replace

import pytest
from small_graphs import cluster as small_cluster

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import resolve_cluster
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import Profile
from autoparallel.cost_model.profile.records import Transfer
from autoparallel.cost_model.profile.transfers import overlapped
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.basis import CostAssumptions
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Mesh

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


@pytest.mark.parametrize("zero", [0, 3])
def test_a_profile_says_how_much_compute_is_lost_beside_collectives(zero: int) -> None:
    """On a CPU everything is taken for lost, but where it was measured or the cluster says so."""
    cluster = small_cluster(4)
    link = f"intra:{cluster.hosts[0].link.name}"
    kinds = ["all_gather", "reduce_scatter", "all_reduce"]
    alone = {"zero_gather": 1.0, "zero_scatter": 1.0, **dict.fromkeys(kinds, 2.0)}
    seconds = {**alone, **{overlapped(kind): 0.5 for kind in kinds}}
    measured = Profile(
        Environment("toy", "", "2.13.0", 4),
        {},
        tuple(Transfer(link, "gloo", kind, 4, 1, 1 << 20, each) for kind, each in seconds.items()),
    )
    spec, mesh = TensorSpec((NUMEL,), "float32", True), Mesh(("dp",), (4,))

    def share(cluster: Cluster, profile: Profile | None) -> float:
        prices = Prices(
            mesh,
            cluster,
            tuple(range(4)),
            "fp32",
            "adamw",
            rules,
            profile=profile,
            assumptions=CostAssumptions(copies_states=False),
        )
        found, _ = prices.parameter(spec, (INVARIANT,), zero)
        slowed = found.forward_slowed + found.backward_slowed + found.sync_slowed
        return slowed / (found.forward_states + found.backward_states + found.gradient_sync)

    device = replace(cluster.hosts[0].device, slowdown=dict.fromkeys(kinds, 1.25))
    said = replace(cluster, hosts=(replace(cluster.hosts[0], device=device),))
    assert share(cluster, None) == pytest.approx(1.0)
    assert share(cluster, measured) == pytest.approx(0.25)
    assert share(said, measured) == pytest.approx(0.2)
