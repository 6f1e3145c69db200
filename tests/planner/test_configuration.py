"""One hand-written configuration costs what the search says, and few layers stand for many."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autoparallel.cost_model.cluster import Cluster
from autoparallel.cost_model.compute import op_seconds
from autoparallel.cost_model.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Cache, Configuration, price
from autoparallel.planner.configured.configuration import Program as Setup
from autoparallel.planner.configured.stage_runs import even_layers, find_layers, stage_runs
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph import Ref
from autoparallel.planner.inter_op.submesh import mesh_of, restriction
from autoparallel.planner.positions import position_dims
from autoparallel.planner.pricing.choices import Restriction
from autoparallel.planner.pricing.structure import Structure
from autoparallel.planner.requests.request import Forced, Request
from autoparallel.planner.rules import axis_strategies
from autoparallel.planner.search.search import plan
from examples.gpt import GPT, example_batch

HIDDEN, SEQ, ROWS = 64, 32, 4


@cache
def program(num_layers: int) -> Program:
    with torch.device("meta"):
        model = GPT(n_layer=num_layers, d_model=HIDDEN, n_head=4, seq=SEQ, vocab=128, tied=False)
    return capture(model, example_batch(2, SEQ), dtype="bfloat16")


def cluster(num_devices: int) -> Cluster:
    return parse_cluster(f"{num_devices}xA100-80GB")


def priced(num_layers: int, num_devices: int, found: Cache | None = None, **options: Any) -> Any:
    own = program(num_layers)
    asked = Configuration(precision="bf16", **{"microbatch_size": ROWS, **options})
    return price(own.graph, own.blocks, cluster(num_devices), asked, cache=found)


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2},
        {"pp": 2, "num_microbatches": 4},
        {"pp": 2, "num_microbatches": 4, "schedule": "interleaved-1f1b", "num_chunks": 3},
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_four_layers_stand_for_a_deeper_model(options: dict[str, Any]) -> None:
    few, many = priced(4, 2, depth=7, **options), priced(7, 2, **options)
    assert few.step_seconds == pytest.approx(many.step_seconds, rel=1e-12)
    assert few.peak_bytes == pytest.approx(many.peak_bytes, rel=1e-12)
    assert [dict(each) for each in few.memory_bytes] == [dict(each) for each in many.memory_bytes]


@pytest.mark.parametrize(
    "forced",
    [{"dp": 2, "pp": 2, "tp": 1}, {"dp": 4, "pp": 1, "tp": 1}, {"dp": 1, "pp": 4, "tp": 1}],
    ids=str,
)
def test_a_configuration_costs_what_the_search_says(forced: dict[str, int]) -> None:
    own = program(4)
    request = Request(
        16, precision="bf16", microbatch_size=ROWS,
        forced=Forced(**forced, zero=0, recompute="none", schedule="1f1b"),
    )  # fmt: skip
    found = plan(own.graph, own.blocks, cluster(4), request)
    layers = tuple(sum(b.kind == "layers" for b in stage.blocks) for stage in found.stages)
    step = priced(4, 4, **forced, num_microbatches=4, layers=layers)
    ends = [found.stages[0].blocks[0].kind, found.stages[-1].blocks[-1].kind]
    assert ends == ["embedding", "head"]
    assert step.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)


def test_recomputing_trades_time_for_memory_and_selective_is_between() -> None:
    steps = [priced(4, 1, recompute=how) for how in ("none", "selective", "full")]
    seconds = [step.step_seconds for step in steps]
    kept = [step.memory_bytes[0]["activations"] for step in steps]
    assert seconds == sorted(seconds)
    assert kept == sorted(kept, reverse=True)
    assert len(set(seconds)) == len(set(kept)) == 3


def test_full_recomputation_runs_the_layers_again_and_not_the_head() -> None:
    none, full = (priced(4, 1, recompute=how).stages[0].seconds for how in ("none", "full"))
    own = program(4)
    alone = Structure(own.graph.with_batch_size(ROWS), own.blocks)
    assert find_layers(alone).count == 4
    again = full.backward_compute - none.backward_compute
    assert 0 < again < none.forward_compute


def slow_host(issue_seconds: float) -> Cluster:
    on = cluster(2)
    device = replace(on.hosts[0].device, issue_seconds=issue_seconds)
    return replace(on, hosts=(replace(on.hosts[0], device=device),))


def test_a_pass_lasts_until_the_host_has_issued_it() -> None:
    """An issue of a second outlasts all compute: seconds are then numbers of kernels."""
    own = program(4)
    asked = Configuration(pp=2, precision="bf16", microbatch_size=ROWS, num_microbatches=2)
    one, two, none = (
        price(own.graph, own.blocks, slow_host(each), asked).stages for each in (1.0, 2.0, 0.0)
    )
    for first, second, free in zip(one, two, none, strict=True):
        kernels = first.compute_seconds
        assert kernels == tuple(round(each) for each in kernels)
        assert second.compute_seconds == pytest.approx([2 * each for each in kernels])
        assert free.compute_seconds == (free.seconds.forward_compute, free.seconds.backward_compute)


def test_full_recomputation_issues_the_layers_again() -> None:
    own = program(4)
    asked = [
        Configuration(dp=2, precision="bf16", microbatch_size=ROWS, recompute=how)
        for how in ("none", "full")
    ]
    none, full = (price(own.graph, own.blocks, slow_host(1.0), each).stages[0] for each in asked)
    again = full.compute_seconds[1] - none.compute_seconds[1]
    assert 0 < again < none.compute_seconds[0], "the embedding and the head are not run again"


def test_a_program_adds_to_every_microbatch_and_message() -> None:
    base = priced(4, 1, num_microbatches=3)
    slower = priced(4, 1, num_microbatches=3, program=Setup(loss_seconds=0.5))
    assert slower.step_seconds == pytest.approx(base.step_seconds + 3 * 0.5)
    two = priced(4, 2, pp=2, num_microbatches=1)
    late = priced(4, 2, pp=2, num_microbatches=1, program=Setup(message_seconds=0.5))
    assert late.step_seconds == pytest.approx(two.step_seconds + 2 * 0.5)


def test_gradients_that_are_kept_twice_and_added_by_kernels_cost_bytes_and_passes() -> None:
    base = priced(4, 1, num_microbatches=3)
    own = priced(4, 1, num_microbatches=3, program=Setup(second_gradients=0.5, accumulation=3.0))
    gradients = base.memory_bytes[0]["gradients"]
    assert own.peak_bytes - base.peak_bytes == pytest.approx(gradients / 2)
    device = cluster(1).hosts[0].device
    added = op_seconds(device, "elementwise", 0.0, 3 * gradients, "bfloat16")
    assert added > 3 * gradients / device.memory_bytes_per_second
    before, after = (step.stages[0].seconds for step in (base, own))
    assert after.backward_compute - before.backward_compute == pytest.approx(added)
    assert after.forward_compute == before.forward_compute


def test_context_parallel_ranks_share_the_pairs_of_causal_attention() -> None:
    """Long sequences, where attention is nearly all: half as much on each of two ranks."""
    with torch.device("meta"):
        model = GPT(n_layer=4, d_model=HIDDEN, n_head=4, seq=8192, vocab=128, tied=False)
    own = capture(model, example_batch(2, 8192), dtype="bfloat16")
    one, two = (
        price(
            own.graph, own.blocks, cluster(cp),
            Configuration(cp=cp, precision="bf16", microbatch_size=ROWS),
        ).stages[0].seconds.forward_compute
        for cp in (1, 2)
    )  # fmt: skip
    assert one / 2 <= two < 0.6 * one


def test_zero_shards_over_context_ranks_too() -> None:
    one = priced(4, 4, dp=4, zero=1).memory_bytes[0]["optimizer"]
    both = priced(4, 4, dp=2, cp=2, zero=1).memory_bytes[0]["optimizer"]
    assert both == pytest.approx(one, rel=1e-6)


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


def test_every_layer_is_in_one_stage() -> None:
    own = program(7)
    structure = Structure(own.graph, own.blocks)
    for count in (1, 2, 3, 7):
        runs = stage_runs(structure, even_layers(7, count))
        assert sum(run.num_layers for run in runs) == 7
        assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
        assert (runs[0].start, runs[-1].stop) == (0, len(own.blocks.blocks))


def test_the_axes_of_a_context_parallel_mesh_are_restricted_each_its_own_way() -> None:
    found = restriction(mesh_of(2, 2, 2), Forced(dp=2, tp=2, cp=2, sequence_parallel=True))
    assert found == Restriction((0,), (2,), True, (1,), gathers=(1,))
    assert replace(found, sequence_parallel=None) == restriction(
        mesh_of(2, 2, 2), Forced(dp=2, tp=2, cp=2)
    )
