"""A cluster: devices in hosts, joined by links, every figure with its source.

GB is 1e9 bytes, GiB is 2**30. Rates are bytes per second in one direction per device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from .gpu_links import MOST_DEVICES, Wires, are_wires, num_links_used, wires_among

Source = Literal["measured", "interpolated", "spec"]


class FigureError(ValueError):
    """Error for a wrong or missing figure of a device or link. ``what`` is a sentence that states
    the problem, ``where`` the location of the figure (file and key), ``fix`` a remedy."""

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.what}{where}" + (f": {self.fix}" if self.fix else "")


class ClusterError(FigureError):
    """Error in a cluster's description; ``where`` is the file and key, or the text (such as
    "8xH100")."""


MAX_DEVICES = 2**17
"""Maximum devices of a cluster: 131,072. The largest published runs have about 100,000."""


def check_size(num_hosts: int, devices_per_host: int, at: str) -> None:
    """Raise ``ClusterError``, at location ``at``, for more than ``MAX_DEVICES`` devices in all."""
    if num_hosts * devices_per_host > MAX_DEVICES:
        raise ClusterError(
            f"{num_hosts * devices_per_host} devices are more than {MAX_DEVICES}",
            at,
            f"plan for a part: a plan of {MAX_DEVICES} devices is repeated by its data parallelism",
        )


STATE_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds of collectives that gather parameters or sum gradients while compute runs."""

OVERLAPPED_COLLECTIVES = (*STATE_COLLECTIVES, "all_to_all")
"""Kinds of collectives that run beside compute: those of states, and of tokens with experts."""

MEASURED_SLOWDOWN = 1.189
"""Factor by which compute takes longer while communication runs at the same time: on average 18.9 %
longer and at most 40 %, for GPT and LLaMA models trained on A100, H100, MI210 and MI250
(arXiv:2507.03114, abstract). The average is over whole iterations, so it is a lower bound for the
time in which both run."""


@dataclass(frozen=True, slots=True)
class Device:
    """Accelerator, or a share of a CPU, with its performance figures. An op family is a kind of ops
    with a common efficiency, such as "matmul" or "norm".

    ``peak_flops`` is dense FLOP/s by dtype name. ``usable_memory_bytes`` is the memory that a
    process may allocate. ``sources`` maps the name of each field to the source of its figure.
    ``efficiency`` maps an op family to the fraction of the peak (FLOP/s, or memory bandwidth) that
    it reaches, 1.0 if absent; a key of family and dtype ("matmul_float8_e4m3fn") holds for that
    dtype alone. ``launch_seconds`` is the time that the start and end of any kernel take on the
    device. ``issue_seconds`` is the host's time to issue a kernel: a sequence of n kernels takes at
    least n times that. ``num_units`` is the number of units (SMs) over which the output tiles of a
    matrix product are distributed in waves; 0 for devices without such waves. ``dollars_per_hour``
    is the price of one device, None if unknown. ``tf32`` are the op families whose float32 products
    are computed in TensorFloat-32; None if unknown, which counts as no family.

    ``slowdown`` maps a kind of collective (of ``OVERLAPPED_COLLECTIVES``) to the factor, at least
    1, by which compute takes longer while a collective of this kind runs at the same time. The
    default is ``MEASURED_SLOWDOWN`` on a GPU; on a CPU compute and collectives share cores, so
    overlap gains nothing.

    ``message_seconds`` is the host's time to send or to receive one message of a pipeline while the
    device waits. It is 0 where the device sends by itself (NCCL).

    Figures of a GPU's host, 0 if unknown: ``host_link_bytes_per_second`` is the rate of copies
    between host and GPU in one direction, ``host_bytes_per_second`` the GPU's share of the
    bandwidth of the host's memory, ``host_memory_bytes`` its share of the host's memory.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    usable_memory_bytes: int
    memory_bytes_per_second: float
    peak_flops: Mapping[str, float]
    efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_seconds: float = 5e-6
    sources: Mapping[str, str] = field(default_factory=dict)
    issue_seconds: float = 0.0
    num_units: int = 0
    dollars_per_hour: float | None = None
    tf32: tuple[str, ...] | None = None
    slowdown: Mapping[str, float] = field(default_factory=dict)
    message_seconds: float = 0.0
    host_link_bytes_per_second: float = 0.0
    host_bytes_per_second: float = 0.0
    host_memory_bytes: int = 0

    def slowed_share(self, collective: str) -> float:
        """Return the share of compute speed (0 to 1) that this device loses while a collective of
        the kind ``collective`` ("all_gather", …) runs at the same time; 1 if compute stops."""
        if collective in self.slowdown:
            return 1 - 1 / self.slowdown[collective]
        return 1.0 if self.kind == "cpu" else 1 - 1 / MEASURED_SLOWDOWN

    @property
    def speed(self) -> str:
        """Text that is equal for two devices if they run every op in the same time."""
        figures = (
            self.name,
            self.kind,
            self.memory_bytes_per_second,
            sorted(self.peak_flops.items()),
            sorted(self.efficiency.items()),
            self.launch_seconds,
            self.issue_seconds,
            self.num_units,
            self.tf32 or (),
            sorted(self.slowdown.items()),
            self.host_link_bytes_per_second,
            self.host_bytes_per_second,
        )
        return repr(figures)


@dataclass(frozen=True, slots=True)
class Link:
    """Kind of link between devices or hosts. ``alpha_seconds`` is the latency of a message,
    ``bytes_per_second`` the rate of one device in one direction. ``base_seconds`` is the time to
    start any transfer or collective, however many messages it has. ``reduction_bytes_per_second``
    is the rate at which the switch itself sums an all-reduce (NVLink SHARP), in bytes of the tensor
    per second; 0 if it cannot. In a host without a switch, ``num_links`` is the number of wires of
    a device that together have this rate (0 with a switch). ``of_links`` is set for a link over
    only some of a device's wires: the number of all its wires."""

    name: str
    alpha_seconds: float
    bytes_per_second: float
    source: str = ""
    base_seconds: float = 0.0
    reduction_bytes_per_second: float = 0.0
    num_links: int = 0
    of_links: int = 0


@lru_cache(maxsize=256)
def _part_of(link: Link, num_links: int) -> Link:
    """Return ``link`` restricted to ``num_links`` wires per device, at their share of its rate."""
    if num_links == link.num_links:
        return link
    rate = link.bytes_per_second * num_links / link.num_links
    return replace(link, bytes_per_second=rate, num_links=num_links, of_links=link.num_links)


@dataclass(frozen=True, slots=True)
class Host:
    """Host (machine) of equal devices that are joined by one link. ``rack`` is the name of its
    rack. For a host without a switch, ``wires`` gives the number of direct links between any two
    devices, and ``detour`` is the link (such as PCIe) between devices that no ring of direct links
    joins. Raises ``ClusterError`` if the arguments contradict each other."""

    device: Device
    num_devices: int
    link: Link
    rack: str = ""
    wires: Wires = ()
    detour: Link | None = None

    def __post_init__(self) -> None:
        if not self.wires:
            if self.detour is not None:
                raise ClusterError(
                    "detour is set, but wires is not", fix="add wires, or remove detour"
                )
            return
        if len(self.wires) != self.num_devices or not are_wires(self.wires):
            raise ClusterError(
                f"wires must be a symmetric {self.num_devices} × {self.num_devices} table of "
                "link counts "
                "with zeros on the diagonal"
            )
        if self.num_devices > MOST_DEVICES:
            raise ClusterError(f"wires can be given for at most {MOST_DEVICES} devices")
        if self.link.num_links < 1:
            raise ClusterError(
                f"link {self.link.name!r} does not say how many links its rate is for",
                fix="add num_links",
            )
        if self.detour is None:
            raise ClusterError(
                "the host has no link for devices that no wires join", fix='add detour = "pcie4"'
            )

    def link_among(self, devices: Sequence[int]) -> Link:
        """Return the link for a collective among ``devices`` (indices within this host). In a host
        without a switch, its rate is the part that rings through these devices can use; if no ring
        joins them, the link is the host's ``detour``."""
        if not self.wires or self.detour is None or len(set(devices)) < 2:
            return self.link
        used = num_links_used(wires_among(self.wires, devices))
        return _part_of(self.link, used) if used else self.detour

    def part(self, num_devices: int) -> Host:
        """Return a host of only the first ``num_devices`` devices and the wires among them."""
        wires = wires_among(self.wires, range(num_devices)) if self.wires else ()
        return replace(self, num_devices=num_devices, wires=wires)


@dataclass(frozen=True)
class Cluster:
    """Hosts joined by ``inter_link``. Ranks number the devices host by host. ``rack_link`` joins
    hosts of different racks; None if all hosts are in one rack."""

    name: str
    hosts: tuple[Host, ...]
    inter_link: Link
    rack_link: Link | None = None

    @cached_property
    def usable_memory_bytes(self) -> int:
        """Bytes that a process may allocate on any device: the least of all devices."""
        return min(host.device.usable_memory_bytes for host in self.hosts)

    @cached_property
    def num_devices(self) -> int:
        return sum(host.num_devices for host in self.hosts)

    @cached_property
    def host_size(self) -> int | None:
        """Number of devices of each host; None if hosts have different numbers of devices."""
        sizes = {host.num_devices for host in self.hosts}
        return sizes.pop() if len(sizes) == 1 else None

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of each host."""
        return tuple(accumulate((host.num_devices for host in self.hosts[:-1]), initial=0))

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """Index in ``hosts`` of each rank's host; the tuple is indexed by rank."""
        return tuple(
            index for index, host in enumerate(self.hosts) for _ in range(host.num_devices)
        )

    def device(self, rank: int) -> Device:
        return self.hosts[self.host_of[rank]].device

    def with_devices(self, changed: Callable[[Device], Device]) -> Cluster:
        """Return the cluster with each host's kind of device replaced by ``changed(device)``."""
        hosts = tuple(replace(host, device=changed(host.device)) for host in self.hosts)
        return replace(self, hosts=hosts)

    def link(self, first: int, second: int) -> Link:
        """Return the link between two ranks: within a host, between hosts, or between racks."""
        host, other = self.host_of[first], self.host_of[second]
        if host == other:
            return self.link_within(host, (first, second))
        return self.host_link({self.hosts[host].rack, self.hosts[other].rack})

    def link_within(self, host: int, ranks: Sequence[int]) -> Link:
        """Return the link for a collective among ``ranks``, which are all on one ``host``."""
        start = self.first_ranks[host]
        return self.hosts[host].link_among([rank - start for rank in ranks])

    def entry_link(self, first: int, size: int) -> Link:
        """Return the link over which the pipeline stage on ranks ``first`` … ``first`` + ``size`` −
        1 receives its inputs, if the previous stage is on the ``size`` ranks before them."""
        before = range(max(first - size, 0), max(first, 1))
        return self.send_link(before, range(first, first + size))

    def send_link(self, sources: Sequence[int], targets: Sequence[int]) -> Link:
        """Return the slowest link over which ranks ``sources`` of one pipeline stage send to ranks
        ``targets`` of the next. Within a host without a switch, each of the last sources sends to
        one target; otherwise the last source and the first target represent all pairs."""
        hosts = {self.host_of[rank] for rank in (sources[0], sources[-1], targets[0], targets[-1])}
        if len(hosts) > 1 or not self.hosts[next(iter(hosts))].wires:
            return self.link(sources[-1], targets[0])
        number = min(len(sources), len(targets))
        pairs = zip(sources[-number:], targets[:number], strict=True)
        links = [self.link(*pair) for pair in pairs if pair[0] != pair[1]]
        whole = self.hosts[next(iter(hosts))].link
        return min(links, key=lambda link: link.bytes_per_second, default=whole)

    def wires_of(self, first: int, size: int) -> tuple[Wires, ...]:
        """Return tables of the wires (numbers of direct links) among ``size`` ranks from ``first``
        on: one for each host without a switch of which only a part is used."""
        found = []
        # only the first and the last host can be used in part
        for host in sorted({self.host_of[first], self.host_of[first + size - 1]}):
            own, start = self.hosts[host], self.first_ranks[host]
            here = range(max(first - start, 0), min(first + size - start, own.num_devices))
            if own.wires and len(here) < own.num_devices:
                found.append(wires_among(own.wires, here))
        return tuple(found)

    def host_link(self, racks: Collection[str]) -> Link:
        """Return the slowest link on the path between hosts in ``racks`` (names of racks)."""
        return self.inter_link if self.rack_link is None or len(racks) < 2 else self.rack_link

    def joins_hosts(self, link: Link) -> bool:
        """Return true if the cluster has several hosts and ``link`` joins them."""
        return len(self.hosts) > 1 and link in (self.inter_link, self.rack_link)

    def slowest_device(self, ranks: Sequence[int]) -> Device:
        """Return a device that is in every figure as slow as the slowest of ``ranks``: devices that
        compute an op together wait for the slowest of them, which may differ by op."""
        if len(self._devices) == 1:
            return self._devices[0]
        hosts = sorted(set(map(self.host_of.__getitem__, ranks)))
        devices = _distinct(self.hosts[host].device for host in hosts)
        return devices[0] if len(devices) == 1 else _worst(devices)

    @cached_property
    def _devices(self) -> list[Device]:
        """Distinct devices of all hosts."""
        return _distinct(host.device for host in self.hosts)


def _distinct(devices: Iterable[Device]) -> list[Device]:
    """Return the devices without equal ones, in order of their first use."""
    found: list[Device] = []
    for device in {id(device): device for device in devices}.values():
        if device not in found:
            found.append(device)
    return found


def _worst(devices: Sequence[Device]) -> Device:
    """Return a device of which each figure is the worst among ``devices``."""
    dtypes = set.intersection(*(set(device.peak_flops) for device in devices))
    lowest = {dtype: min(device.peak_flops[dtype] for device in devices) for dtype in dtypes}
    slowest = min(devices, key=lambda device: max(device.peak_flops.values(), default=0.0))
    families = {family for device in devices for family in device.efficiency}
    kinds = {device.kind for device in devices}
    return Device(
        name="+".join(sorted({device.name for device in devices})),
        kind="cpu" if "cpu" in kinds else "cuda",
        memory_bytes=min(device.memory_bytes for device in devices),
        usable_memory_bytes=min(device.usable_memory_bytes for device in devices),
        memory_bytes_per_second=min(device.memory_bytes_per_second for device in devices),
        peak_flops=dict(sorted(lowest.items())) or slowest.peak_flops,
        efficiency={
            family: min(device.efficiency.get(family, 1.0) for device in devices)
            for family in sorted(families)
        },
        launch_seconds=max(device.launch_seconds for device in devices),
        sources={"name": "the worst of each figure of devices that work together"},
        issue_seconds=max(device.issue_seconds for device in devices),
        num_units=slowest.num_units,
        tf32=_common_tf32(devices),
        slowdown=_largest_slowdown(devices),
        message_seconds=max(device.message_seconds for device in devices),
    )


def _largest_slowdown(devices: Sequence[Device]) -> Mapping[str, float]:
    """Return for each kind of collective the largest factor by which it slows compute down, among
    ``devices``; infinite if compute stops."""
    kinds = sorted({kind for device in devices for kind in device.slowdown})
    shares = {kind: max(device.slowed_share(kind) for device in devices) for kind in kinds}
    return {kind: 1 / (1 - share) if share < 1 else float("inf") for kind, share in shares.items()}


def _common_tf32(devices: Sequence[Device]) -> tuple[str, ...] | None:
    """Return the op families that all devices compute in TF32; None if unknown for every device."""
    if all(device.tf32 is None for device in devices):
        return None
    return tuple(sorted(set.intersection(*(set(device.tf32 or ()) for device in devices))))
