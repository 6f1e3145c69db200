"""What each process of ``autoparallel profile`` does: ask the search, measure, keep.

Runs inside a process group with one rank per device. Rank 0 plans and so finds out what
would be asked for, all ranks measure, rank 0 writes every result to the database at once.
Then it plans again with what is known by now: the winner may be another, with other ops.
That goes on until nothing is missing, nothing more can be had, or the budget is used up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autoparallel.cache.database import explain_errors, measuring_environment
from autoparallel.cost_model.cluster.cluster import STATE_COLLECTIVES, Cluster
from autoparallel.cost_model.cluster.cluster_file import from_dict
from autoparallel.cost_model.collectives.collectives import Group, group_of
from autoparallel.cost_model.profile.case import OpCase, case_from_json, case_to_json
from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import Profile, level_of
from autoparallel.cost_model.profile.measure import Budget
from autoparallel.cost_model.profile.records import Measurement, Transfer
from autoparallel.cost_model.profile.transfers import overlapped
from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import PlanOptions, without_servers
from autoparallel.passes.programs.program import Program
from autoparallel.planner.find_plan import plan
from autoparallel.planner.precision import with_precision
from autoparallel.planner.pricing.basis import Basis
from autoparallel.planner.pricing.mesh_prices import STATE_KINDS
from autoparallel.planner.pricing.update import LEVEL, LIBRARY, update_curve, update_kind
from autoparallel.planner.profiling_targets import Wanted, asked_cases
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import own_update, request_of
from autoparallel.planning.tf32 import with_choice
from autoparallel.profiling.blocks import BlockTodo, measure_blocks, todo_of
from autoparallel.profiling.progress import Shown, shown_progress
from autoparallel.profiling.transfers import LinkTodo, sizes_to
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.messages.shared_objects import share_text
from autoparallel.runtime.profile.links import (
    COLLECTIVES,
    OVERLAPPED,
    Links,
    LinkTime,
    Meshes,
    measure_links,
    partition_of,
)
from autoparallel.runtime.profile.ops import OpTime, measure_ops
from autoparallel.runtime.profile.update import SIZES, measure_updates
from autoparallel.runtime.update.optimizer import BuildOptimizer
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

MOST_ROUNDS = 4
LINK_SHARE = 0.3
"""The part of the budget that transfers may take at most."""
LINK_SECONDS = 0.15
BLOCK_SHARE = 0.2
"""The part of the budget that is kept for whole blocks."""
LEAST_CASE_SECONDS, MOST_CASE_SECONDS = 0.05, 1.0
USUAL_BYTES = 1 << 22
"""How far transfers are measured that the search did not ask for."""
COLLECTIVE_OF = {STATE_KINDS.get(kind, kind): kind for kind in STATE_COLLECTIVES}
"""By the kind of transfer that the search asks for, the collective of states that it is of: what
compute loses beside that collective is measured, too."""


@dataclass(frozen=True, slots=True)
class _Todo:
    """What one round measures."""

    ops: tuple[OpCase, ...]
    links: tuple[LinkTodo, ...]
    case_seconds: float
    optimizer: str = ""
    """Whose step is measured; "" if none is to be."""

    @property
    def is_empty(self) -> bool:
        return not (self.ops or self.links or self.optimizer)

    def to_text(self) -> str:
        ops = [case_to_json(case) for case in self.ops]
        links = [asdict(link) for link in self.links]
        rest = {"case_seconds": self.case_seconds, "optimizer": self.optimizer}
        return json.dumps({"ops": ops, "links": links, **rest})

    @staticmethod
    def from_text(text: str) -> _Todo:
        table = json.loads(text)
        links = []
        for each in table["links"]:
            own = each.pop("links")
            groups = tuple(map(tuple, own["partition"]))
            links.append(LinkTodo(Links(own["kind"], groups, tuple(own["num_bytes"])), **each))
        ops = tuple(case_from_json(case) for case in table["ops"])
        return _Todo(ops, tuple(links), table["case_seconds"], table["optimizer"])


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
    """Measures what planning ``target`` with these options asks for. Collective.

    Rank 0 returns what was done.
    """
    loaded = load_target(target, parse_settings(settings))
    on = from_dict(dict(cluster), "cluster")
    device = join_as(worker, on)
    with ExitStack() as stack:
        leader = None
        if worker.rank == 0:
            stack.enter_context(explain_errors(Path(database)))
            opened = stack.enter_context(Database(database))
            shown = stack.enter_context(shown_progress(budget, quiet=quiet))
            chosen = PlanOptions.from_json(options)
            on = with_choice(on, chosen.tf32)
            leader = _Leader(worker, loaded, on, chosen, opened, shown, budget)
        for _ in range(MOST_ROUNDS):
            worker.watchdog.progress("waiting for what to measure")
            text = None if leader is None else leader.todo().to_text()
            todo = _Todo.from_text(share_text(text))
            if todo.is_empty:
                break
            _measure(worker, todo, leader, device=device, build=loaded.build_optimizer)
        blocks = None if leader is None else leader.blocks()
        for case, found in measure_blocks(worker, blocks, device=device):
            if leader is not None:
                leader.keep_block(case, found)
        return {} if leader is None else leader.outcome()


def _measure(
    worker: Worker,
    todo: _Todo,
    leader: _Leader | None,
    *,
    device: torch.device,
    build: BuildOptimizer | None,
) -> None:
    """One round, on every rank."""
    late = (lambda: False) if leader is None else leader.is_late
    links_late = (lambda: False) if leader is None else leader.is_late_for_links
    asked = [link for link in todo.links if link.is_asked]
    _measure_links(worker, asked, leader, device=device, until=links_late)
    if todo.optimizer:
        worker.watchdog.progress("measuring the optimizer's step")
        for time_ in measure_updates(
            todo.optimizer, device=device, case_seconds=LINK_SECONDS, until=late, build=build
        ):
            if leader is not None:
                leader.keep_update(todo.optimizer, time_)
    budget = Budget(case_seconds=todo.case_seconds)
    for found in measure_ops(todo.ops, device=device, budget=budget, until=late):
        worker.watchdog.progress(f"measuring {found.case.op}")
        if leader is not None:
            leader.keep(found)
    usual = [link for link in todo.links if not link.is_asked]
    _measure_links(worker, usual, leader, device=device, until=late)


def _measure_links(
    worker: Worker,
    links: Sequence[LinkTodo],
    leader: _Leader | None,
    *,
    device: torch.device,
    until: Callable[[], bool],
) -> None:
    meshes = Meshes(device)
    for link in links:
        for found in measure_links(
            link.links, device=device, case_seconds=LINK_SECONDS, until=until, meshes=meshes
        ):
            worker.watchdog.progress(f"measuring {link.links.kind}")
            if leader is not None:
                leader.keep_transfer(link, found)
    meshes.close()


_Asked = tuple[str, Group, tuple[tuple[int, ...], ...], float]
"""A kind of transfer, one group, the partition into such groups, and the largest size in bytes."""


def _of_overlap(
    kind: str, group: Group, partition: tuple[tuple[int, ...], ...]
) -> tuple[_Asked, _Asked]:
    """The two measurements whose quotient is the share of compute that a collective costs: the
    collective alone, and what compute loses beside it."""
    return (kind, group, partition, USUAL_BYTES), (overlapped(kind), group, partition, USUAL_BYTES)


@dataclass
class _Leader:
    """Rank 0: what is asked for, what is known, what is left of the budget."""

    worker: Worker
    target: Target
    cluster: Cluster
    options: PlanOptions
    database: Database
    shown: Shown
    budget: float
    environment: Environment = field(init=False)
    program: Program = field(init=False)
    skipped: dict[str, str] = field(default_factory=dict)
    measured: int = 0
    num_transfers: int = 0
    num_asked: int = 0
    waiting: set[OpCase] = field(default_factory=set)
    waiting_links: int = 0
    tried: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.environment = measuring_environment(self.cluster)
        self.worker.watchdog.progress("capturing the model")
        self.program = capture_target(self.target, self.options)
        self.began = time.perf_counter()
        self.links_began = self.began

    def is_late(self) -> bool:
        """Whether the part of the budget for ops and transfers is used up."""
        return time.perf_counter() - self.began > (1 - BLOCK_SHARE) * self.budget

    def blocks(self) -> BlockTodo:
        """The blocks to measure in one piece: those of the best plan as far as is known."""
        known = self.known()
        graph, blocks = self.program.graph, self.program.blocks
        request = request_of(self.program, self.target, without_servers(self.options))
        best = plan(graph, blocks, self.cluster, request, basis=Basis(known))
        todo = todo_of(
            best, with_precision(graph, request.precision), blocks,
            known=known.ops.__contains__, seconds=BLOCK_SHARE * self.budget,
        )  # fmt: skip
        self.shown.expect(len(todo.blocks))
        return todo

    def keep_block(self, case: OpCase, found: Measurement | str) -> None:
        """Writes a whole block's time at once."""
        if isinstance(found, str):
            self.keep(OpTime(case, None, found))
        else:
            self.keep(OpTime(case, found))

    def is_late_for_links(self) -> bool:
        used = time.perf_counter() - self.links_began
        return used > LINK_SHARE * self.budget or self.is_late()

    def known(self) -> Profile:
        """What was measured in exactly this environment."""
        return Profile(
            self.environment,
            self.database.all(self.environment),
            self.database.all_transfers(self.environment),
        )

    def todo(self) -> _Todo:
        """What to measure next; nothing when the time is up."""
        if self.is_late():
            return _Todo((), (), 0.0)
        self.worker.watchdog.progress("asking the search")
        known = self.known()
        wanted = asked_cases(
            self.program.graph,
            self.program.blocks,
            self.cluster,
            request_of(self.program, self.target, self.options),
            basis=Basis(known),
        )
        self.num_asked = wanted.num_asked
        ops = tuple(op.case for op in wanted.ops if op.case.key() not in self.skipped)
        self.waiting = set(ops)
        links = tuple(self._links(wanted, known))
        self.links_began = time.perf_counter()
        left = self.budget - (self.links_began - self.began)
        has_asked = any(link.is_asked for link in links)
        seconds = left * (1 - LINK_SHARE * has_asked) / max(len(ops), 1)
        optimizer = own_update(self.target) or self.options.optimizer
        if optimizer in self.tried or update_curve(known, optimizer) is not None:
            optimizer = ""
        self.tried.add(optimizer)
        self.waiting_links += sum(len(link.links.num_bytes) for link in links)
        self.shown.expect(len(ops) + self.waiting_links + bool(optimizer) * len(SIZES))
        case_seconds = min(MOST_CASE_SECONDS, max(LEAST_CASE_SECONDS, seconds * 0.7))
        return _Todo(ops, links, case_seconds, optimizer)

    def _links(self, wanted: Wanted, known: Profile) -> Iterator[LinkTodo]:
        """The sizes of the search's transfers that nothing measured reaches, then the usual."""
        reached: dict[object, int] = {}
        for each in known.transfers:
            place = (each.level, each.library, each.kind, each.num_ranks, each.num_hosts)
            reached[place] = max(each.num_bytes, reached.get(place, 0))
        asked: list[_Asked] = [
            (t.kind, t.group, t.partition, t.most_bytes) for t in wanted.transfers
        ]
        asked += [
            each
            for kind, group, partition, _ in asked if kind in COLLECTIVE_OF
            for each in _of_overlap(COLLECTIVE_OF[kind], group, partition)
        ]  # fmt: skip
        for index, (kind, group, partition, most) in enumerate([*asked, *self._usual()]):
            partition = partition_of(self.cluster, kind, group, partition)
            wanted_sizes = (USUAL_BYTES,) if kind in OVERLAPPED else sizes_to(most)
            links = Links(kind, partition, wanted_sizes)
            is_asked = index < len(asked)
            link = LinkTodo(links, level_of(group), group.library, group.num_hosts, is_asked)
            new = [(link.place, size) for size in wanted_sizes if partition]
            new = [each for each in new if each[1] > 2 * reached.get(link.place, 0)]
            sizes = tuple(size for place, size in new if (place, size) not in self.tried)
            self.tried.update(new)
            if sizes:
                yield replace(link, links=replace(links, num_bytes=sizes))

    def _usual(self) -> Iterator[_Asked]:
        """Every kind on each level: a whole host, one rank of every host, all ranks."""
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
            yield "p2p", Group(2, 1, 2, link, link, library=library), (), USUAL_BYTES

    def keep(self, found: OpTime) -> None:
        """Writes an op's time at once."""
        self.shown.advance(found.case.op)
        self.waiting.discard(found.case)
        if found.measurement is None:
            self.skipped[found.case.key()] = found.reason
            return
        self.database.put(self.environment, found.case, found.measurement)
        self.measured += 1

    def keep_transfer(self, link: LinkTodo, found: LinkTime) -> None:
        """Writes a transfer's time at once."""
        self.shown.advance(f"{link.links.kind} of {len(link.links.partition[0])} ranks")
        self.waiting_links -= 1
        self.database.put_transfer(self.environment, link.transfer(found))
        self.num_transfers += 1

    def keep_update(self, optimizer: str, found: LinkTime) -> None:
        """Writes the time of an optimizer's step at once."""
        self.shown.advance(f"{optimizer}'s step")
        kind = update_kind(optimizer)
        transfer = Transfer(
            LEVEL, LIBRARY, kind, 1, 1, found.num_bytes, found.seconds, found.repeats
        )
        self.database.put_transfer(self.environment, transfer)
        self.num_transfers += 1

    def outcome(self) -> dict[str, Any]:
        """What was done, as plain data."""
        known = self.known()
        families = sorted({case.family for case in known.ops})
        return {
            "environment": str(self.environment),
            "asked": self.num_asked,
            "measured": self.measured,
            "transfers": self.num_transfers,
            "left": len(self.waiting) + self.waiting_links,
            "known": [known.num_ops, known.num_transfers],
            "skipped": sorted(self.skipped.items()),
            "errors": {family: known.interpolation_error(family) for family in families},
            "counts": {
                family: sum(case.family == family for case in known.ops) for family in families
            },
            "seconds": time.perf_counter() - self.began,
        }
