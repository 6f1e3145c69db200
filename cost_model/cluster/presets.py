"""Devices and links by name, with the hosts they usually come in; every figure with its source.

In: ``links.toml``, ``devices.toml`` and ``references.toml`` of this folder, which say how they are
written. They are read when a preset is first asked for, by the checks of ``figures``. Out: presets.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from .cluster import ClusterError, Device, Host, Link
from .figures import parse_bytes, read_device, read_link
from .gpu_links import WIRES, wires_among

NOT_CHECKED = "not checked"
"""Source given for a figure that was not compared with any data sheet."""

WITHIN_HOSTS = ("nvlink", "infinity-fabric", "pcie", "loopback")
"""Prefixes of the names of links within a host; all other links join hosts."""

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Protocols:
    """Figures of NCCL's protocols on a kind of link.

    ``short_share`` is the part of the link's rate that the protocols for short messages reach (LL
    and LL128, which send flags with the data). ``long_alpha_seconds`` is the additional time of
    each message under the protocol that reaches the whole rate (Simple, which synchronizes at every
    step and fills a buffer at every hop). ``switch_fill_seconds`` is the time that the first chunk
    takes through a switch that sums. ``exchange_seconds`` is the additional time to start an
    all-to-all, which NCCL implements by sends and receives, and ``exchange_share`` the part of the
    rate that an all-to-all reaches. A send of up to ``p2p_few_bytes`` between only two ranks
    reaches the part ``p2p_few_share`` of the rate, as NCCL opens few channels for it.
    """

    short_share: float = 1.0
    long_alpha_seconds: float = 0.0
    switch_fill_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchange_share: float = 1.0
    p2p_few_share: float = 1.0
    p2p_few_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Preset:
    """Known kind of device with the usual hosts around it. ``link`` and ``fabric`` are the names of
    the links within and between its hosts, ``host_size`` the number of devices of a host. For hosts
    without a switch, ``wires`` has pairs (largest number of devices, name of the table of wires for
    at most so many devices) in ascending order; ``detour`` is the link where no ring of wires joins
    devices."""

    device: Device
    link: str
    fabric: str
    host_size: int = 8
    wires: tuple[tuple[int, str], ...] = ()
    detour: str = "pcie3"

    def host(self, num_devices: int, device: Device | None = None) -> Host:
        """Return a host of ``num_devices`` devices with the preset's usual links between them.
        ``device`` replaces the preset's device, None keeps it.

        >>> find_preset("V100-16GB").host(4).link_among((0, 1)).num_links
        1
        """
        device, link = device or self.device, link_presets()[self.link]
        for most, name in self.wires:
            if 1 < num_devices <= most:
                wires = wires_among(WIRES[name], range(num_devices))
                detour = link_presets()[self.detour]
                return Host(device, num_devices, link, wires=wires, detour=detour)
        return Host(device, num_devices, link)


@cache
def device_presets() -> Mapping[str, Preset]:
    """Return all known devices, as presets by name."""
    file = _read_file("devices")
    texts = {name: link.source for name, link in link_presets().items()}
    for date, addresses in _read_file("references").items():
        texts |= {name: dated(address, date) for name, address in addresses.items()}
    texts = _filled(file["texts"], texts)
    tables = {**file["templates"], **file["devices"]}
    return {
        name: _preset({"name": name, **_inherited(name, tables)}, file["hosts"], texts)
        for name in file["devices"]
    }


@cache
def link_presets() -> Mapping[str, Link]:
    """Return the known links by name."""
    file = _read_file("links")
    texts = _filled(file["texts"], {})
    tables = {**file["templates"], **file["links"]}
    return {
        name: _link({"name": name, **_inherited(name, tables)}, texts) for name in file["links"]
    }


@cache
def link_protocols() -> Mapping[str, Protocols]:
    """Return the figures of NCCL's protocols on each known link, by the link's name."""
    tables = _read_file("links")["protocols"]
    return {name: Protocols(**_inherited(name, tables)) for name in tables}


def device_aliases() -> Mapping[str, str]:
    """Return the other names of known devices: a map from each alias to the name of the preset."""
    return _read_file("devices")["aliases"]  # type: ignore[no-any-return]


def link_aliases() -> Mapping[str, str]:
    """Return the other names of known links: a map from each alias to the name of the link."""
    return _read_file("links")["aliases"]  # type: ignore[no-any-return]


@cache
def _read_file(name: str) -> Table:
    import tomllib
    from importlib import resources

    return tomllib.loads((resources.files(__package__) / f"{name}.toml").read_text("utf-8"))


def dated(address: str, date: str) -> str:
    """Return the text of a web ``address`` with the date on which it was read.

    >>> dated("example.org/a100", "2026-01-31")
    'example.org/a100 (read 2026-01-31)'
    """
    return f"{address} (read {date})"


def _filled(texts: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Return ``known`` and ``texts`` joined, with each ``{name}`` in the latter replaced by its
    text."""
    filled = dict(known)
    for name, text in texts.items():
        filled[name] = text.format_map(filled)
    return filled


def _inherited(name: str, tables: Mapping[str, Table]) -> Table:
    """Return the table ``name`` merged over the table that its key ``inherits`` names, if it has
    one. ``tables``: all tables of the TOML file by name."""
    table = dict(tables[name])
    base = table.pop("inherits", None)
    return table if base is None else _merged(_inherited(base, tables), table)


def _merged(base: Table, changes: Table) -> Table:
    merged = dict(base)
    for key, value in changes.items():
        is_table = isinstance(value, dict) and key in base
        merged[key] = _merged(base[key], value) if is_table else value
    return merged


def _link(table: Table, texts: Mapping[str, str]) -> Link:
    """Return the link that a table of ``links.toml`` describes; ``texts`` fills in its source."""
    table["source"] = table["source"].format_map(texts)
    if "gigabits" in table:
        gigabits, fraction = table.pop("gigabits"), table.pop("fraction")
        table["bytes_per_second"] = gigabits / 8 * 1e9 * fraction
        spec = f"spec {gigabits:g} Gb/s per device x {fraction:g}"
        table["source"] = f"{spec}; {table['source']}"
    return read_link(table, f"links.toml: {table['name']}")


def _preset(table: Table, hosts: Mapping[str, Table], texts: Mapping[str, str]) -> Preset:
    """Return the preset that a table of ``devices.toml`` describes. ``hosts``: usual hosts by name,
    for figures of the host's memory; ``texts``: replacements of names in the sources."""
    keys = ("link", "fabric", "host_size", "detour")
    usual = {key: table.pop(key) for key in keys if key in table}
    wires = tuple((most, name) for most, name in table.pop("wires", ()))
    if "host" in table:
        table = _merged(table, _host_share(hosts[table.pop("host")]))
    if "usable_percent" in table:
        usable_bytes = parse_bytes(table["memory_bytes"]) * table.pop("usable_percent") // 100
        table["usable_memory_bytes"] = usable_bytes
    table["efficiency"] = _with_memory_families(table["efficiency"])
    table["sources"] = {key: text.format_map(texts) for key, text in table["sources"].items()}
    device = read_device(table, f"devices.toml: {table['name']}")
    return Preset(device, **usual, wires=wires)


def _host_share(host: Table) -> Table:
    """Return the figures of a GPU that depend on its usual host: its share of the host's memory and
    memory bandwidth, and the rate of its link to the host, with sources."""
    link, source = host["link"], host["source"]
    return {
        "host_link_bytes_per_second": link_presets()[link].bytes_per_second,
        "host_bytes_per_second": host["host_bytes_per_second"],
        "host_memory_bytes": host["host_memory_bytes"],
        "sources": {
            "host_link_bytes_per_second": f"{link}: {{{link}}}",
            "host_bytes_per_second": source,
            "host_memory_bytes": source,
        },
    }


def _with_memory_families(efficiency: Table) -> Table:
    """Return the ``efficiency`` of a device for all op families. Unless given, ops that only move
    memory follow from copies: elementwise ops have the same efficiency, norms 85 % of it."""
    copy = efficiency["copy"]
    memory = {"norm": round(copy * 0.85, 3), "elementwise": copy, "copy": copy}
    computing = {family: efficiency[family] for family in ("matmul", "attention", "conv")}
    return {**computing, **memory, **efficiency}


def find_preset(name: str, where: str = "") -> Preset:
    """Return the preset of a device by its name or alias, in upper or lower case. Raises
    ``ClusterError``, which names location ``where``, for an unknown name.

    >>> find_preset("a100-sxm4-40gb").device.name
    'A100-40GB'
    """
    presets = device_presets()
    return presets[_canonical(name, presets, device_aliases(), kind="device", where=where)]


def is_preset(name: str) -> bool:
    """Return true if ``name`` is the name or alias of a known device, in upper or lower case."""
    known = (*device_presets(), *device_aliases())
    return name.lower() in {each.lower() for each in known}


def find_link(name: str, where: str = "") -> Link:
    """Return a known link by its name or alias, in upper or lower case. Raises ``ClusterError``,
    which names location ``where``, for an unknown name.

    >>> find_link("NDR").name
    'infiniband-ndr'
    """
    links = link_presets()
    return links[_canonical(name, links, link_aliases(), kind="link", where=where)]


def joins_devices(link: Link) -> bool:
    """Return true if a known link joins devices within a host, and false if it joins hosts."""
    return link.name.startswith(WITHIN_HOSTS)


def _canonical(
    name: str, names: Iterable[str], aliases: Mapping[str, str], *, kind: str, where: str
) -> str:
    known = {known.lower(): known for known in names}
    known.update({alias.lower(): target for alias, target in aliases.items()})
    if name.lower() in known:
        return known[name.lower()]
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    near = list(dict.fromkeys(known[key] for key in close))
    fix = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    raise ClusterError(f"unknown {kind} {name!r}", where, fix)
