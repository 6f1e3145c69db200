"""Plans that keep masters and optimizer states in host memory: found, forbidden, priced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_graphs import mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.errors import InfeasibleError, UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.find_plan import SearchMethod, plan
from autoparallel.planner.plan import Plan, Recompute
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.features import OFFERED_MODES, Features
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.search.problem import SharedTables
from autoparallel.planner.summary import plan_summary

GRAPH, BLOCKS = mlp(2, rows=8, width=8192, inner=32768)
"""1.14 billion parameters: 18.3 GB of states in float32, 9.1 GB of them on the device."""

NUMEL = 8192 * 8192 + 2 * 2 * 8192 * 32768
DENIED = Features(frozenset({"offload"}))
ROOM = 13 * 10**9


def h100s(num_devices: int = 1) -> Cluster:
    return parse_cluster(f"{num_devices}xH100")


def planned(num_devices: int = 1, **request: object) -> Plan:
    return plan(GRAPH, BLOCKS, h100s(num_devices), Request(8, **request))  # type: ignore[arg-type]


def test_what_fits_on_the_device_stays_there() -> None:
    assert planned().offload == "none"


def test_what_fits_nowhere_else_is_offloaded() -> None:
    found = planned(memory_limit_bytes=ROOM)
    assert found.offload == "optimizer"
    assert found.prediction.peak_memory_bytes <= ROOM
    assert "· optimizer offloaded ·" in plan_summary(found)
    assert loads(dumps(found)) == found


@pytest.mark.parametrize(
    "more", [{"features": DENIED}, {"forced": Forced(offload="none")}], ids=["denied", "forced off"]
)
def test_nothing_is_offloaded_where_that_is_forbidden(more: dict[str, object]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_limit_bytes=ROOM, **more)
    assert caught.value.code == "AP301"


def test_nothing_is_offloaded_on_cpus_whose_memory_is_the_hosts() -> None:
    with pytest.raises(InfeasibleError):
        plan(GRAPH, BLOCKS, parse_cluster("cpu:1"), Request(8, memory_limit_bytes=ROOM))


def test_activations_are_offloaded_before_optimizer_states() -> None:
    """A limit between the least memory of recomputation alone and that of offloaded activations;
    the plan says which blocks are offloaded, and its file keeps it."""
    graph, blocks = mlp(12, rows=4096)
    forced = Forced(num_microbatches=1)

    def found(mode: Recompute | None, **request: object) -> Plan:
        own = Request(4096, forced=replace(forced, recompute=mode), **request)  # type: ignore[arg-type]
        return plan(graph, blocks, h100s(), own)

    full, moved = (found(mode) for mode in ("full", "attention-offloaded"))
    least = [each.prediction.peak_memory_bytes for each in (moved, full)]
    assert least[0] < least[1]
    limit = {"memory_limit_bytes": sum(least) // 2}
    best = found(None, **limit)
    assert best.offload == "none"
    assert {"attention-offloaded"} <= {block.recompute for block in best.stages[0].blocks}
    assert best.stages[0].prediction.host_bytes > 0
    assert "offload, recompute all but attention" in plan_summary(best)
    assert loads(dumps(best)) == best
    names = ("offload", "attention-offloaded", "none-offloaded", "attention")
    with pytest.raises(InfeasibleError):
        found(None, features=Features(frozenset(names)), **limit)


def test_offloaded_activations_use_no_more_memory_of_the_host_than_there_is() -> None:
    """Nothing fits on the device without them, nor with few of them."""
    graph, blocks = mlp(12, rows=4096)
    features = Features(changes=frozenset(OFFERED_MODES), denied=frozenset({"offload"}))
    forced = Forced(num_microbatches=1)
    own = Request(4096, forced=forced, features=features, memory_limit_bytes=707 * 10**6)
    needed = plan(graph, blocks, h100s(), own).stages[0].prediction.host_bytes
    (host,) = h100s().hosts

    def with_memory(num_bytes: int) -> Cluster:
        device = replace(host.device, host_memory_bytes=num_bytes)
        return replace(h100s(), hosts=(replace(host, device=device),))

    assert needed > 0
    again = plan(graph, blocks, with_memory(needed), own).stages[0].prediction
    assert again.host_bytes == needed
    with pytest.raises(InfeasibleError):
        plan(graph, blocks, with_memory(needed // 10), own)


def test_sharding_over_more_devices_comes_before_offloading() -> None:
    """Two devices hold half of the states each."""
    assert planned(2, memory_limit_bytes=ROOM).offload == "none"


def test_the_update_is_priced_over_the_hosts_link_and_memory() -> None:
    """In float32 4 bytes go down and 4 up at 48 GB/s, and the host moves 12 bytes of states, the
    gradient and the copy twice each at half of 70.4 GB/s."""
    found = planned(forced=Forced(offload="optimizer"), offload="optimizer")
    seconds = found.stages[0].prediction.seconds["optimizer"]
    assert seconds == pytest.approx(NUMEL * (8 / 48e9 + 40 / 35.2e9), rel=1e-9)
    memory = found.stages[0].prediction.memory_bytes
    assert memory["optimizer"] == 0
    assert memory["parameters"] == 4 * NUMEL


def test_searches_that_share_tables_price_each_update_by_its_own_policy() -> None:
    shared = SharedTables()
    for offload in ("none", "optimizer", "none"):
        asked = Request(8, forced=Forced(pp=1, offload=offload), offload=offload)  # type: ignore[arg-type]
        with_others, alone = (
            plan(GRAPH, BLOCKS, h100s(), asked, method=SearchMethod(tables=tables))
            for tables in (shared, None)
        )
        assert with_others.prediction == alone.prediction


def test_a_faster_link_makes_a_faster_step() -> None:
    cluster = h100s()
    (host,) = cluster.hosts
    device = replace(host.device, host_link_bytes_per_second=96e9)
    faster = replace(cluster, hosts=(replace(host, device=device),))
    request = Request(8, forced=Forced(offload="optimizer"), offload="optimizer")
    before, after = (plan(GRAPH, BLOCKS, on, request) for on in (cluster, faster))
    gained = before.prediction.step_seconds - after.prediction.step_seconds
    assert gained == pytest.approx(NUMEL * 8 * (1 / 48e9 - 1 / 96e9), rel=1e-6)


def test_a_configuration_offloads_as_the_plan_does() -> None:
    plan_of = planned(offload="optimizer", forced=Forced(offload="optimizer", num_microbatches=1))
    own = Configuration(microbatch_size=8, offload="optimizer")
    step = ConfigurationPricer(GRAPH, BLOCKS).price(h100s(), own)
    assert step.step_seconds == pytest.approx(plan_of.prediction.step_seconds, rel=1e-6)
    again = evaluate(GRAPH, BLOCKS, step.plan, h100s())
    assert again.step_seconds == pytest.approx(step.step_seconds, rel=1e-9)


def test_gradients_in_half_precision_take_half_of_their_bytes() -> None:
    whole, half = (
        planned(precision="bf16", gradient_dtype=kind).stages[0].prediction.memory_bytes
        for kind in ("master", "compute")
    )
    assert (whole["gradients"], half["gradients"]) == (4 * NUMEL, 2 * NUMEL)
    assert whole["parameters"] == half["parameters"] == 6 * NUMEL


def test_bad_requests_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Forced(offload="parameters")  # type: ignore[arg-type]
    assert caught.value.code == "AP190"
    with pytest.raises(UsageError) as caught:
        Forced(offload="optimizer", schedule="pipedream")
    assert caught.value.code == "AP191"
    with pytest.raises(UsageError) as caught:
        Request(8, forced=Forced(offload="optimizer"), features=DENIED)
    assert caught.value.code == "AP186"
