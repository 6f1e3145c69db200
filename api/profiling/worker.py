"""Worker processes of ``autoparallel profile``: they run the search, measure, and store.

They run inside a process group with one rank per device. Rank 0 plans, and so finds the ops,
transfers and blocks whose times a search needs; all ranks measure them (``work_list``). Then rank 0
plans again with the new times, as another plan with other ops may win. Whole blocks are measured
last, in a reserved part of the budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autoparallel.cache.database import explain_errors
from autoparallel.cost_model.cluster.cluster import STATE_COLLECTIVES
from autoparallel.cost_model.cluster.cluster_file import from_dict
from autoparallel.cost_model.collectives.collectives import Group, group_of
from autoparallel.cost_model.profile.case import OpCase
from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.lookup import Profile, level_of
from autoparallel.cost_model.profile.records import Transfer
from autoparallel.cost_model.profile.transfers import overlapped
from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import without_servers
from autoparallel.planner.configured.profiling_targets import ProfilingTargets, asked_cases
from autoparallel.planner.costs.basis import Basis
from autoparallel.planner.costs.mesh_prices import STATE_KINDS, update_curve
from autoparallel.planner.costs.precision import with_precision
from autoparallel.planner.find_plan import plan
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import own_update, request_of
from autoparallel.planning.tf32 import with_choice
from autoparallel.profiling.progress import Shown, shown_progress
from autoparallel.profiling.start import options_from_json
from autoparallel.profiling.work_list import (
    BlockTask,
    Found,
    LinkTask,
    OpsTask,
    Task,
    UpdateTask,
    WorkList,
    blocks_of,
    measure_together,
    sizes_to,
)
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.profile.links import COLLECTIVES, OVERLAPPED, Links, partition_of
from autoparallel.target.load import load_target

LINK_SHARE = 0.3
"""Maximum share of the budget for transfers that the search needs."""
LINK_SECONDS = 0.15
BLOCK_SHARE = 0.2
"""Share of the budget that is reserved for whole blocks."""
MOST_BLOCK_SECONDS = 2.0
LEAST_CASE_SECONDS, MOST_CASE_SECONDS = 0.05, 1.0
SEARCH_ROUNDS = 4
"""Maximum number of rounds for ops and transfers; blocks are measured afterwards."""
USUAL_BYTES = 1 << 22
"""Largest size of common transfers, which are measured even if the search does not need them."""
COLLECTIVE_OF = {STATE_KINDS.get(kind, kind): kind for kind in STATE_COLLECTIVES}
"""Collective on parameters or gradients for each kind of transfer that a search needs. The compute
time lost while it runs is measured too."""


def profile(
    worker: Worker,
    *,
    target: str,
    settings: Sequence[str],
    cluster: Mapping[str, Any],
    options: Mapping[str, Any],
    budget: float,
    database: str,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure the times that planning ``target`` with ``options`` needs. Collective.

    ``cluster`` and ``options`` are JSON values; ``budget`` is in seconds. Rank 0 returns a summary.
    """
    loaded = load_target(target, parse_settings(settings))
    on = from_dict(dict(cluster), "cluster")
    device = join_as(worker, on)
    tell = worker.watchdog.progress
    with ExitStack() as stack:
        work = None
        if worker.rank == 0:
            shown = stack.enter_context(shown_progress(budget, quiet=quiet))
            with explain_errors(Path(database)), Database(database):
                pass  # an unwritable file is reported before anything is measured
            chosen = options_from_json(options)
            tell("capturing the model")
            work = SearchWork(
                capture_target(loaded, chosen),
                loaded,
                with_choice(on, chosen.tf32),
                chosen,
                Path(database),
                budget=budget,
                shown=shown,
            )
        measure_together(work, device=device, build=loaded.build_optimizer, tell=tell)
        return {} if work is None else work.outcome()


Transfers = tuple[str, Group, tuple[tuple[int, ...], ...], float]
"""Kind of transfer, one group, the partition of ranks into such groups, and the largest bytes."""


def _of_overlap(
    kind: str, group: Group, partition: tuple[tuple[int, ...], ...]
) -> tuple[Transfers, Transfers]:
    """Return two transfers to measure for a collective: the collective alone, and compute beside
    it. Their ratio of times is the share of compute that the collective costs."""
    return (kind, group, partition, USUAL_BYTES), (overlapped(kind), group, partition, USUAL_BYTES)


@dataclass(kw_only=True)
class SearchWork(WorkList):
    """List, on rank 0, of the measurements that a search for plans needs, and of usual transfers,
    to be made within ``budget`` seconds."""

    budget: float
    shown: Shown
    skipped: dict[str, str] = field(default_factory=dict)
    measured: int = 0
    num_transfers: int = 0
    num_asked: int = 0
    waiting: set[OpCase] = field(default_factory=set)
    waiting_links: int = 0
    rounds: int = 0
    began: float = field(default_factory=time.perf_counter)
    links_began: float = 0.0

    def left_seconds(self, task: Task) -> float:
        """Return the seconds left in the share of the budget for measurements of a task's kind."""
        now = time.perf_counter()
        if isinstance(task.what, BlockTask):
            return self.budget
        left = (1 - BLOCK_SHARE) * self.budget - (now - self.began)
        if isinstance(task.what, LinkTask) and task.what.is_asked:
            left = min(left, LINK_SHARE * self.budget - (now - self.links_began))
        return left

    def tasks(self) -> tuple[Task, ...]:
        """Return the next round's measurements: ops and transfers that the search needs and, in the
        last round, whole blocks."""
        is_late = time.perf_counter() - self.began > (1 - BLOCK_SHARE) * self.budget
        found = () if is_late or self.rounds >= SEARCH_ROUNDS else self._searched()
        self.rounds = self.rounds + 1 if found else SEARCH_ROUNDS
        return found or self._blocks()

    def _searched(self) -> tuple[Task, ...]:
        known, _ = self.known()
        request = request_of(self.program, self.target, self.options)
        wanted = asked_cases(
            self.program.graph, self.program.blocks, self.cluster, request, basis=Basis(known)
        )
        self.num_asked = wanted.num_asked
        ops = tuple(op.case for op in wanted.ops if op.case.key() not in self.skipped)
        self.waiting = set(ops)
        links = tuple(self._links(wanted, known))
        self.links_began = time.perf_counter()
        left = self.budget - (self.links_began - self.began)
        has_asked = any(link.is_asked for link in links)
        seconds = left * (1 - LINK_SHARE * has_asked) / max(len(ops), 1)
        case_seconds = min(MOST_CASE_SECONDS, max(LEAST_CASE_SECONDS, seconds * 0.7))
        optimizer = own_update(self.target) or self.options.optimizer
        updates = [UpdateTask(optimizer)] if update_curve(known, optimizer) is None else []
        updates = [each for each in updates if each not in self.tried]
        self.tried.update(updates)
        self.waiting_links += sum(len(link.links.num_bytes) for link in links)
        num_updates = sum(len(each.num_bytes) for each in updates)
        self.shown.expect(len(ops) + self.waiting_links + num_updates)
        return (
            *(Task(link, LINK_SECONDS) for link in links if link.is_asked),
            *(Task(each, LINK_SECONDS) for each in updates),
            *([Task(OpsTask(ops), case_seconds)] if ops else []),
            *(Task(link, LINK_SECONDS) for link in links if not link.is_asked),
        )

    def _blocks(self) -> tuple[Task, ...]:
        """Return the measurements of whole blocks of the plan that is best by the known times."""
        known, _ = self.known()
        graph, blocks = self.program.graph, self.program.blocks
        request = request_of(self.program, self.target, without_servers(self.options))
        best = plan(graph, blocks, self.cluster, request, basis=Basis(known))
        tf32 = self.cluster.device(0).tf32 or ()
        tasks = [
            BlockTask(at, block, best.num_microbatches > 1, tf32)
            for at, block in blocks_of(best, with_precision(graph, request.precision), blocks)
        ]
        tasks = [
            each for each in tasks if each.case not in known.ops and each.case not in self.tried
        ]
        self.tried.update(each.case for each in tasks)
        self.shown.expect(len(tasks))
        seconds = min(MOST_BLOCK_SECONDS, BLOCK_SHARE * self.budget / max(len(tasks), 1))
        return tuple(Task(each, seconds) for each in tasks)

    def _links(self, wanted: ProfilingTargets, known: Profile) -> Iterator[LinkTask]:
        """Yield tasks for the search's transfers at sizes not in ``known``, then usual
        transfers."""
        reached = self.reached(known)
        asked: list[Transfers] = [
            (each.kind, each.group, each.partition, each.most_bytes) for each in wanted.transfers
        ]
        asked += [
            each
            for kind, group, partition, _ in asked
            if kind in COLLECTIVE_OF
            for each in _of_overlap(COLLECTIVE_OF[kind], group, partition)
        ]
        for index, (kind, group, partition, most) in enumerate([*asked, *self._usual()]):
            partition = partition_of(self.cluster, kind, group, partition)
            wanted_sizes = (USUAL_BYTES,) if kind in OVERLAPPED else sizes_to(most)
            links = Links(kind, partition, wanted_sizes)
            is_asked = index < len(asked)
            link = LinkTask(links, level_of(group), group.library, group.num_hosts, is_asked)
            new = [(link.place, size) for size in wanted_sizes if partition]
            new = [each for each in new if each[1] > 2 * reached.get(link.place, 0)]
            sizes = tuple(size for place, size in new if (place, size) not in self.tried)
            self.tried.update(new)
            if sizes:
                yield replace(link, links=replace(links, num_bytes=sizes))

    def _usual(self) -> Iterator[Transfers]:
        """Yield all kinds of collectives and messages at a common size: in a host, across hosts,
        and over all ranks."""
        sizes = [host.num_devices for host in self.cluster.hosts]
        total, first = sum(sizes), sizes[0]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        partitions = [
            (tuple(range(first)),),
            tuple(tuple(start + i for start in starts) for i in range(min(sizes))),
            (tuple(range(total)),),
        ]
        for partition in dict.fromkeys(each for each in partitions if len(each[0]) > 1):
            group = group_of(self.cluster, partition[0])
            for kind in COLLECTIVES:
                yield kind, group, partition, USUAL_BYTES
        library = group_of(self.cluster, range(total)).library
        if first > 1:
            link = self.cluster.link(0, 1)
            yield "p2p", Group(2, 2, 1, link, link, library=library), (), USUAL_BYTES
        if len(self.cluster.hosts) > 1:
            link = self.cluster.inter_link
            yield "p2p", Group(2, 1, 2, link, link, library, min(sizes[:2])), (), USUAL_BYTES

    def keep(self, found: Found) -> None:
        """Store a measurement and count it; failures are reported, not stored."""
        if isinstance(found, Transfer):
            self.shown.advance(found.kind)
            self.waiting_links = max(0, self.waiting_links - 1)
            self.num_transfers += 1
            super().keep(found)
            return
        self.shown.advance(found.case.op)
        self.waiting.discard(found.case)
        if found.measurement is None:
            self.skipped[found.case.key()] = found.reason
            return
        super().keep(found)
        self.measured += 1

    def outcome(self) -> dict[str, Any]:
        """Return a summary of the measurements as plain data."""
        known, _ = self.known()
        families = sorted({case.family for case in known.ops})
        return {
            "environment": str(self.environment),
            "asked": self.num_asked,
            "measured": self.measured,
            "transfers": self.num_transfers,
            "left": len(self.waiting) + self.waiting_links,
            "known": [len(known.ops), len(known.transfers)],
            "skipped": sorted(self.skipped.items()),
            "errors": {family: known.interpolation_error(family) for family in families},
            "counts": {
                family: sum(case.family == family for case in known.ops) for family in families
            },
            "seconds": time.perf_counter() - self.began,
        }
