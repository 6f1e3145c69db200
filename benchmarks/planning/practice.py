"""What practitioners run beside what the planner chooses, both priced by the same model.

``python benchmarks/planning/practice.py [--only NAME,...] [--json FILE]``. A practice is a
published configuration: its degrees, ZeRO stage, recomputation, schedule and micro-batch are
forced, and what it leaves open (layouts, cuts) the planner chooses for it. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.options import parse_parallel
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import plan_summary
from autoparallel.planning import PlanOptions, capture_target, find_cluster, plan_program
from autoparallel.targets import load_target
from benchmarks.planning.cases import HERE, LLAMA, LLAMA_70B, LLAMA_405B

GPT = f"hf:{HERE / 'gpt_39b'}"
GPT_175B = {"n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048}
GPT_1B = {"n_embd": 2048, "n_head": 16, "n_layer": 24, "n_positions": 2048}


@dataclass(frozen=True)
class Setting:
    """A model on a cluster and how it is trained. ``practice``: as of ``--parallel``.

    ``micro_batch`` is that of the practice. ``measured_seconds`` of a step is what ``source``
    published for it; None where it published none.
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
DGXC = "NVIDIA/dgxc-benchmarking v25.02"
SETTINGS = (
    Setting("Llama-3-8B, 8 H100", LLAMA, "8xH100-96GB", 16, 8192, "dp=8,zero=3,recompute=selective",
            f"{TITAN} (96 GB cards)", 16, 2.8435),
    Setting("Llama-3-8B, 64 H100", LLAMA, "8x8xH100", 128, 8192,
            "dp=64,zero=3,recompute=selective", f"{TITAN}, one sample per device", 64),
    Setting("Llama-3-70B, 64 H100", LLAMA, "8x8xH100", 128, 8192,
            "dp=2,tp=4,pp=4,cp=2,zero=1,schedule=interleaved,chunks=5", DGXC, 2, 14.61,
            settings=LLAMA_70B),
    Setting("Llama-3-70B, 256 H100", LLAMA, "32x8xH100", 512, 8192,
            "dp=32,tp=8,zero=3,recompute=full", f"{TITAN} (96 GB cards)", 512,
            settings=LLAMA_70B),
    Setting("Llama-3-405B, 16,384 H100", LLAMA, "2048x8xH100", 2048, 8192,
            "dp=128,tp=8,pp=16,zero=1,recompute=selective,schedule=interleaved,chunks=8",
            "arXiv:2407.21783, section 3.3 (recomputation and chunks assumed)", 128,
            settings=LLAMA_405B),
    Setting("Mixtral-8x22B, 128 H100", f"hf:{HERE / 'mixtral_8x22b'}", "16x8xH100", 512, 4096,
            "dp=4,ep=8,pp=4,zero=1,recompute=selective,schedule=interleaved,chunks=7",
            "Megatron Core's recipe for experts (ep within a host, pp across)", 32),
    Setting("GPT-3 175B, 1,024 A100", GPT, "128x8xA100-80GB", 1536, 2048,
            "dp=8,tp=8,pp=16,recompute=full", "Megatron-LM README of 2021", 8, 31.92,
            precision="fp16", settings=GPT_175B),
    Setting("GPT 1.3B, 8 x 24 GB over PCIe", GPT, "8xRTX4090", 256, 2048,
            "dp=8,zero=2,recompute=full", "usual recipe: ZeRO 2 with recomputation", 32,
            settings=GPT_1B),
    Setting("Llama-3-8B, 2 H100", LLAMA, "2xH100", 16, 2048, "dp=2,zero=3,recompute=full",
            "usual recipe: FSDP with recomputation", 4),
)  # fmt: skip


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

    @property
    def gain(self) -> float | None:
        """How much less the plan takes."""
        if self.practice_seconds is None:
            return None
        return 1 - self.plan_seconds / self.practice_seconds


def compared(setting: Setting) -> Compared:
    """Plans a setting with and without its practice forced."""
    target = load_target(setting.target, dict(setting.settings))
    cluster = find_cluster(setting.cluster)
    options = PlanOptions(setting.global_batch, setting.seq, precision=setting.precision)
    program = capture_target(target, options)

    def planned(parallel: str, micro_batch: int | None) -> Plan:
        own = PlanOptions(
            setting.global_batch, setting.seq, precision=setting.precision,
            micro_batch=micro_batch, forced=parse_parallel(parallel or None),
            time_limit_seconds=240.0,
        )  # fmt: skip
        return plan_program(program, target, cluster, own)

    free = planned("", None)
    try:
        forced = planned(setting.practice, setting.micro_batch)
        text, seconds = plan_summary(forced), forced.prediction.step_seconds
    except AutoparallelError as error:
        text, seconds = f"{setting.practice}: {str(error).splitlines()[0]}", None
    return Compared(
        setting.name, text, seconds, setting.measured_seconds, plan_summary(free),
        free.prediction.step_seconds, free.solver.gap, setting.source,
    )  # fmt: skip


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME,...", help="settings whose names contain one")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args(arguments)
    wanted = asked.only.split(",") if asked.only else [""]
    print("| setting | practice | priced | measured | plan | priced | faster by | source |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for setting in SETTINGS:
        if any(text in setting.name for text in wanted):
            rows.append(compared(setting))
            print(line(rows[-1]), flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
