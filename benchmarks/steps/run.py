"""Predicted against measured step time, of real processes on this machine.

``python benchmarks/steps/run.py [--budget SECONDS] [--rounds N] [--json FILE] [NAME ...]``.
Every case is a model and a plan. In each round, which begins with an empty database, each
case is profiled (``autoparallel profile``), planned from what was measured, and at once trained by
that plan, so that what else the machine does falls on both. A case's seconds are the medians over
the rounds, and its error is that of the median of the rounds' ratios. Printed: the error of
each case, the mean, what share of the time was measured, and Kendall's τ between the predicted
and the measured order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from autoparallel.options.plan_options import plan_options
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.profiling.start import start_profiling
from autoparallel.target.load import load_target
from autoparallel.training.start import start_training

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained."""

    model: str
    parallel: str
    ranks: int = 2
    global_batch: int = 8
    settings: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        size = "".join(f" {name}={value}" for name, value in self.settings)
        return f"{self.model}{size} batch={self.global_batch} {self.parallel} on {self.ranks}"


CASES = (
    Case("gpt", "dp=1", ranks=1),
    Case("gpt", "dp=2"),
    Case("gpt", "dp=2,zero=1"),
    Case("gpt", "dp=2,zero=3"),
    Case("gpt", "tp=2"),
    Case("gpt", "pp=2,microbatches=4"),
    Case("gpt", "dp=2,recompute=full"),
    Case("gpt", "dp=2,microbatches=4,zero=0", global_batch=16),
    Case("gpt", "pp=2,microbatches=8,schedule=gpipe", global_batch=16),
    Case("gpt", "tp=2", settings=(("n_layer", 3), ("d_model", 768))),
    Case("mlp_mixer", "dp=2", global_batch=64, settings=(("channels", 256),)),
    Case("mlp_mixer", "pp=2,microbatches=4", global_batch=64, settings=(("channels", 256),)),
    Case("alexnet", "dp=2", global_batch=16),
    Case("wide_resnet", "dp=2", global_batch=32),
    Case("unet", "dp=2", global_batch=16, settings=(("channels", 32),)),
    Case("two_towers", "dp=2", global_batch=64, settings=(("width", 256), ("num_layers", 4))),
    Case("gshard_moe", "dp=2", global_batch=8, settings=(("d_model", 256), ("d_ff", 1024))),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: predicted and measured seconds of each round, the prediction's shares by source."""

    case: str
    rounds: tuple[tuple[float, float], ...]
    sources: Mapping[str, float]

    @property
    def predicted_seconds(self) -> float:
        return statistics.median(predicted for predicted, _ in self.rounds)

    @property
    def measured_seconds(self) -> float:
        return statistics.median(measured for _, measured in self.rounds)

    @property
    def error(self) -> float:
        return statistics.median(predicted / measured for predicted, measured in self.rounds) - 1


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's τ of (predicted, measured) pairs: concordant less discordant, over all.

    >>> kendall_tau([(1, 1), (2, 3), (3, 2)])
    0.3333333333333333
    """
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def planned(case: Case, budget: float, folder: Path) -> Any:
    """The case's plan from what is measured now alone, in ``folder``/its name.json."""
    target = str(EXAMPLES / f"{case.model}.py")
    database = folder / "profile.sqlite"
    options: dict[str, Any] = {
        "global_batch": case.global_batch,
        "seq": None,
        "parallel": case.parallel,
        "micro_batch": None,
        "precision": "fp32",
        "optimizer": "adamw",
        "memory_limit": None,
        "time_limit": 60.0,
    }
    cluster = f"cpu:{case.ranks}"
    settings = [f"{name}={value}" for name, value in case.settings]
    start_profiling(
        target, settings, cluster, options=plan_options(**options), budget=budget, database=database
    )
    plan = make_plan(
        load_target(target, dict(case.settings)),
        cluster,
        plan_options(**options, database=str(database)),
    )
    save_plan(plan, _file(case, folder))
    return plan


def measured(case: Case, folder: Path) -> float:
    """Seconds of the median step of a short training run."""
    with redirect_stdout(sys.stderr):
        outcome = start_training(_file(case, folder), steps=STEPS, seed=0)
    return float(outcome["step_seconds"])


def _round(cases: Sequence[Case], budget: float) -> list[tuple[float, float, Mapping[str, float]]]:
    """Of each case predicted and measured seconds of a step, the prediction's shares by source."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in cases:
            plan = planned(case, budget, folder)
            seconds = measured(case, folder)
            predicted = plan.prediction.step_seconds
            print(
                f"{case.name}: {predicted:.4f} s, {seconds:.4f} s measured",
                file=sys.stderr,
                flush=True,
            )
            found.append((predicted, seconds, dict(plan.prediction.sources)))
    return found


def _file(case: Case, folder: Path) -> Path:
    return folder / (case.name.replace(" ", "_") + ".json")


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """The errors over all rows."""
    errors = [abs(row.error) for row in rows]
    return {
        "n": len(rows),
        "mean_abs_error": statistics.mean(errors),
        "median_abs_error": statistics.median(errors),
        "kendall_tau": kendall_tau([(r.predicted_seconds, r.measured_seconds) for r in rows])
        if len(rows) > 1
        else None,
        "rows": [
            asdict(row)
            | {
                "predicted_seconds": row.predicted_seconds,
                "measured_seconds": row.measured_seconds,
                "error": row.error,
            }
            for row in rows
        ],
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Profiles, plans and trains every case, and prints one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only cases whose name has one of these")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to profile a case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cases = [
        case
        for case in CASES
        if not options.names or any(name in case.name for name in options.names)
    ]
    rounds = [_round(cases, options.budget) for _ in range(options.rounds)]
    rows = [
        Row(
            case.name,
            tuple(each[index][:2] for each in rounds),
            rounds[-1][index][2],
        )
        for index, case in enumerate(cases)
    ]
    found = report(rows)
    for row in rows:
        shares = " ".join(f"{name} {share:.0%}" for name, share in row.sources.items() if share)
        print(
            f"{row.case:52} predicted {row.predicted_seconds * 1e3:7.0f} ms  measured "
            f"{row.measured_seconds * 1e3:7.0f} ms  {row.error:+6.1%}  {shares}"
        )
    print({key: value for key, value in found.items() if key != "rows"})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
