"""Cutting a failing model down while it fails in the same way."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.fuzz.draw import without
from benchmarks.fuzz.pool import Pool, Result, Trial

MOST_SECONDS = 240.0


def shrink(pool: Pool, trial: Trial, result: Result) -> tuple[Trial, Result]:
    """Return a smaller trial that ends in the same way, and how it ends."""
    began = time.monotonic()
    improved = True
    while improved and time.monotonic() - began < MOST_SECONDS:
        improved = False
        for smaller in _smaller(trial):
            found = pool.run(smaller)
            if (found.kind, found.code) == (result.kind, result.code):
                trial, result, improved = smaller, found, True
                break
            if time.monotonic() - began > MOST_SECONDS:
                break
    return trial, result


def _smaller(trial: Trial) -> list[Trial]:
    found = [replace(trial, model=model) for model in without(trial.model)]
    plan = trial.plan
    simpler = [
        replace(plan, accumulate=1),
        replace(plan, max_norm=None),
        replace(plan, optimizer="sgd"),
    ]
    if plan.parallel:
        words = plan.parallel.split(",")
        simpler += [
            replace(plan, parallel=",".join(w for w in words if w != word)) for word in words[1:]
        ]
    if plan.stepped and "pp=" not in (plan.parallel or "pp="):
        simpler.append(replace(plan, stepped=False))
    return found + [replace(trial, plan=each) for each in simpler if each != plan]
