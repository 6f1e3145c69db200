"""What practitioners run beside what the planner chooses, both priced by the same model.

``python benchmarks/planning/practice.py [--only NAME] [--json FILE] [--write FILE]``. A
practice is a published or usual configuration: its degrees, ZeRO stage, recomputation, schedule
and micro-batch are forced, and what it leaves open (layouts, cuts) the planner chooses for it.
Each setting is added to the JSON file as soon as it is planned; ``--write`` puts the tables of all
that are in it between the markers of a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, plan_program
from autoparallel.target.load import load_target
from benchmarks.planning.cases import HERE, LLAMA, LLAMA_70B, LLAMA_405B

GPT = f"hf:{HERE / 'gpt_39b'}"
GPT_175B = {"n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048}
GPT_1B = {"n_embd": 2048, "n_head": 16, "n_layer": 24, "n_positions": 2048}
TERMS = ("compute", "communication", "synchronization", "optimizer", "bubble")
MUCH_FASTER = 0.1
OPEN = "the practice's recomputation does not fit here: left open"
BEGIN, END = "<!-- practice.py: begin -->", "<!-- practice.py: end -->"


def _moe(name: str) -> str:
    """The target of a model of experts, as the published runs are priced."""
    return f"hf:{HERE.parent / 'validation' / 'data' / 'moe_models' / name}"


@dataclass(frozen=True)
class Setting:
    """A model on a cluster and how it is trained. ``practice``: as of ``--parallel``.

    ``micro_batch``: the samples of a rank in a micro-batch of the practice. ``measured_seconds`` of
    a step is what ``source`` published for it; None where it published none.
    """

    name: str
    target: str
    cluster: str
    global_batch: int
    seq: int | None
    practice: str
    source: str
    micro_batch: int | None = None
    measured_seconds: float | None = None
    precision: str = "bf16"
    settings: Mapping[str, Any] = field(default_factory=dict)


TITAN = "torchtitan, benchmarks of 2024-12 and 2025-06"
BRIDGE = "NVIDIA Megatron-Bridge, performance summary"
DGXC = "NVIDIA/dgxc-benchmarking v25.02"
SETTINGS = (
    Setting(
        "Llama-3-8B, 8 H100",
        LLAMA,
        "8xH100-96GB",
        16,
        8192,
        "dp=8,zero=3,recompute=selective",
        f"{TITAN} (96 GB cards)",
        2,
        2.8435,
    ),
    Setting(
        "Llama-3-8B, 64 H100",
        LLAMA,
        "8x8xH100",
        128,
        8192,
        "dp=64,zero=3,recompute=selective",
        f"{TITAN}, one sample per device",
        1,
    ),
    Setting(
        "Llama-3-70B, 64 H100",
        LLAMA,
        "8x8xH100",
        128,
        8192,
        "dp=2,tp=4,pp=4,cp=2,zero=1,schedule=interleaved,chunks=5",
        DGXC,
        1,
        14.61,
        settings=LLAMA_70B,
    ),
    Setting(
        "Llama-3-70B, 256 H100",
        LLAMA,
        "32x8xH100",
        512,
        8192,
        "dp=32,tp=8,zero=3,recompute=full",
        "torchtitan, asyncTP benchmark: compiled, bf16, AsyncTP (96 GB cards)",
        16,
        25.11,
        settings=LLAMA_70B,
    ),
    Setting(
        "Llama-3-405B, 16,384 H100",
        LLAMA,
        "2048x8xH100",
        2048,
        8192,
        "dp=128,tp=8,pp=16,zero=1,recompute=selective,schedule=interleaved,chunks=8",
        "arXiv:2407.21783, section 3.3 (recomputation and chunks assumed)",
        1,
        settings=LLAMA_405B,
    ),
    Setting(
        "Mixtral-8x22B, 128 H100",
        f"hf:{HERE / 'mixtral_8x22b'}",
        "16x8xH100",
        512,
        4096,
        "dp=32,ep=8,pp=4,zero=1,recompute=selective,schedule=interleaved,chunks=7",
        "Megatron Core's recipe for experts (ep within a host, pp across)",
        1,
    ),
    Setting(
        "Qwen3-30B-A3B, 8 H100",
        _moe("Qwen3-30B-A3B"),
        "8xH100",
        512,
        4096,
        "dp=8,ep=8,zero=3,recompute=full",
        "NeMo Automodel's published run: FSDP, experts by DeepEP",
        4,
        21.773,
    ),
    Setting(
        "Qwen3-30B-A3B, 16 H100",
        _moe("Qwen3-30B-A3B"),
        "2x8xH100",
        1024,
        4096,
        "dp=8,ep=8,pp=2,zero=1,schedule=interleaved,chunks=2",
        f"{BRIDGE} (its run is in fp8)",
        1,
    ),
    Setting(
        "GPT-OSS-120B, 64 H100",
        _moe("GPT-OSS-120B"),
        "8x8xH100",
        1280,
        4096,
        "dp=16,ep=8,pp=4,zero=1,recompute=selective",
        BRIDGE,
        1,
        13.69,
    ),
    Setting(
        "GPT-OSS-120B, 64 H100, 512 sequences",
        _moe("GPT-OSS-120B"),
        "8x8xH100",
        512,
        4096,
        "dp=64,ep=64,zero=3,recompute=full",
        "NeMo Automodel's published run: FSDP, experts by DeepEP",
        2,
        4.3,
    ),
    Setting(
        "Llama-4 Maverick, 512 H100",
        _moe("Llama-4-Maverick-400B"),
        "64x8xH100",
        1024,
        8192,
        "dp=128,tp=4,ep=128,zero=1",
        "NVIDIA/dgxc-benchmarking v25.05",
        1,
        4.426,
    ),
    Setting(
        "DeepSeek-V3, 256 GB200",
        _moe("DeepSeek-V3"),
        "64x4xGB200",
        4096,
        4096,
        "dp=64,ep=64,pp=4,zero=1,recompute=selective,schedule=interleaved,chunks=4",
        f"{BRIDGE} 25.11",
        1,
        20.878,
    ),
    Setting(
        "DeepSeek-V3, 1,024 H100",
        _moe("DeepSeek-V3"),
        "128x8xH100",
        8192,
        4096,
        "dp=128,ep=64,pp=8,zero=1,recompute=selective,schedule=interleaved,chunks=2",
        "NVIDIA/dgxc-benchmarking v25.08",
        1,
        36.189,
    ),
    Setting(
        "GPT-3 175B, 1,024 A100",
        GPT,
        "128x8xA100-80GB",
        1536,
        2048,
        "dp=8,tp=8,pp=16,zero=0,recompute=full,schedule=1f1b",
        "Megatron-LM README of 2021",
        1,
        31.92,
        precision="fp16",
        settings=GPT_175B,
    ),
    Setting(
        "GPT 1.3B, 8 x 24 GB over PCIe",
        GPT,
        "8xRTX4090",
        256,
        2048,
        "dp=8,zero=2,recompute=full",
        "usual recipe: ZeRO 2 with recomputation",
        4,
        settings=GPT_1B,
    ),
    Setting(
        "LoRA of Llama-3-8B, 2 x 24 GB over PCIe",
        LLAMA,
        "2xRTX4090",
        16,
        2048,
        "dp=2,zero=3,recompute=full",
        "usual recipe: FSDP with recomputation",
        1,
        settings={"lora": "r=8,alpha=16"},
    ),
    Setting(
        "ViT-L/16, 8 A100",
        f"hf:{HERE / 'vit_l'}",
        "8xA100-80GB",
        1024,
        None,
        "dp=8,zero=0",
        "usual recipe: data parallelism, 128 images per device",
        128,
    ),
    Setting(
        "Llama-3-8B, 2 H100",
        LLAMA,
        "2xH100",
        16,
        2048,
        "dp=2,zero=3,recompute=full",
        "usual recipe: FSDP with recomputation",
        2,
    ),
)


@dataclass(frozen=True)
class Compared:
    """The figures of a setting; seconds are of a step."""

    name: str
    practice: str
    practice_seconds: float | None
    measured_seconds: float | None
    plan: str
    plan_seconds: float
    gap: float
    source: str
    practice_terms: dict[str, float] = field(default_factory=dict)
    plan_terms: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """How much less the plan takes."""
        if self.practice_seconds is None:
            return None
        return 1 - self.plan_seconds / self.practice_seconds


def terms(plan: Plan) -> dict[str, float]:
    """Seconds of a step by what the busiest pipeline rank spends them on, and the bubble."""
    ranks: dict[tuple[int, ...], dict[str, float]] = {}
    count = plan.num_microbatches
    for stage in plan.stages:
        seconds = stage.prediction.seconds
        rank = ranks.setdefault(stage.devices, dict.fromkeys(TERMS, 0.0))
        rank["compute"] += count * seconds["compute"]
        rank["communication"] += count * seconds["communication"]
        rank["synchronization"] += seconds["exposed_sync"]
        rank["optimizer"] += seconds["optimizer"]
    busiest = max(ranks.values(), key=lambda rank: sum(rank.values()))
    return {**busiest, "bubble": plan.prediction.bubble_fraction * plan.prediction.step_seconds}


def with_practice(planned: Callable[[str, int | None], Plan], setting: Setting) -> tuple[Plan, str]:
    """The plan of a practice and "", or the plan with recomputation left open and a note.

    What is recomputed selectively differs between implementations, and so does what fits.
    """
    try:
        return planned(setting.practice, setting.micro_batch), ""
    except AutoparallelError:
        items = setting.practice.split(",")
        rest = [item for item in items if not item.startswith("recompute=")]
        if rest == items:
            raise
        return planned(",".join(rest), setting.micro_batch), f" ({OPEN})"


def compared(setting: Setting, time_limit: float) -> Compared:
    """Plans a setting with and without its practice forced."""
    target = load_target(setting.target, dict(setting.settings))
    cluster = find_cluster(setting.cluster)
    options = PlanOptions(setting.global_batch, setting.seq, precision=setting.precision)
    program = capture_target(target, options)

    def planned(parallel: str, micro_batch: int | None) -> Plan:
        own = PlanOptions(
            setting.global_batch,
            setting.seq,
            precision=setting.precision,
            micro_batch=micro_batch,
            forced=parse_parallel(parallel or None),
            deny=("offload",) if parallel else (),  # no practice has states in host memory
            time_limit_seconds=time_limit,
        )
        return plan_program(program, target, cluster, own)

    free = planned("", None)
    spent: dict[str, float] = {}
    try:
        forced, left_open = with_practice(planned, setting)
        text, seconds = plan_summary(forced) + left_open, forced.prediction.step_seconds
        spent = terms(forced)
    except AutoparallelError as error:
        text, seconds = f"{setting.practice}: {str(error).splitlines()[0]}", None
    return Compared(
        setting.name,
        text,
        seconds,
        setting.measured_seconds,
        plan_summary(free),
        free.prediction.step_seconds,
        free.solver.gap,
        setting.source,
        spent,
        terms(free),
    )


def line(found: Compared) -> str:
    """A row of the table."""
    measured = "" if found.measured_seconds is None else f"{found.measured_seconds:.4g} s"
    seconds = found.practice_seconds
    practice = "does not fit" if seconds is None else f"{seconds:.4g} s"
    gain = "" if found.gain is None else f"{found.gain:.1%}"
    return (
        f"| {found.name} | {found.practice} | {practice} | {measured} | {found.plan} | "
        f"{found.plan_seconds:.4g} s | {gain} | {found.source} |"
    )


def reason(found: Compared) -> str:
    """A row on where a plan that is much faster spends less than the practice."""
    cells = (f"{found.practice_terms[term]:.4g} → {found.plan_terms[term]:.4g}" for term in TERMS)
    return f"| {found.name} | {' | '.join(cells)} |"


def tables(rows: Sequence[Compared]) -> str:
    """Every setting, and the terms of those whose plan is over ``MUCH_FASTER``."""
    much = [row for row in rows if row.gain is not None and row.gain > MUCH_FASTER]
    return "\n".join(
        (
            "| setting | practice | priced | measured | plan | priced | faster by | source |",
            "|---|---|---|---|---|---|---|---|",
            *map(line, rows),
            "",
            "Where the plan is more than 10 % faster, seconds of a step, practice → plan:",
            "",
            f"| setting | {' | '.join(TERMS)} |",
            f"|---|{'---|' * len(TERMS)}",
            *map(reason, much),
        )
    )


def write(page: Path, text: str) -> None:
    """Replaces what is between the markers of ``page``."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", metavar="NAME", default="", help="settings that contain it; - is none"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, default=HERE / "practice.json")
    parser.add_argument("--write", metavar="FILE", type=Path, help="a page with the markers")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, default=60.0)
    asked = parser.parse_args(arguments)
    kept = json.loads(asked.json.read_text()) if asked.json.exists() else []
    rows = {row["name"]: Compared(**row) for row in kept}
    for setting in SETTINGS:
        if asked.only in setting.name and asked.only != "-":
            rows[setting.name] = compared(setting, asked.time_limit)
            print(line(rows[setting.name]), flush=True)
            values = [asdict(row) for row in rows.values()]
            asked.json.write_text(json.dumps(values, indent=2) + "\n")
    ordered = [rows[setting.name] for setting in SETTINGS if setting.name in rows]
    if asked.write:
        write(asked.write, tables(ordered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
