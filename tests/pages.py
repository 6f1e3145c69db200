"""Pages of a plan made by hand, with everything that a page can have."""

from __future__ import annotations

from dataclasses import replace

from handmade import GIB, pipeline_plan

from autoparallel.baselines import Baseline
from autoparallel.cost_model.actions import COMPUTE
from autoparallel.html import Sources, page
from autoparallel.measurement import Measurement, checksum
from autoparallel.planner.plan import Plan
from autoparallel.priced_again import OpWork, PricedAgain
from autoparallel.report.drawing import timeline_of

SECTIONS = (
    "cluster", "model", "schedule", "communication", "memory", "time", "roofline", "candidates",
    "measured", "sources",
)  # fmt: skip


def drawn_plan() -> Plan:
    """Two stages under 1F1B, four micro-batches: forward 1 s, backward 2 s, a step of 15 s."""
    plan = pipeline_plan()
    seconds = {
        "forward": 1.0, "backward": 2.0, "compute": 2.9, "communication": 0.1,
        "states": 0.2, "hidden_states": 0.15,
    }  # fmt: skip
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, seconds=seconds))
        for stage in plan.stages
    )
    prediction = replace(plan.prediction, step_seconds=15.0)
    return replace(
        plan, stages=stages, prediction=prediction, num_microbatches=4, schedule="1f1b",
        version="0.1.0", torch_version="2.13.0",
    )  # fmt: skip


BASELINES = (
    Baseline("DDP", reason="a batch of 64 samples cannot be divided over dp=3"),
    Baseline("FSDP", "dp=8 · ZeRO 3 · 8 × 8", 18.0, 40 * GIB, True, 8),
    Baseline("3-D (Megatron)", "dp=2 tp=2 pp=2 · 1F1B · 16 × 4", 16.5, 60 * GIB, True, 30, True),
)


def full_sources(plan: Plan) -> Sources:
    """The plan priced again and measured, with values made by hand."""
    timeline = timeline_of(plan)
    assert timeline is not None
    actions = [e.action for e in timeline.events[0] if e.action.kind in COMPUTE]
    memory = tuple(
        (action, {"parameters": 8.0 * GIB, "activations": (1.0 + at % 3) * GIB, "inputs": 1e6})
        for at, action in enumerate(actions)
    )
    ops = (
        OpWork(
            "linear", "mlp.up", "4×256 256×1024", "matmul", "bfloat16", False, 8, 2e12, 4e9, 5e-3
        ),
        OpWork(
            "linear", "mlp.up", "4×256 256×1024", "matmul", "bfloat16", True, 8, 4e12, 8e9, 9e-3
        ),
        OpWork("gelu", "mlp", "4×1024", "elementwise", "bfloat16", False, 8, 1e7, 4e7, 2e-5),
    )
    shapes = {"layers.0.attn.qkv.weight": (3072, 1024), "embed.weight": (50000, 1024)}
    priced = PricedAgain(plan.prediction.step_seconds, timeline, 0, memory, ops, shapes, BASELINES)
    measured = Measurement(
        checksum(plan), 16.0, 50 * GIB, (17.0, 16.0, 15.9), 3, 1, "H100",
        "2026-01-02T03:04:05+00:00", "0.1.0", "2.13.0",
    )  # fmt: skip
    return Sources(priced, "", measured)


def full_page() -> str:
    """A page in which no section is without its content."""
    plan = drawn_plan()
    return page(plan, full_sources(plan))
