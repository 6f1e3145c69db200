"""Predicted against measured memory, on real processes of this machine.

``python benchmarks/memory/run.py [--json FILE] [NAME ...]``. Every case is a model and a
plan: it is planned, its memory is predicted by running its stages on fake tensors
(``passes.memory.stage_memory``) and by the rules that the search uses, and it is trained for a few
steps on as many gloo processes as it has devices, where every storage is counted
(``step_memory``). The batch that the caller holds is in neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.memory.stage_memory import stage_memory
from autoparallel.planner.plan import Precision
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import plan_program
from autoparallel.planning.plan_files import save_plan
from autoparallel.runtime.launch.launch import launch
from autoparallel.target.load import load_target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained."""

    model: str
    parallel: str
    ranks: int = 2
    precision: Precision = "fp32"
    global_batch: int = 8
    seq: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.parallel} {self.precision} on {self.ranks}"


CASES = (
    Case("gpt", "dp=2", seq=64),
    Case("gpt", "dp=2,zero=1,microbatches=4", seq=64),
    Case("gpt", "dp=2,zero=2,microbatches=4", seq=64),
    Case("gpt", "dp=2,zero=3,microbatches=4", precision="bf16", seq=64),
    Case("gpt", "dp=2,zero=0,microbatches=4", precision="bf16", seq=64),
    Case("gpt", "dp=2,zero=3,microbatches=2,recompute=full", seq=64),
    Case("gpt", "tp=2", seq=64),
    Case("gpt", "pp=2,schedule=1f1b", seq=64),
    Case("gpt", "dp=2,tp=2,zero=3", ranks=4, seq=64),
    Case("gpt", "dp=2,pp=2,zero=1", ranks=4, seq=64),
    Case("mlp_mixer", "dp=2,recompute=full"),
    Case("mlp_mixer", "pp=2,schedule=gpipe,microbatches=4"),
    Case("gshard_moe", "tp=2", seq=64),
    Case("gshard_moe", "dp=2,zero=3", seq=64),
    Case("wide_resnet", "dp=2"),
    Case("wide_resnet", "tp=2"),
    Case("unet", "dp=2,zero=3"),
    Case("unet", "pp=2"),
    Case("two_towers", "dp=2"),
    Case("two_towers", "pp=2"),
    Case("alexnet", "dp=2"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One stage of a case: bytes of its first rank, by category, and their sums."""

    case: str
    stage: int
    measured_bytes: int
    exact_bytes: float
    rule_bytes: float
    measured: Mapping[str, int]
    exact: Mapping[str, float]
    rules: Mapping[str, float]

    @property
    def exact_error(self) -> float:
        return self.exact_bytes / self.measured_bytes - 1

    @property
    def rule_error(self) -> float:
        return self.rule_bytes / self.measured_bytes - 1


def run(case: Case) -> list[Row]:
    """Plans, predicts and measures one case."""
    target = load_target(str(EXAMPLES / f"{case.model}.py"), {})
    options = PlanOptions(
        global_batch=case.global_batch,
        seq=case.seq,
        precision=case.precision,
        forced=parse_parallel(case.parallel),
    )
    program = capture_target(target, options)
    plan = plan_program(program, target, parse_cluster(f"cpu:{case.ranks}"), options)
    exact = stage_memory(plan, program.graph, program.blocks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(plan, path)
        found = launch("worker:measure", {"plan_path": str(path)}, num_processes=case.ranks)
    rows = []
    for index, (stage, own) in enumerate(zip(plan.stages, exact, strict=True)):
        ranks = [found[rank] for rank in stage.devices]
        report = min(ranks, key=lambda each: each["peak_bytes"])
        rows.append(_row(case, index, report, own or {}, stage.prediction.memory_bytes))
    return rows


def _row(
    case: Case,
    stage: int,
    report: Mapping[str, Any],
    exact: Mapping[str, float],
    rules: Mapping[str, float],
) -> Row:
    measured = {name: size for name, size in report["by_category"].items() if name != "batch"}
    return Row(
        case.name,
        stage,
        sum(measured.values()),
        sum(exact.values()),
        float(sum(rules.values())),
        measured,
        dict(exact),
        dict(rules),
    )


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Mean and worst absolute error of both predictions, of the peak."""
    exact = [abs(row.exact_error) for row in rows]
    rules = [abs(row.rule_error) for row in rows]
    return {
        "n": len(rows),
        "mean_abs_error": statistics.fmean(exact),
        "worst_abs_error": max(exact),
        "rules_mean_abs_error": statistics.fmean(rules),
        "rules_worst_abs_error": max(rules),
    }


def text(row: Row) -> str:
    """A row for a person: the errors, and measured and predicted by category."""
    lines = [
        f"{row.case}, stage {row.stage}: measured {row.measured_bytes / 1e6:.3f} MB, predicted "
        f"{row.exact_error:+.2%}, by rules {row.rule_error:+.1%}"
    ]
    for title, found in (("measured", row.measured), ("predicted", row.exact)):
        parts = ", ".join(f"{name} {size / 1e6:.3f}" for name, size in sorted(found.items()))
        lines.append(f"    {title:9s} {parts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only the cases whose names have one of these")
    parser.add_argument("--json", help="write rows and summary to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        for row in run(case):
            rows.append(row)
            print(text(row), flush=True)
    found = summary(rows)
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if options.json:
        whole = {"summary": found, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
