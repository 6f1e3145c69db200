"""Predicted against published step times.

``python benchmarks/validation/run.py [--vtrain-single FILE] [--vtrain-multi FILE] [--runs FILE]
[--json]``. Files have the columns of those in ``data/``, which are used where none is given.
``--json`` prints one object with a key per file; without it, tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.validation.experts import run_of
from benchmarks.validation.pricing import Pricer, Result
from benchmarks.validation.published import published
from benchmarks.validation.scores import (
    Score,
    bias_by,
    by_source,
    by_zero,
    compile_gains,
    regrets,
    score,
)
from benchmarks.validation.tables import Row, Run, Skipped, read
from benchmarks.validation.vtrain import multi_node, single_node

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True, slots=True)
class Table:
    """A kind of file: its key, the copy in ``data/``, how a row is read."""

    key: str
    default: str
    parse: Callable[[Row, int], Run]


TABLES = (
    Table("vtrain_single", "vtrain_a100_single_node.csv", single_node),
    Table("vtrain_multi", "vtrain_a100_multi_node.csv", multi_node),
    Table("runs", "published_runs.csv", published),
    Table("runs_2", "published_runs_2.csv", published),
    Table("experts", "moe_runs.csv", run_of),
)


LONG = 16_384
"""Tokens of a sequence that is long."""


@dataclass(frozen=True, slots=True)
class Report:
    """A file's results. ``judged`` are those that its headline figures count: quality A."""

    key: str
    path: Path
    results: list[Result | Skipped]
    runs: list[Run]
    seconds: float

    @property
    def judged(self) -> list[Result | Skipped]:
        return [each for each in self.results if quality(each) == "A"]

    @property
    def long(self) -> list[Result]:
        """The priced rows of long sequences, of all qualities."""
        return [each for each in priced(self) if each.run.shape.seq >= LONG]

    @property
    def headline(self) -> Score:
        return score(self.judged, self.runs)


def quality(each: Result | Skipped) -> str:
    return each.run.quality if isinstance(each, Result) else each.quality


def report(table: Table, path: Path, pricer: Pricer) -> Report:
    """Every row of a file, priced."""
    began = time.perf_counter()
    rows = read(path, table.parse)
    results = [pricer.result(row) if isinstance(row, Run) else row for row in rows]
    runs = [row for row in rows if isinstance(row, Run)]
    return Report(table.key, path, results, runs, time.perf_counter() - began)


def as_json(found: Report) -> dict[str, Any]:
    """A file's figures, by quality and source, and its rows."""
    qualities = sorted({quality(each) for each in found.results})
    return {
        "file": found.path.name,
        **found.headline.as_json(),
        "seconds": found.seconds,
        "by_quality": {
            each: score([r for r in found.results if quality(r) == each]).as_json()
            for each in qualities
        },
        "by_source": {
            source: score(own).as_json() for source, own in by_source(found.results).items()
        },
        "by_zero": {stage: score(own).as_json() for stage, own in by_zero(found.results).items()},
        "long": score(found.long).as_json(),
        "compile_gains": [asdict(gain) for gain in compile_gains(priced(found))],
        "regrets": regrets(priced(found)),
        "rows": [row_json(each) for each in found.results],
    }


def priced(found: Report) -> list[Result]:
    """The results that are no refusals."""
    return [each for each in found.results if isinstance(each, Result)]


def row_json(each: Result | Skipped) -> dict[str, Any]:
    """One row; ``skipped`` says why there is no prediction."""
    if isinstance(each, Skipped):
        return {
            "name": each.name,
            "source": each.source,
            "quality": each.quality,
            "skipped": each.reason,
        }
    own = each.run.configuration
    return {
        "name": each.run.name,
        "source": each.run.source,
        "quality": each.run.quality,
        "group": each.run.group,
        "tp": own.tp,
        "dp": own.dp,
        "pp": own.pp,
        "cp": own.cp,
        "zero": own.zero,
        "recompute": own.recompute,
        "schedule": own.schedule,
        "chunks": own.num_chunks,
        "micro_batch": each.run.rows,
        "microbatches": own.num_microbatches,
        "measured_seconds": each.run.measured_seconds,
        "predicted_seconds": each.seconds,
        "error": each.error,
        "measured_bytes": each.run.measured_bytes,
        "predicted_bytes": each.num_bytes,
        "memory_error": each.memory_error,
        "out_of_memory": each.run.out_of_memory,
        "fits": each.fits,
        "assumed": list(each.run.assumed),
    }


def print_report(found: Report) -> None:
    """A file's tables."""
    print(f"\n{found.key}: {found.path.name}, {found.seconds:.1f} s")
    _print_row("", found.headline)
    for level in sorted({quality(each) for each in found.results}):
        _print_row(f"quality {level}", score([r for r in found.results if quality(r) == level]))
    sources = by_source(found.results)
    for source, own in sources.items() if len(sources) > 1 else ():
        _print_row(source[:60], score(own))
    for stage, own in by_zero(found.results).items():
        _print_row(f"ZeRO {stage}", score(own))
    if found.long:
        _print_row(f"{LONG} tokens and more", score(found.long))
    _print_residuals([each for each in found.judged if isinstance(each, Result)])
    for gain in compile_gains(priced(found)):
        text = f"  compiled {gain.compiled}: {100 * gain.predicted:+.1f} % steps per second"
        text += f" (measured {100 * gain.measured:+.1f} %), {-100 * gain.predicted_bytes:+.1f} %"
        if gain.measured_bytes is not None:
            text += f" bytes (measured {-100 * gain.measured_bytes:+.1f} %)"
        print(text)
    reasons = Counter(each.reason for each in found.results if isinstance(each, Skipped))
    for reason, count in reasons.most_common():
        print(f"  skipped {count}: {reason}")


def _print_residuals(priced: Sequence[Result]) -> None:
    """The mean signed error by each degree."""
    for name, value in (
        ("tp", lambda each: each.run.configuration.tp),
        ("dp", lambda each: each.run.configuration.dp),
        ("pp", lambda each: each.run.configuration.pp),
        ("micro-batch", lambda each: each.run.rows),
        ("micro-batches", lambda each: each.run.configuration.num_microbatches),
    ):
        found = bias_by(priced, value)
        text = ", ".join(f"{key}: {100 * error:+.1f} %" for key, error in found.items())
        print(f"  error by {name:14} {text}")


def _print_row(name: str, own: Score) -> None:
    parts = [f"n {own.n}", f"skipped {own.skipped}"]
    for label, value in (
        ("error mean", own.mean_abs_error),
        ("median", own.median_abs_error),
        ("bias", own.mean_error),
        ("memory", own.mean_memory_error),
        ("regret mean", own.mean_regret),
        ("worst", own.worst_regret),
    ):
        if value is not None:
            parts.append(f"{label} {100 * value:.1f} %")
    if own.kendall_tau is not None:
        parts.append(f"tau {own.kendall_tau:.2f}")
    if own.oom_rows:
        parts.append(f"OOM right {own.oom_right}/{own.oom_rows}")
    parts.append(f"fits right {own.fit_right}/{own.n}")
    print(f"  {name or 'headline':60} " + ", ".join(parts))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for table in TABLES:
        parser.add_argument(f"--{table.key.replace('_', '-')}", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    given = {table.key: getattr(options, table.key) for table in TABLES}
    wanted = [t for t in TABLES if given[t.key] is not None] or list(TABLES)
    pricer = Pricer()
    reports = []
    for table in wanted:
        path = given[table.key] or DATA / table.default
        if not path.is_file():
            parser.error(f"there is no file {path}")
        reports.append(report(table, path, pricer))
        if not options.json:
            print_report(reports[-1])
    if options.json:
        print(json.dumps({each.key: as_json(each) for each in reports}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
