"""Clusters in a word: ``8xH100``, ``4x8xA100-80GB``, ``cpu:4``, ``2x8xH100@ethernet-100g``."""

from __future__ import annotations

import re

from .cluster import Cluster, ClusterError, Host
from .presets import find_link, find_preset, joins_devices

_SHORTHAND = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([^@\s]+)", re.IGNORECASE)
_CPU = re.compile(r"cpu:(\d+)", re.IGNORECASE)
_FIX = "write DEVICESxNAME, HOSTSxDEVICESxNAME or cpu:PROCESSES, such as 8xH100 or 4x8xA100-80GB"


def is_shorthand(text: str) -> bool:
    """Whether ``text`` has the form of a shorthand, known names or not."""
    word = text.partition("@")[0].strip()
    return bool(_SHORTHAND.fullmatch(word) or _CPU.fullmatch(word))


def parse_cluster(text: str) -> Cluster:
    """The cluster that a shorthand stands for.

    ``HOSTSxDEVICESxNAME``, the hosts left out for one. ``@LINK`` replaces the link of the
    preset: a NVLink or PCIe name the one within hosts, any other the one between hosts.
    Raises ``ClusterError``.

    >>> cluster = parse_cluster("4x8xA100-80GB@ethernet-100g")
    >>> len(cluster.hosts), cluster.num_devices, cluster.inter_link.name
    (4, 32, 'ethernet-100g')
    """
    word, at, fabric = (part.strip() for part in text.partition("@"))
    num_hosts, num_devices, name = _counts(word, text)
    preset = find_preset(name, text)
    if num_devices > preset.host_size:
        hosts = -(-num_devices // preset.host_size)
        raise ClusterError(
            f"no host has {num_devices} {preset.device.name}: at most {preset.host_size}",
            text,
            f"write {num_hosts * hosts}x{preset.host_size}x{name}, or describe it in a TOML file",
        )
    link, inter_link = find_link(preset.link), find_link(preset.fabric)
    if at:
        chosen = find_link(fabric, text)
        link, inter_link = (chosen, inter_link) if joins_devices(chosen) else (link, chosen)
    host = Host(preset.device, num_devices, link)
    return Cluster(name=text.strip(), hosts=(host,) * num_hosts, inter_link=inter_link)


def _counts(word: str, text: str) -> tuple[int, int, str]:
    """(hosts, devices per host, device name)."""
    match = _SHORTHAND.fullmatch(word)
    cpu = _CPU.fullmatch(word)
    if match:
        counts = int(match.group(1) or 1), int(match.group(2)), match.group(3)
    elif cpu:
        counts = 1, int(cpu.group(1)), "cpu"
    else:
        raise ClusterError(f"{text!r} describes no cluster", text, _FIX)
    if counts[0] < 1 or counts[1] < 1:
        raise ClusterError(f"{text!r} has no devices", text, _FIX)
    return counts
