"""``autoparallel explain``: alternatives to a plan's choices, forced degrees and other clusters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from autoparallel.actions.terminal import stdout_console
from autoparallel.analysis.compare import read_run
from autoparallel.analysis.explain import explain as explained
from autoparallel.analysis.lengths import price_lengths
from autoparallel.analysis.measured_blocks import compute_errors
from autoparallel.analysis.plan_model import load_plan_model
from autoparallel.analysis.what_if import what_if as changed
from autoparallel.analysis.what_if import why_not as forced_plan
from autoparallel.cache.database import find_profile
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.options.results import say_json
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning.document_lengths import read_lengths
from autoparallel.planning.plan_files import load_plan
from autoparallel.report import explanation as pages
from autoparallel.report.explanation import measured_json, print_lengths, print_measured


def explain(
    *,
    plan: str,
    name: str,
    why_not: str | None,
    what_if: list[str] | None,
    measured: str | None,
    lengths: str | None,
    database: str | None,
    time_limit: float,
    trust: bool,
    json: bool,
) -> None:
    """Print one of: the alternatives to a plan's choice ``name``; the plan with forced degrees
    (``why_not``) or on a changed cluster (``what_if``); a run's metrics beside predictions; steps
    whose sequences have ``lengths``, the path of a file."""
    given = (name or None, why_not, what_if or None, measured, lengths)
    if sum(each is not None for each in given) != 1:
        raise UsageError(
            "AP360",
            "explain needs one of NAME, --why-not, --what-if, --measured and --lengths",
            fix="for example: autoparallel explain plan.json zero",
        )

    loaded = load_plan(plan)
    corpus = [] if lengths is None else read_lengths(Path(lengths))
    if measured is not None:
        _measured(loaded, plan, measured, database, trust=trust, json=json)
        return

    with plan_cache() as cache:
        model = load_plan_model(loaded, plan, trust=trust, cache=cache.values)
        if why_not is not None:
            other = forced_plan(model, why_not, time_limit, cache.values)
            if json:
                say_json("explain", pages.why_not_json(loaded, other, why_not))
            else:
                pages.print_why_not(loaded, other, why_not, stdout_console())
        elif corpus:
            steps = price_lengths(model, corpus)
            if json:
                say_json("explain", asdict(steps))
            else:
                print_lengths(steps, loaded, stdout_console())
        elif what_if:
            found = changed(model, what_if, time_limit, cache.values)
            if json:
                say_json("explain", pages.what_if_json(found))
            else:
                pages.print_what_if(found, stdout_console())
        else:
            reasons = explained(model, name)
            if json:
                say_json("explain", asdict(reasons))
            else:
                pages.print_explanation(reasons, stdout_console())


def _measured(
    plan: Plan, path: str, measured: str, database: str | None, *, trust: bool, json: bool
) -> None:
    """Print a plan's predictions beside the metrics of a run (file ``measured``).

    If the profile database has measurements for the plan's devices, predicted compute seconds of
    blocks and stages are also printed beside prices from these measurements.
    """
    run, blocks = read_run(Path(measured)), None
    if find_profile(plan.cluster, "auto", database) is not None:
        with plan_cache() as cache:
            model = load_plan_model(plan, path, trust=trust, profile="analytic", cache=cache.values)
            blocks = compute_errors(model, database)
    if json:
        say_json("explain", measured_json(plan, run, blocks))
    else:
        print_measured(plan, run, blocks, stdout_console())
