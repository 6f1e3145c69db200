"""``autoparallel plan``: find the fastest plan and print or write it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from autoparallel.actions.terminal import next_steps, stdout_console, with_lora
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.options.collection import rare_collections
from autoparallel.options.outputs import check_output_file
from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import progress
from autoparallel.options.results import say, say_json
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import to_table
from autoparallel.planning.plan_files import save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.report import ONE_SCREEN, print_report
from autoparallel.target.check import check_target
from autoparallel.target.load import load_target


@rare_collections()
def plan(
    target: str,
    *,
    cluster: str,
    options: PlanOptions,
    output: str | None,
    settings: list[str] | None,
    lora: str | None,
    json: bool,
    check: bool,
    no_cache: bool,
) -> None:
    """Plan the training of ``target`` on ``cluster``, print the report and write the plan's file.
    With ``check`` only check the target."""
    check_output_file(output)
    loaded = load_target(target, parse_settings(with_lora(settings, lora)))
    if check:
        checked = check_target(loaded, options.global_batch, options.seq)
        say_json("plan", asdict(checked)) if json else say(str(checked))
        return

    with plan_cache(not no_cache) as cache:
        try:
            with progress() as observe:
                found = make_plan(loaded, cluster, options, observe, cache.values)
        except KeyboardInterrupt:
            typer.echo("autoparallel: interrupted before a plan was found", err=True)
            raise
        if said := cache.report():
            typer.echo(f"autoparallel: cache: {said}", err=True)
    show(found, output=output, json=json)


def show(plan: Plan, *, output: str | None, json: bool) -> None:
    """Print the short report, or JSON, on stdout, and write the plan to ``output`` if given."""
    if output is not None:
        save_plan(plan, output)
    if json:
        say_json("plan", to_table(plan))
        return
    print_report(plan, stdout_console(), ONE_SCREEN)
    if output is not None:
        command, _ = next_steps(plan, output)[-1]
        typer.echo(f"\nwritten to {output}; next: {command}", err=True)
