"""``autoparallel plan``: find the fastest plan and print or write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.commands.options import (
    ClusterOption,
    JsonOption,
    LoraOption,
    OutputOption,
    SetOption,
    TargetArgument,
    planning,
    stdout_console,
    with_lora,
)
from autoparallel.options.collection import rare_collections
from autoparallel.options.parse import parse_settings

if TYPE_CHECKING:
    from autoparallel.planner.plan import Plan
    from autoparallel.planning.plan import PlanOptions

CheckOption = Annotated[bool, typer.Option("--check", help="check the model file without planning")]

NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="neither read nor write the cache of earlier searches")
]


@planning()
@rare_collections()
def plan(
    target: TargetArgument,
    *,
    cluster: ClusterOption = "local",
    options: PlanOptions,
    output: OutputOption = None,
    settings: SetOption = None,
    lora: LoraOption = None,
    json: JsonOption = False,
    check: CheckOption = False,
    no_cache: NoCacheOption = False,
) -> None:
    """Find the fastest way to train TARGET on a cluster."""
    from autoparallel.target.load import load_target

    loaded = load_target(target, parse_settings(with_lora(settings, lora)))
    if check:
        from autoparallel.target.check import check_target

        typer.echo(check_target(loaded, options.global_batch, options.seq))
        return
    from autoparallel.cache.plan_cache import plan_cache
    from autoparallel.options.progress import progress
    from autoparallel.planning.plan import make_plan

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
    """The short report, or JSON, on stdout; the plan's file if one is asked for."""
    from autoparallel.planner.plan_file import dumps
    from autoparallel.planning.plan_files import save_plan
    from autoparallel.report import ONE_SCREEN, print_report

    if output is not None:
        save_plan(plan, output)
    if json:
        typer.echo(dumps(plan), nl=False)
        return
    print_report(plan, stdout_console(), ONE_SCREEN)
    if output is not None:
        typer.echo(f"\nwritten to {output}; next: autoparallel run {output}", err=True)
