"""Plans the corpus, and compares each plan with the baseline's under this checkout's prices.

``python benchmarks/corpus/run.py [--cases NAME,... | --quick | --planning] [--jobs N]
[--against PATH] [--times N] [--write] [--json FILE]``. README.md says what is compared. Exits with
1 where a plan is more than 1 % slower than the baseline's, where plans are slower in the mean, or
where a case fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.corpus.baseline import records, reference, write
from benchmarks.corpus.cases import BY_NAME, CASES, PLANNING, QUICK, Case
from benchmarks.corpus.checkouts import ROOT, Worker, linked_package
from benchmarks.corpus.rows import Row, heading, is_worse, line, row_of, summary

Pair = tuple[Worker, Worker | None]
"""A worker of this checkout, and one of the other where there is one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, or with ``--write`` writes the baseline."""
    asked = _parser().parse_args(arguments)
    cases = chosen(asked)
    if asked.write:
        return written(cases, asked.jobs)
    rows = []
    print(heading(asked.against is not None), flush=True)
    answer = partial(compared, times=asked.times)
    for row in each_answer(cases, answer, asked.jobs, asked.against):
        rows.append(row)
        print(line(row), flush=True)
        if asked.json:
            Path(asked.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(summary(rows))
    return int(is_worse(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--cases", metavar="NAME,...", help="only these")
    which.add_argument("--quick", action="store_true", help="the sample that CI plans")
    which.add_argument(
        "--planning", action="store_true", help="seven large jobs, which need --against"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="plan with the checkout in PATH too, in turn, and compare with its plans",
    )
    parser.add_argument(
        "--times", type=int, default=1, help="so often each case is planned; the least time counts"
    )
    parser.add_argument("--write", action="store_true", help="write the baseline")
    parser.add_argument("--json", metavar="FILE", help="write the rows to a file")
    return parser


def chosen(asked: argparse.Namespace) -> tuple[Case, ...]:
    """The cases that are asked for."""
    listed = [case.name for case in (PLANNING if asked.planning else CASES)]
    if asked.quick or asked.cases:
        listed = asked.cases.split(",") if asked.cases else list(QUICK)
    known = records()
    for name in listed:
        if name not in BY_NAME:
            raise SystemExit(f"{name}: no such case")
        if asked.against is None and not asked.write and name not in known:
            raise SystemExit(f"{name}: no baseline; give --against PATH, or --write one")
    return tuple(BY_NAME[name] for name in listed)


def each_answer(
    cases: Sequence[Case], answer: Callable[[Case, Pair], Any], jobs: int, against: Path | None
) -> Iterator[Any]:
    """``answer`` of each case as it is done, ``jobs`` at a time, each with workers of its own."""
    with ExitStack() as stack:
        package = stack.enter_context(linked_package(ROOT))
        other = stack.enter_context(linked_package(against)) if against is not None else None
        free: SimpleQueue[Pair] = SimpleQueue()
        for _ in range(min(jobs, len(cases))):
            own = stack.enter_context(Worker(ROOT, package))
            free.put((own, stack.enter_context(Worker(against, other)) if other else None))

        def answered(case: Case) -> Any:
            pair = free.get()
            try:
                return answer(case, pair)
            finally:
                free.put(pair)

        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        for done in as_completed([pool.submit(answered, case) for case in cases]):
            yield done.result()


def compared(case: Case, pair: Pair, times: int) -> Row:
    """A case planned here, and compared with the other checkout's plan or the baseline's.

    Both checkouts plan in turn, so that what else the machine does falls on both alike.
    """
    own, other = pair
    request = {"case": asdict(case), "plan": True, "plans": []}
    answers, others = [], []
    against = reference(case.name) if other is None else {}
    for turn in range(times):
        if other is not None:
            others.append(other.ask(request))
            against = others[-1].get("found", {})
        is_last = turn == times - 1
        texts = [against["plan"]] if is_last and "plan" in against else []
        answers.append(own.ask({**request, "plans": texts}))
    return row_of(case.name, against, answers, others)


def written(cases: Sequence[Case], jobs: int) -> int:
    """Writes the baseline of the cases. Returns 1 where one fails or was cut short."""

    def planned(case: Case, pair: Pair) -> tuple[str, dict[str, Any]]:
        return case.name, pair[0].ask({"case": asdict(case), "plan": True, "plans": []})

    status = 0
    for name, answer in each_answer(cases, planned, jobs, None):
        text = answer.get("failure", "")
        if not text:
            write(name, answer)
            stopped = records()[name].get("stopped", "")
            text = f"the search was stopped: {stopped}" if stopped else ""
        status |= bool(text)
        print(f"{name:<24}{text or 'written'}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
