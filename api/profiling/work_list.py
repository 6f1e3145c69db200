"""What the best plan asks for, measured before it is chosen.

In: a captured program, this machine's processes, seconds. Out: measurements in the profile
database. A plan is made with what is known; its blocks in one piece at the rows of a rank, its
collectives and messages, and the optimizer's step are measured where the database lacks them,
what takes most of the predicted step first. With that another plan may be the best, which is
looked at in the same way, until nothing is missing or the seconds are used up. Blocks that are
left out are scaled as those that were measured (``planner.pricing.whole_block``).

Every process of the plan measures at the same time, as training runs them: those that torchrun
started, or one per device that are started for it (``first_worker``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from autoparallel.cache.database import database_path, explain_errors, measuring_environment
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.detect import MAX_CPU_DEVICES, match_gpu_name
from autoparallel.cost_model.cluster.torch_tf32 import torch_computing
from autoparallel.cost_model.profile.case import OpCase
from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.lookup import Profile, level_of
from autoparallel.cost_model.profile.records import Measurement, Transfer
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.program import Program
from autoparallel.planner.evaluate import evaluate
from autoparallel.planner.graph import Block, Graph
from autoparallel.planner.plan import Plan
from autoparallel.planner.precision import with_precision
from autoparallel.planner.pricing.basis import Asked, Basis
from autoparallel.planner.pricing.update import LEVEL, LIBRARY, update_curve, update_kind
from autoparallel.planner.pricing.whole_block import block_case, seconds_by_ops
from autoparallel.planning.plan import own_update, plan_program
from autoparallel.profiling.blocks import blocks_of
from autoparallel.profiling.transfers import LinkTodo, sizes_to
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
from autoparallel.runtime.profile.update import SIZES, measure_updates
from autoparallel.runtime.update.optimizer import BuildOptimizer
from autoparallel.target.target import Target

MOST_ROUNDS = 6
MEASURING_SHARE = 0.5
"""Of the seconds that a user waits, what is for measuring at least."""

WORTH_STARTING = 0.01
"""Of a predicted step, what must hang on unmeasured times for processes to be started."""

LINK_STEP = 16
"""How far the sizes of transfers lie apart."""

LEAST_SECONDS, MOST_SECONDS = 0.05, 3.0
"""What measuring one size of a transfer, or one block, may take."""

LINK_SHARE, BLOCK_SHARE = 0.01, 0.5
"""Of what is left of the seconds: for one size of a transfer, and for all blocks of a plan."""

BLOCK_ROUNDS = 5
"""How often a block runs forward and backward at least while it is measured."""

UPDATE_SHARE = 0.05
"""Of a predicted step, what hangs on the optimizer's: it is priced too low where steps are small,
but blocks come before it."""

SLOWER = 2.0
"""A block that was not measured may take so many times what its ops are priced at."""

BlockSeconds = tuple[OpCase, Measurement | str]


@dataclass(frozen=True, slots=True)
class BlockTodo:
    """A block to measure in one piece, with the graph at the rows that it is measured at."""

    graph: Graph
    block: Block
    accumulates: bool
    tf32: tuple[str, ...] = ()

    @property
    def case(self) -> OpCase:
        return block_case(self.graph, self.block, self.tf32)


@dataclass(frozen=True, slots=True)
class UpdateTodo:
    """An optimizer's step to measure, of parameters of these bytes."""

    optimizer: str
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Todo:
    """One thing to measure: ``weight`` seconds of the predicted step hang on it."""

    what: BlockTodo | LinkTodo | UpdateTodo
    weight: float
    seconds: float = LEAST_SECONDS


def is_at_hand(cluster: Cluster) -> bool:
    """Whether a cluster is this machine: processes of its CPU, or GPUs that it has."""
    if len(cluster.hosts) != 1:
        return False
    (host,) = cluster.hosts
    if host.device.kind == "cpu":
        is_detected = cluster.name == f"cpu:{host.num_devices}"
        return is_detected and host.num_devices <= MAX_CPU_DEVICES
    if not torch.cuda.is_available() or torch.cuda.device_count() < host.num_devices:
        return False
    memory_bytes = int(torch.cuda.get_device_properties(0).total_memory)
    preset = match_gpu_name(torch.cuda.get_device_name(0), memory_bytes)
    name = preset.device.name if preset is not None else torch.cuda.get_device_name(0)
    return host.device.name == name


def is_wanted(options: PlanOptions, cluster: Cluster) -> bool:
    """Whether anything is measured before planning for a cluster."""
    return options.profile == "auto" and options.measure_seconds > 0 and is_at_hand(cluster)


def under_torchrun_here(cluster: Cluster, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun has started the processes of a cluster, all on this machine."""
    started = environment.get("WORLD_SIZE", "")
    is_one_host = environment.get("LOCAL_WORLD_SIZE", started) == started
    return is_one_host and started == str(cluster.num_devices)


@dataclass
class Leader:
    """Rank 0: what is known and what is missing.

    ``began`` is when the user's wait began (``time.time``): starting processes and planning
    count, but half of the seconds are for measuring however long those take.
    """

    program: Program
    target: Target
    cluster: Cluster
    options: PlanOptions
    advance: Callable[[str], None] = lambda what: None
    began: float = field(default_factory=time.time)
    measured_seconds: float = 0.0
    tried: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.path = database_path(self.options.database)
        self.environment = measuring_environment(self.cluster)

    @property
    def left_seconds(self) -> float:
        """What is left to measure in."""
        all_seconds = self.options.measure_seconds
        waited = time.time() - self.began
        return max(all_seconds - waited, MEASURING_SHARE * all_seconds - self.measured_seconds)

    def known(self) -> tuple[Profile, Mapping[str, str]]:
        """What was measured in exactly this environment, and what cannot be."""
        if not self.path.exists():
            return Profile(self.environment, {}), {}
        with explain_errors(self.path), Database(self.path) as opened:
            return Profile(
                self.environment,
                opened.all(self.environment),
                opened.all_transfers(self.environment),
                update=own_update(self.target),
            ), opened.failures(self.environment)

    def todo(self) -> tuple[Todo, ...]:
        """What the best plan asks for and is not known, the weightiest first."""
        if self.left_seconds <= 0:
            return ()
        return self.missing(plan_program(self.program, self.target, self.cluster, self.options))

    def is_worth_starting(self, plan: Plan) -> bool:
        """Whether enough of a plan's step hangs on what is not known."""
        weight = sum(each.weight for each in self.missing(plan))
        return weight > WORTH_STARTING * plan.prediction.step_seconds

    def missing(self, plan: Plan) -> tuple[Todo, ...]:
        """What a plan asks for and is not known, the weightiest first, each once."""
        known, failures = self.known()
        found = [
            *self._update(plan, known), *self._links(plan, known),
            *self._blocks(plan, known, failures),
        ]  # fmt: skip
        found = [each for each in found if _key(each) not in self.tried]
        self.tried.update(map(_key, found))
        return tuple(sorted(found, key=lambda each: -each.weight))

    def _blocks(self, plan: Plan, known: Profile, failures: Mapping[str, str]) -> Iterator[Todo]:
        """The blocks of a plan at its rows, or at fewer where those would take too long."""
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
            share = BLOCK_SHARE * self.left_seconds
            rows = at.batch_size
            while BLOCK_ROUNDS * SLOWER * seconds > share and rows % 2 == 0 and graph.batch_dims:
                rows, seconds = rows // 2, seconds / 2
            part = at.with_batch_size(rows) if rows != at.batch_size else at
            todo = BlockTodo(part, block, plan.num_microbatches > 1, tf32)
            if todo.case in known.ops or todo.case.key() in failures:
                continue
            wanted = max(BLOCK_ROUNDS * SLOWER * seconds, share / len(counts))
            yield Todo(todo, weight, max(LEAST_SECONDS, min(MOST_SECONDS, wanted)))

    def _links(self, plan: Plan, known: Profile) -> Iterator[Todo]:
        """The collectives and messages of a plan, up to the sizes that it asks for."""
        asked = Asked()
        basis = Basis(known, asked=asked)
        evaluate(self.program.graph, self.program.blocks, plan, self.cluster, basis=basis)
        reached: dict[object, int] = {}
        for has in known.transfers:
            place = (has.level, has.library, has.kind, has.num_ranks, has.num_hosts)
            reached[place] = max(has.num_bytes, reached.get(place, 0))
        for each in asked.transfers.values():
            group = each.group
            partition = partition_of(self.cluster, each.kind, group, each.partition)
            if not partition:
                continue
            links = Links(each.kind, partition, sizes_to(each.most_bytes, LINK_STEP))
            todo = LinkTodo(links, level_of(group), group.library, group.num_hosts, True)
            most = reached.get(todo.place, 0)
            sizes = tuple(size for size in links.num_bytes if size > 2 * most)
            if sizes:
                todo = replace(todo, links=replace(links, num_bytes=sizes))
                seconds = max(LEAST_SECONDS, LINK_SHARE * self.left_seconds)
                yield Todo(todo, each.seconds, seconds)

    def _update(self, plan: Plan, known: Profile) -> Iterator[Todo]:
        """The optimizer's step, of parameters as large as the plan's."""
        optimizer = own_update(self.target) or plan.model.optimizer
        if update_curve(known, optimizer) is None:
            largest = max(
                (node.spec.num_bytes for node in self.program.graph.parameters), default=0
            )
            sizes = [size for size in SIZES if size < largest]
            sizes += [size for size in SIZES if size >= largest][:1]
            weight = UPDATE_SHARE * plan.prediction.step_seconds
            yield Todo(UpdateTodo(optimizer, tuple(sizes)), weight)

    def keep(self, found: BlockSeconds | Transfer) -> None:
        """Writes a time at once, or why there is none."""
        with explain_errors(self.path), Database(self.path) as opened:
            if isinstance(found, Transfer):
                opened.put_transfer(self.environment, found)
            elif isinstance(found[1], Measurement):
                opened.put(self.environment, found[0], found[1])
            else:
                opened.put_failure(self.environment, found[0], found[1])


def measure_together(
    leader: Leader | None,
    *,
    device: torch.device,
    build: BuildOptimizer | None,
    tell: Callable[[str], None] = lambda what: None,
) -> None:
    """Measures what rank 0's ``leader`` asks for, on every rank. Collective over all ranks.

    Random numbers that a script draws afterwards are those that it would have drawn without.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for _ in range(MOST_ROUNDS):
            tell("waiting for what to measure")
            todos = share_value(None if leader is None else leader.todo())
            if not todos:
                break
            for todo in todos:
                if not agree(leader is None or leader.left_seconds > 0, device):
                    break
                began = time.perf_counter()
                tell(f"measuring {_name(todo)}")
                if leader is not None:
                    leader.advance(_name(todo))
                ends = began + (0.0 if leader is None else leader.left_seconds)
                for found in _measured(todo, ends, device=device, build=build):
                    if leader is not None:
                        leader.keep(found)
                if leader is not None:
                    leader.measured_seconds += time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measured(
    todo: Todo, ends: float, *, device: torch.device, build: BuildOptimizer | None
) -> Iterator[BlockSeconds | Transfer]:
    """The times of one thing. Sizes end at ``ends`` of rank 0's ``perf_counter``."""
    what, seconds = todo.what, todo.seconds

    def is_late() -> bool:
        return time.perf_counter() > ends

    if isinstance(what, BlockTodo):
        with torch_computing(what.tf32):
            found = measure_everywhere(
                what.graph, what.block, device=device, accumulates=what.accumulates, seconds=seconds
            )
        yield what.case, found
    elif isinstance(what, LinkTodo):
        meshes = Meshes(device)
        for each in measure_links(
            what.links, device=device, case_seconds=seconds, until=is_late, meshes=meshes
        ):
            yield what.transfer(each)
        meshes.close()
    else:
        for each in measure_updates(
            what.optimizer, what.num_bytes, device=device, case_seconds=seconds, until=is_late,
            build=build,
        ):  # fmt: skip
            yield _update_time(what.optimizer, each)


def _update_time(optimizer: str, found: LinkTime) -> Transfer:
    kind = update_kind(optimizer)
    return Transfer(LEVEL, LIBRARY, kind, 1, 1, found.num_bytes, found.seconds, found.repeats)


def _name(todo: Todo) -> str:
    what = todo.what
    if isinstance(what, BlockTodo):
        return what.block.name
    if isinstance(what, LinkTodo):
        return f"{what.links.kind} of {len(what.links.partition[0])} ranks"
    return f"the step of {what.optimizer.split()[0]}"


def _key(todo: Todo) -> object:
    what = todo.what
    if isinstance(what, BlockTodo):
        return what.case
    if isinstance(what, LinkTodo):
        return what.place, what.links.num_bytes
    return what
