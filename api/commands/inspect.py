"""``autoparallel inspect``: the report of a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import JsonOption, stdout_console

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="a plan file")]


def inspect(plan: PlanArgument, json: JsonOption = False) -> None:
    """Show a plan: stages, sharding, memory, step time, alternatives, confidence."""
    from autoparallel.plan_io import load_plan
    from autoparallel.planner.plan_file import dumps
    from autoparallel.report import print_report

    loaded = load_plan(plan)
    if json:
        typer.echo(dumps(loaded), nl=False)
    else:
        print_report(loaded, stdout_console())
