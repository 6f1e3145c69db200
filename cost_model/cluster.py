"""A cluster: devices in hosts, joined by links, every figure with its source.

GB is 1e9 bytes, GiB is 2**30. Rates are bytes per second in one direction per device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Source = Literal["measured", "interpolated", "spec"]


class ClusterError(ValueError):
    """A description of a cluster is wrong.

    ``what`` is one sentence; ``where`` the file and key, or the text given; ``fix`` what to try.
    """

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.what}{where}" + (f": {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator (or a share of a CPU).

    ``peak_flops`` is dense FLOP/s by dtype name. ``usable_memory_bytes`` is what a process
    may allocate. ``sources`` says for each field name where its figure comes from.
    ``efficiency`` is the fraction of the peak that each op family reaches (1.0 if absent).

    ``launch_seconds`` is what a kernel takes on the device whatever it does: to start and to
    drain. ``issue_seconds`` is what the host takes to issue one, so that a run of ops takes
    at least their number times that. ``num_units`` are the units (SMs) that the tiles of a
    matrix product are dealt to; 0 where products do not come in waves.
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


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network: latency per message and bandwidth per device, one direction.

    ``base_seconds`` is what starting any transfer or collective costs once, whatever its
    number of messages. ``reduction_bytes_per_second`` is the rate at which the switch itself
    sums an all-reduce (NVLink SHARP): bytes of the tensor per second; 0 where it cannot.
    """

    name: str
    alpha_seconds: float
    bytes_per_second: float
    source: str = ""
    base_seconds: float = 0.0
    reduction_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """Equal devices joined by one link."""

    device: Device
    num_devices: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Hosts joined by ``inter_link``. Ranks number the devices host by host."""

    name: str
    hosts: tuple[Host, ...]
    inter_link: Link

    @property
    def num_devices(self) -> int:
        return sum(host.num_devices for host in self.hosts)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """For each rank the index of its host."""
        return tuple(
            index for index, host in enumerate(self.hosts) for _ in range(host.num_devices)
        )

    def device(self, rank: int) -> Device:
        return self.hosts[self.host_of[rank]].device

    def link(self, first: int, second: int) -> Link:
        """The link that two ranks talk over."""
        host = self.host_of[first]
        return self.hosts[host].link if host == self.host_of[second] else self.inter_link

    def slowest_device(self, ranks: Sequence[int]) -> Device:
        return min(
            (self.device(rank) for rank in ranks),
            key=lambda device: max(device.peak_flops.values(), default=0.0),
        )
