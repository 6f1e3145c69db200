"""``autoparallel profile``: measure what planning a target asks for, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.commands.options import (
    ClusterOption,
    DatabaseOption,
    JsonOption,
    SetOption,
    planning,
    print_json,
    stdout_console,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

TargetOrNothing = Annotated[
    str, typer.Argument(metavar="[TARGET]", help="the model to measure for, as for plan")
]
BudgetOption = Annotated[float, typer.Option("--budget", min=1, help="time limit in seconds")]
ExportOption = Annotated[
    str | None, typer.Option("--export", metavar="FILE", help="write all measurements to FILE")
]
ImportOption = Annotated[
    str | None,
    typer.Option("--import", metavar="FILE", help="add the measurements of an exported file"),
]
ListOption = Annotated[bool, typer.Option("--list", help="list the database's contents")]


@planning(without=("profile", "database", "measure_seconds", "objective", "price", "deadline"))
def profile(
    target: TargetOrNothing = "",
    *,
    cluster: ClusterOption = "local",
    asked: dict[str, Any],
    settings: SetOption = None,
    budget: BudgetOption = 120.0,
    database: DatabaseOption = None,
    export_file: ExportOption = None,
    import_file: ImportOption = None,
    show_list: ListOption = False,
    json: JsonOption = False,
) -> None:
    """Measure the ops and collectives that planning TARGET needs."""
    from autoparallel.cache.database import database_path

    path = database_path(database)
    if not (target or export_file or import_file or show_list):
        from autoparallel.planner.errors import UsageError

        raise UsageError("AP175", "nothing to do: give a TARGET, --list, --export or --import")
    if import_file is not None:
        take_over(path, import_file)
    if target:
        from autoparallel.profiling.start import start_profiling

        try:
            outcome = start_profiling(
                target, settings or [], cluster, options=asked, budget=budget, database=path
            )
        except KeyboardInterrupt:
            typer.echo(f"interrupted; what was measured until now is in {path}", err=True)
            raise
        if outcome:
            print_json(outcome) if json else show(outcome, path, stdout_console())
    if export_file is not None:
        hand_out(path, export_file)
    if show_list:
        show_database(path, json=json)


def take_over(path: Path, source: str) -> None:
    """Imports an exported file into the database."""
    from autoparallel.cache.database import explained
    from autoparallel.cost_model.profile.database import Database

    with explained(Path(source)), Database(path) as opened:
        counts = opened.import_file(source)
    typer.echo(
        f"imported {source} into {path}: {counts.added} new, {counts.replaced} replaced,"
        f" {counts.kept} known better",
        err=True,
    )


def hand_out(path: Path, to: str) -> None:
    """Exports the database to a file."""
    from autoparallel.cache.database import existing, explained
    from autoparallel.cost_model.profile.database import Database

    with explained(path), Database(existing(path), read_only=True) as opened:
        count = opened.export_file(to)
    typer.echo(f"{count} measurements written to {to}", err=True)


def show(outcome: Mapping[str, Any], path: Path, console: Console) -> None:
    """What was measured and skipped, how well the rest is interpolated, and where it is."""
    from collections import Counter

    from autoparallel.options.words import percent_text, seconds_text
    from autoparallel.report.printing import plain_table

    console.print(f"[bold]{outcome['environment']}[/]")
    skipped = outcome["skipped"]
    console.print(
        f"measured {outcome['measured']} ops and {outcome['transfers']} transfers"
        f" in {seconds_text(outcome['seconds'])}; {len(skipped)} skipped,"
        f" {outcome['left']} left for another run"
    )
    table = plain_table(("family", "left"), ("measured", "right"), ("interpolation error", "right"))
    for family, count in outcome["counts"].items():
        error = outcome["errors"][family]
        table.add_row(family, str(count), "—" if error is None else f"±{percent_text(error)}")
    console.print(table)
    reasons = Counter((key.split(" ")[0], reason) for key, reason in skipped)
    for (op, reason), count in reasons.most_common(8):
        console.print(f"skipped {op} ({count}): {reason}", style="yellow", markup=False)
    console.print(f"database: {path}", soft_wrap=True)


def show_database(path: Path, *, json: bool) -> None:
    """For every environment how many ops and transfers are known."""
    from autoparallel.cache.database import database_counts
    from autoparallel.report.printing import plain_table

    counts = database_counts(path)
    if json:
        print_json(
            [
                {"environment": str(where), "ops": ops, "transfers": transfers}
                for where, ops, transfers in counts
            ]
        )
        return
    table = plain_table(("environment", "left"), ("ops", "right"), ("transfers", "right"))
    for where, ops, transfers in counts:
        table.add_row(str(where), str(ops), str(transfers))
    console = stdout_console()
    console.print(table)
    console.print(f"database: {path}", soft_wrap=True)
