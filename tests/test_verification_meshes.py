"""Context and expert parallelism on 2-D and 3-D meshes: each plan equals one device.

As ``test_verification``: float64, two AdamW steps, losses, gradients and weights to 1e-9.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
from processes import run_processes
from test_verification import GLOBAL_BATCH, SEQ, captured, check_verified, target, verify_all

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.graph.layout import BALANCED, HALO, NodeLayout, balanced_axes, shard
from autoparallel.planner.ops.attention import ring_axes
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps
from autoparallel.planner.requests.request import Forced, folded_axes
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.verify.verify import Verification

FEW = (
    ("gpt", "dp=2,cp=2"),
    ("window", "dp=2,cp=2"),
    ("packed", "cp=4"),
    ("mixtral", "dp=4,ep=2,zero=2"),
    ("few", "dp=4,ep=2,zero=3,microbatches=2"),
    ("gpt-tied", "dp=4,zero=3,shard=2,microbatches=2"),
    ("mixtral", "dp=4,ep=4,zero=3,microbatches=2,recompute=full"),
)
FOUR = (
    ("gpt", "dp=2,cp=2,zero=1"),
    ("gpt-tied", "dp=2,cp=2,zero=3,microbatches=2"),
    ("llama", "cp=4,zero=3,microbatches=2"),
    ("llama", "dp=2,cp=2,zero=1,shard=2,microbatches=2"),
    ("mixtral", "dp=4,ep=2,zero=3,shard=2,microbatches=2,recompute=full"),
    ("mixtral", "dp=4,ep=4,zero=2,shard=2,microbatches=2"),
    ("mixtral", "dp=4,ep=2,zero=1,microbatches=2"),
    ("few", "dp=4,ep=2,zero=1,microbatches=2"),
    ("few", "dp=4,ep=2,zero=2"),
    ("mixtral", "dp=4,ep=2,zero=3,recompute=selective"),
    ("mixtral", "dp=4,ep=4,zero=2,microbatches=2"),
    ("mixtral", "dp=2,ep=2,pp=2,zero=3,microbatches=4,schedule=1f1b"),
    ("mixtral", "dp=2,ep=2,pp=2,zero=2,microbatches=4,schedule=zb-h1"),
    ("mixtral", "dp=2,ep=2,pp=2,zero=1,microbatches=4,schedule=zbv"),
    ("gpt", "cp=2,tp=2,microbatches=2,recompute=full"),
    ("llama", "dp=2,cp=2,zero=2"),
    ("window", "cp=4"),
    ("packed", "dp=2,cp=2,zero=3,recompute=attention"),
    ("packed", "cp=2,tp=2,recompute=full"),
    ("packed", "cp=2,pp=2,microbatches=4,recompute=selective"),
    ("packed", "tp=4,recompute=none-offloaded"),
    ("window", "cp=2,tp=2,recompute=full"),
    ("window", "cp=2,pp=2,microbatches=4,recompute=selective"),
    ("window", "cp=2,pp=2,microbatches=4,recompute=none-offloaded"),
    ("window", "dp=4,shard=2,zero=3,recompute=attention-offloaded"),
    ("llama", "cp=2,pp=2,microbatches=4"),
    ("mixtral", "ep=4,microbatches=2"),
    ("mixtral", "ep=2,tp=2"),
)
SLICED_FEW = (
    ("mixtral", "dp=2,tp=2,ep=2,etp=2,zero=3,microbatches=2,recompute=full,sp"),
    ("mixtral", "dp=2,tp=2,ep=1,etp=2,zero=2,sp"),
    ("gpt_oss", "dp=2,tp=2,ep=2,etp=2,zero=1,sp"),
    ("deepseek_v3", "tp=4,etp=4"),
)
SLICED_FOUR = (
    ("mixtral", "dp=2,tp=2,ep=2,etp=2,recompute=selective"),
    ("mixtral", "tp=2,ep=1,etp=2,pp=2,microbatches=2,schedule=zb-h1,sp"),
    ("gpt_oss", "dp=2,tp=2,ep=2,etp=2,zero=3,microbatches=2,recompute=full,sp"),
    ("gpt_oss", "tp=4,etp=4"),
    ("deepseek_v3", "dp=2,tp=2,ep=2,etp=2,zero=3,sp"),
    ("deepseek_v3", "dp=2,tp=2,ep=2,etp=2,zero=2,microbatches=2,recompute=selective"),
)
BALANCED_FEW = (
    ("gpt", "cp=2"),
    ("packed", "cp=2"),
    ("llama", "cp=2,microbatches=2,recompute=selective"),
)
BALANCED_FOUR = (
    ("gpt", "cp=4"),
    ("packed", "cp=4,recompute=attention"),
    ("gpt", "cp=2,tp=2,microbatches=2,recompute=full"),
    ("llama", "dp=2,cp=2,zero=3,microbatches=2"),
    ("llama", "cp=2,pp=2,microbatches=4,recompute=selective"),
)
RING_FEW = (
    ("gpt", "cp=2"),
    ("llama", "cp=2,microbatches=2,recompute=selective"),
    ("llama", "cp=2,recompute=full"),
    ("unmasked", "cp=2,recompute=selective"),
)
RING_FOUR_FEW = (("gpt", "cp=4"), ("llama", "cp=2,tp=2,recompute=selective"))
RING_FOUR = (
    ("llama", "cp=4,zero=3,microbatches=2"),
    ("gpt", "cp=2,tp=2,microbatches=2,recompute=full"),
    ("llama", "dp=2,cp=2,zero=3,microbatches=2"),
    ("llama", "cp=2,pp=2,microbatches=4,recompute=selective"),
    ("deepseek_v3", "cp=4"),
    ("llama", "cp=2,tp=2,recompute=attention"),
    ("gpt", "cp=4,recompute=none-offloaded"),
)
HALO_FEW = (
    ("window", "cp=2,microbatches=2,recompute=attention"),
    ("window", "cp=2,recompute=none"),
)
HALO_FOUR = (
    ("window", "cp=4,zero=3,microbatches=2,recompute=selective"),
    ("window", "cp=2,tp=2,recompute=full"),
    ("window", "dp=2,cp=2,zero=2,recompute=attention-offloaded"),
)
DROPPED_FEW = (("dropout", "cp=2"),)
HEADS_FEW = (("gpt", "cp=2"), ("llama", "cp=2,microbatches=2,recompute=selective"))
EIGHT = (
    ("llama", "dp=2,cp=2,tp=2"),
    ("gpt", "dp=4,tp=2,zero=3,shard=2,microbatches=2"),
    ("gpt-tied", "dp=4,pp=2,zero=2,shard=2,microbatches=4,schedule=1f1b"),
    ("gpt", "dp=4,pp=2,zero=3,shard=2,microbatches=4,schedule=zb-h1"),
    ("mixtral", "dp=4,ep=2,tp=2,zero=1"),
    ("gpt-tied", "dp=2,cp=2,pp=2,zero=2,microbatches=4"),
    ("mixtral", "dp=4,ep=2,cp=2,zero=3"),
    ("mixtral", "dp=4,ep=2,pp=2,zero=2,microbatches=4,schedule=zb-h1"),
    ("mixtral", "dp=4,ep=4,tp=2,etp=2,zero=1,sp"),
    ("deepseek_v3", "dp=2,ep=4,cp=2,tp=2,etp=2,zero=3"),
)


def forced_of(parallel: str) -> Forced:
    """The choices of ``--parallel``; "sp" splits values between products along sequences, too."""
    text = parallel.removesuffix(",sp")
    return replace(parse_parallel(text), sequence_parallel=True if text != parallel else None)


def degrees(parallel: str) -> dict[str, int]:
    forced = forced_of(parallel)
    names = ("dp", "ep", "cp", "tp", "pp")
    return {name: size for name in names if (size := getattr(forced, name) or 1) > 1}


def mesh_degrees(parallel: str) -> dict[str, int]:
    """The sizes of the axes: "dp" has the data-parallel ranks that share no experts."""
    found, etp = degrees(parallel), forced_of(parallel).etp
    if "dp" in found and "ep" in found:
        _, ep = folded_axes(*(found.get(name, 1) for name in ("ep", "dp", "tp", "cp")), etp)
        found = {**found, "dp": found["dp"] // ep, "ep": ep}
    return {name: size for name, size in found.items() if size > 1}


@cache
def planned(model: str, parallel: str, allow: tuple[str, ...] = ()) -> Plan:
    options = PlanOptions(
        global_batch=GLOBAL_BATCH, seq=SEQ, forced=forced_of(parallel), allow=allow
    )
    asked = mesh_degrees(parallel)
    cluster = parse_cluster(f"cpu:{prod(asked.values())}")
    found = plan_program(captured(model, "fp32")[1], target(model), cluster, options)
    axes = {name: size for name, size in asked.items() if name != "pp"}
    for stage in found.stages:
        assert dict(zip(stage.mesh.axes, stage.mesh.shape, strict=True)) == axes
        assert stage.slice_degree == (options.forced.etp or 1)
    return found


def balanced(plan: Plan) -> Plan:
    """The plan with its attention balanced on "cp", whether that gains or not."""

    def relabelled(layout: NodeLayout, cp: int) -> NodeLayout:
        labels = [
            BALANCED if axis == cp and label == "q" else label
            for axis, label in enumerate(layout.labels)
        ]
        return replace(layout, labels=tuple(labels))

    stages = []
    for stage in plan.stages:
        cp = stage.mesh.axes.index("cp")
        layouts = {name: relabelled(layout, cp) for name, layout in stage.layouts.items()}
        assert any(balanced_axes(layout) == (cp,) for layout in layouts.values())
        stages.append(replace(stage, layouts=layouts))
    return replace(plan, stages=tuple(stages))


Case = tuple[str, str]


@cache
def results(
    num_ranks: int,
    cases: tuple[Case, ...],
    change: Callable[[Plan], Plan] = lambda plan: plan,
    allow: tuple[str, ...] = (),
) -> dict[Case, Verification]:
    """Every case of that many ranks, run in one set of processes."""
    plans = [(model, dumps(change(planned(model, parallel, allow)))) for model, parallel in cases]
    found = run_processes(num_ranks, verify_all, plans, timeout_seconds=500)
    return dict(zip(cases, found[0], strict=True))


@pytest.mark.parametrize("case", FEW, ids=" ".join)
def test_positions_or_experts_split_beside_rows_equal_one_device(case: Case) -> None:
    check_verified(results(4, FEW)[case])


@pytest.mark.parametrize("case", SLICED_FEW, ids=" ".join)
def test_experts_split_by_width_equal_one_device(case: Case) -> None:
    check_verified(results(4, SLICED_FEW)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLICED_FOUR, ids=" ".join)
def test_slices_of_experts_on_four_ranks_equal_one_device(case: Case) -> None:
    check_verified(results(4, SLICED_FOUR)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=" ".join)
def test_a_plan_on_four_ranks_equals_one_device(case: Case) -> None:
    check_verified(results(4, FOUR)[case])


@pytest.mark.parametrize("case", BALANCED_FEW, ids=" ".join)
def test_balanced_attention_on_two_ranks_equals_one_device(case: Case) -> None:
    check_verified(results(2, BALANCED_FEW, balanced, ("gather",))[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", BALANCED_FOUR, ids=" ".join)
def test_balanced_attention_on_four_ranks_equals_one_device(case: Case) -> None:
    check_verified(results(4, BALANCED_FOUR, balanced, ("gather",))[case])


def by_ring(plan: Plan) -> Plan:
    """The plan, whose attention passes keys and values along "cp"."""
    for stage in plan.stages:
        cp = stage.mesh.axes.index("cp")
        assert any(ring_axes(layout) == (cp,) for layout in stage.layouts.values())
    return plan


@pytest.mark.parametrize("case", RING_FEW, ids=" ".join)
def test_ring_attention_on_two_ranks_equals_one_device(case: Case) -> None:
    check_verified(results(2, RING_FEW, by_ring, ("ring",))[case])


@pytest.mark.parametrize("case", RING_FOUR_FEW, ids=" ".join)
def test_a_ring_of_four_ranks_or_beside_split_heads_equals_one_device(case: Case) -> None:
    check_verified(results(4, RING_FOUR_FEW, by_ring, ("ring",))[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", RING_FOUR, ids=" ".join)
def test_ring_attention_on_four_ranks_equals_one_device(case: Case) -> None:
    check_verified(results(4, RING_FOUR, by_ring, ("ring",))[case])


@pytest.mark.parametrize("case", HALO_FEW, ids=" ".join)
def test_windows_across_two_ranks_equal_one_device(case: Case) -> None:
    check_verified(results(2, HALO_FEW, by_halo, ("ring",))[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", HALO_FOUR, ids=" ".join)
def test_windows_across_four_ranks_equal_one_device(case: Case) -> None:
    check_verified(results(4, HALO_FOUR, by_halo, ("ring",))[case])


def by_halo(plan: Plan) -> Plan:
    """The plan, whose attention receives the keys of its windows alone."""
    assert all(
        any(HALO in layout.labels for layout in stage.layouts.values()) for stage in plan.stages
    )
    return plan


@pytest.mark.parametrize("case", DROPPED_FEW, ids=" ".join)
def test_attention_with_dropout_gathers_keys_and_values(case: Case) -> None:
    """Attention with dropout, which is made of other ops."""
    plan = planned(*case, allow=("ring",))
    assert not any(ring_axes(layout) for layout in plan.stages[0].layouts.values())
    check_verified(results(2, DROPPED_FEW, allow=("ring",))[case])


@pytest.mark.parametrize("case", HEADS_FEW, ids=" ".join)
def test_heads_split_between_split_positions_equal_one_device(case: Case) -> None:
    """The all-to-all of the axis "cp" that brings queries, keys and values to heads."""
    plan = planned(*case, allow=("ulysses",))
    attention = plan.stages[0].layouts["scaled_dot_product_attention"]
    cp = plan.stages[0].mesh.axes.index("cp")
    assert {held[cp] for held in (*attention.inputs[:3], *attention.outputs)} == {shard(1)}
    check_verified(results(2, HEADS_FEW, allow=("ulysses",))[case])


@pytest.mark.slow
def test_balanced_attention_that_the_search_chooses_equals_one_device(tmp_path: Path) -> None:
    """With --compile, whose runs of ops end at the attention."""
    settings = {"n_layer": 1, "d_model": 128, "n_head": 2, "seq": 1024, "vocab": 64}
    file = str(tmp_path / "plan.json")
    command = [
        sys.executable,
        "-m",
        "autoparallel",
        "plan",
        "examples/gpt.py",
        "--cluster",
        "cpu:2",
        "--profile",
        "analytic",
        "--seq",
        "1024",
        "--global-batch",
        "1",
        "--parallel",
        "cp=2",
        "--allow",
        "gather",
        "--compile",
        "-o",
        file,
        *(text for name, value in settings.items() for text in ("--set", f"{name}={value}")),
    ]
    subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    shown, verified = (
        subprocess.run(
            [sys.executable, "-m", "autoparallel", name, file],
            capture_output=True,
            text=True,
            timeout=500,
            check=True,
        ).stdout
        for name in ("inspect", "verify")
    )
    assert "causal attention balanced by swapping queries" in shown
    assert "verified: 36 tensors" in verified


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT, ids=" ".join)
def test_a_plan_of_three_axes_on_eight_ranks_equals_one_device(case: Case) -> None:
    check_verified(results(8, EIGHT)[case])


def test_the_axis_ep_splits_experts_and_nothing_else_but_rows() -> None:
    plan = planned("mixtral", "ep=2,tp=2")
    graph = captured("mixtral", "fp32")[1].graph
    rows = graph.batch_dims
    layouts = plan.stages[0].layouts
    experts = [name for name in layouts if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(experts) == 2
    for name, layout in layouts.items():
        own = [each[0] for each in layout.outputs]
        if name in experts:
            assert own == [shard(0)], name
        elif graph[name].kind == "op" and name in rows:
            for placement, dim in zip(own, rows[name], strict=True):
                by_rows = placement.kind == "P" or (dim is not None and placement == shard(dim))
                assert by_rows, name


def test_the_axis_cp_splits_positions_and_gathers_keys_and_values() -> None:
    plan = planned("llama", "dp=2,cp=2,zero=2")
    graph = captured("llama", "fp32")[1].graph
    (attention,) = [
        layout
        for name, layout in plan.stages[0].layouts.items()
        if graph[name].op.startswith("aten.scaled_dot_product_attention")
    ]
    query, key, value = (layout[1] for layout in attention.inputs[:3])
    assert query == shard(2)
    assert not key.is_shard
    assert not value.is_shard
    assert attention.outputs[0][1] == shard(2)


@pytest.mark.slow
def test_three_axes_that_the_search_chooses_equal_one_device() -> None:
    """Two rows for four hosts of two: only "tp" is forced, and one stage is asked for."""
    settings = {"n_layer": 2, "d_model": 64, "n_head": 4, "seq": 512, "vocab": 256}
    command = [
        sys.executable,
        "-m",
        "autoparallel",
        "verify",
        "examples/gpt.py",
        "--cluster",
        "4x2xcpu",
        "--seq",
        "512",
        "--global-batch",
        "2",
        "--deny",
        "pp",
        "--parallel",
        "tp=2",
        *(text for name, value in settings.items() for text in ("--set", f"{name}={value}")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "dp=2 cp=2 tp=2" in done.stdout
    assert "verified: 60 tensors" in done.stdout
