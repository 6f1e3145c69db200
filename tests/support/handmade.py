"""Plans made by hand, for tests of what reads plans."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.planner.graph.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Layout,
    Mesh,
    NodeLayout,
    shard,
)
from autoparallel.planner.plan import (
    Alternative,
    BlockPlan,
    ModelInfo,
    Plan,
    Prediction,
    SolverInfo,
    StagePlan,
    StagePrediction,
)

GIB = 2**30

DEVICE = Device(
    name="H100-SXM",
    kind="cuda",
    memory_bytes=80 * 10**9,
    usable_memory_bytes=72 * GIB,
    memory_bytes_per_second=3.35e12,
    peak_flops={"bfloat16": 989e12},
    sources={"memory_bytes": "NVIDIA H100 data sheet", "peak_flops": "NVIDIA H100 data sheet"},
)

CLUSTER = Cluster(
    name="8xH100",
    hosts=(Host(DEVICE, 8, Link("NVLink 4", 5e-6, 450e9, "NVIDIA H100 data sheet")),),
    inter_link=Link("InfiniBand", 1e-5, 50e9, "ConnectX-7 data sheet"),
)

MESH = Mesh(("dp", "tp"), (2, 2))

WHOLE: Layout = (REPLICATE, REPLICATE)
ROWS: Layout = (REPLICATE, shard(0))
COLUMNS: Layout = (REPLICATE, shard(1))
BATCH: Layout = (shard(0), INVARIANT)


def held(layout: Layout) -> NodeLayout:
    return NodeLayout((), (layout,))


def layer(name: str) -> dict[str, NodeLayout]:
    return {
        f"{name}.attn.qkv.weight": held(ROWS),
        f"{name}.attn.proj.weight": held(COLUMNS),
        f"{name}.mlp.up.weight": held(ROWS),
        f"{name}.mlp.up.bias": held(ROWS),
        f"{name}.mlp.down.weight": held(COLUMNS),
        f"{name}.ln_1.weight": held(WHOLE),
        f"{name}.ln_2.weight": held(WHOLE),
        "layer_norm": NodeLayout((BATCH, WHOLE), (BATCH,)),
        "linear": NodeLayout(((shard(0), REPLICATE), ROWS), ((shard(0), shard(2)),)),
        "linear_1": NodeLayout(((shard(0), shard(2)), COLUMNS), ((shard(0), PARTIAL),)),
    }


def stage(names: list[tuple[str, str]], ranks: range, layouts: dict[str, NodeLayout]) -> StagePlan:
    return StagePlan(
        blocks=tuple(BlockPlan(name, kind, "none") for name, kind in names),
        devices=tuple(ranks),
        mesh=MESH,
        zero=1,
        layouts=layouts,
        prediction=StagePrediction(
            seconds={
                "forward": 0.0381,
                "backward": 0.0822,
                "compute": 0.101,
                "communication": 0.0193,
                "gradient_sync": 0.021,
                "optimizer": 0.008,
                "send": 0.0004,
            },
            memory_bytes={
                "parameters": 8 * GIB,
                "gradients": 8 * GIB,
                "optimizer": 16 * GIB,
                "activations": 21 * GIB,
                "transient": GIB,
                "buffers": GIB // 2,
                "reserve": GIB,
            },
        ),
    )


def pipeline_plan() -> Plan:
    """Two stages of dp=2 tp=2, eight layers."""
    first = [("embed", "embed")] + [(f"layers.{index}", "layer") for index in range(4)]
    second = [(f"layers.{index}", "layer") for index in range(4, 8)] + [("head", "head")]
    return Plan(
        model=ModelInfo(
            "examples/llama.py", {"layers": 8}, "abc", 8_030_000_000, 64, 4096, "bf16", "adamw"
        ),
        cluster=CLUSTER,
        num_microbatches=16,
        schedule="1f1b",
        stages=(
            stage(first, range(4), {"embed.weight": held(ROWS), **layer("layers.0")}),
            stage(second, range(4, 8), {**layer("layers.0"), "head.weight": held(ROWS)}),
        ),
        prediction=Prediction(
            2.1, 0.058, 124_830.5, 0.463, 55 * GIB, {"measured": 0.92, "interpolated": 0.08}
        ),
        alternatives=(
            Alternative("dp=8 · ZeRO 3 · 16 × 4", 2.31, 61 * GIB, "all-gathers not hidden: 11 %"),
            Alternative("dp=4 tp=2 · ZeRO 2 · 16 × 4", 2.205, 68 * GIB, "more communication"),
            Alternative("dp=8 · ZeRO 0 · 16 × 4", 0.0, 142 * GIB, "does not fit: 70 GiB too much"),
        ),
        solver=SolverInfo(0.0, 24, {"capture": 2.1, "costs": 1.4, "ilp": 3.2, "dp": 0.4}),
    )


def flat_plan() -> Plan:
    """One stage over all devices of a mesh of four."""
    plan = pipeline_plan()
    return replace(plan, stages=plan.stages[:1], schedule="gpipe", num_microbatches=4)
