"""Sources left out in turn: constants fitted on the others, tried on the one.

``python benchmarks/validation/left_out.py [--runs FILE] [--runs-2 FILE] [--experts FILE]``. A
``Knob`` is a constant that was fitted on published runs. Each run is priced as it is, and once more
with each knob at ``STEP`` times its value; between, and beyond, its time is taken to be a power of
the factor. Then, for each source, the knobs are fitted on all runs of the other sources: the least
mean error, one knob after the other over ``FACTORS``, until none changes. vTrain's rows have
constants of their own and are not among these. llm-foundry's are left out for its runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.cost_model.cluster.cluster import Device
from autoparallel.cost_model.cluster.presets import find_preset
from benchmarks.validation.experts import run_of
from benchmarks.validation.pricing import Pricer, Result
from benchmarks.validation.published import published
from benchmarks.validation.sources import Program
from benchmarks.validation.tables import Run, Skipped, read

DATA = Path(__file__).with_name("data")
STEP = 1.15
FACTORS = tuple(0.5 + 0.02 * number for number in range(51))
FEWEST = 3
"""Rows of a source that has a line of its own."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A fitted constant: which runs it is in, and a run with so many times its value."""

    name: str
    applies: Callable[[Run], bool]
    scaled: Callable[[Run, float], Run]


def _with_efficiency(family: str, run: Run, factor: float) -> Run:
    def changed(device: Device) -> Device:
        own = {family: factor * device.efficiency[family]}
        return replace(device, efficiency={**device.efficiency, **own})

    return replace(run, cluster=run.cluster.with_devices(changed))


def _of_device(name: str, family: str, *, in_fp8: bool) -> Knob:
    def applies(run: Run) -> bool:
        is_fp8 = run.configuration.precision == "fp8"
        return name in run.cluster.hosts[0].device.name and is_fp8 == in_fp8

    return Knob(
        f"{family} of {name}", applies, lambda run, factor: _with_efficiency(family, run, factor)
    )


def _of_program(
    name: str, applies: Callable[[Run], bool], change: Callable[[Program, float], Program]
) -> Knob:
    return Knob(name, applies, lambda run, f: replace(run, program=change(run.program, f)))


KNOBS = (
    _of_device("B200", "matmul", in_fp8=False),
    _of_device("B200", "matmul_float8_e4m3fn", in_fp8=True),
    _of_device("B300", "matmul", in_fp8=False),
    _of_device("B300", "matmul_float8_e4m3fn", in_fp8=True),
    _of_device("H100", "matmul", in_fp8=False),
    _of_device("H100", "attention", in_fp8=False),
    _of_program(
        "waits",
        lambda run: run.program.waits > 0,
        lambda program, factor: replace(program, waits=factor * program.waits),
    ),
    _of_program(
        "exposed_share",
        lambda run: run.program.exposed_share < 1,
        lambda own, factor: replace(own, exposed_share=min(1.0, factor * own.exposed_share)),
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A run's logarithmic error, and by knob how it grows with the logarithm of the factor."""

    source: str
    error: float
    slopes: Mapping[int, float]

    def at(self, factors: Sequence[float]) -> float:
        """The relative error at these factors."""
        moved = sum(slope * log(factors[knob]) for knob, slope in self.slopes.items())
        return exp(self.error + moved) - 1


def publisher(text: str) -> str:
    """The project or paper that a source names, whatever its release.

    >>> publisher("NVIDIA/dgxc-benchmarking@v25.05 deepseek_v3/pretraining/README.md")
    'NVIDIA/dgxc-benchmarking'
    """
    return re.split(r"[@ ;,]", text)[0]


def without_source(run: Run) -> Run:
    """The run without constants that no other source shares."""
    if "llm-foundry" not in run.source:
        return run
    cluster = run.cluster.with_devices(lambda device: find_preset(device.name).device)
    return replace(run, cluster=cluster, program=Program())


def line(run: Run, pricer: Pricer) -> Line | Skipped:
    """A run's error and slopes."""
    run = without_source(run)
    found = pricer.result(run)
    if isinstance(found, Skipped) or found.error is None:
        return Skipped(run.name, run.source, "not priced")
    slopes = {}
    for number, knob in enumerate(KNOBS):
        if knob.applies(run):
            moved = pricer.result(knob.scaled(run, STEP))
            if isinstance(moved, Result) and moved.seconds != found.seconds:
                slopes[number] = log(moved.seconds / found.seconds) / log(STEP)
    return Line(publisher(run.source), log(1 + found.error), slopes)


def fitted(lines: Sequence[Line]) -> list[float]:
    """The factors with the least mean error of these runs."""
    factors = [1.0] * len(KNOBS)
    for _ in range(10):
        before = list(factors)
        for knob in range(len(KNOBS)):
            own = [each for each in lines if knob in each.slopes]
            if own:
                factors[knob] = min(
                    FACTORS, key=lambda f: _error(own, [*factors[:knob], f, *factors[knob + 1 :]])
                )
        if factors == before:
            break
    return factors


def _error(lines: Sequence[Line], factors: Sequence[float]) -> float:
    return mean(abs(each.at(factors)) for each in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per source: its runs' error as priced, and with constants of the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    files = {
        "runs": "published_runs.csv",
        "runs_2": "published_runs_2.csv",
        "experts": "moe_runs.csv",
    }
    for name, default in files.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, default=DATA / default)
    options = parser.parse_args(arguments)
    pricer, lines = Pricer(), []
    for name in files:
        for row in read(getattr(options, name), run_of if name == "experts" else published):
            if isinstance(row, Run) and row.quality in "AB" and row.measured_seconds is not None:
                found = line(row, pricer)
                lines += [found] if isinstance(found, Line) else []
    by_source: dict[str, list[Line]] = {}
    for each in lines:
        by_source.setdefault(each.source, []).append(each)
    errors = []
    print("| source left out | runs | error, constants of the others (bias) | as priced |")
    print("|---|---|---|---|")
    for source, own in by_source.items():
        if len(own) < FEWEST:
            continue
        factors = fitted([each for each in lines if each.source != source])
        errors.append(_error(own, factors))
        bias, priced = mean(each.at(factors) for each in own), _error(own, [1.0] * len(KNOBS))
        print(
            f"| {source} | {len(own)} | {100 * errors[-1]:.1f} % ({100 * bias:+.1f} %) | "
            f"{100 * priced:.1f} % |"
        )
    print(f"\nmean over {len(errors)} sources: {100 * mean(errors):.1f} %")
    whole = fitted(lines)
    print(
        "fitted on all: "
        + ", ".join(f"{k.name} × {f:.2f}" for k, f in zip(KNOBS, whole, strict=True))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
