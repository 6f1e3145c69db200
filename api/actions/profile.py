"""``autoparallel profile``: measure on this machine the ops and transfers of planning a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from autoparallel.actions.terminal import stdout_console
from autoparallel.cache.database import database_counts, database_path, explain_errors, find_file
from autoparallel.cost_model.profile.database import Database
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.results import say_json
from autoparallel.options.words import percent_text, seconds_text
from autoparallel.planner.errors import UsageError
from autoparallel.profiling.start import start_profiling
from autoparallel.report.printing import plain_table


def profile(
    target: str,
    *,
    cluster: str,
    options: PlanOptions,
    settings: list[str] | None,
    budget: float,
    database: str | None,
    export_file: str | None,
    import_file: str | None,
    show_list: bool,
    json: bool,
) -> None:
    """Measure the ops and collectives that planning ``target`` needs, within ``budget`` seconds,
    and import, export or list the profile database as requested."""
    path = database_path(database)
    if not (target or export_file or import_file or show_list):
        raise UsageError("AP175", "nothing to do: give a TARGET, --list, --export or --import")
    if import_file is not None:
        take_over(path, import_file)
    if target:
        try:
            outcome = start_profiling(
                target, settings or [], cluster, options=options, budget=budget, database=path
            )
        except KeyboardInterrupt:
            typer.echo(f"interrupted; what was measured until now is in {path}", err=True)
            raise
        if outcome and not (json and show_list):
            say_json("profile", outcome) if json else show(outcome, path, stdout_console())
    if export_file is not None:
        hand_out(path, export_file)
    if show_list:
        show_database(path, json=json)


def take_over(path: Path, source: str) -> None:
    """Import the exported measurements in the file ``source`` into the database at ``path``."""
    with explain_errors(Path(source)), Database(path) as opened:
        counts = opened.import_file(source)
    typer.echo(
        f"imported {source} into {path}: {counts.added} new, {counts.replaced} replaced,"
        f" {counts.kept} known better",
        err=True,
    )


def hand_out(path: Path, to: str) -> None:
    """Export the profile database at ``path`` to the file ``to``."""
    with explain_errors(path), Database(find_file(path), read_only=True) as opened:
        count = opened.export_file(to)
    typer.echo(f"{count} measurements written to {to}", err=True)


def show(outcome: Mapping[str, Any], path: Path, console: Console) -> None:
    """Print a profiling result: measured and skipped ops, interpolation errors, database path."""
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
    """Print the number of measured ops and transfers in each environment."""
    counts = database_counts(path)
    if json:
        names = ("environment", "ops", "transfers")
        rows = [(str(where), ops, transfers) for where, ops, transfers in counts]
        say_json("profile", [dict(zip(names, row, strict=True)) for row in rows])
        return
    table = plain_table(("environment", "left"), ("ops", "right"), ("transfers", "right"))
    for where, ops, transfers in counts:
        table.add_row(str(where), str(ops), str(transfers))
    console = stdout_console()
    console.print(table)
    console.print(f"database: {path}", soft_wrap=True)
