"""Clusters in a word: ``8xH100``, ``4x8xA100-80GB``, ``cpu:4``, ``2x8xH100@ethernet-100g``.

Hosts that differ are joined by ``+``: ``2x8xA100+8xH100``.
"""

from __future__ import annotations

import re

from .cluster import Cluster, ClusterError, Host, Link
from .presets import find_link, find_preset, joins_devices

_SHORTHAND = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([^@+\s]+)", re.IGNORECASE)
_CPU = re.compile(r"cpu:(\d+)", re.IGNORECASE)
_FIX = "write DEVICESxNAME, HOSTSxDEVICESxNAME or cpu:PROCESSES, such as 8xH100 or 4x8xA100-80GB"


def is_shorthand(text: str) -> bool:
    """Whether ``text`` has the form of a shorthand, known names or not."""
    words = [part.partition("@")[0].strip() for part in text.split("+")]
    return all(_SHORTHAND.fullmatch(word) or _CPU.fullmatch(word) for word in words)


def parse_cluster(text: str) -> Cluster:
    """The cluster that a shorthand stands for.

    ``HOSTSxDEVICESxNAME``, the hosts left out for one; several such, joined by ``+``, for
    hosts that differ. ``@LINK`` replaces the link of the preset: a NVLink or PCIe name the
    one within the hosts it follows, any other the one between all hosts, which else is the
    slowest that one of the presets usually has. Raises ``ClusterError``.

    >>> cluster = parse_cluster("4x8xA100-80GB@ethernet-100g")
    >>> len(cluster.hosts), cluster.num_devices, cluster.inter_link.name
    (4, 32, 'ethernet-100g')
    >>> [host.device.name for host in parse_cluster("2x8xA100+8xH100").hosts]
    ['A100-80GB', 'A100-80GB', 'H100']
    """
    hosts: list[Host] = []
    usual: list[Link] = []
    chosen: dict[str, Link] = {}
    for part in text.split("+"):
        own, fabric, between = _hosts(part, text)
        hosts += own
        usual.append(fabric)
        if between is not None:
            chosen[between.name] = between
    if len(chosen) > 1:
        raise ClusterError(
            f"two links between the hosts are given: {' and '.join(chosen)}", text,
            "give one link; describe links that differ between racks in a TOML file",
        )  # fmt: skip
    inter_link = next(iter(chosen.values()), min(usual, key=lambda link: link.bytes_per_second))
    return Cluster(name=text.strip(), hosts=tuple(hosts), inter_link=inter_link)


def _hosts(part: str, text: str) -> tuple[list[Host], Link, Link | None]:
    """(equal hosts, the usual link between such hosts, the one that is named for them)."""
    word, at, link_name = (each.strip() for each in part.partition("@"))
    num_hosts, num_devices, name = _counts(word, text)
    preset = find_preset(name, text)
    if num_devices > preset.host_size:
        hosts = -(-num_devices // preset.host_size)
        raise ClusterError(
            f"a host has at most {preset.host_size} {preset.device.name}, not {num_devices}",
            text,
            f"write {num_hosts * hosts}x{preset.host_size}x{name}, or describe it in a TOML file",
        )
    host, between = preset.host(num_devices), None
    if at:
        named = find_link(link_name, text)
        if joins_devices(named):
            host = Host(preset.device, num_devices, named)
        else:
            between = named
    return [host] * num_hosts, find_link(preset.fabric), between


def _counts(word: str, text: str) -> tuple[int, int, str]:
    """(hosts, devices per host, device name)."""
    match = _SHORTHAND.fullmatch(word)
    cpu = _CPU.fullmatch(word)
    if match:
        counts = int(match.group(1) or 1), int(match.group(2)), match.group(3)
    elif cpu:
        counts = 1, int(cpu.group(1)), "cpu"
    else:
        raise ClusterError(f"{text!r} is not a cluster", text, _FIX)
    if counts[0] < 1 or counts[1] < 1:
        raise ClusterError(f"{text!r} has no devices", text, _FIX)
    return counts
