"""Hardware needed to train a model: fewest devices of each kind, with the figures of a plan there.

In: a target, and devices by name. Out: for each device and training method (full, or LoRA) the
smallest number of devices on which a plan exists, with that plan. The search is coarse
(``find_plan.COARSE``): pipelines of equal stages, one per rank, without a lower bound. Mostly the
bytes of the model states alone prove at once that fewer devices do not suffice.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache as once
from functools import partial
from typing import TYPE_CHECKING, Literal

from autoparallel.cache.cached_plan import reuse_or_search
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError
from autoparallel.cost_model.cluster.presets import find_preset
from autoparallel.cost_model.cluster.shorthand import is_shorthand, parse_cluster
from autoparallel.options.collection import rare_collections
from autoparallel.options.plan_options import PlanOptions
from autoparallel.options.progress import Observe, ignore
from autoparallel.planner.costs.precision import check_precision
from autoparallel.planner.errors import (
    AutoparallelError,
    InfeasibleError,
    TimeLimitError,
    UsageError,
)
from autoparallel.planner.find_plan import COARSE, plan
from autoparallel.planner.plan import Plan, Precision
from autoparallel.planner.requests.goal import Goal
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.problem import SharedTables
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, priced, request_of, stamped, within_limit
from autoparallel.planning.repeated_search import RepeatedSearch
from autoparallel.planning.tf32 import with_choice
from autoparallel.target.load import load_target
from autoparallel.target.target import Target

if TYPE_CHECKING:
    from autoparallel.passes.programs.program import Program

Method = Literal["full", "lora"]
"""Training method: "full" trains every weight, "lora" only the adapters."""

DEFAULT_DEVICES = "RTX4090,A100-80GB,H100"
DEFAULT_LORA = "r=8,alpha=16"

COARSE_GAP = 0.1
"""Relative gap at which the search for layouts stops."""

DENIED = ("offload", "mixed-stages")
"""Features that the search leaves out. Stages of unequal sizes doubled the search time for
Llama-3-8B on RTX 4090s, were 1.5 % faster on 8 of them, and fitted on no fewer."""

MORE_SECONDS = 4.0
"""Factor of the time limit for a second search, after the first ran out of time without a plan."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings of an estimate. ``precision`` None means bf16 if the device supports it, else fp16;
    ``lora`` None leaves out LoRA; ``seconds`` limits each search; ``tokens`` are trained on in all;
    ``prices`` are dollars per device and hour, by device; ``processes`` search at once."""

    devices: tuple[str, ...]
    global_batch: int = 64
    seq: int | None = None
    precision: Precision | None = None
    optimizer: str = "adamw"
    lora: str | None = DEFAULT_LORA
    max_devices: int = 1024
    seconds: float = 30.0
    tokens: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """Result for one device and training method (full or LoRA). ``plan`` uses the fewest devices
    that can train, or is None if none can: see ``why``. ``dollars_per_hour`` is of all devices."""

    device: str
    method: Method
    plan: Plan | None
    why: str = ""
    tokens: float | None = None
    dollars_per_hour: float | None = None

    @property
    def num_devices(self) -> int | None:
        return None if self.plan is None else self.plan.cluster.num_devices

    @property
    def days(self) -> float | None:
        """Training time in days for ``tokens`` (samples, if the model has no sequences)."""
        if self.plan is None or self.tokens is None:
            return None
        return self.tokens / self.plan.prediction.tokens_per_second / 86400

    @property
    def dollars(self) -> float | None:
        """Cost of the training on all devices in dollars, None if the devices have no price."""
        if self.days is None or self.dollars_per_hour is None:
            return None
        return self.days * 24 * self.dollars_per_hour


def parse_devices(text: str) -> tuple[str, ...]:
    """Parse the text of ``--devices`` into names. Raises UsageError AP350 for an unknown device.

    >>> parse_devices("h100, 2x8xA100@ethernet-100g")
    ('H100', '2x8xA100@ethernet-100g')
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError(
            "AP350", "--devices names no device", fix=f"for example: --devices {DEFAULT_DEVICES}"
        )
    found = []
    for name in names:
        try:
            if is_shorthand(name):
                parse_cluster(name)
                found.append(name)
            else:
                device, at, link = name.partition("@")
                preset = find_preset(device.strip(), name)
                parse_cluster(f"1x{name}")
                found.append(f"{preset.device.name}{at}{link}")
        except ClusterError as error:
            raise UsageError(
                "AP350",
                f"--devices: {error.what}",
                where=f"--devices {text}",
                fix=error.fix or "autoparallel show cluster lists the devices",
            ) from error
    return tuple(dict.fromkeys(found))


def clusters_of(device: str, max_devices: int) -> Iterator[Cluster]:
    """Yield clusters of a device by size: parts of a host, then whole hosts, in round numbers.

    A shorthand (``4xH100``) gives only the cluster that it names.

    >>> [cluster.name for cluster in clusters_of("T4", 24)][5:]
    ['6xT4', '7xT4', '8xT4', '2x8xT4', '3x8xT4']
    """
    if is_shorthand(device):
        yield find_cluster(device)
        return
    size = find_preset(device.partition("@")[0]).host_size
    for count in counts(min(size, max_devices + 1) - 1):
        yield parse_cluster(f"{count}x{device}")
    for hosts in counts(max_devices // size):
        yield parse_cluster(f"{size}x{device}" if hosts == 1 else f"{hosts}x{size}x{device}")


def counts(most: int) -> Iterator[int]:
    """Yield round numbers up to ``most``: 1 to 8, then 4, 5, 6 and 7 times each power of two.

    Batches and models often divide by them, and each is at most a quarter above its predecessor.

    >>> list(counts(33))
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    """
    for count in range(1, most + 1):
        if count % (1 << max(0, count.bit_length() - 3)) == 0:
            yield count


@rare_collections()
def estimate_target(
    target: Target, asked: Asked, observe: Observe = ignore, cache: Cache = NO_CACHE
) -> tuple[Estimate, ...]:
    """Return an estimate per device and training method (full, LoRA), in the order of the devices.

    Raises the errors of capture, and UsageError AP351 for LoRA of a target that is not ``hf:``.
    """
    methods: tuple[Method, ...] = ("full",) if asked.lora is None else ("full", "lora")
    tasks = [(device, method) for device in asked.devices for method in methods]
    search, found = _Search(target, asked, cache), dict[tuple[str, Method], Estimate]()
    hardest_first = sorted(tasks, key=search.ease)
    for done, each in enumerate(_mapped(search, hardest_first, asked.processes)):
        observe("search", done, len(tasks))
        found[each.device, each.method] = each
    observe("search", len(tasks), len(tasks))
    return tuple(found[task] for task in tasks)


def num_processes() -> int:
    """Return the default number of processes: two if the CPU has two cores, one under torchrun,
    whose ranks share the cores."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return 1
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else (0,)
    return min(2, len(cores))


def has_lora(target: Target) -> bool:
    """Return whether a target is ``hf:``, so that LoRA adapters can be added to its model."""
    return target.name.startswith("hf:")


def _mapped(
    search: _Search, tasks: Sequence[tuple[str, Method]], processes: int
) -> Iterator[Estimate]:
    """Yield the estimates of all tasks (pairs of device and method): first those that need no
    search as the cache has them, then the others, searched in ``processes`` processes."""
    unknown, search.only_known = list[tuple[str, Method]](), True
    for task in tasks:
        try:
            yield search(task)
        except _UnknownError:
            unknown.append(task)
    search.only_known = False
    if processes < 2 or len(unknown) < 2 or "fork" not in multiprocessing.get_all_start_methods():
        yield from map(search, unknown)
        return
    global _forked  # the programs cross by the fork: they hold what does not pickle
    _forked = search
    try:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            yield from pool.imap(_in_fork, unknown)
    finally:
        _forked = None


_forked: _Search | None = None


def _in_fork(task: tuple[str, Method]) -> Estimate:
    assert _forked is not None
    found = _forked(task)
    if _forked.cache.shelf is not None:
        _forked.cache.shelf.write()
    return found


class _UnknownError(Exception):
    """Signal that a plan is not in the cache, raised while only cached plans may be used."""


class _Search:
    """Search for the estimate of a task, a pair (device, method); tasks share captured programs."""

    def __init__(self, target: Target, asked: Asked, cache: Cache) -> None:
        self.target, self.asked, self.cache = target, asked, cache
        self.program = once(self._program)
        self.tables = SharedTables()
        self.only_known = False

    def precision(self, device: str) -> Precision:
        """Return the requested precision, or bf16 if every device supports it, else fp16."""
        if self.asked.precision is not None:
            return self.asked.precision
        cluster = next(clusters_of(device, 1))
        have = all("bfloat16" in host.device.peak_flops for host in cluster.hosts)
        return "bf16" if have else "fp16"

    def ease(self, task: tuple[str, Method]) -> tuple[object, ...]:
        """Return a sort key of a task. The device with the least memory comes first, as its search
        is longest, and its LoRA task before its full task, so that two processes capture both."""
        device, method = task
        first = min(self.asked.devices, key=_memory_bytes)
        return (device != first, method == "full", _memory_bytes(device), device)

    def _target(self, method: Method) -> Target:
        if method == "full":
            return self.target
        if not has_lora(self.target):
            raise UsageError(
                "AP351",
                "--lora needs an hf: target",
                where=self.target.name,
                fix="leave --lora out, or name a folder with a config.json: hf:PATH",
            )
        settings = dict(self.target.settings)
        return load_target(self.target.name, {**settings, "lora": self.asked.lora})

    def _options(self, precision: Precision) -> PlanOptions:
        return PlanOptions(
            global_batch=self.asked.global_batch,
            seq=self.asked.seq,
            precision=precision,
            optimizer=self.asked.optimizer,
            gap=COARSE_GAP,
            time_limit_seconds=self.asked.seconds,
            num_candidates=1,
            prices=self.asked.prices,
            deny=DENIED,
            profile="auto",
        )

    def _program(self, method: Method, precision: Precision) -> tuple[Target, Program]:
        target, options = self._target(method), self._options(precision)
        return target, capture_target(target, options, ignore, self.cache)

    def __call__(self, task: tuple[str, Method]) -> Estimate:
        """Return the estimate of a task: the plan on the smallest cluster that has a plan."""
        device, method = task
        precision = self.precision(device)
        target, program = self.program(method, precision)
        request = request_of(program, target, self._options(precision))
        why = ""
        for cluster in clusters_of(device, self.asked.max_devices):
            runs = RepeatedSearch(partial(self._planned, target, program), self.asked.seconds)
            found = runs.run(cluster, request)
            if isinstance(runs.error, TimeLimitError):
                runs = runs.anew(self.asked.seconds * MORE_SECONDS)
                found = runs.run(cluster, request)
            if found is not None:
                price = Goal(prices=self.asked.prices).dollars_per_hour(cluster)
                return Estimate(device, method, found, "", self.asked.tokens, price)
            assert runs.error is not None
            why = _reason(runs.error, cluster)
            if isinstance(runs.error, UsageError):
                break
        return Estimate(device, method, None, why, self.asked.tokens)

    def _planned(
        self, target: Target, program: Program, cluster: Cluster, request: Request
    ) -> Plan:
        """Return the plan for a cluster, with simulated memory; from the cache if stored there."""
        options = self._options(request.precision)
        check_precision(cluster, request.precision)
        cluster = with_choice(cluster, options.tf32)
        graph, basis = priced(program, target, cluster, options)

        coarse = replace(COARSE, tables=self.tables)
        limit = cluster.usable_memory_bytes

        def searched(request: Request) -> Plan:
            return stamped(
                plan(graph, program.blocks, cluster, request, basis=basis, method=coarse)
            )

        def again(count: int, limit_bytes: int) -> Plan:
            """Plan again with less memory: with ``count`` micro-batches, if any fit."""
            less = replace(request, memory_limit_bytes=limit_bytes)
            try:
                return searched(replace(less, forced=replace(less.forced, num_microbatches=count)))
            except InfeasibleError:
                return searched(less)

        def search() -> Plan | None:
            if self.only_known:
                raise _UnknownError
            try:
                first = searched(request)
                less = partial(again, first.num_microbatches)
                return within_limit(first, program, limit, less, self.cache)
            except InfeasibleError:
                return None

        known = partial(reuse_or_search, self.cache, graph, program.blocks, cluster, request)
        found: Plan | None = known(basis=basis, search=search, method=("coarse",))
        if found is None or found.prediction.peak_memory_bytes > limit:
            raise InfeasibleError("AP301", f"nothing fits on {cluster.name}")
        return found


def _memory_bytes(device: str) -> int:
    return next(clusters_of(device, 1)).usable_memory_bytes


def _reason(error: AutoparallelError, cluster: Cluster) -> str:
    if isinstance(error, InfeasibleError):
        return f"does not fit on {cluster.num_devices}"
    if isinstance(error, TimeLimitError):
        return f"no plan for {cluster.num_devices} within the time limit"
    return error.what
