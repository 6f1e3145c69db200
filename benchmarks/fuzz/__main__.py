"""Random models under random plans: ``python -m benchmarks.fuzz --seed 17 --ranks 2 [--show]``.

``--count`` models from a seed on are trained on ranks of this machine and compared with plain
PyTorch. ``--page`` does this for the models of ``make fuzz`` and writes their counts into a
document. The exit code is 1 if one differs or crashes.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.fuzz.pool import Pool, Result, Trial, draw_trial  # noqa: E402
from benchmarks.fuzz.shrink import shrink  # noqa: E402

SUITE = ((2, 1000), (4, 200))
"""Ranks and number of models of ``make fuzz``, seeds 0 and up."""

FAILURES = ("different", "crash")
FIELDS = ("ranks", "seed", "plan", "result", "code", "seconds", "detail")


@dataclass(frozen=True, slots=True)
class Row:
    """How the trial of a seed ended."""

    num_ranks: int
    trial: Trial
    result: Result
    seconds: float

    def cells(self) -> tuple[object, ...]:
        """Return the row of the CSV file."""
        trial, result = self.trial, self.result
        ended = (result.kind, result.code, f"{self.seconds:.1f}", summarize(result))
        return (self.num_ranks, trial.seed, trial.plan, *ended)

    def __str__(self) -> str:
        result = self.result
        head = f"{self.trial.seed} {result.kind} {result.code}".rstrip()
        return f"{head} ({self.trial.plan}) {self.seconds:.1f} s {summarize(result)}".rstrip()


def summarize(result: Result) -> str:
    """Return a result's details in one line."""
    lines = [line.strip() for line in result.text.strip().splitlines() if line.strip()]
    if result.kind == "crash":
        errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Node)\b", line)]
        return (errors or lines or [""])[-1][:300]
    return " ".join(lines)[:300]


def run_seeds(
    pool: Pool, seeds: Iterable[int], *, shows: bool, shrinks: bool, is_long: bool
) -> Iterable[Row]:
    """Yield how the trial of each seed ends; a failing one is cut down where asked."""
    for seed in seeds:
        began = time.monotonic()
        trial = draw_trial(seed, pool.num_ranks, is_long=is_long)
        if shows:
            print(trial.model.source(), f"# {trial.plan}", sep="\n", flush=True)
        result = pool.run(trial)
        if shrinks and result.kind in FAILURES:
            trial, result = shrink(pool, trial, result)
            print(trial.model.source(), f"# {trial.plan}", sep="\n", flush=True)
        yield Row(pool.num_ranks, trial, result, time.monotonic() - began)
        if shows or shrinks:
            print(result.text[-3000:])


def table(rows: Sequence[Row]) -> str:
    """Return the counts of results by ranks as a table of Markdown."""
    ranks = sorted({row.num_ranks for row in rows})
    counts = Counter((row.num_ranks, row.result.kind, row.result.code) for row in rows)
    lines = [f"| result |{''.join(f' {n} ranks |' for n in ranks)}", f"|---|{'---|' * len(ranks)}"]
    for kind, code in sorted({key[1:] for key in counts}):
        name = f"{kind} {code}".strip()
        lines.append(f"| {name} |{''.join(f' {counts[n, kind, code]} |' for n in ranks)}")
    failures = [row for row in rows if row.result.kind in FAILURES]
    if failures:
        lines += ["", "| ranks | seed | plan | failure |", "|---|---|---|---|"]
    for row in failures:
        name = f"{row.result.kind} {row.result.code}".strip()
        text = f"{name}: {summarize(row.result)}".replace("|", "\\|")
        lines.append(f"| {row.num_ranks} | {row.trial.seed} | `{row.trial.plan}` | {text[:160]} |")
    return "\n".join(lines)


def write_page(path: Path, rows: Sequence[Row], minutes: float) -> None:
    """Replace what follows the heading "Results" of a document."""
    import torch

    head = path.read_text().split("## Results")[0]
    date = time.strftime("%Y-%m-%d")
    count = f"{len(rows)} models in {minutes:.0f} minutes"
    path.write_text(
        f"{head}## Results\n\n{date}, torch {torch.__version__}: {count}.\n\n{table(rows)}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print each model and its full result")
    parser.add_argument("--shrink", action="store_true", help="cut a failing model down")
    parser.add_argument("--long", action="store_true", help="plans as for long sequences")
    parser.add_argument("--csv", type=Path, help="write a row for each model")
    parser.add_argument("--page", type=Path, help="run all models of make fuzz for this document")
    parser.add_argument("--minutes", type=float, default=75, help="begin no model after so long")
    asked = parser.parse_args(arguments)
    parts = SUITE if asked.page else ((asked.ranks, asked.count),)
    began = time.monotonic()
    rows: list[Row] = []
    for i, (num_ranks, count) in enumerate(parts):
        share = (
            asked.minutes * 60 * sum(each for _, each in parts[: i + 1]) / sum(c for _, c in parts)
        )
        with Pool(num_ranks) as pool:
            seeds = range(asked.seed, asked.seed + count)
            options = {"shows": asked.show, "shrinks": asked.shrink, "is_long": asked.long}
            for row in run_seeds(pool, seeds, **options):
                rows.append(row)
                print(row, flush=True)
                if time.monotonic() - began > share:
                    break
    minutes = (time.monotonic() - began) / 60
    if asked.csv:
        with asked.csv.open("w", newline="") as file:
            csv.writer(file).writerows((FIELDS, *(row.cells() for row in rows)))
    if asked.page:
        write_page(asked.page, rows, minutes)
    print(table(rows), f"{len(rows)} models, {len(rows) / minutes:.1f} a minute", sep="\n")
    return int(any(row.result.kind in FAILURES for row in rows))


if __name__ == "__main__":
    sys.exit(main())
