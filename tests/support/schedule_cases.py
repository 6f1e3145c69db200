"""Pipelines of a few models under every schedule, for tests that run their plans.

In: models, a schedule, a number of micro-batches. Out: the captured program, and the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kept_captures import capture_once
from test_verification_branches import slow_wires

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import Deferred
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan import plan_program
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

SCHEDULES = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved,chunks=2",
    "interleaved,chunks=4",
    "bfs,chunks=2",
    "zb-h1",
    "zb-h1,chunks=2",
    "zb-h2",
    "zbv",
    "dualpipev",
    "chimera",
    "terapipe,slices=2",
)
"""Those that compute what one device would."""


@dataclass(frozen=True)
class Case:
    """A model under a schedule with ``count`` micro-batches.

    ``parallel``: the degrees. ``hosts``: the number of devices of each host; one host without it.
    """

    model: str
    schedule: str
    count: int
    parallel: str = "pp=2"
    hosts: tuple[int, ...] = ()

    def __str__(self) -> str:
        hosts = " on " + "+".join(map(str, self.hosts)) if self.hosts else ""
        return f"{self.model} {self.forced}{hosts}"

    @property
    def forced(self) -> str:
        return f"{self.parallel},schedule={self.schedule},microbatches={self.count}"

    @property
    def cluster(self) -> Cluster:
        """Links between ``hosts`` are so slow that each host becomes a stage."""
        if self.hosts:
            return slow_wires((1e7,) * len(self.hosts), self.hosts)
        return parse_cluster(f"cpu:{self.num_ranks}")

    @property
    def num_ranks(self) -> int:
        if self.hosts:
            return sum(self.hosts)
        forced = parse_parallel(self.parallel)
        return (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)


@dataclass(frozen=True, eq=False)
class Models:
    """Models by name: the file and the settings of each, and the ``sequences`` that it is run with,
    if any. What was loaded or captured is kept."""

    files: Mapping[str, tuple[str, Mapping[str, Any]]]
    sequences: Mapping[str, int]

    @cache  # noqa: B019 (there are two of them, for a whole session)
    def target(self, model: str) -> Target:
        path, settings = self.files[model]
        return load_target(path, settings)

    @cache  # noqa: B019
    def captured(self, model: str, precision: str = "fp32") -> tuple[Deferred, Program]:
        found = self.target(model)
        return capture_once(found, found.example_batch(2, self.sequences.get(model)), precision)

    @cache  # noqa: B019
    def planned(self, case: Case, rows: int) -> Plan | None:
        """Of a batch of so many rows; None where the model or the schedule cannot have this."""
        _, program = self.captured(case.model)
        forced, seq = parse_parallel(case.forced), self.sequences.get(case.model)
        options = PlanOptions(global_batch=rows, seq=seq, forced=forced)
        try:
            return plan_program(program, self.target(case.model), case.cluster, options)
        except AutoparallelError:
            return None
