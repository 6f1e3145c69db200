"""Commands about this machine.

Declarations: ``actions`` carries them out.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from autoparallel.commands.options import (
    ClusterOption,
    DatabaseOption,
    JsonOption,
    SetOption,
    SetupOption,
    command,
)
from autoparallel.options.plan_options import PlanOptions


@command(
    "profile",
    without=("profile", "database", "measure_seconds", "objective", "price", "deadline"),
    starts_others=True,
)
def profile(
    target: Annotated[
        str, typer.Argument(metavar="[TARGET]", help="the model to measure for, as for plan")
    ] = "",
    *,
    cluster: ClusterOption = "local",
    options: PlanOptions,
    settings: SetOption = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="time limit in seconds")] = 120.0,
    database: DatabaseOption = None,
    export_file: Annotated[
        str | None, typer.Option("--export", metavar="FILE", help="write all measurements to FILE")
    ] = None,
    import_file: Annotated[
        str | None,
        typer.Option("--import", metavar="FILE", help="add the measurements of an exported file"),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="list the database's contents")] = False,
    json: JsonOption = False,
) -> None:
    """Measure the ops and collectives that planning TARGET needs."""


@command("doctor", starts_others=True)
def doctor(
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="PLAN", help="check the cluster that a plan is for"),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="check a cluster against its description, as for plan"),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="A,B,…|FILE",
            help="check these hosts from here, over ssh, in the cluster's order",
        ),
    ] = None,
    setup: SetupOption = "",
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=1.0, help="seconds without progress that end the check"),
    ] = 120.0,
    json: JsonOption = False,
) -> None:
    """Check software, limits and GPUs of this machine; of a cluster also devices and links."""


@command("mcp", starts_others=True)
def mcp(
    skill: Annotated[bool, typer.Option("--skill", help="print a SKILL.md for agents")] = False,
) -> None:
    """Serve plan, estimate, simulate, explain and compare to AI agents as tools of MCP, over stdio.

    Clients start `autoparallel mcp` in the folder of the models. It needs the extra mcp.
    """


@command("listings")
def cache(
    action: Annotated[
        Literal["show", "clear"], typer.Argument(metavar="[show|clear]", help="what to do")
    ] = "show",
    json: JsonOption = False,
) -> None:
    """Show or clear the cache of earlier searches."""
