"""Search by objective: step time, tokens per dollar, memory, or number of devices.

In: the arguments of ``find_plan.plan``, and the request's goal. Out: the plan, with a report of the
tries. ``cost`` and ``devices`` plan for parts of the cluster (``sub_clusters``): some whole hosts,
or some devices of a host; equal parts are tried once. ``memory`` plans under memory limits found by
bisection between the least that fits and the most that does not. Each search gets an equal share of
the time that is left. A deadline applies to every objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, product
from typing import Any

from autoparallel.cost_model.cluster.cluster import Cluster, Host
from autoparallel.options.progress import Observe, ignore
from autoparallel.planner.costs.precision import check_precision
from autoparallel.planner.dims.batch import BATCH_NORMS
from autoparallel.planner.errors import AutoparallelError, InfeasibleError, UsageError
from autoparallel.planner.find_plan import SearchMethod, plan
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.ops.case import packet
from autoparallel.planner.plan import GoalReport, Plan, Tried
from autoparallel.planner.requests.request import Request
from autoparallel.planner.search.problem import SharedTables
from autoparallel.planning.infeasible import with_nearest_change
from autoparallel.planning.repeated_search import RepeatedSearch, Search

LINEAR = 16
"""Number of sub-clusters up to which all are tried; of more the smallest is found by bisection."""

TOLERANCE = 0.01
"""Relative precision to which the smallest memory limit with a plan is found."""

MOST_LIMITS = 12
"""Maximum number of memory limits that are tried."""

MOST_COUNTED = 8
"""Number of equal hosts or devices up to which every count is tried; above, only doublings."""

MOST_PARTS = 256
"""Maximum number of sub-clusters that are tried; the smallest are kept."""


def plan_for(
    graph: Graph,
    blocks: Blocks,
    cluster: Cluster,
    request: Request,
    *,
    observe: Observe = ignore,
    tables: SharedTables | None = None,
    **options: Any,
) -> Plan:
    """Find the best plan for the request's goal.

    ``tables`` are shared with other searches of the graph, ``options`` are passed to
    ``find_plan.plan``; ``observe`` is told of the phases "search" and "trying changes".

    Raises the errors of ``find_plan.plan``, AP301 with the nearest change that fits; AP126 for bf16
    on a GPU without it; AP188 if a device has no price; AP302 if no plan meets the deadline.
    """
    check_precision(cluster, request.precision)
    method = SearchMethod(tables=tables or SharedTables())
    search = partial(plan, graph, blocks, method=method, **options)

    def observed(what: str, done: float, total: float) -> None:
        observe("search", min(done, total - 1), total)

    try:
        found = _Job(cluster, request, partial(search, observe=observed)).found()
        observe("search", 1, 1)
        return found
    except InfeasibleError as error:
        if error.code != "AP301":
            raise
        mixing = _mixing(graph)
        raise with_nearest_change(
            error, cluster, request, search, mixing=mixing, observe=observe
        ) from error


def _mixing(graph: Graph) -> str:
    """Return the module and op that mixes rows (samples) of a batch, "" if none."""
    nodes = [graph[name] for name in graph.accumulation.mixing]
    norms = [node for node in nodes if packet(node.op) in BATCH_NORMS]
    for node in norms or nodes:
        name = "batch norm" if norms else packet(node.op)
        return f"{node.module or node.name} ({name})"
    return ""


@dataclass
class _Job:
    cluster: Cluster
    request: Request
    search: Search
    tried: list[Tried] = field(default_factory=list)
    runs: RepeatedSearch = field(init=False)

    def __post_init__(self) -> None:
        self.runs = RepeatedSearch(self.search, self.request.time_limit_seconds)

    def found(self) -> Plan:
        """Return the plan that is best by the request's objective and meets its deadline."""
        objective = self.request.goal.objective
        if objective == "cost":
            self._dollars(self.cluster)
            return self._cheapest()
        if objective == "devices":
            return self._fewest()
        if objective == "memory":
            return self._thriftiest()
        found = self.search(self.cluster, self.request)
        if not self._is_in_time(found):
            raise self._too_late([found])
        return self._reported(found, self.cluster.name)

    def _dollars(self, cluster: Cluster) -> float:
        price = self.request.goal.dollars_per_hour(cluster)
        if price is None:
            names = ", ".join(dict.fromkeys(host.device.name for host in cluster.hosts))
            raise UsageError(
                "AP188",
                "--objective cost needs the price of the devices",
                fix=f"--price DOLLARS of a device and hour, or of each by name ({names}); or "
                "dollars_per_hour of the devices in the cluster file",
            )
        return price

    @property
    def _tokens(self) -> int:
        """Number of tokens in a training step; samples, if the model has no sequences."""
        return self.request.global_batch * (self.request.seq or 1)

    @property
    def _limit_seconds(self) -> float:
        deadline = self.request.goal.deadline
        return float("inf") if deadline is None else deadline.step_seconds(self._tokens)

    def _is_in_time(self, found: Plan) -> bool:
        return found.prediction.step_seconds <= self._limit_seconds

    def _try(
        self,
        name: str,
        cluster: Cluster,
        request: Request,
        left: int,
        value: Callable[[Plan], float | None],
    ) -> Plan | None:
        """Return the plan for ``cluster`` found within 1/``left`` of the remaining time, or None.

        The attempt is recorded under ``name`` with the plan's ``value``, the number to be compared.
        """
        found = self.runs.run(cluster, request, parts=left)
        seconds, number, reason = 0.0, None, ""
        if found is None:
            reason = self.runs.error.what if self.runs.error is not None else ""
        else:
            seconds, number = found.prediction.step_seconds, value(found)
            reason = "" if self._is_in_time(found) else "misses the deadline"
        self.tried.append(Tried(name, cluster.num_devices, seconds, number, reason))
        return found

    def _try_part(self, part: Cluster, left: int) -> Plan | None:
        """Return the fastest plan on a part of the cluster, None if there is none."""
        return self._try(part.name, part, self.request, left, self._value)

    def _value(self, found: Plan) -> float | None:
        """Return the tokens that a plan trains per dollar, None if its devices have no price."""
        price = self.request.goal.dollars_per_hour(found.cluster)
        if not price:
            return None
        return self._tokens / (price / 3600 * found.prediction.step_seconds)

    def _cheapest(self) -> Plan:
        parts = sub_clusters(self.cluster)
        found = [self._try_part(part, len(parts) - index) for index, part in enumerate(parts)]
        plans = [each for each in found if each is not None]
        meeting = [each for each in plans if self._is_in_time(each)]
        if not meeting:
            raise self._too_late(plans)
        best = min(
            meeting,
            key=lambda p: (
                self._dollars(p.cluster) * p.prediction.step_seconds,
                p.prediction.step_seconds,
            ),
        )
        return self._reported(best, self._part_of(best))

    def _part_of(self, found: Plan) -> str:
        own, every = found.cluster.num_devices, self.cluster.num_devices
        if own == every:
            return f"all {every} devices"
        return f"{found.cluster.name}: {own} of {every} devices"

    def _fewest(self) -> Plan:
        parts = sub_clusters(self.cluster)
        known: dict[int, Plan | None] = {}

        def meets(index: int) -> bool:
            if index not in known:
                known[index] = self._try_part(parts[index], min(len(parts) - index, LINEAR))
            found = known[index]
            return found is not None and self._is_in_time(found)

        last = len(parts) - 1
        order = range(len(parts)) if len(parts) <= LINEAR else doublings(last)
        before = -1
        for index in order:
            if meets(index):
                best = index if len(parts) <= LINEAR else first_meeting(before, index, meets)
                found = known[best]
                assert found is not None
                return self._reported(found, self._part_of(found))
            before = index
        raise self._too_late([each for each in known.values() if each is not None])

    def _thriftiest(self) -> Plan:
        """Return the plan of least memory: the fastest plan under the lowest memory limit that some
        plan keeps, found by bisection."""
        best = self.search(self.cluster, self.runs.share(self.request, 3))
        if not self._is_in_time(best):
            raise self._too_late([best])
        low, left = 0.0, MOST_LIMITS
        while left and self.runs.left > 0:
            high = float(best.prediction.peak_memory_bytes)
            if high - low <= TOLERANCE * high:
                break
            limit = int((low + high) / 2)
            found = self._try(
                f"at most {limit / 2**30:.3g} GiB",
                self.cluster,
                replace(self.request, memory_limit_bytes=limit),
                left,
                lambda plan: float(plan.prediction.peak_memory_bytes),
            )
            left -= 1
            if found is None or not self._is_in_time(found):
                low = float(limit)
            else:
                best = found
        peak = best.prediction.peak_memory_bytes
        words = f"{peak / 2**30:.3g} GiB; no plan was found for {low / 2**30:.3g} GiB"
        return self._reported(best, words)

    def _too_late(self, plans: list[Plan]) -> AutoparallelError:
        """Return error AP302 about the fastest of ``plans``; without plans, the last search's
        error."""
        if not plans:
            assert self.runs.error is not None
            return self.runs.error
        fastest = min(plans, key=lambda each: each.prediction.step_seconds)
        seconds = fastest.prediction.step_seconds
        return InfeasibleError(
            "AP302",
            f"no plan meets the deadline: a step may take {self._limit_seconds:.4g} s",
            why=f"the fastest found, on {fastest.cluster.name}, takes {seconds:.4g} s",
            fix=f"a deadline {seconds / self._limit_seconds:.3g} times as long, or more devices",
        )

    def _reported(self, found: Plan, chosen: str) -> Plan:
        goal = self.request.goal
        price = goal.dollars_per_hour(found.cluster)
        if goal.objective == "time" and price is None and goal.deadline is None:
            return found
        limit = None if goal.deadline is None else self._limit_seconds
        report = GoalReport(
            goal.objective, chosen, price, self._value(found), limit, tuple(self.tried)
        )
        seconds = {**found.solver.seconds, "total": self.runs.seconds - self.runs.left}
        return replace(found, goal=report, solver=replace(found.solver, seconds=seconds))


def doublings(last: int) -> Iterator[int]:
    """Yield indices from 0 on, at doubling distances, and ``last`` at the end.

    >>> list(doublings(20))
    [0, 1, 3, 7, 15, 20]
    """
    index = 0
    while index < last:
        yield index
        index = 2 * index + 1
    yield last


def first_meeting(below: int, meeting: int, meets: Callable[[int], bool]) -> int:
    """Find by bisection the first index at which ``meets`` is true, assuming it is monotone.

    >>> first_meeting(7, 15, lambda index: index >= 11)
    11
    """
    while meeting - below > 1:
        middle = (below + meeting) // 2
        if meets(middle):
            meeting = middle
        else:
            below = middle
    return meeting


def sub_clusters(cluster: Cluster) -> tuple[Cluster, ...]:
    """Return sub-clusters of a cluster by number of devices, the whole cluster last.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> [part.num_devices for part in sub_clusters(parse_cluster("2x4xH100"))]
    [1, 2, 3, 4, 8]
    >>> [part.name for part in sub_clusters(parse_cluster("1xV100+2x1xH100"))][:4]
    ['1xH100', '1xV100-16GB', '2x1xH100', '1xV100-16GB+1xH100']
    """
    kinds = _kinds(cluster)
    whole = [
        tuple(chain.from_iterable(own[:count] for own, count in zip(kinds, counts, strict=True)))
        for counts in product(*((0, *counted(len(own))) for own in kinds))
        if any(counts)
    ]
    cut = [
        (cluster.hosts[own[0]].part(count),)
        for own in kinds
        for count in counted(cluster.hosts[own[0]].num_devices)[:-1]
    ]
    parts = [_part(cluster, hosts) for hosts in cut]
    for numbers in whole:
        if len(numbers) < len(cluster.hosts):
            parts.append(_part(cluster, tuple(cluster.hosts[n] for n in sorted(numbers))))
    ordered = sorted(parts, key=lambda part: part.num_devices)
    return (*ordered[:MOST_PARTS], cluster)


def first_hosts(cluster: Cluster, number: int) -> Cluster:
    """Return the part of a cluster that consists of its first ``number`` hosts.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> first_hosts(parse_cluster("4x8xH100"), 3).name
    '3x8xH100'
    """
    if number == len(cluster.hosts):
        return cluster
    return _part(cluster, cluster.hosts[:number])


def counted(number: int) -> tuple[int, ...]:
    """Return the counts to try of ``number`` equal hosts or devices: all, or doublings if many.

    >>> counted(3), counted(48)
    ((1, 2, 3), (1, 2, 4, 8, 16, 32, 48))
    """
    if number <= MOST_COUNTED:
        return tuple(range(1, number + 1))
    return (*(1 << bit for bit in range(number.bit_length()) if 1 << bit < number), number)


def _kinds(cluster: Cluster) -> list[list[int]]:
    """Group hosts that are equal in devices and links; return the indices of each group's hosts."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, host in enumerate(cluster.hosts):
        device = host.device
        key = (
            device.speed,
            device.usable_memory_bytes,
            device.dollars_per_hour,
            host.num_devices,
            host.link,
            host.wires,
            host.detour,
        )
        found.setdefault(key, []).append(index)
    return list(found.values())


def _part(cluster: Cluster, hosts: tuple[Host, ...]) -> Cluster:
    racks = {host.rack for host in hosts}
    return Cluster(
        _name(hosts), hosts, cluster.inter_link, cluster.rack_link if len(racks) > 1 else None
    )


def _name(hosts: Sequence[Host]) -> str:
    parts = []
    for name, run in groupby(hosts, key=lambda host: f"{host.num_devices}x{host.device.name}"):
        count = len(list(run))
        parts.append(f"{count}x{name}" if count > 1 else name)
    return "+".join(parts)
