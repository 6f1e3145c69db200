"""The dynamic program against placers that learn, and against chance, on real models.

``python benchmarks/placement/run.py [--evaluations N] [--seeds N] [--price formula|simulator]
[--json FILE] [NAME ...]``. Every method has the same table of stage costs and prices the same
number of pipelines; the dynamic program prices none. A placer's row is over seeds: the step of
its best pipeline over the dynamic program's, mean and worst; how many seeds ended within 1e-9 of
it; and the mean number of evaluations after which it was within 1 %, of the seeds that came
there. It is a failure (exit 1) if a placer finds less than the dynamic program by the formula
that this is exact for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.placers.placement import Method, Placement, place
from autoparallel.placers.space import Problem, space_of
from autoparallel.planner.inter_op.inter_op import Pipeline, pipelines
from benchmarks.placement.cases import CASES, Case, Priced, problem_of

METHODS: tuple[Method, ...] = get_args(Method)
SAME = 1e-9
CLOSE = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one case."""

    case: str
    method: str
    num_evaluations: float
    best_seconds: float
    mean_excess: float
    worst_excess: float
    num_optimal: int
    num_close: int
    evaluations_to_close: float | None
    elapsed_seconds: float


def exact(priced: Priced, price: str) -> tuple[Pipeline, float]:
    """The dynamic program's pipeline, what it costs, and how long it took.

    By the simulator it is the fastest simulated of the best pipelines of every number of stages.
    """
    problem = priced.by_formula
    began = time.perf_counter()
    found = pipelines(problem.table, problem.num_microbatches, problem.num_stages)
    if price == "simulator":
        simulated = priced.by_simulator.price
        assert simulated is not None
        found = tuple(Pipeline(each.stages, simulated(each.stages)) for each in found)
    best = min(found, key=lambda each: each.seconds)
    return best, time.perf_counter() - began


def rows_of(
    case: Case, problem: Problem, best: Pipeline, *, evaluations: int, seeds: int
) -> list[Row]:
    """Every placer on a case."""
    rows = []
    for method in METHODS:
        began = time.perf_counter()
        found = [
            place(problem, method=method, evaluations=evaluations, seed=seed)
            for seed in range(seeds)
        ]
        elapsed = (time.perf_counter() - began) / seeds
        rows.append(_row(case.name, found, best.seconds, elapsed))
    return rows


def _row(case: str, found: Sequence[Placement], exact_seconds: float, elapsed: float) -> Row:
    ends = [each.best.seconds for each in found if each.best is not None]
    excess = [seconds / exact_seconds - 1 for seconds in ends]
    close = [
        next(p.num_evaluations for p in each.curve if p.best_seconds <= exact_seconds * (1 + CLOSE))
        for each, over in zip(found, excess, strict=True)
        if over <= CLOSE
    ]
    return Row(
        case,
        found[0].method,
        statistics.fmean(each.num_evaluations for each in found),
        min(ends),
        statistics.fmean(excess),
        max(excess),
        sum(over <= SAME for over in excess),
        len(close),
        statistics.fmean(close) if close else None,
        elapsed,
    )


def report(row: Row, seeds: int) -> str:
    close = "-" if row.evaluations_to_close is None else f"{row.evaluations_to_close:.0f}"
    return (
        f"  {row.method:8s} best {row.best_seconds * 1e3:10.4f} ms  over DP mean "
        f"{row.mean_excess:+8.3%} worst {row.worst_excess:+8.3%}  optimal {row.num_optimal}/{seeds}"
        f"  within 1 % {row.num_close}/{seeds} after {close:>5s}  {row.elapsed_seconds:.2f} s"
    )


def run(
    case: Case, *, evaluations: int, seeds: int, price: str, show: Callable[[str], None]
) -> list[Row]:
    """Plans one case and places it by every method."""
    priced = problem_of(case)
    problem = priced.by_formula if price == "formula" else priced.by_simulator
    space, table = space_of(problem), problem.table  # asks the table for every cost once
    best, elapsed = exact(priced, price)
    show(
        f"{case.name}: {table.num_blocks} blocks, {table.num_devices} devices, "
        f"{problem.num_microbatches} micro-batches of {priced.rows}; "
        f"{space.num_pipelines:.3g} pipelines\n"
        f"  {'DP':8s} best {best.seconds * 1e3:10.4f} ms  {len(best.stages)} stages on "
        f"{', '.join(str(stage.num_devices) for stage in best.stages)}  {elapsed:.2f} s"
    )
    own = Row(case.name, "dp", 0, best.seconds, 0.0, 0.0, 1, 1, 0.0, elapsed)
    rows = rows_of(case, problem, best, evaluations=evaluations, seeds=seeds)
    for row in rows:
        show(report(row, seeds))
    return [own, *rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only the cases whose names have one of these")
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--price", choices=("formula", "simulator"), default="formula")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        rows += run(
            case,
            evaluations=options.evaluations,
            seeds=options.seeds,
            price=options.price,
            show=lambda line: print(line, flush=True),
        )
    if options.json:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    exact_loses = [row for row in rows if row.best_seconds < _dp(rows, row) * (1 - SAME)]
    if options.price == "formula" and exact_loses:
        print(f"the dynamic program lost {len(exact_loses)} times", file=sys.stderr)
        return 1
    return 0


def _dp(rows: Sequence[Row], row: Row) -> float:
    return next(r.best_seconds for r in rows if r.case == row.case and r.method == "dp")


if __name__ == "__main__":
    sys.exit(main())
