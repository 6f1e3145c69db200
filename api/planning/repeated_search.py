"""Search that is run repeatedly, with one time budget for all of its runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.errors import (
    AutoparallelError,
    InfeasibleError,
    TimeLimitError,
    UsageError,
)
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Request

Search = Callable[[Cluster, Request], Plan]

CANNOT = ("AP124", "AP127", "AP128", "AP183", "AP184")
"""Codes of usage errors that a changed cluster or request can raise although the user's raises
none; they count as no plan."""

LEAST_SECONDS = 0.1
"""Minimum time limit of one search."""


@dataclass
class RepeatedSearch:
    """Search that may run several times within ``seconds``; ``error`` is the last failed run's."""

    search: Search
    seconds: float
    ignores: bool = False
    """True if any planning error of a run counts as no plan instead of being raised."""
    began: float = field(default_factory=lambda: time.perf_counter())
    error: AutoparallelError | None = None

    def anew(self, seconds: float) -> RepeatedSearch:
        """Return the same search with a new time budget of ``seconds`` from now on."""
        return RepeatedSearch(self.search, seconds, self.ignores)

    @property
    def left(self) -> float:
        """Seconds left of the time budget."""
        return self.seconds - (time.perf_counter() - self.began)

    def share(self, request: Request, parts: int = 1) -> Request:
        """Return the request with a time limit of 1/``parts`` of the seconds left."""
        seconds = max(max(self.left, 0.0) / max(parts, 1), LEAST_SECONDS)
        return replace(request, time_limit_seconds=seconds)

    def run(self, cluster: Cluster, request: Request, *, parts: int = 1) -> Plan | None:
        """Plan within 1/``parts`` of the time left; return None if there is no plan.

        Raises usage errors, except those that a changed cluster or request alone can cause.
        """
        try:
            return self.search(cluster, self.share(request, parts))
        except AutoparallelError as error:
            is_expected = isinstance(error, InfeasibleError | TimeLimitError)
            is_expected |= isinstance(error, UsageError) and error.code in CANNOT
            if not (self.ignores or is_expected):
                raise
            self.error = error
            return None
