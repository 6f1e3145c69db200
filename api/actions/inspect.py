"""``autoparallel inspect``: the report of a plan, on the terminal or as a page."""

from __future__ import annotations

from autoparallel.actions.terminal import next_steps, stdout_console, write_html
from autoparallel.analysis.measurement import load_measurement, measured_text
from autoparallel.options.outputs import check_output_file
from autoparallel.options.results import say_json
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
    """Print a report of a plan file on stdout, or write it as the page ``html``."""
    loaded = load_plan(plan)
    check_output_file(html, "--html")
    if html is not None:
        from autoparallel.html.plan_page import plan_page  # imports torch, a second or two

        write_html(plan_page(loaded, plan, loads_target=target, trust=trust), html)
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
        next_steps=() if everything else next_steps(loaded, plan),
        measured=measured_text(found, loaded) if found is not None else "",
    )
