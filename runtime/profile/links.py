"""Measurement of collectives and messages between real processes.

In: a kind of operation, the groups of ranks that run it at the same time, sizes. Out: median
seconds, the same on every rank.

- Collectives run as in training, through ``ProcessCommunicator`` (with the copies it makes), in
  all groups of a partition at once, so that links and memory are shared as in training.
- Messages go back and forth between pairs of ranks, all pairs at once; one way is half of that.
- States of a block are gathered and scattered by ``fully_shard`` itself, with the copies into and
  out of its buffers. A gather is ``unshard`` then ``reshard``. A scatter is a backward of a small
  product that keeps its parameters gathered, less the same backward of a plain module.
- Compute that hides a collective is matrix products that take about twice as long. They run
  beside the collective and alone; the difference is the cost of the hidden collective. On a GPU
  the two share memory and multiprocessors, on a CPU its cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ...cost_model.cluster.cluster import STATE_COLLECTIVES, Cluster
from ...cost_model.collectives.collectives import Group, group_of
from ...cost_model.profile.clocks import stopwatch
from ...cost_model.profile.transfers import level_of, overlapped
from ..messages.communicator import ProcessCommunicator, all_gather, reduce_scatter
from ..messages.shared_objects import control_group, share_tensor
from ..parameters.reductions import AsyncReduceScatter, PendingReductions

NUM_TENSORS = 4
COLUMNS = 64
ITEM_BYTES = 4

Timed = tuple[Callable[[], object], Callable[[], object] | None, int]
"""Function to time, function whose time is subtracted (or None), and number of bytes really
moved."""


class _Block(nn.Module):
    """Model with several parameters of ``rows`` rows, each used once, to be sharded."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(rows, COLUMNS, device=device)) for _ in range(NUM_TENSORS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x @ weight.t()).sum() for weight in self.weights]).sum()


def state_calls(kind: str, num_bytes: int, mesh: DeviceMesh, device: torch.device) -> Timed:
    """Return functions to time that run ``fully_shard``'s all-gather of parameters ("zero_gather")
    or reduce-scatter of gradients ("zero_scatter"), of about ``num_bytes`` in all. They run over
    the ranks of ``mesh``, which has one axis."""
    row_bytes = NUM_TENSORS * COLUMNS * ITEM_BYTES * mesh.size()
    rows = max(1, num_bytes // row_bytes) * mesh.size()
    sharded = _sharded(_Block(rows, device), mesh, keeps=kind == "zero_scatter")
    whole_bytes = rows * COLUMNS * NUM_TENSORS * ITEM_BYTES
    if kind == "zero_gather":
        return _gather(sharded), None, whole_bytes
    return _step(sharded, device), _step(_Block(rows, device), device), whole_bytes


def _sharded(block: nn.Module, mesh: DeviceMesh, *, keeps: bool) -> FSDPModule:
    made = fully_shard(block, mesh=mesh, reshard_after_forward=not keeps)
    made.set_gradient_divide_factor(1.0)
    made.set_force_sum_reduction_for_comms(True)
    made.set_reshard_after_backward(not keeps)
    if mesh.device_type == "cpu":
        reduces = AsyncReduceScatter(PendingReductions(), is_async=False)
        made.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]  # no public base
    return made


def _gather(block: FSDPModule) -> Callable[[], object]:
    def gather() -> None:
        block.unshard()
        block.reshard()

    return gather


def _step(block: nn.Module | FSDPModule, device: torch.device) -> Callable[[], object]:
    assert isinstance(block, nn.Module)
    x = torch.ones(1, COLUMNS, device=device)

    def step() -> None:
        block(x).backward()
        block.zero_grad()

    return step


SIZES = {"cpu": 256, "cuda": 4096}
"""Number of rows and columns of the square matrices that are multiplied, by kind of device."""
COMPUTE_RATIO = 2.0
"""Compute time relative to the collective's: as they slow each other, the collective must end
first."""
CALIBRATION_CALLS = 5


def overlap_calls(
    kind: str, num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> Timed:
    """Return two functions to time, and the bytes of the tensor: matrix products beside a
    collective of about ``num_bytes``, and the products alone. The difference is the slowdown by the
    collective.

    ``kind``: "all_reduce", "all_gather" or "reduce_scatter"; bytes are counted for the whole
    tensor. All ranks of ``group`` call it together, and compute as long as the slowest rank needs
    to hide its collective.
    """
    size = dist.get_world_size(group)
    part = max(1, num_bytes // ITEM_BYTES // size)
    whole, own = (torch.zeros(count, device=device) for count in (size * part, part))
    starts: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=True),
        "all_gather": lambda: all_gather(whole, own, group=group, async_op=True),
        "reduce_scatter": lambda: reduce_scatter(own, whole, group=group, async_op=True),
    }
    start = starts[kind]
    rows = SIZES[device.type]
    left, product = (torch.ones(rows, rows, device=device) for _ in range(2))

    def multiply() -> None:
        torch.mm(left, left, out=product)

    ratio = _seconds(lambda: start().wait(), device) / _seconds(multiply, device)
    box = torch.tensor(ratio, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    count = max(1, math.ceil(COMPUTE_RATIO * float(box)))

    def compute() -> None:
        for _ in range(count):
            multiply()

    def both() -> None:
        work = start()
        compute()
        work.wait()

    return both, compute, size * part * ITEM_BYTES


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    samples = stopwatch(device.type).samples(call, CALIBRATION_CALLS)
    return max(min(samples), 1e-9)


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
STATES = ("zero_gather", "zero_scatter")
"""Kinds of measurements that run ``fully_shard`` on a block's parameters and gradients."""
OVERLAPPED = {overlapped(kind): kind for kind in STATE_COLLECTIVES}
"""Kinds that measure how a collective on parameters or gradients slows compute, mapped to the
collective."""

LEAST_SECONDS = 1e-7
WARMUP_CALLS = 2
LEAST_CALLS = 5
MOST_CALLS = 200

_AXIS = 1


@dataclass(frozen=True, slots=True)
class Links:
    """Transfers to measure: collectives of one ``kind``, or messages ("p2p"), of each size in
    ``num_bytes``. All groups of global ranks in ``partition`` (pairs for "p2p") run at once."""

    kind: str
    partition: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Median seconds of one collective or message of ``num_bytes``, which are counted as
    ``collective_seconds`` counts them; ``repeats`` is the number of measurements."""

    num_bytes: int
    seconds: float
    repeats: int


class Meshes:
    """Cache of device meshes used in measurements, by their ranks; ``close`` frees them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[str, DeviceMesh] = {}

    def of(self, ranks: Sequence[Any], names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return the device mesh over the nested list ``ranks`` of global ranks; its axes get
        ``names``. Collective over all ranks."""
        if (key := str(ranks)) not in self._made:
            array = torch.tensor(ranks, dtype=torch.int)
            self._made[key] = DeviceMesh(self._device.type, array, mesh_dim_names=names)
        return self._made[key]

    def close(self) -> None:
        """Destroy the process groups of all meshes. Collective over all ranks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier(group=control_group())
        for mesh in self._made.values():
            if mesh.get_coordinate() is not None:
                for group in mesh.get_all_groups():
                    if group is not dist.group.WORLD:
                        dist.destroy_process_group(group)
        self._made.clear()


def ends_first(sizes: Sequence[int]) -> list[int]:
    """Order sizes for measuring: the smallest, the largest, then the sizes between, so that a
    measurement cut short by time has both ends of the curve.

    >>> ends_first((1, 4, 16, 64))
    [1, 64, 4, 16]
    """
    ordered = sorted(sizes)
    return [*ordered[:1], *ordered[1:][-1:], *ordered[1:-1]]


def measure_links(
    links: Links,
    *,
    device: torch.device,
    case_seconds: float,
    until: Callable[[], bool],
    meshes: Meshes,
) -> Iterator[LinkTime]:
    """Measure the transfers ``links`` and yield the time of each size, in the order of
    ``ends_first``; each size takes about ``case_seconds``. Collective over all ranks. Before every
    size, ``until()`` is called on rank 0 alone; if true, all ranks stop. The caller closes
    ``meshes``."""
    run = message_call(links, device) if links.kind == "p2p" else _on_mesh(links, device, meshes)
    for num_bytes in ends_first(links.num_bytes):
        if not agree(not until(), device):
            return
        call, base, actual_bytes = run(num_bytes)
        seconds, repeats = median_seconds(call, device=device, case_seconds=case_seconds)
        if base is not None:
            seconds -= median_seconds(base, device=device, case_seconds=case_seconds)[0]
        yield LinkTime(actual_bytes, max(seconds, LEAST_SECONDS), repeats)


Prepared = Callable[[int], Timed]
"""Function from a size in bytes to the functions to time (see ``Timed``)."""


def _on_mesh(links: Links, device: torch.device, meshes: Meshes) -> Prepared:
    mesh = meshes.of(links.partition, ("groups", "members"))
    if mesh.get_coordinate() is None:
        base = _nothing if links.kind in ("zero_scatter", *OVERLAPPED) else None
        return lambda num_bytes: (_nothing, base, num_bytes)
    if links.kind in OVERLAPPED:
        collective, group = OVERLAPPED[links.kind], mesh.get_group(_AXIS)
        return lambda num_bytes: overlap_calls(collective, num_bytes, group, device)
    if links.kind in STATES:
        return lambda num_bytes: state_calls(links.kind, num_bytes, mesh["members"], device)
    return _collective(links, mesh, device)


def _collective(links: Links, mesh: DeviceMesh, device: torch.device) -> Prepared:
    communicator, size = ProcessCommunicator(mesh), len(links.partition[0])

    def prepared(num_bytes: int) -> Timed:
        part = max(1, num_bytes // ITEM_BYTES // size)
        whole_bytes = part * size * ITEM_BYTES
        whole = torch.ones(size * part, device=device)
        own = torch.ones(part, device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: communicator.all_reduce(whole, _AXIS),
            "all_gather": lambda: communicator.all_gather(own, _AXIS, 0),
            "reduce_scatter": lambda: communicator.reduce_scatter(whole, _AXIS, 0),
            "all_to_all": lambda: communicator.all_to_all(whole.view(size, part), _AXIS, 0, 1),
            "broadcast": lambda: dist.broadcast(whole, group=mesh.get_group(_AXIS), group_src=0),
        }
        return calls[links.kind], None, whole_bytes

    return prepared


def message_call(links: Links, device: torch.device) -> Prepared:
    """Return a function that, given a size in bytes, prepares the call to time: messages of that
    size in both directions of a pair, in all pairs of ``links`` at once. Pairs that share a link
    then share each of its directions; with messages there and back they would take turns."""
    rank = dist.get_rank()
    pair = next((pair for pair in links.partition if rank in pair), None)

    def prepared(num_bytes: int) -> Timed:
        numel = max(1, num_bytes // ITEM_BYTES)
        if pair is None:
            return _nothing, None, numel * ITEM_BYTES
        sent, received = (torch.ones(numel, device=device) for _ in range(2))
        (other,) = (each for each in pair if each != rank)

        def exchange() -> None:
            both = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return exchange, None, numel * ITEM_BYTES

    return prepared


def _nothing() -> None:
    return None


def median_seconds(
    call: Callable[[], object], *, device: torch.device, case_seconds: float
) -> tuple[float, int]:
    """Call ``call`` on all ranks repeatedly; return the median seconds of a call on the slowest
    rank, and the number of calls. They take about ``case_seconds``, but are at least
    ``LEAST_CALLS`` and at most ``MOST_CALLS``. A rank that has nothing to measure passes a function
    that does nothing."""
    watch = stopwatch(device.type)
    for _ in range(WARMUP_CALLS):
        call()
    first = _slowest(watch.samples(call, 1)[0], device)
    count = min(MOST_CALLS, max(LEAST_CALLS, int(case_seconds / max(first, 1e-6))))
    dist.barrier(group=control_group())
    return _slowest(median(watch.samples(call, count)), device), count


def _slowest(seconds: float, device: torch.device) -> float:
    box = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def agree(wanted: bool, device: torch.device) -> bool:
    """Return rank 0's value of ``wanted`` on every rank. Collective."""
    return bool(share_tensor(torch.tensor(wanted, device=device).float()))


def spread_partition(
    partition: Sequence[Sequence[int]], world_size: int
) -> tuple[tuple[int, ...], ...]:
    """Extend a stage's groups of ranks by shifted copies of them that cover all ranks: in training,
    other stages communicate at the same time.

    >>> spread_partition(((0, 1),), 4), spread_partition(((0, 2), (1, 3)), 4)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    members = [rank for group in partition for rank in group]
    first, width = min(members), max(members) - min(members) + 1
    found = []
    for shift in range(first % width, world_size - width + 1, width):
        found += [tuple(rank - first + shift for rank in group) for group in partition]
    return tuple(found) or tuple(tuple(group) for group in partition)


def partition_of(
    cluster: Cluster, kind: str, group: Group, partition: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that run a collective of ``kind`` (or "p2p" messages) at once
    while it is measured, as all stages do in training: copies of the groups ``partition``, or pairs
    of ranks (between hosts ``group.num_pairs``). On a cluster with listed wiring, only groups wired
    like ``group``."""
    is_wired, level = any(host.wires for host in cluster.hosts), level_of(group)
    if kind != "p2p":
        spread = spread_partition(partition, cluster.num_devices)
        if not is_wired:
            return spread
        return tuple(own for own in spread if level_of(group_of(cluster, own)) == level)
    hosts = [host.num_devices for host in cluster.hosts]
    if group.num_hosts > 1:
        return neighbours(hosts, between_hosts=True)[: group.num_pairs]
    if not is_wired:
        return neighbours(hosts, between_hosts=False)
    pairs = combinations(range(cluster.num_devices), 2)
    return disjoint(pair for pair in pairs if level_of(group_of(cluster, pair)) == level)


def disjoint(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Go through ``pairs`` in order and return each pair that shares no rank with an earlier pair
    of the result.

    >>> disjoint([(0, 1), (1, 2), (2, 3)])
    ((0, 1), (2, 3))
    """
    found: list[tuple[int, int]] = []
    for pair in pairs:
        if not any(rank in other for rank in pair for other in found):
            found.append(pair)
    return tuple(found)


def neighbours(host_sizes: Sequence[int], *, between_hosts: bool) -> tuple[tuple[int, ...], ...]:
    """Return disjoint pairs of ranks: adjacent ranks of each host or, if ``between_hosts``, ranks
    of the first two hosts.

    >>> neighbours((4, 4), between_hosts=False)
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> neighbours((2, 2), between_hosts=True)
    ((0, 2), (1, 3))
    """
    if between_hosts:
        return tuple((i, host_sizes[0] + i) for i in range(min(host_sizes[:2])))
    pairs, start = [], 0
    for size in host_sizes:
        pairs += [(start + i, start + i + 1) for i in range(0, size - 1, 2)]
        start += size
    return tuple(pairs)
