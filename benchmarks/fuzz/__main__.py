"""Random models under random plans: ``python -m benchmarks.fuzz --seed 17 --ranks 2 [--show]``.

``--count`` models from a seed on are trained on ranks of this machine and compared with plain
PyTorch. The exit code is 1 if one differs or crashes.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.fuzz.pool import Pool, Result, Trial, draw_trial  # noqa: E402
from benchmarks.fuzz.shrink import shrink  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print each model and its full result")
    parser.add_argument("--shrink", action="store_true", help="cut a failing model down")
    parser.add_argument("--csv", type=Path, help="write a row for each model")
    asked = parser.parse_args(arguments)
    counts: Counter[tuple[str, str]] = Counter()
    rows: list[tuple[object, ...]] = []
    began = time.monotonic()
    with Pool(asked.ranks) as pool:
        for seed in range(asked.seed, asked.seed + asked.count):
            start = time.monotonic()
            trial = draw_trial(seed, asked.ranks)
            if asked.show:
                print(trial.model.source(), f"# {trial.plan}", sep="\n", flush=True)
            result = pool.run(trial)
            if asked.shrink and result.kind in ("different", "crash"):
                trial, result = shrink(pool, trial, result)
                print(trial.model.source(), f"# {trial.plan}", sep="\n", flush=True)
            seconds = time.monotonic() - start
            counts[result.kind, result.code] += 1
            rows.append((asked.ranks, seed, trial.plan, result.kind, result.code, f"{seconds:.1f}", _line(result)))
            if result.kind != "equal" or asked.show or asked.count < 20:
                print(f"{seed} {result.kind} {result.code} ({trial.plan}) {seconds:.1f} s: {_line(result)}", flush=True)
            if asked.show or asked.shrink:
                print(result.text[-3000:])
        starts = pool.num_starts
    if asked.csv:
        with asked.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("ranks", "seed", "plan", "result", "code", "seconds", "detail"))
            writer.writerows(rows)
    minutes = (time.monotonic() - began) / 60
    for (kind, code), count in sorted(counts.items()):
        print(f"{kind} {code}: {count}")
    print(f"{asked.count} models in {minutes:.1f} minutes, {asked.count / minutes:.0f} a minute; groups started: {starts}")
    return int(any(kind in ("different", "crash") for kind, _ in counts))


def _line(result: Result) -> str:
    lines = [line.strip() for line in result.text.strip().splitlines() if line.strip()]
    return (lines[-1] if result.kind == "crash" and lines else " ".join(lines))[:300]


if __name__ == "__main__":
    sys.exit(main())
