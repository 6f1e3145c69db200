"""``autoparallel inspect``: the report of a plan, on the terminal or as a page."""

from __future__ import annotations

from pathlib import Path

import typer

from autoparallel.actions.terminal import stdout_console, write_html
from autoparallel.analysis.measurement import load_measurement, measured_text
from autoparallel.analysis.repriced import price_again
from autoparallel.html import MISSING, Sources, page
from autoparallel.options.outputs import check_output_file
from autoparallel.options.progress import progress
from autoparallel.options.results import say_json
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import to_table
from autoparallel.planning.plan_files import load_plan
from autoparallel.report import Details, print_report


def inspect(
    *,
    plan: str,
    stages: bool,
    memory: bool,
    candidates: bool,
    layouts: bool,
    everything: bool,
    html: str | None,
    target: bool,
    trust: bool,
    json: bool,
) -> None:
    """Carry out ``autoparallel inspect``."""
    loaded = load_plan(plan)
    check_output_file(html, "--html")
    if html is not None:
        sources = page_sources(loaded, plan, loads_target=target, trust=trust)
        write_html(page(loaded, sources), html)
        return
    if json:
        say_json("inspect", to_table(loaded))
        return
    found = load_measurement(plan)
    details = Details(
        stages or everything,
        memory or everything,
        candidates or everything,
        layouts or everything,
        everything,
    )
    print_report(
        loaded,
        stdout_console(),
        details,
        next_steps=() if everything else next_steps(plan),
        measured=measured_text(found, loaded) if found is not None else "",
    )


def next_steps(plan_path: str) -> list[tuple[str, str]]:
    """List the next commands for a plan, each with its purpose."""
    page = Path(plan_path).with_suffix(".html").name
    return [
        (f"autoparallel inspect {plan_path} --html {page}", "the report as a page"),
        (f"autoparallel verify {plan_path}", "compare with one device"),
        (f"autoparallel run {plan_path}", "train and measure"),
    ]


def page_sources(plan: Plan, plan_path: str, *, loads_target: bool, trust: bool = False) -> Sources:
    """Collect a page's sources besides the plan: a run's measurement, and the plan priced again or
    the reason why its model could not be loaded."""
    measured = load_measurement(plan_path)
    if not loads_target:
        return Sources(None, MISSING, measured)

    try:
        with progress() as observe:
            return Sources(price_again(plan, plan_path, observe, trust=trust), "", measured)
    except AutoparallelError as error:
        typer.echo(f"autoparallel: the page is without baselines: {error.what}", err=True)
        return Sources(None, f"{error.what} ({error.code})", measured)
