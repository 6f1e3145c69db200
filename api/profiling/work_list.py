"""Lists of measurements that planning needs, and the loop that makes them.

In: a captured program, this machine's processes, seconds. Out: measurements in the profile
database. Rank 0 makes a list (``WorkList``) from a plan or search with the times known so far. All
ranks measure its tasks together, as training runs them, and rank 0 stores each result at once. With
the new times another plan may be the best and need other times, so the list is made again, until
nothing is missing or the seconds are used up.

``PlanWork`` is the list for planning on this machine: the blocks of the best plan measured as a
whole at the rows of a rank, its collectives and messages, and the optimizer's step, if missing in
the database; the largest part of the predicted step first. Times of unmeasured blocks are scaled by
the measured blocks (``planner.costs.whole_block``). ``autoparallel profile`` has another list
(``worker``) with all times that a search needs.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autoparallel.cache.database import explain_errors, measuring_environment
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.detect import is_at_hand
from autoparallel.cost_model.cluster.tf32 import torch_computing
from autoparallel.cost_model.profile.case import OpCase
from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import Profile, level_of
from autoparallel.cost_model.profile.measure import Budget
from autoparallel.cost_model.profile.records import Measurement, Transfer
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.program import Program
from autoparallel.planner.costs.basis import Basis, CostQueries
from autoparallel.planner.costs.mesh_prices import LEVEL, LIBRARY, update_curve, update_kind
from autoparallel.planner.costs.precision import with_precision
from autoparallel.planner.costs.whole_block import block_case, seconds_by_ops
from autoparallel.planner.evaluate.evaluate import evaluate
from autoparallel.planner.graph.graph import Block, Blocks, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan import own_update, plan_program
from autoparallel.runtime.messages.shared_objects import share_value
from autoparallel.runtime.profile.blocks import measure_everywhere
from autoparallel.runtime.profile.links import (
    Links,
    LinkTime,
    Meshes,
    agree,
    measure_links,
    partition_of,
)
from autoparallel.runtime.profile.ops import SIZES, OpTime, measure_ops, measure_updates
from autoparallel.runtime.update.optimizer import BuildOptimizer
from autoparallel.target.target import Target

MOST_ROUNDS = 6
MEASURING_SHARE = 0.5
"""Minimum share of the user's wait that is spent on measuring."""

MOST_WAIT = 2.0
"""Largest ratio of the user's whole wait to the requested seconds of measuring: on a busy machine
processes start slowly."""

WORTH_STARTING = 0.01
"""Share of a predicted step that must depend on unmeasured times before processes are started."""

LINK_STEP = 16
"""Factor between successive sizes of transfers (collectives, messages) before planning."""

LEAST_SECONDS, MOST_SECONDS = 0.05, 3.0
"""Minimum and maximum seconds for measuring one size of a transfer, or one block."""

LINK_SHARE, BLOCK_SHARE = 0.01, 0.5
"""Shares of the remaining seconds for one size of a transfer, and for all blocks of a plan."""

BLOCK_ROUNDS = 5
"""Minimum number of forward and backward runs of a measured block."""

UPDATE_SHARE = 0.05
"""Assumed share of the optimizer in a predicted step, since small updates are priced too low;
blocks still come before it."""

SLOWER = 2.0
"""Factor by which an unmeasured block may be slower than its ops' prices."""

LEAST_BYTES, MOST_BYTES, STEP = 1 << 10, 1 << 28, 4
"""Sizes of transfers: smallest, largest (if needed), and the factor between successive sizes."""


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Measurement of a whole block (a layer) of the model, with ``graph``'s number of samples;
    ``accumulates`` says that its gradients are added up over micro-batches."""

    graph: Graph
    block: Block
    accumulates: bool
    tf32: tuple[str, ...] = ()

    @property
    def case(self) -> OpCase:
        return block_case(self.graph, self.block, self.tf32)


@dataclass(frozen=True, slots=True)
class LinkTask:
    """Measurement of a collective or message between ranks at several sizes.

    ``level``, ``library`` and ``num_hosts`` are parts of its database key. ``is_asked`` says that
    the search needs the times; others are measured if time is left.
    """

    links: Links
    level: str
    library: str
    num_hosts: int
    is_asked: bool

    def transfer(self, found: LinkTime) -> Transfer:
        """Return the measured time of a transfer as a database record with its key."""
        return Transfer(*self.place, found.num_bytes, found.seconds, found.repeats)

    @property
    def place(self) -> tuple[str, str, str, int, int]:
        kind, partition = self.links.kind, self.links.partition
        at_once = partition if kind == "p2p" and self.num_hosts > 1 else partition[:1]
        return (self.level, self.library, kind, sum(map(len, at_once)), self.num_hosts)


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """Measurement of an optimizer's step, on parameters of each size (bytes) in ``num_bytes``."""

    optimizer: str
    num_bytes: tuple[int, ...] = SIZES


@dataclass(frozen=True, slots=True)
class OpsTask:
    """Measurement of several ops, one after another; a case is an op with shapes and dtypes."""

    cases: tuple[OpCase, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Measurement to make; ``weight`` is the part of a step's predicted seconds that rests on it.

    ``seconds`` is the time for measuring each block, op or size in it.
    """

    what: BlockTask | LinkTask | UpdateTask | OpsTask
    seconds: float = LEAST_SECONDS
    weight: float = 0.0

    @property
    def key(self) -> object:
        """Value that identifies the measurement, so that it is tried only once."""
        if isinstance(self.what, BlockTask):
            return self.what.case
        if isinstance(self.what, LinkTask):
            return self.what.place, self.what.links.num_bytes
        return self.what

    @property
    def name(self) -> str:
        """Name shown to users while it is measured."""
        if isinstance(self.what, BlockTask):
            return self.what.block.name
        if isinstance(self.what, LinkTask):
            return f"{self.what.links.kind} of {len(self.what.links.partition[0])} ranks"
        if isinstance(self.what, UpdateTask):
            return f"the step of {self.what.optimizer.split()[0]}"
        return "ops"


Found = OpTime | Transfer
"""Result of a measurement: seconds of an op or block, or of a transfer."""


def sizes_to(most_bytes: float, step: int = STEP) -> tuple[int, ...]:
    """Return the sizes in bytes to measure for transfers of up to ``most_bytes``.

    >>> sizes_to(20_000)
    (1024, 4096, 16384, 65536)
    """
    sizes = [LEAST_BYTES]
    while sizes[-1] < min(most_bytes, MOST_BYTES):
        sizes.append(sizes[-1] * step)
    return tuple(sizes)


def blocks_of(plan: Plan, graph: Graph, blocks: Blocks) -> tuple[tuple[Graph, Block], ...]:
    """Return a block of each kind in a plan, and the graph at one rank's number of samples."""
    found: dict[tuple[str, int], tuple[Graph, Block]] = {}
    position = 0
    for stage in plan.stages:
        rows = max(1, plan.microbatch_size // stage.mesh.row_parts)
        can = bool(graph.batch_dims) or rows == graph.batch_size
        for _ in stage.blocks:
            kind = blocks.blocks[position].kind
            if can and (kind, rows) not in found:
                found[kind, rows] = (graph.with_batch_size(rows), blocks.kinds[kind])
            position += 1
    return tuple(found.values())


def is_wanted(options: PlanOptions, cluster: Cluster) -> bool:
    """Return whether the options want times measured before planning for a cluster."""
    return options.profile == "auto" and options.measure_seconds > 0 and is_at_hand(cluster)


def under_torchrun_here(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun started exactly the processes of a cluster, all on this machine."""
    started = environment.get("WORLD_SIZE", "")
    is_one_host = environment.get("LOCAL_WORLD_SIZE", started) == started
    return is_one_host and started == str(cluster.num_devices)


@dataclass
class WorkList(ABC):
    """List, on rank 0, of the measurements that are still to be made for planning a target; results
    are stored in the database at ``path``."""

    program: Program
    target: Target
    cluster: Cluster
    options: PlanOptions
    path: Path
    advance: Callable[[str], None] = lambda name: None
    measured_seconds: float = 0.0
    tried: set[object] = field(default_factory=set)
    environment: Environment = field(init=False)

    def __post_init__(self) -> None:
        self.environment = measuring_environment(self.cluster)

    @abstractmethod
    def tasks(self) -> tuple[Task, ...]:
        """Return the measurements to make next; none if nothing is missing, or time is up."""

    @abstractmethod
    def left_seconds(self, task: Task) -> float:
        """Return the seconds that may still be spent on measuring ``task``."""

    def known(self) -> tuple[Profile, Mapping[str, str]]:
        """Return the measurements in this exact environment, and the reasons of failed ones."""
        if not self.path.exists():
            return Profile(self.environment, {}), {}
        with explain_errors(self.path), Database(self.path) as opened:
            return Profile(
                self.environment,
                opened.all(self.environment),
                opened.all_transfers(self.environment),
                update=own_update(self.target),
            ), opened.failures(self.environment)

    def keep(self, found: Found) -> None:
        """Write a measurement, or the reason for its failure, to the database."""
        with explain_errors(self.path), Database(self.path) as opened:
            if isinstance(found, Transfer):
                opened.put_transfer(self.environment, found)
            elif found.measurement is not None:
                opened.put(self.environment, found.case, found.measurement)
            else:
                opened.put_failure(self.environment, found.case, found.reason)

    @staticmethod
    def reached(known: Profile) -> Mapping[object, int]:
        """Return the largest measured size in bytes of each kind of transfer, by database key."""
        most: dict[object, int] = {}
        for each in known.transfers:
            place = (each.level, each.library, each.kind, each.num_ranks, each.num_hosts)
            most[place] = max(each.num_bytes, most.get(place, 0))
        return most


@dataclass
class PlanWork(WorkList):
    """List, on rank 0, of the measurements that the fastest plan found so far depends on and lacks.

    ``began`` is when the user's wait began (``time.time``): starting processes and planning count.
    ``MEASURING_SHARE`` of the requested seconds is for measuring even so, unless the wait then
    lasts more than ``MOST_WAIT`` times the requested seconds.
    """

    began: float = field(default_factory=time.time)

    def left_seconds(self, task: Task | None = None) -> float:
        """Return the seconds left for all measuring; ``task`` is ignored."""
        all_seconds = self.options.measure_seconds
        waited = time.time() - self.began
        share = MEASURING_SHARE * all_seconds - self.measured_seconds
        return min(max(all_seconds - waited, share), MOST_WAIT * all_seconds - waited)

    def tasks(self) -> tuple[Task, ...]:
        """Return the fastest plan's missing measurements by descending weight, while time is
        left."""
        if self.left_seconds() <= 0:
            return ()
        return self.missing(plan_program(self.program, self.target, self.cluster, self.options))

    def is_worth_starting(self, plan: Plan) -> bool:
        """Return whether the unmeasured share of a plan's step time exceeds ``WORTH_STARTING``."""
        weight = sum(each.weight for each in self.missing(plan))
        return weight > WORTH_STARTING * plan.prediction.step_seconds

    def missing(self, plan: Plan) -> tuple[Task, ...]:
        """Return the measurements that a plan lacks, without tried ones, by descending weight."""
        known, failures = self.known()
        found = [
            *self._update(plan, known),
            *self._links(plan, known),
            *self._blocks(plan, known, failures),
        ]
        found = [each for each in found if each.key not in self.tried]
        self.tried.update(each.key for each in found)
        return tuple(sorted(found, key=lambda each: -each.weight))

    def _blocks(self, plan: Plan, known: Profile, failures: Mapping[str, str]) -> Iterator[Task]:
        """Yield a task per kind of block in the plan that is not measured, at one rank's number of
        samples, halved until the measurement is quick enough."""
        graph = with_precision(self.program.graph, plan.model.precision)
        counts: dict[str, int] = {}
        for block in self.program.blocks.blocks:
            counts[block.kind] = counts.get(block.kind, 0) + 1
        tf32 = self.cluster.device(0).tf32 or ()
        for at, block in blocks_of(plan, graph, self.program.blocks):
            if block_case(at, block, tf32) in known.ops:
                continue
            seconds = sum(seconds_by_ops(at, block, self.cluster, known))
            weight = seconds * counts[block.kind] * plan.num_microbatches
            share = BLOCK_SHARE * self.left_seconds()
            rows = at.batch_size
            while BLOCK_ROUNDS * SLOWER * seconds > share and rows % 2 == 0 and graph.batch_dims:
                rows, seconds = rows // 2, seconds / 2
            part = at.with_batch_size(rows) if rows != at.batch_size else at
            task = BlockTask(part, block, plan.num_microbatches > 1, tf32)
            if task.case in known.ops or task.case.key() in failures:
                continue
            wanted = max(BLOCK_ROUNDS * SLOWER * seconds, share / len(counts))
            yield Task(task, max(LEAST_SECONDS, min(MOST_SECONDS, wanted)), weight)

    def _links(self, plan: Plan, known: Profile) -> Iterator[Task]:
        """Yield tasks for a plan's collectives and messages that ``known`` lacks, up to the plan's
        sizes."""
        asked = CostQueries()
        basis = Basis(known, asked=asked)
        evaluate(self.program.graph, self.program.blocks, plan, self.cluster, basis=basis)
        reached = self.reached(known)
        for each in asked.transfers.values():
            group = each.group
            partition = partition_of(self.cluster, each.kind, group, each.partition)
            if not partition:
                continue
            links = Links(each.kind, partition, sizes_to(each.most_bytes, LINK_STEP))
            task = LinkTask(links, level_of(group), group.library, group.num_hosts, True)
            most = reached.get(task.place, 0)
            sizes = tuple(size for size in links.num_bytes if size > 2 * most)
            if sizes:
                task = replace(task, links=replace(links, num_bytes=sizes))
                seconds = max(LEAST_SECONDS, LINK_SHARE * self.left_seconds())
                yield Task(task, seconds, each.seconds)

    def _update(self, plan: Plan, known: Profile) -> Iterator[Task]:
        """Yield the task for the optimizer's step, up to the largest parameter, if unmeasured."""
        optimizer = own_update(self.target) or plan.model.optimizer
        if update_curve(known, optimizer) is None:
            largest = max(
                (node.spec.num_bytes for node in self.program.graph.parameters), default=0
            )
            number = 1 + sum(size < largest for size in SIZES)
            weight = UPDATE_SHARE * plan.prediction.step_seconds
            yield Task(UpdateTask(optimizer, SIZES[: max(2, number)]), weight=weight)


def measure_together(
    work: WorkList | None,
    *,
    device: torch.device,
    build: BuildOptimizer | None,
    tell: Callable[[str], None] = lambda name: None,
) -> None:
    """Measure the tasks of rank 0's list ``work`` (None elsewhere). Collective over all ranks.

    ``build`` makes the target's own optimizer; ``tell`` is called with each action. Random states
    are restored, so a script draws the same numbers as without measuring.
    """
    devices = [device] if device.type == "cuda" else []
    meshes = Meshes(device)
    with torch.random.fork_rng(devices):
        for _ in range(MOST_ROUNDS):
            tell("waiting for what to measure")
            tasks = share_value(None if work is None else work.tasks())
            if not tasks:
                break
            for task in tasks:
                if not agree(work is None or work.left_seconds(task) > 0, device):
                    continue
                began = time.perf_counter()
                tell(f"measuring {task.name}")
                if work is not None:
                    work.advance(task.name)
                ends = began + (0.0 if work is None else work.left_seconds(task))
                for found in _measured(task, ends, meshes, device=device, build=build):
                    if isinstance(found, OpTime):
                        tell(f"measuring {found.case.op}")
                    if work is not None:
                        work.keep(found)
                if work is not None:
                    work.measured_seconds += time.perf_counter() - began
    meshes.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measured(
    task: Task, ends: float, meshes: Meshes, *, device: torch.device, build: BuildOptimizer | None
) -> Iterator[Found]:
    """Measure a task at most until ``ends`` (rank 0's ``perf_counter``); yield each result."""
    what, seconds = task.what, task.seconds

    def is_late() -> bool:
        return time.perf_counter() > ends

    if isinstance(what, BlockTask):
        with torch_computing(what.tf32):
            block = measure_everywhere(
                what.graph, what.block, device=device, accumulates=what.accumulates, seconds=seconds
            )
        if isinstance(block, Measurement):
            yield OpTime(what.case, block)
        else:
            yield OpTime(what.case, None, block)
    elif isinstance(what, LinkTask):
        for each in measure_links(
            what.links, device=device, case_seconds=seconds, until=is_late, meshes=meshes
        ):
            yield what.transfer(each)
    elif isinstance(what, OpsTask):
        budget = Budget(case_seconds=seconds)
        yield from measure_ops(what.cases, device=device, budget=budget, until=is_late)
    else:
        for each in measure_updates(
            what.optimizer,
            what.num_bytes,
            device=device,
            case_seconds=seconds,
            until=is_late,
            build=build,
        ):
            kind = update_kind(what.optimizer)
            yield Transfer(LEVEL, LIBRARY, kind, 1, 1, each.num_bytes, each.seconds, each.repeats)
