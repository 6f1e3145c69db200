"""Page of a plan file: its plan, the measurement beside it, and its model priced again."""

from __future__ import annotations

import typer

from autoparallel.analysis.measurement import load_measurement
from autoparallel.analysis.repriced import price_again
from autoparallel.html.document import MISSING, Sources, page
from autoparallel.options.progress import progress
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan


def plan_page(plan: Plan, path: str, *, loads_target: bool, trust: bool = False) -> str:
    """Return the HTML page of the plan in the file ``path``, with a run's measurement if any.
    ``loads_target`` loads and prices the plan's model, as baselines and roofline need it."""
    return page(plan, page_sources(plan, path, loads_target=loads_target, trust=trust))


def page_sources(plan: Plan, plan_path: str, *, loads_target: bool, trust: bool = False) -> Sources:
    """Collect the data of a plan's page besides the plan: a run's measurement, and the plan priced
    with its model or the reason why the model could not be loaded."""
    measured = load_measurement(plan_path)
    if not loads_target:
        return Sources(None, MISSING, measured)

    try:
        with progress() as observe:
            return Sources(price_again(plan, plan_path, observe, trust=trust), "", measured)
    except AutoparallelError as error:
        typer.echo(f"autoparallel: the page is without baselines: {error.what}", err=True)
        return Sources(None, f"{error.what} ({error.code})", measured)
