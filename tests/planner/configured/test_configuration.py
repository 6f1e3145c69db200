"""A hand-written configuration is a plan, and costs what the search says of such a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from marks import slow
from one_stage import plan

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.compute import work_seconds
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as default_rules
from autoparallel.planner.configured.configuration import (
    Configuration,
    even_layers,
    find_equal,
    find_layers,
    stage_bounds,
)
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.costs.basis import DEFAULT, Basis, CostAssumptions
from autoparallel.planner.costs.choices import Restriction, input_specs
from autoparallel.planner.errors import UsageError
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.graph.graph import Block, Blocks, Ref
from autoparallel.planner.graph.positions import position_dims
from autoparallel.planner.inter_op.submesh import mesh_of, restriction
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.requests.request import Forced, Request
from examples.gpt import GPT, example_batch

HIDDEN, SEQ, ROWS = 64, 32, 4


@cache
def program(num_layers: int) -> Program:
    with torch.device("meta"):
        model = GPT(n_layer=num_layers, d_model=HIDDEN, n_head=4, seq=SEQ, vocab=128, tied=False)
    return capture(model, example_batch(2, SEQ), dtype="bfloat16")


def cluster(num_devices: int) -> Cluster:
    return parse_cluster(f"{num_devices}xA100-80GB")


def priced(num_layers: int, num_devices: int, basis: Basis = DEFAULT, **options: Any) -> PricedStep:
    own = program(num_layers)
    asked = Configuration(precision="bf16", **{"microbatch_size": ROWS, **options})
    return ConfigurationPricer(own.graph, own.blocks, basis).price(cluster(num_devices), asked)


@pytest.mark.parametrize(
    "forced",
    [
        {"dp": 2, "pp": 2, "tp": 1},
        pytest.param({"dp": 4, "pp": 1, "tp": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "pp": 4, "tp": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "pp": 1, "tp": 1, "recompute": "selective"}, marks=pytest.mark.slow),
        {"dp": 4, "pp": 1, "tp": 1, "recompute": "full", "zero": 2},
        {"dp": 2, "pp": 2, "tp": 1, "recompute": "selective", "zero": 1},
        pytest.param({"dp": 2, "pp": 2, "tp": 1, "recompute": "full"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_configuration_costs_what_the_search_says(forced: dict[str, Any]) -> None:
    own = program(4)
    forced = {"zero": 0, "recompute": "none", **forced}
    request = Request(
        16,
        precision="bf16",
        microbatch_size=ROWS // forced["dp"],
        forced=Forced(**forced, schedule="1f1b"),
    )
    found = plan(own.graph, own.blocks, cluster(4), request)
    layers = tuple(sum(b.kind == "layers" for b in stage.blocks) for stage in found.stages)
    step = priced(4, 4, **forced, num_microbatches=4, layers=layers)
    ends = [found.stages[0].blocks[0].kind, found.stages[-1].blocks[-1].kind]
    assert ends == ["embedding", "head"]
    assert step.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)
    for rank, stage in zip(step.memory_bytes, found.stages, strict=True):
        predicted = stage.prediction.memory_bytes
        for name in ("parameters", "gradients", "optimizer", "activations", "transient"):
            assert rank[name] == pytest.approx(predicted[name], abs=1), name


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2, "pp": 2, "schedule": "interleaved-1f1b", "num_chunks": 2},
        {"tp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "selective"},
        {"dp": 2, "pp": 2, "schedule": "zbv", "num_chunks": 2},
        {"dp": 2, "pp": 2, "schedule": "chimera"},
        {"dp": 2, "pp": 2, "schedule": "terapipe", "num_slices": 2},
        {"cp": 2, "tp": 2, "zero": 1},
    ],
    ids=str,
)
def test_a_configuration_is_a_plan_and_costs_what_that_costs(options: dict[str, Any]) -> None:
    own = program(4)
    step = priced(4, 4, **options, num_microbatches=4)
    found = evaluate(own.graph, own.blocks, step.plan, cluster(4))
    assert found.step_seconds == pytest.approx(step.step_seconds, rel=1e-12)
    ranks = {frozenset(stage.devices) for stage in step.plan.stages}
    assert len(ranks) == options.get("pp", 1)
    assert sorted(rank for stage in ranks for rank in stage) == [0, 1, 2, 3]


def test_recomputing_trades_time_for_memory_and_selective_is_between() -> None:
    steps = [priced(4, 1, recompute=how) for how in ("none", "selective", "full")]
    seconds = [step.step_seconds for step in steps]
    kept = [step.memory_bytes[0]["activations"] for step in steps]
    assert seconds == sorted(seconds)
    assert kept == sorted(kept, reverse=True)
    assert len(set(seconds)) == len(set(kept)) == 3


def test_full_recomputation_can_spare_the_ends() -> None:
    assert len(find_layers(program(4).blocks)) == 4
    none, full = (
        priced(4, 1, recompute=how, recomputes_ends=False).stages[0].seconds
        for how in ("none", "full")
    )
    again = full.backward_compute - none.backward_compute
    assert 0 < again < none.forward_compute
    step = priced(4, 1, recompute="full", recomputes_ends=False)
    modes = {block.name: block.recompute for block in step.plan.stages[0].blocks}
    assert modes["embedding"] == modes["head"] == "none"
    assert set(list(modes.values())[1:-1]) == {"full"}


def test_a_share_of_the_layers_is_selectively_recomputed_and_the_others_fully() -> None:
    step = priced(4, 1, recompute="selective", recomputes_ends=False, selective_share=0.5)
    modes = [block.recompute for block in step.plan.stages[0].blocks]
    assert modes == ["none", "full", "full", "selective", "selective", "none"]


def test_recomputing_the_core_of_attention_keeps_all_but_what_the_core_makes() -> None:
    """Attention as one op: its forward runs again, and its result and statistics are not kept."""
    core = Basis(assumptions=CostAssumptions(recomputed=("core_attn",)))
    none, again = (
        priced(4, 1, core, recompute=how, recomputes_ends=False) for how in ("none", "selective")
    )
    own = program(4)
    graph = own.graph.with_batch_size(ROWS)
    layer = own.blocks.kinds["layers"]
    (attention,) = (n for n in layer.nodes if "scaled_dot_product_attention" in graph[n].op)
    more = again.stages[0].seconds.backward_compute - none.stages[0].seconds.backward_compute
    device = cluster(1).hosts[0].device
    work = default_rules.work(
        graph[attention], input_specs(graph[attention], graph), graph[attention].outputs
    )
    forward, _ = work_seconds(device, work, "bfloat16")
    assert more == pytest.approx(4 * forward)
    less = none.stages[0].activation_bytes - again.stages[0].activation_bytes
    assert less >= 4 * graph[attention].spec.num_bytes
    assert again.stages[0].activation_bytes > none.stages[0].activation_bytes / 2


def test_attention_takes_the_time_of_the_kernel_that_a_program_runs() -> None:
    """Presets of Hopper have an efficiency of their own for cuDNN's kernel; an A100 has one
    efficiency for every kernel."""
    own = program(4)
    asked = Configuration(precision="bf16", microbatch_size=ROWS)
    seconds = {
        (device, kernel): ConfigurationPricer(
            own.graph, own.blocks, Basis(assumptions=CostAssumptions(attention=kernel))
        )
        .price(parse_cluster(f"1x{device}"), asked)
        .stages[0]
        .seconds.forward_compute
        for device in ("H100", "A100-80GB")
        for kernel in ("flash", "cudnn")
    }
    assert seconds["A100-80GB", "flash"] == seconds["A100-80GB", "cudnn"]
    assert seconds["H100", "cudnn"] < seconds["H100", "flash"]


def slow_host(issue_seconds: float) -> Cluster:
    on = cluster(2)
    device = replace(on.hosts[0].device, issue_seconds=issue_seconds)
    return replace(on, hosts=(replace(on.hosts[0], device=device),))


def test_a_pass_lasts_until_the_host_has_issued_it() -> None:
    """An issue of a second outlasts all compute: seconds are then numbers of kernels."""
    own = program(4)
    asked = Configuration(pp=2, precision="bf16", microbatch_size=ROWS, num_microbatches=2)
    one, two, none = (
        ConfigurationPricer(own.graph, own.blocks).price(slow_host(each), asked).stages
        for each in (1.0, 2.0, 0.0)
    )
    for first, second, free in zip(one, two, none, strict=True):
        kernels = first.compute_seconds
        assert kernels == tuple(round(each) for each in kernels)
        assert second.compute_seconds == pytest.approx([2 * each for each in kernels])
        assert free.compute_seconds == (free.seconds.forward_compute, free.seconds.backward_compute)


def test_full_recomputation_issues_the_layers_again() -> None:
    own = program(4)
    asked = [
        Configuration(
            dp=2, precision="bf16", microbatch_size=ROWS, recompute=how, recomputes_ends=False
        )
        for how in ("none", "full")
    ]
    none, full = (
        ConfigurationPricer(own.graph, own.blocks).price(slow_host(1.0), each).stages[0]
        for each in asked
    )
    again = full.compute_seconds[1] - none.compute_seconds[1]
    assert 0 < again < none.compute_seconds[0], "the embedding and the head are not run again"


def test_context_parallel_ranks_share_the_pairs_of_causal_attention() -> None:
    """Long sequences, where attention is nearly all: half as much on each of two ranks, as these
    swap queries."""
    with torch.device("meta"):
        model = GPT(n_layer=4, d_model=1024, n_head=16, seq=8192, vocab=128, tied=False)
    own = capture(model, example_batch(2, 8192), dtype="bfloat16")
    one, two = (
        ConfigurationPricer(own.graph, own.blocks)
        .price(cluster(cp), Configuration(cp=cp, precision="bf16", microbatch_size=ROWS))
        .stages[0]
        .seconds.forward_compute
        for cp in (1, 2)
    )
    assert one / 2 <= two < 0.6 * one


def test_zero_shards_over_context_ranks_too() -> None:
    one = priced(4, 4, dp=4, zero=1).memory_bytes[0]["optimizer"]
    both = priced(4, 4, dp=2, cp=2, zero=1).memory_bytes[0]["optimizer"]
    assert both == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("zero", [slow(0), slow(1), slow(2), 3])
def test_a_joint_group_of_data_and_context_ranks_sums_gradients_as_data_ranks_do(zero: int) -> None:
    states = ("gradient_sync", "parameter_gather", "forward_states", "backward_states")
    found = [
        [getattr(priced(4, 4, **degrees, zero=zero).stages[0].seconds, s) for s in states]
        for degrees in ({"dp": 4}, {"dp": 2, "cp": 2}, {"cp": 4})
    ]
    assert sum(found[0]) > 0
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_degrees_and_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="AP127"):
        priced(4, 4, dp=2)
    with pytest.raises(UsageError, match="AP124"):
        priced(4, 4, dp=4, microbatch_size=2)
    with pytest.raises(UsageError, match="AP128"):
        priced(4, 2, pp=2, layers=(1, 2))
    with pytest.raises(UsageError, match="AP128"):
        priced(4, 2, pp=2, layers=(4,))


def test_rows_and_positions_are_told_from_features() -> None:
    graph = program(4).graph
    dims = position_dims(graph, lambda node: axis_strategies(node, graph, 2))
    block = program(4).blocks.kinds["layers"]
    norm, attention = (
        next(n for n in block.nodes if graph[n].op.startswith(f"aten.{op}"))
        for op in ("layer_norm", "scaled_dot_product_attention")
    )
    assert dims[Ref(norm)] == {0, 1}  # (batch, seq, hidden)
    assert dims[Ref(attention)] == {0, 2}  # (batch, heads, seq, head_dim)


@pytest.mark.parametrize(
    ("names", "kinds", "layers", "equal"),
    [
        ("in n.0 n.1 n.2 n.3 head", "in a b b a head", range(1, 5), range(2, 4)),
        ("e.0 e.1 d.0 d.1 d.2 d.3", "a a b c b c", range(2, 6), range(2)),
        ("n.0 n.1 n.2", "a a head", range(2), range(2)),
        ("in layers.0 layers.0+1 layers.1 out", "in a a a out", range(1, 4), range(1, 4)),
        ("x y z", "a a b", range(2), range(2)),
    ],
)
def test_layers_are_the_members_of_a_list_whatever_their_kinds(
    names: str, kinds: str, layers: range, equal: range
) -> None:
    """Such as dense layers before layers of experts, or two kinds in turn."""
    pairs = zip(names.split(), kinds.split(), strict=True)
    blocks = Blocks(tuple(Block(name, kind, (), ()) for name, kind in pairs))
    assert find_layers(blocks) == layers
    assert find_equal(blocks) == equal


def test_every_block_is_in_one_stage() -> None:
    blocks = program(7).blocks
    for count in (1, 2, 3, 7):
        bounds = stage_bounds(blocks, None, count)
        assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][1]) == (0, len(blocks.blocks))
        layers = set(find_layers(blocks))
        counts = tuple(len(layers.intersection(range(*each))) for each in bounds)
        assert counts == even_layers(7, count)


def test_the_axes_of_a_context_parallel_mesh_are_restricted_each_its_own_way() -> None:
    found = restriction(mesh_of(2, 2, 2), Forced(dp=2, tp=2, cp=2, sequence_parallel=True))
    assert found == Restriction((0,), (2,), True, (1,))
    assert replace(found, sequence_parallel=None) == restriction(
        mesh_of(2, 2, 2), Forced(dp=2, tp=2, cp=2)
    )
