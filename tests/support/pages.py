"""Pages of plans made by hand, with everything that a page can have, and how they are read."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from handmade import GIB, pipeline_plan

from autoparallel.analysis.baselines import Baseline
from autoparallel.analysis.compare import Item, MeasuredRun
from autoparallel.analysis.measurement import Measurement, checksum
from autoparallel.analysis.repriced import OpWork, PricedAgain
from autoparallel.cost_model.simulator.actions import COMPUTE
from autoparallel.html import Sources, page
from autoparallel.planner.plan import Plan
from autoparallel.report.drawing import timeline_of

SECTIONS = (
    "cluster",
    "model",
    "schedule",
    "communication",
    "memory",
    "time",
    "roofline",
    "candidates",
    "measured",
    "sources",
)


def drawn_plan() -> Plan:
    """Two stages under 1F1B, four micro-batches: forward 1 s, backward 2 s, a step of 15 s."""
    plan = pipeline_plan()
    seconds = {
        "forward": 1.0,
        "backward": 2.0,
        "compute": 2.9,
        "communication": 0.1,
        "states": 0.2,
        "hidden_states": 0.15,
    }
    stages = tuple(
        replace(stage, prediction=replace(stage.prediction, seconds=seconds))
        for stage in plan.stages
    )
    prediction = replace(plan.prediction, step_seconds=15.0)
    return replace(
        plan,
        stages=stages,
        prediction=prediction,
        num_microbatches=4,
        schedule="1f1b",
        version="0.1.0",
        torch_version="2.13.0",
    )


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
        checksum(plan),
        16.0,
        50 * GIB,
        (17.0, 16.0, 15.9),
        3,
        1,
        "H100",
        "2026-01-02T03:04:05+00:00",
        "0.1.0",
        "2.13.0",
    )
    return Sources(priced, "", measured)


def full_page() -> str:
    """A page in which no section is without its content."""
    plan = drawn_plan()
    return page(plan, full_sources(plan))


def compared_items() -> tuple[Item, ...]:
    """Two plans, of which the first has run and the second does not fit, and a run alone."""
    plan = drawn_plan()
    measured = full_sources(plan).measured
    more = replace(plan.prediction, step_seconds=18.0, peak_memory_bytes=90 * GIB)
    other = replace(plan, prediction=more, num_microbatches=8, schedule="gpipe")
    run = MeasuredRun(12, 12.5, 640.0, 40 * GIB, 2.5)
    return (
        Item("runs/plan.json", plan, None, measured),
        Item("<fsdp>", other),
        Item("run.jsonl", None, run),
    )


VOID = {"meta", "link", "br", "hr", "img", "input", "col"}
CLOSED_IN_SVG = {"rect", "line", "path", "circle"}


class Outline(HTMLParser):
    """What a page consists of: tags with attributes, texts by tag, and what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def attributes(self, name: str) -> list[str]:
        return [own[name] or "" for _, own in self.tags if name in own]
