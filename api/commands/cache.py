"""``autoparallel cache``: what earlier searches left on this machine, and its removal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from autoparallel.commands.options import JsonOption, print_json

ActionArgument = Annotated[
    Literal["show", "clear"], typer.Argument(metavar="[show|clear]", help="what to do")
]


def cache(action: ActionArgument = "show", json: JsonOption = False) -> None:
    """Show or clear the cache of earlier searches."""
    from autoparallel.cache.plan_cache import clear_cache, contents

    if action == "clear":
        freed = clear_cache()
        typer.echo(f"{freed / 1e6:.1f} MB removed")
        return
    found = contents()
    if json:
        print_json({**asdict(found), "path": str(found.path)})
        return
    typer.echo(f"{found.path}  {found.num_bytes / 1e6:.1f} MB")
    if not found.values:
        typer.echo("no values")
    for name, number in found.values.items():
        mark = "this version" if name == found.own else "another version, not used"
        typer.echo(f"{number:>8,} values of {mark}: {name}")
    for reason in found.faults:
        typer.echo(f"fault: {reason}")
