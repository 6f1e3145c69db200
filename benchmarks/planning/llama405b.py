"""Llama-3-405B on 16,384 H100s: the published configuration beside the planner's own.

``python benchmarks/planning/llama405b.py [--priced] [--time-limit S] [--json FILE]``. Sequences of
8,192 tokens, a global batch of 16 M tokens (2,048 rows). Published: tp 8, cp 1, pp 16, dp 128, at
38 to 43 % of the peak over the configurations of its table (Dubey et al. 2024, "The Llama 3 Herd
of Models", arXiv:2407.21783, section 3.3 and table 4). The paper says that the first and the last
stage have a layer less, that optimizer states and gradients are sharded and parameters are not
gathered again for the backward, and that nothing is recomputed; it does not say how many chunks
its interleaved schedule had, so several are priced (what the paper says besides the degrees and
the MFU is recalled here, not copied from it). ``--priced`` leaves the planner's own out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.analysis.configurations import simulated
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import progress
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.costs.basis import DEFAULT, RUNTIME, Basis
from autoparallel.planner.plan import ModelInfo
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, plan_program
from autoparallel.target.load import load_target
from autoparallel.target.target import Target
from benchmarks.planning.cases import BY_NAME

if TYPE_CHECKING:
    from autoparallel.cost_model.cluster.cluster import Cluster
    from autoparallel.passes.programs.program import Program

CASE = BY_NAME["llama-3-405b"]
TP, PP, DP = 8, 16, 128
PUBLISHED_MFU = (0.38, 0.43)
GIB = 2**30

PLANNED = tuple(
    f"tp={TP},pp={PP},dp={DP},zero=1,recompute=selective,{rest}"
    for rest in ("schedule=1f1b", "schedule=interleaved,chunks=4", "schedule=interleaved,chunks=8")
)
"""Of the published degrees what fits."""


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration's figures; seconds are of a step."""

    name: str
    step_seconds: float
    mfu: float
    memory_bytes: float
    usable_bytes: float
    bubble_fraction: float
    details: str


def stage_layers(num_stages: int, num_layers: int = 126) -> tuple[int, ...]:
    """Layers by stage, the first and the last with one less.

    >>> stage_layers(16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    each = (num_layers + 2) // num_stages
    return (each - 1, *(each,) * (num_stages - 2), each - 1)


def configurations() -> Iterator[tuple[str, Configuration, Basis]]:
    """What is published, and what it is like without one of its parts."""
    rows = CASE.global_batch
    base = Configuration(
        dp=DP,
        tp=TP,
        pp=PP,
        zero=1,
        microbatch_size=DP,
        num_microbatches=rows // DP,
        layers=stage_layers(PP),
        precision="bf16",
        sequence_parallel=True,
    )
    stopping = Basis(assumptions=replace(RUNTIME, slowdown=inf))
    yield "1f1b, gradients summed beside nothing", base, stopping
    yield "1f1b", base, DEFAULT
    for chunks in (2, 4):
        layers = stage_layers(PP * chunks)
        inter = replace(base, schedule="interleaved-1f1b", num_chunks=chunks, layers=layers)
        yield f"interleaved, {chunks} chunks", inter, DEFAULT
    yield "1f1b, ZeRO 2", replace(base, zero=2), DEFAULT
    yield "1f1b, all recomputed", replace(base, recompute="full"), DEFAULT


def priced(program: Program, cluster: Cluster) -> Iterator[Row]:
    """The published configuration's rows."""
    for name, configuration, basis in configurations():
        model = ModelInfo("", {}, "", 0, 0, CASE.seq, configuration.precision, "adamw")
        step, plan = simulated(program, cluster, configuration, model, basis=basis)
        slowest = max(step.stages, key=lambda cost: cost.seconds.forward_compute)
        own = slowest.seconds
        communication = own.forward_communication + own.backward_communication
        fullest = max(step.memory_bytes, key=lambda rank: sum(rank.values()))
        held = ", ".join(f"{name} {size / GIB:.1f}" for name, size in fullest.items())
        yield Row(
            f"tp={TP} pp={PP} dp={DP}, {name}",
            step.timeline.step_seconds,
            plan.prediction.model_flops_utilization,
            step.peak_bytes,
            step.usable_bytes,
            step.timeline.bubble_fraction,
            f"a stage's micro-batch: compute {own.forward_compute + own.backward_compute:.3f} s, "
            f"collectives {communication:.3f} s; per step: gradients {own.gradient_sync:.3f} s, "
            f"optimizer {own.optimizer:.3f} s\n  GiB: {held}",
        )


def planned(
    program: Program, target: Target, cluster: Cluster, time_limit_seconds: float, parallel: str
) -> Row:
    """The planner's own, with these degrees if any are given."""
    options = PlanOptions(
        CASE.global_batch,
        CASE.seq,
        precision="bf16",
        time_limit_seconds=time_limit_seconds,
        forced=parse_parallel(parallel or None),
    )
    began = time.perf_counter()
    with progress() as observe:
        found = plan_program(program, target, cluster, options, observe)
    stages = [
        f"{len(stage.blocks)} blocks on "
        + ",".join(f"{a}={n}" for a, n in zip(stage.mesh.axes, stage.mesh.shape, strict=True))
        + f" zero={stage.zero}"
        for stage in found.stages
    ]
    distinct = ", ".join(f"{stages.count(each)} x ({each})" for each in dict.fromkeys(stages))
    modes = Counter(block.recompute for stage in found.stages for block in stage.blocks)
    blocks = ", ".join(f"{number} {mode}" for mode, number in modes.items())
    ours = found.prediction
    usable = min(host.device.usable_memory_bytes for host in cluster.hosts)
    return Row(
        f"the planner's {parallel or 'own'}, found in {time.perf_counter() - began:.0f} s",
        ours.step_seconds,
        ours.model_flops_utilization,
        ours.peak_memory_bytes,
        usable,
        ours.bubble_fraction,
        f"{found.schedule}, {found.num_microbatches} micro-batches of {found.microbatch_size} "
        f"rows, blocks recomputed: {blocks}; {distinct}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--priced", action="store_true", help="without the planner's own")
    parser.add_argument("--time-limit", type=float, default=600.0)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args(arguments)
    target = load_target(CASE.target, dict(CASE.settings))
    cluster = find_cluster(CASE.cluster)
    program = capture_target(target, PlanOptions(CASE.global_batch, CASE.seq, precision="bf16"))
    rows: list[Row] = []
    print(f"published: {PUBLISHED_MFU[0]:.0%} to {PUBLISHED_MFU[1]:.0%} of the peak")
    for row in priced(program, cluster):
        rows.append(row)
        show(row, rows[0])
    if not asked.priced:
        for parallel in (*PLANNED, ""):
            rows.append(planned(program, target, cluster, asked.time_limit, parallel))
            show(rows[-1], rows[0])
    if asked.json:
        listed: list[dict[str, Any]] = [
            {name: getattr(row, name) for name in Row.__dataclass_fields__} for row in rows
        ]
        Path(asked.json).write_text(json.dumps(listed, indent=2) + "\n")
    return 0


def show(row: Row, first: Row) -> None:
    """A row, and how it differs from the first."""
    more = "" if row is first else f" ({row.step_seconds / first.step_seconds - 1:+.1%})"
    over = "" if row.memory_bytes <= row.usable_bytes else ", MORE THAN FITS"
    print(
        f"{row.name}\n  step {row.step_seconds:.2f} s{more}  MFU {row.mfu:.1%}  "
        f"bubble {row.bubble_fraction:.1%}  memory {row.memory_bytes / GIB:.1f} of "
        f"{row.usable_bytes / GIB:.1f} GiB{over}\n  {row.details}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
