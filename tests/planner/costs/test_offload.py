"""Plans that keep states in host memory: found, forbidden, priced."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
from small_graphs import mlp

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.memory import Offload
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


def test_activations_leave_room_for_states_in_the_memory_of_the_host() -> None:
    """With memory for one of both alone, fewer activations are offloaded, or nothing fits."""
    graph, blocks = mlp(12, rows=4096)
    numel = sum(node.spec.numel for node in graph if node.kind == "parameter")
    forced = Forced(num_microbatches=1, offload="optimizer")
    features = Features(changes=frozenset(OFFERED_MODES))
    own = Request(
        4096, forced=forced, offload="optimizer", features=features, memory_limit_bytes=706 * 10**6
    )
    needed = plan(graph, blocks, h100s(), own).stages[0].prediction.host_bytes
    (host,) = h100s().hosts
    states = 12 * numel
    assert needed > 0
    for room in (needed, needed // 2):
        device = replace(host.device, host_memory_bytes=states + room)
        on = replace(h100s(), hosts=(replace(host, device=device),))
        with suppress(InfeasibleError):
            assert plan(graph, blocks, on, own).stages[0].prediction.host_bytes <= room
    device = replace(host.device, host_memory_bytes=states)
    with pytest.raises(InfeasibleError):
        plan(graph, blocks, replace(h100s(), hosts=(replace(host, device=device),)), own)


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


def moved(states: Offload, num_devices: int = 1, **forced: int) -> Plan:
    """The plan of one micro-batch with these states in host memory."""
    own = Forced(offload=states, num_microbatches=1, **forced)  # type: ignore[arg-type]
    return planned(num_devices, offload=states, forced=own)


def test_states_in_host_memory_take_none_of_the_devices() -> None:
    """In float32 a rank's share of parameters and of gradients takes 4 bytes per parameter; what is
    on its way is the share of two blocks."""
    of = {states: moved(states, 2, dp=2, zero=3) for states in get_args(Offload)[1:]}
    memory = {states: plan.stages[0].prediction.memory_bytes for states, plan in of.items()}
    held = {name: (own["parameters"], own["gradients"]) for name, own in memory.items()}
    share = 4 * NUMEL // 2
    assert held == {
        "optimizer": (share, share),
        "gradients": (share, 0),
        "parameters": (0, 0),
    }
    assert memory["parameters"]["transient"] - memory["gradients"]["transient"] == pytest.approx(
        2 * max(block_shares()), rel=0.01
    )


def block_shares() -> list[float]:
    """Bytes of one of two ranks' shares of each block, in float32."""
    numels = [sum(GRAPH[name].spec.numel for name in block.parameters) for block in BLOCKS.blocks]
    return [4 * numel / 2 for numel in numels]


def test_copies_of_gradients_run_beside_the_backward_and_the_update_needs_none() -> None:
    """A gradient of 4 bytes per parameter goes to the host beside the compute of the block before,
    that of the first block after all; the update copies parameters only, and reads gradients
    once more for the norm."""
    before, after = (
        moved(states).stages[0].prediction.seconds for states in ("optimizer", "gradients")
    )
    saved = NUMEL * (4 / 48e9 - 4 / 35.2e9)
    assert before["optimizer"] - after["optimizer"] == pytest.approx(saved, rel=1e-9)
    copies = 4 * NUMEL / 48e9
    assert after["states"] == pytest.approx(copies, rel=1e-9)
    waits = after["backward"] - before["backward"]
    assert 2 * min(block_shares()) / 48e9 < waits <= copies


def test_parameters_are_copied_before_each_gathering_and_not_after_the_update() -> None:
    of = [
        moved(states, 2, dp=2, zero=3).stages[0].prediction
        for states in ("gradients", "parameters")
    ]
    before, after = (own.seconds for own in of)
    copy = 4 * NUMEL / 2 / 48e9
    assert before["optimizer"] - after["optimizer"] == pytest.approx(copy, rel=1e-9)
    assert after["states"] - before["states"] == pytest.approx(2 * copy, rel=1e-9)
    assert after["forward"] > before["forward"]


@pytest.mark.slow
def test_more_states_are_offloaded_only_where_fewer_do_not_fit() -> None:
    """Of a model of many blocks on two devices, with limits down to what each level leaves free."""
    graph, blocks = mlp(24, rows=8, width=2048, inner=8192)

    def found(**request: Any) -> Plan:
        return plan(graph, blocks, h100s(2), Request(8, **request))

    limit, chosen = found().prediction.peak_memory_bytes, ["none"]
    while chosen[-1] != "parameters":
        own = found(memory_limit_bytes=limit)
        assert own.prediction.peak_memory_bytes <= limit
        assert loads(dumps(own)) == own
        chosen += [own.offload] if own.offload != chosen[-1] else []
        if own.offload != "none":
            with pytest.raises(InfeasibleError):
                found(memory_limit_bytes=limit, features=DENIED)
        limit = int(limit * 0.97)
    assert chosen == list(get_args(Offload))


@pytest.mark.parametrize(
    ("forced", "code"),
    [
        ({"offload": "moments"}, "AP190"),
        ({"offload": "optimizer", "schedule": "pipedream"}, "AP191"),
        ({"offload": "gradients", "zero": 1}, "AP191"),
        ({"offload": "parameters", "zero": 2}, "AP191"),
        ({"offload": "gradients", "gradients": "priority"}, "AP191"),
    ],
)
def test_choices_that_exclude_each_other_are_refused(forced: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        Forced(**forced)
    assert caught.value.code == code


def test_parameters_that_no_ranks_share_are_refused() -> None:
    for devices, own in ((1, {}), (2, {"tp": 2})):
        with pytest.raises(UsageError) as caught:
            moved("parameters", devices, **own)
        assert caught.value.code == "AP191"


def test_bad_requests_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Request(
            8,
            forced=Forced(offload="parameters"),
            features=Features(frozenset({"zero3"})),
        )
    assert caught.value.code == "AP186"
    with pytest.raises(UsageError) as caught:
        Request(8, forced=Forced(offload="optimizer"), features=DENIED)
    assert caught.value.code == "AP186"
