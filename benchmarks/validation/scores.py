"""How good the predictions are: errors, regrets, verdicts, order.

In: results. Out: figures for a report. Errors are relative; a regret is the measured time of
the configuration that the model thinks fastest over the best measured one, less 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import mean, median

from .pricing import Result
from .tables import Run, Skipped


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of some rows; None where there is nothing to judge.

    ``oom_right`` of ``oom_rows`` that ran out of memory are predicted not to fit;
    ``fit_right`` of ``n`` that ran are predicted to fit.
    """

    n: int
    skipped: int
    mean_abs_error: float | None
    median_abs_error: float | None
    mean_error: float | None
    memory_rows: int
    mean_memory_error: float | None
    oom_rows: int
    oom_right: int
    fit_right: int
    groups: int
    mean_regret: float | None
    worst_regret: float | None
    kendall_tau: float | None

    def as_json(self) -> dict[str, float | int | None]:
        return asdict(self)


def score(results: Sequence[Result | Skipped], runs: Iterable[Run] = ()) -> Score:
    """The figures of results; ``runs`` adds measured ones that were not priced to the groups."""
    priced = [each for each in results if isinstance(each, Result)]
    timed = [each for each in priced if each.error is not None]
    errors = [each.error for each in timed if each.error is not None]
    memory = [abs(e) for each in priced if (e := each.memory_error) is not None]
    oom = [each for each in priced if each.run.out_of_memory]
    found = list(regrets(timed, runs).values())
    sizes = [abs(error) for error in errors]
    return Score(
        n=len(timed),
        skipped=len(results) - len(priced),
        mean_abs_error=mean(sizes) if sizes else None,
        median_abs_error=median(sizes) if sizes else None,
        mean_error=mean(errors) if errors else None,
        memory_rows=len(memory),
        mean_memory_error=mean(memory) if memory else None,
        oom_rows=len(oom),
        oom_right=sum(not each.fits for each in oom),
        fit_right=sum(each.fits for each in timed),
        groups=len(found),
        mean_regret=mean(found) if found else None,
        worst_regret=max(found, default=None),
        kendall_tau=kendall_tau(timed),
    )


def regrets(timed: Sequence[Result], runs: Iterable[Run] = ()) -> dict[str, float]:
    """For each group of two or more configurations the regret of the model's choice."""
    best: dict[str, float] = {}
    for run in [*runs, *(each.run for each in timed)]:
        if run.group and run.measured_seconds is not None:
            best[run.group] = min(run.measured_seconds, best.get(run.group, float("inf")))
    groups: dict[str, list[Result]] = {}
    for each in timed:
        if each.run.group:
            groups.setdefault(each.run.group, []).append(each)
    found = {}
    for group, members in groups.items():
        chosen = min(members, key=lambda each: each.seconds).run.measured_seconds
        if len(members) > 1 and chosen is not None:
            found[group] = chosen / best[group] - 1
    return found


@dataclass(frozen=True, slots=True)
class Gain:
    """What compiling gave a run: steps per second more, and bytes less, over the eager run's."""

    eager: str
    compiled: str
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float | None


def compile_gains(timed: Sequence[Result]) -> list[Gain]:
    """The pairs of runs that differ in nothing but whether blocks are compiled."""
    pairs: dict[object, dict[bool, Result]] = {}
    for each in timed:
        run, own = each.run, each.run.configuration
        key = (run.source, run.shape, run.cluster.name, replace(own, compiled=False))
        pairs.setdefault(key, {})[own.compiled] = each
    found = []
    for pair in pairs.values():
        if len(pair) < 2 or any(each.run.measured_seconds is None for each in pair.values()):
            continue
        eager, compiled = pair[False], pair[True]
        before, after = eager.run.measured_bytes, compiled.run.measured_bytes
        found.append(
            Gain(
                eager.run.name,
                compiled.run.name,
                eager.seconds / compiled.seconds - 1,
                (eager.run.measured_seconds or 0.0) / (compiled.run.measured_seconds or 1.0) - 1,
                1 - compiled.num_bytes / eager.num_bytes,
                None if before is None or after is None else 1 - after / before,
            )
        )
    return found


def kendall_tau(timed: Sequence[Result]) -> float | None:
    """How well the order of the times is predicted: pairs in order less pairs out, over all."""
    signs = []
    for one, other in combinations(timed, 2):
        measured = (one.run.measured_seconds or 0.0) - (other.run.measured_seconds or 0.0)
        predicted = one.seconds - other.seconds
        if measured:
            signs.append((measured * predicted > 0) - (measured * predicted < 0))
    return mean(signs) if signs else None


def by_zero(results: Sequence[Result | Skipped]) -> dict[str, list[Result | Skipped]]:
    """Priced results by ZeRO stage; those of DeepSpeed's first ZeRO 3 are told apart."""
    found: dict[str, list[Result | Skipped]] = {}
    for each in results:
        if isinstance(each, Result):
            stage = each.run.configuration.zero
            is_first = stage == 3 and "SC21" in each.run.source
            name = f"{stage}, DeepSpeed of 2021" if is_first else str(stage)
            found.setdefault(name, []).append(each)
    return dict(sorted(found.items()))


def by_source(results: Sequence[Result | Skipped]) -> Mapping[str, list[Result | Skipped]]:
    """Results by the source of their rows, in the file's order."""
    found: dict[str, list[Result | Skipped]] = {}
    for each in results:
        source = each.run.source if isinstance(each, Result) else each.source
        found.setdefault(source_name(source), []).append(each)
    return found


def source_name(text: str) -> str:
    """The document that a source names, without the place in it.

    >>> source_name("bigscience@9e64ede chronicles.md line 776 (one line per benchmark)")
    'bigscience@9e64ede chronicles.md'
    """
    return re.split(r" line \d| section |;| \(one |, ", text)[0].strip()


def bias_by(timed: Sequence[Result], value: Callable[[Result], int]) -> Mapping[int, float]:
    """The mean signed error by something about the configuration, ascending."""
    found: dict[int, list[float]] = {}
    for each in timed:
        if each.error is not None:
            found.setdefault(value(each), []).append(each.error)
    return {key: mean(found[key]) for key in sorted(found)}
