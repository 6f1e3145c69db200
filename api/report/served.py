"""The part of a report about parameter servers."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from autoparallel.options.words import ranks_text
from autoparallel.planner.plan import ServerPlan


def server_lines(servers: ServerPlan) -> RenderableType:
    """Describe workers and servers, their shares, and the meaning of staleness."""
    count = len(servers.servers)
    shares = ", ".join(map(str, servers.shares))
    lines = [
        f"workers on ranks {ranks_text(servers.workers)}: {shares} micro-batches of a step",
        f"servers on ranks {ranks_text(servers.servers)}: each 1/{count} of all weights and "
        "optimizer states",
    ]
    if servers.replicas:
        lines.append("each server holds a replica of another one's part")
    if servers.consistency == "ssp":
        lines.append(
            f"staleness {servers.staleness}: a worker is at most {servers.staleness} iterations "
            "ahead of the slowest"
        )
    return Text("\n".join(lines))
