"""The emulated clusters: their network, and how the planner sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoparallel.cost_model.cluster.cluster import (
    OVERLAPPED_COLLECTIVES,
    Cluster,
    Device,
    Host,
    Link,
)

FLOPS_PER_SECOND, BYTES_PER_SECOND = 10e9, 10e9
"""What an emulated device does: so little that the machine's own two cores do not matter."""
MEMORY_BYTES = 4 << 30
LATENCY_SECONDS = 3e-4
NUM_RANKS = 4


@dataclass(frozen=True)
class Emulated:
    """Devices: Mbit/s of each one's link, of each host's uplink, and the hosts' speeds.

    Without ``uplinks`` all are in one host. ``speeds`` are factors of the device's rates.
    ``issue_seconds`` are what the host takes to issue an op, ``message_seconds`` to send or to
    receive a message.
    """

    name: str
    mbit: int
    uplinks: tuple[int, ...] = ()
    speeds: tuple[float, ...] = (1.0,)
    issue_seconds: float = 0.0
    message_seconds: float = 0.0
    num_ranks: int = NUM_RANKS

    def cluster(self) -> Cluster:
        """The cluster as the planner sees it before links are measured."""
        link = _link("switch", self.mbit)
        hosts = tuple(
            Host(self._device(speed), self.num_ranks // len(self.speeds), link)
            for speed in self.speeds
        )
        return Cluster(self.name, hosts, _link("uplink", min(self.uplinks, default=self.mbit)))

    def _device(self, speed: float) -> Device:
        """A device whose compute takes no longer while it communicates: it sleeps."""
        return Device(
            name=f"emulated x{speed:g}",
            kind="cpu",
            memory_bytes=MEMORY_BYTES,
            usable_memory_bytes=MEMORY_BYTES,
            memory_bytes_per_second=BYTES_PER_SECOND * speed,
            peak_flops={"float32": FLOPS_PER_SECOND * speed},
            launch_seconds=0.0,
            issue_seconds=self.issue_seconds,
            message_seconds=self.message_seconds,
            slowdown=dict.fromkeys(OVERLAPPED_COLLECTIVES, 1.0),
        )

    def partitions(self) -> list[tuple[tuple[int, ...], ...]]:
        """Groups of ranks of each kind that meshes have, all groups of a kind at once."""
        count, found = self.num_ranks, []
        sizes = [size for size in range(2, count + 1) if count % size == 0]
        for size in sizes:
            found.append(tuple(tuple(range(at, at + size)) for at in range(0, count, size)))
            step = count // size
            if len(self.speeds) > 1 and step > 1:
                found.append(tuple(tuple(range(at, count, step)) for at in range(step)))
        return found


def _link(name: str, mbit: int) -> Link:
    return Link(name, LATENCY_SECONDS, mbit * 1e6 / 8)


FLAT_FAST = Emulated("flat fast", 500)
CLUSTERS = (
    FLAT_FAST,
    replace(FLAT_FAST, name="flat slow", mbit=100),
    Emulated("two islands", 500, uplinks=(100, 100), speeds=(1.0, 1.0)),
    Emulated("one slow host", 500, uplinks=(250, 250), speeds=(1.0, 0.5)),
)
ISLANDS = CLUSTERS[2]
OF_EIGHT = (
    replace(FLAT_FAST, name="flat of 8", num_ranks=8),
    replace(ISLANDS, name="two islands of 4", num_ranks=8),
)
"""Clusters on which only models of experts are measured."""
