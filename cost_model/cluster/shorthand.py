"""The cluster that a word means: this machine, a shorthand, or the path of a TOML file.

Shorthands are ``8xH100``, ``4x8xA100-80GB``, ``cpu:4``, ``2x8xH100@ethernet-100g``; hosts that
differ are joined by ``+``: ``2x8xA100+8xH100``.
"""

from __future__ import annotations

import re
from pathlib import Path

from .cluster import Cluster, ClusterError, Host, Link, check_size
from .cluster_file import load_cluster
from .detect import detect_cpu, detect_local
from .given_text import read_text, shortened, whole_number
from .presets import find_link, find_preset, is_preset, joins_devices

_SHORTHAND = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*x\s*([^@+\s]+)", re.IGNORECASE)
_CPU = re.compile(r"cpu:(\d+)", re.IGNORECASE)
_FIX = "write DEVICESxNAME, HOSTSxDEVICESxNAME or cpu:PROCESSES, such as 8xH100 or 4x8xA100-80GB"


def resolve_cluster(text: str) -> Cluster:
    """Return the cluster that a user's ``text`` names: ``local`` detects this machine, ``cpu:N``
    measures its CPU as N processes, a shorthand such as ``8xH100`` is made from presets, and any
    other text is the path of a TOML file. Raises ``ClusterError``."""
    word = text.strip()
    if word == "local":
        return detect_local()
    if is_shorthand(word):
        cluster = parse_cluster(word)
        is_cpu_here = word.lower().startswith("cpu:") and not set("@+") & set(word)
        return detect_cpu(cluster.num_devices) if is_cpu_here else cluster
    path = Path(word)
    is_file = path.suffix == ".toml" or "/" in word
    try:
        described = read_text(path)
    except (OSError, ValueError) as error:
        if is_file or path.exists():
            why = getattr(error, "strerror", None) or str(error)
            where = shortened(word)
            raise ClusterError(f"the file {where} cannot be read: {why}", where) from error
        return parse_cluster(word)
    return load_cluster(described, str(path))


def is_shorthand(text: str) -> bool:
    """Return true if ``text`` has the form of a shorthand such as ``8xH100`` (see
    ``parse_cluster``), even if its names are unknown."""
    words = [part.partition("@")[0].strip() for part in text.split("+")]
    return all(_SHORTHAND.fullmatch(word) or _CPU.fullmatch(word) for word in words)


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a shorthand describes: ``HOSTSxDEVICESxNAME``, or ``DEVICESxNAME``
    for a single host, or ``NAME`` for a single device; ``+`` joins different hosts. ``@LINK``
    replaces a preset's link: an NVLink or PCIe name replaces the link within the preceding hosts,
    any other name the link between all hosts, by default the slowest of the presets'. Raises
    ``ClusterError``.

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
        equal_hosts, fabric, between = _hosts(part, text)
        hosts += equal_hosts
        usual.append(fabric)
        if between is not None:
            chosen[between.name] = between
    if len(chosen) > 1:
        raise ClusterError(
            f"two links between the hosts are given: {' and '.join(chosen)}",
            text,
            "give one link; describe links that differ between racks in a TOML file",
        )
    inter_link = next(iter(chosen.values()), min(usual, key=lambda link: link.bytes_per_second))
    return Cluster(name=text.strip(), hosts=tuple(hosts), inter_link=inter_link)


def _hosts(part: str, text: str) -> tuple[list[Host], Link, Link | None]:
    """Return the equal hosts that ``part`` of a shorthand (such as "2x8xH100@NDR") stands for, the
    usual link between such hosts, and the link between hosts that it names after "@", if any.
    ``text``: the whole shorthand, for errors."""
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
    check_size(num_hosts, num_devices, text)
    host, between = preset.host(num_devices), None
    if at:
        named = find_link(link_name, text)
        if joins_devices(named):
            host = Host(preset.device, num_devices, named)
        else:
            between = named
    return [host] * num_hosts, find_link(preset.fabric), between


def _counts(word: str, text: str) -> tuple[int, int, str]:
    """Return (number of hosts, devices per host, name of the device) of a ``word`` such as
    "2x8xH100". ``text``: the whole shorthand, for errors."""
    match = _SHORTHAND.fullmatch(word)
    cpu = _CPU.fullmatch(word)
    if match:
        hosts, devices, name = match.group(1) or "1", match.group(2), match.group(3)
    elif cpu:
        hosts, devices, name = "1", cpu.group(1), "cpu"
    elif is_preset(word) and word.lower() != "cpu":
        hosts, devices, name = "1", "1", word
    else:
        raise ClusterError(f"{shortened(text)!r} is not a cluster", shortened(text), _FIX)
    try:
        counts = whole_number(hosts), whole_number(devices), name
    except ValueError as error:
        raise ClusterError(f"{shortened(text)!r}: {error}", shortened(text), _FIX) from error
    if counts[0] < 1 or counts[1] < 1:
        raise ClusterError(f"{text!r} has no devices", text, _FIX)
    return counts
