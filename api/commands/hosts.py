"""Options of the commands that run on several hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autoparallel.runtime.launch.rendezvous import Hosts

NumHostsOption = Annotated[
    str | None,
    typer.Option(
        "--nnodes", metavar="N|MIN:MAX", help="hosts of the run, on each of which this is started"
    ),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where the hosts meet: an address of one of them, and a free port there",
    ),
]
JoinTimeoutOption = Annotated[
    float,
    typer.Option("--join-timeout", min=1.0, help="seconds to wait for the other hosts"),
]
ElasticOption = Annotated[
    bool,
    typer.Option(
        "--elastic", help="go on with MIN hosts or more, by a plan for those that are there"
    ),
]


def asked_hosts(
    nnodes: str | None, endpoint: str | None, join_timeout: float, elastic: bool, source: str
) -> Hosts | None:
    """The hosts that the options ask for. Raises UsageError AP156.

    Its hosts need one plan, so ``source`` has to be a plan file.
    """
    from autoparallel.options.hosts import parse_hosts
    from autoparallel.planner.errors import UsageError

    hosts = parse_hosts(nnodes, endpoint, join_seconds=join_timeout, elastic=elastic)
    if hosts is not None and (not source.endswith(".json") or source.startswith("hf:")):
        raise UsageError(
            "AP156",
            "a target cannot be planned on several hosts at once",
            why="every host would plan separately",
            fix=f"autoparallel plan {source} -o plan.json, then run plan.json on every host",
        )
    return hosts
