"""Parameter servers in a plan: the ranks' roles, seconds of a step, and refused combinations.

In: a plan of one stage on one device, which every worker runs on its micro-batches, and a
``ServerPlan``. Out: the step's seconds and the bytes of the fullest rank. Both ``evaluate`` and the
search use these prices. Parameters are distributed over servers by number of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.simulator.consistency import bound_of
from ...cost_model.simulator.server_simulation import ServerJob, simulate_servers
from ..errors import InfeasibleError, UsageError
from ..graph.graph import Blocks, Graph
from ..plan import Plan, ServerPlan
from ..requests.request import Forced, Request, divisors
from ..stage.stage_cost import StageCost

ITERATIONS = 12
"""Simulated iterations per worker; more than one, as the first iterations wait for nothing."""

MEANINGS = {
    "bsp": "equal to one device: every step sums the gradients of all workers",
    "ssp": "not equal to one device: each worker's gradient is an update of its own, taken at "
    "weights that may lack the last {staleness} iterations of other workers",
    "asp": "not equal to one device: each worker's gradient is an update of its own, taken at "
    "weights that may lack any number of updates of other workers",
}


def describe_servers(plan: Plan) -> str:
    """Describe the updates of a plan with parameter servers in words; return "" for other plans."""
    if plan.servers is None:
        return ""
    return MEANINGS[plan.servers.consistency].format(staleness=plan.servers.staleness)


def server_plan(
    forced: Forced, cluster: Cluster, num_microbatches: int | None, global_batch: int
) -> ServerPlan:
    """Assign ranks and micro-batches to parameter servers and workers. ``forced.servers`` servers
    are on the last ranks, or beside workers on the first.

    With ``num_microbatches`` None there are as few as possible. Raises UsageError AP950 for too few
    ranks, AP951 if micro-batches cannot be divided among the workers.
    """
    assert forced.servers is not None
    total, count = cluster.num_devices, forced.servers
    consistency = forced.consistency or "bsp"
    num_workers = total if forced.place == "beside" else total - count
    if num_workers < 1 or count > total:
        raise UsageError(
            "AP950",
            f"servers={count} leaves no worker on {total} devices",
            where="--parallel",
            fix="fewer servers, or place=beside",
        )
    workers = tuple(range(num_workers))
    ranks = tuple(range(count)) if forced.place == "beside" else tuple(range(num_workers, total))
    possible = [
        number
        for number in divisors(global_batch)
        if number >= num_workers and (consistency == "bsp" or number % num_workers == 0)
    ]
    if num_microbatches is None and possible:
        num_microbatches = possible[0]
    if num_microbatches is None or num_microbatches not in possible:
        given = "" if num_microbatches is None else f" in {num_microbatches} micro-batches"
        least = -(-global_batch // num_workers) * num_workers
        raise UsageError(
            "AP951",
            f"{global_batch} samples{given} cannot be given to {num_workers} workers",
            why="each worker has one micro-batch or more, and without bsp all have as many",
            where="--parallel",
            fix=f"microbatches= one of {', '.join(map(str, possible))}"
            if possible
            else f"--global-batch {least}",
        )
    least, more = divmod(num_microbatches, num_workers)
    shares = tuple(least + (worker < more) for worker in workers)
    return ServerPlan(
        workers, ranks, shares, consistency, forced.staleness or 0, replicas=count > 1
    )


def split_request(request: Request, cluster: Cluster) -> tuple[ServerPlan, Request]:
    """Return the forced parameter servers of a request, and a request to plan a single worker."""
    forced, count = request.forced, request.forced.num_microbatches
    if count is None and request.microbatch_size is not None:
        count = request.global_batch // request.microbatch_size
    servers = server_plan(forced, cluster, count, request.global_batch)
    of_worker = replace(
        forced,
        servers=None,
        consistency=None,
        staleness=None,
        place=None,
        zero=0,
        num_microbatches=sum(servers.shares),
        dp=1,
        tp=1,
        pp=1,
    )
    return servers, replace(request, forced=of_worker)


def one_device(cluster: Cluster) -> Cluster:
    """Return a cluster of only the first device of ``cluster``."""
    host = cluster.hosts[0].part(1)
    return replace(cluster, hosts=(host,), name=f"1 of {cluster.name}")


def check_forced_servers(forced: Forced, cluster: Cluster) -> None:
    """Raise UsageError AP952 if other forced options exclude parameter servers, AP953 if the
    cluster has GPUs."""
    if forced.servers is None:
        return
    others = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "shard": 1, "chunks": 1}
    for name, least in others.items():
        if (getattr(forced, name) or least) > least:
            raise UsageError(
                "AP952",
                f"servers={forced.servers} with {name}={getattr(forced, name)}",
                why="every worker of parameter servers runs the whole model on its own samples, "
                "and the servers hold the states of the optimizer",
                where="--parallel",
                fix=f"remove {name}",
            )
    if forced.schedule is not None:
        raise UsageError(
            "AP952",
            f"servers={forced.servers} with schedule={forced.schedule}",
            why="a worker has no pipeline",
            where="--parallel",
            fix="remove schedule",
        )
    if any(host.device.kind != "cpu" for host in cluster.hosts):
        raise UsageError(
            "AP953",
            "parameter servers run on CPU devices only",
            where="--parallel",
            fix="a cluster such as cpu:4, or a plan without servers",
        )


def check_not_served(plan: Plan | None) -> None:
    """Raise UsageError AP961 if the plan has parameter servers, which scripts cannot run."""
    if plan is not None and plan.servers is not None:
        raise UsageError(
            "AP961",
            "the plan has parameter servers, which scripts cannot run",
            why="a script steps an optimizer of its own, and servers step the weights",
            fix="train by autoparallel run, or plan without servers",
        )


def check_served_memory(plan: Plan, peak_bytes: int, limit_bytes: int | None) -> None:
    """Raise InfeasibleError AP301 if the fullest rank, which needs ``peak_bytes``, exceeds its
    device's memory or ``limit_bytes``. The plan has parameter servers."""
    assert plan.servers is not None
    ranks = sorted({*plan.servers.workers, *plan.servers.servers})
    limit = limit_bytes or plan.cluster.slowest_device(ranks).usable_memory_bytes
    if peak_bytes > limit:
        raise InfeasibleError(
            "AP301",
            "the model does not fit with parameter servers: the fullest rank is about "
            f"{(peak_bytes - limit) / 1e9:.3g} GB over the limit",
            why=f"each device has {limit / 1e9:.3g} GB; a worker holds all weights and gradients, "
            "a server its part of them with the optimizer's states, and a replica of another's",
            fix="smaller micro-batches, recompute=full, more servers, or a plan without servers",
        )


def check_served_model(graph: Graph, precision: str) -> None:
    """Raise UsageError AP954 if training changes a buffer of the model, AP956 for half precision:
    parameter servers support neither."""
    if graph.updates:
        raise UsageError(
            "AP954",
            f"parameter servers cannot train the buffer {min(graph.updates)}",
            why="each worker would keep running statistics of its own samples",
            fix="a model without running statistics (LayerNorm, GroupNorm, or "
            "track_running_stats=False), or a plan without servers",
        )
    if precision not in ("fp32", "fp64"):
        raise UsageError(
            "AP956",
            f"parameter servers do not train in {precision}",
            why="what is pushed and pulled are the weights that are stepped",
            where="--precision",
            fix="fp32",
        )


def blocks_of_parameters(graph: Graph, blocks: Blocks) -> dict[str, int]:
    """Map each trained parameter to the position of the block that uses it; to 0 if several do."""
    found: dict[str, int] = {}
    for index, block in enumerate(blocks.blocks):
        for node in block.nodes:
            for ref in graph[node].inputs:
                source = graph[ref.name]
                if source.kind == "parameter" and source.spec.requires_grad:
                    found[ref.name] = 0 if found.get(ref.name, index) != index else index
    return found


def server_job(plan: Plan, costs: Sequence[StageCost], graph: Graph, blocks: Blocks) -> ServerJob:
    """Build the input of the simulation of parameter servers. ``costs``: each worker's cost of one
    micro-batch."""
    servers, cluster = plan.servers, plan.cluster
    assert servers is not None
    count = len(servers.servers)
    block_of = blocks_of_parameters(graph, blocks)
    sizes = {name: graph[name].spec.numel for name in block_of}
    held = elements_of(shards_of(sizes, count), block_of, count)
    num_blocks = len(blocks.blocks)
    element = 8 if plan.model.precision == "fp64" else 4
    elements = [held.get(block, [0] * count) for block in range(num_blocks)]
    per_element = costs[0].seconds.optimizer / max(1, sum(sizes.values()))
    ranks = sorted({*servers.workers, *servers.servers})
    links = [cluster.link(rank, other) for rank in ranks for other in ranks if rank != other]
    rate = {
        rank: min(cluster.link(rank, other).bytes_per_second for other in ranks if other != rank)
        for rank in ranks
    }
    return ServerJob(
        servers.workers,
        servers.servers,
        forward=tuple(_by_block(c, num_blocks, is_forward=True) for c in costs),
        between=tuple(
            (share - 1) * (cost.forward_seconds + cost.backward_seconds)
            for share, cost in zip(servers.shares, costs, strict=True)
        ),
        backward=tuple(_by_block(c, num_blocks, is_forward=False) for c in costs),
        block_bytes=tuple(tuple(float(n * element) for n in row) for row in elements),
        update_seconds=tuple(tuple(n * per_element for n in row) for row in elements),
        bytes_per_second=tuple(rate.get(rank, 1.0) for rank in range(cluster.num_devices)),
        latency_seconds=max((link.alpha_seconds for link in links), default=0.0),
        bound=bound_of(servers.consistency, servers.staleness),
        replica=tuple((k + 1) % count for k in range(count))
        if servers.replicas and count > 1
        else (),
    )


def _by_block(cost: StageCost, num_blocks: int, *, is_forward: bool) -> tuple[float, ...]:
    """Return the seconds of a micro-batch's forward or backward pass, by block."""
    seconds = cost.forward_seconds if is_forward else cost.backward_seconds
    shares = cost.buckets.forward if is_forward else cost.buckets.backward
    if len(shares) != num_blocks:
        return (seconds / num_blocks,) * num_blocks
    return tuple(share * seconds for share in shares)


def served_step_seconds(
    plan: Plan, costs: Sequence[StageCost], graph: Graph, blocks: Blocks
) -> float:
    """Return the seconds in which all workers together compute one global batch. ``costs``: each
    worker's cost of one micro-batch."""
    job = server_job(plan, costs, graph, blocks)
    return len(job.worker_ranks) / simulate_servers(job, ITERATIONS).iterations_per_second()


def served_peak_bytes(plan: Plan, costs: Sequence[StageCost]) -> int:
    """Return the peak bytes of the fullest rank. A worker holds everything but optimizer states; a
    server holds its part of weights, gradients and states, and a replica of another server's part.

    Under bsp a server also holds the weights before the last update, and a gradient per worker.
    """
    servers = plan.servers
    assert servers is not None
    of_worker = max(cost.total_bytes - cost.memory_bytes["optimizer"] for cost in costs)
    held: Mapping[str, float] = costs[0].memory_bytes
    gradients = len(servers.workers) + 1 if servers.consistency == "bsp" else 2
    versions = 2 if servers.consistency == "bsp" else 1
    whole = versions * held["parameters"] + held["optimizer"] + gradients * held["gradients"]
    copies = 2 if servers.replicas and len(servers.servers) > 1 else 1
    of_server = copies * whole / len(servers.servers)
    if set(servers.servers) & set(servers.workers):
        return round(of_worker + of_server)
    return round(max(of_worker, of_server))


PIECES = 32
"""Minimum number of pieces in an even share: servers then differ by at most 3 %."""
LEAST_ELEMENTS = 1024
"""Minimum elements of a piece, as each piece costs the bookkeeping of a request."""


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Elements ``start`` to ``stop`` of a parameter in memory order, which ``server`` holds."""

    parameter: str
    start: int
    stop: int
    server: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def shards_of(sizes: Mapping[str, int], num_servers: int) -> tuple[Shard, ...]:
    """Assign the elements of parameters to servers evenly; return the shards in the order of
    parameters. ``sizes``: number of elements by parameter.

    >>> [shard.server for shard in shards_of({"a": 10, "b": 6, "c": 5}, 2)]
    [0, 1, 1]
    """
    most = max(LEAST_ELEMENTS, sum(sizes.values()) // num_servers // PIECES)
    pieces = [
        (name, start, stop)
        for name, size in sizes.items()
        for start, stop in _pieces(size, most if num_servers > 1 else size)
    ]
    loads = [0] * num_servers
    found = {}
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        server = min(range(num_servers), key=loads.__getitem__)
        loads[server] += piece[2] - piece[1]
        found[piece] = server
    return _joined([Shard(*piece, found[piece]) for piece in pieces])


def _pieces(size: int, most: int) -> list[tuple[int, int]]:
    """Cut ``size`` elements into the fewest equal (start, stop) pieces of at most ``most``."""
    count = max(1, -(-size // max(1, most)))
    cuts = [size * index // count for index in range(count + 1)]
    return [pair for pair in pairwise(cuts) if pair[0] < pair[1] or not size]


def _joined(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Join neighbouring shards of a parameter that are on the same server."""
    found: list[Shard] = []
    for shard in shards:
        last = found[-1] if found else None
        if last is not None and (last.parameter, last.stop, last.server) == (
            shard.parameter,
            shard.start,
            shard.server,
        ):
            found[-1] = Shard(last.parameter, last.start, shard.stop, last.server)
        else:
            found.append(shard)
    return tuple(found)


def elements_of(
    shards: Sequence[Shard], block_of: Mapping[str, int], num_servers: int
) -> dict[int, list[int]]:
    """Map the position of each block to its number of elements on each server. ``block_of`` maps
    parameters to blocks."""
    found: dict[int, list[int]] = {}
    for shard in shards:
        held = found.setdefault(block_of[shard.parameter], [0] * num_servers)
        held[shard.server] += shard.size
    return found
