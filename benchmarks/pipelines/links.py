"""Ranks on links of a given rate: network namespaces on bridges, shaped in both directions.

Needs root and ``iproute2``. In: how many ranks and a rate, and for ranks in several hosts the
rate of each host's uplink; out: for each rank the command that runs a process in its place, its
address and its interface. Without a rate all places are the loopback.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

BURST_BYTES = 15_000
"""What may pass at once after a pause: little, or every message would travel partly for free."""

FRAME_BYTES = 9014
"""What queues that share an interface let through in turns: one packet."""

TCP = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_no_metrics_save": "1",
    "net.ipv4.tcp_wmem": "4096 4194304 4194304",
    "net.ipv4.tcp_rmem": "4096 4194304 33554432",
}
"""So that a connection sends as fast as the link lets it, whatever the host's defaults: nothing
is ever lost here, so Reno's window only grows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the command to run there, or the namespace ("" for none) to enter."""

    prefix: tuple[str, ...]
    address: str
    interface: str
    space: str = ""


@contextmanager
def network(num_ranks: int, mbit: int, uplinks: Sequence[int] = ()) -> Iterator[list[Place]]:
    """The places of the ranks, taken down afterwards.

    All are on one switch. With ``uplinks`` they are divided evenly among as many hosts, each with
    a switch of its own, and these are joined by links of those rates in Mbit/s.
    """
    if not mbit:
        yield [Place((), "127.0.0.1", "lo")] * num_ranks
        return
    name = f"ap{os.getpid()}"
    switches = [f"{name}h{host}" for host in range(max(1, len(uplinks)))]
    spaces = [f"{name}r{rank}" for rank in range(num_ranks)]
    per_host = num_ranks // len(switches)
    try:
        for switch in switches:
            _bridge(switch)
        if uplinks:
            _bridge(name)
            for host, (switch, rate) in enumerate(zip(switches, uplinks, strict=True)):
                _uplink(switch, name, host, rate)
        for rank, space in enumerate(spaces):
            _join(space, switches[rank // per_host], rank, mbit, num_ranks)
        yield [
            Place(("ip", "netns", "exec", space), _address(rank), "e0", space)
            for rank, space in enumerate(spaces)
        ]
    finally:
        for space in (*spaces, *switches, name):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _bridge(switch: str) -> None:
    """A namespace with a bridge, ``br0``."""
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")


def _uplink(switch: str, center: str, host: int, mbit: int) -> None:
    """A link between a host's switch and the one that joins the hosts."""
    _ip(
        "link",
        "add",
        "uplink",
        "netns",
        switch,
        "mtu",
        "9000",
        "type",
        "veth",
        "peer",
        "name",
        f"h{host}",
        "netns",
        center,
        "mtu",
        "9000",
    )
    for space, interface in ((switch, "uplink"), (center, f"h{host}")):
        _ip("-n", space, "link", "set", "dev", interface, "master", "br0")
        _ip("-n", space, "link", "set", interface, "up", "gso_max_size", "18000")
        _shape(space, interface, mbit)


def _join(space: str, switch: str, rank: int, mbit: int, num_ranks: int) -> None:
    """One namespace on the bridge, sending and receiving at ``mbit``."""
    _ip("netns", "add", space)
    _ip("netns", "exec", space, "sysctl", "-qw", *(f"{key}={value}" for key, value in TCP.items()))
    _ip("-n", space, "link", "set", "lo", "up")
    _ip(
        "link",
        "add",
        "e0",
        "netns",
        space,
        "mtu",
        "9000",
        "type",
        "veth",
        "peer",
        "name",
        f"r{rank}",
        "netns",
        switch,
        "mtu",
        "9000",
    )
    _ip("-n", space, "addr", "add", f"{_address(rank)}/24", "dev", "e0")
    _ip("-n", space, "link", "set", "e0", "up", "gso_max_size", "18000")
    _ip("-n", switch, "link", "set", f"r{rank}", "master", "br0")
    _ip("-n", switch, "link", "set", f"r{rank}", "up")
    # A window that covers the link from the start: no slow start is seen.
    _ip(
        "-n",
        space,
        "route",
        "replace",
        "10.78.0.0/24",
        "dev",
        "e0",
        "initcwnd",
        "1500",
        "initrwnd",
        "1500",
    )
    others = [_address(other) for other in range(num_ranks) if other != rank]
    _shape(space, "e0", mbit, fair=others)
    _shape(switch, f"r{rank}", mbit)


def _shape(space: str, interface: str, mbit: int, *, fair: Sequence[str] = ()) -> None:
    """Lets an interface send at ``mbit``; what waits does so in one queue.

    With ``fair`` addresses it waits in one queue for each of them, and these take turns.

    What only acknowledges (less than 64 bytes) overtakes data: behind the data of the other
    direction it would hold up the sender, and no model of a message knows of that.
    """
    device = ("dev", interface, "parent")
    _tc(space, "qdisc", "add", "dev", interface, "root", "handle", "1:", "htb", "default", "20")
    queues = {"1:10": ("1:", mbit), "1:1": ("1:", mbit)}
    for at in range(max(1, len(fair))):
        queues[f"1:{20 + at}"] = ("1:1", mbit // max(1, len(fair)))
    burst = str(max(BURST_BYTES, mbit * 12))
    for name, (parent, rate) in queues.items():
        _tc(
            space,
            "class",
            "add",
            *device,
            parent,
            "classid",
            name,
            "htb",
            "rate",
            f"{rate}mbit",
            "ceil",
            f"{mbit}mbit",
            "burst",
            burst,
            "cburst",
            burst,
            "quantum",
            str(FRAME_BYTES),
        )
        if name != "1:1":
            _tc(space, "qdisc", "add", *device, name, "bfifo", "limit", "100000000")
    _filter(space, device, "1", ("u16", "0x0000", "0xffc0", "at", "2"), "1:10")
    for at, address in enumerate(fair):
        _filter(space, device, "2", ("ip", "dst", f"{address}/32"), f"1:{20 + at}")


def _filter(
    space: str, device: Sequence[str], priority: str, match: Sequence[str], name: str
) -> None:
    """Sends packets that match to the queue ``name``; the lowest priority is looked at first."""
    _tc(
        space,
        "filter",
        "add",
        *device,
        "1:",
        "protocol",
        "ip",
        "prio",
        priority,
        "u32",
        "match",
        *match,
        "flowid",
        name,
    )


def _address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tc(space: str, *words: str) -> None:
    subprocess.run(["tc", "-n", space, *words], check=True, capture_output=True)
