"""Clusters as TOML files, read with presets and overrides, and as plain dicts for JSON.

A file names hosts, devices and links; a preset's name stands for its table, and a table with
``preset`` overrides some of its figures. Sizes and rates may be texts (``"70GB"``,
``"400Gbit/s"``)::

    name = "two racks"
    inter_link = "infiniband-ndr"
    rack_link = { preset = "ethernet-100g", bytes_per_second = "5GB/s" }

    [[hosts]]
    count = 2
    num_devices = 8
    device = { preset = "H100", slowdown = { all_gather = 1.15, reduce_scatter = 1.25 } }
    rack = "north"

    [[hosts]]
    num_devices = 4
    device = { preset = "A100-80GB-PCIe", usable_memory_bytes = "70GB" }
    link = { preset = "nvlink3-bridge", num_links = 1 }
    wires = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    detour = "pcie4"
    rack = "south"

``inter_link`` and ``link`` default to the usual links of the devices, between hosts to the
slowest of them; ``rack_link`` joins hosts of different racks. A device and a link have the
fields of ``Device`` and ``Link``. Without a switch, ``wires`` are the links between any two devices
of a host, as rows of counts or by a name of ``gpu_links.WIRES``; the link's rate is of
``num_links`` of them, and devices that no ring of wires joins take the ``detour``. V100 hosts come
with theirs unless their ``link`` is given; ``wires = "switch"`` gives them a switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from .cluster import Cluster, ClusterError, Device, Host, Link, check_size
from .figures import (
    DEVICE_FIELDS,
    LINK_FIELDS,
    check_keys,
    read_count,
    read_device,
    read_fields,
    read_link,
    read_num_links,
    read_table,
    read_text,
)
from .given_text import check_texts, parse_toml
from .gpu_links import WIRES, Wires, wires_among
from .presets import find_link, find_preset

SWITCH = "switch"
"""Value of the key for wires that stands for a switch: every device reaches every other over all of
its links."""


def load_cluster(text: str, where: str = "cluster file") -> Cluster:
    """Return the cluster that a TOML text describes. ``where`` names the file in errors. Raises
    ``ClusterError``, which names the wrong key.

    >>> load_cluster('hosts = [{num_devices = 8, device = "H100"}]').num_devices
    8
    """
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ClusterError(f"the file is not valid TOML: {error}", where) from error
    return from_dict(table, where)


def from_dict(table: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """Return the cluster that ``table`` describes: a parsed TOML file, or a result of ``to_dict``.
    ``where`` names its origin in errors. Raises ``ClusterError``."""
    try:
        check_texts(table)
    except ValueError as error:
        raise ClusterError(str(error), where) from error
    check_keys(table, ("name", "inter_link", "rack_link", "hosts"), where)
    groups = table.get("hosts")
    if not isinstance(groups, list) or not groups:
        raise ClusterError("the cluster has no hosts", f"{where}: hosts", "add a [[hosts]] table")
    hosts: list[Host] = []
    usual: list[Link] = []
    for index, group in enumerate(groups):
        at = f"{where}: hosts[{index}]"
        count, host, fabric = _host_group(read_table(group, at), at)
        check_size(len(hosts) + count, host.num_devices, at)
        hosts += [host] * count
        usual += [find_link(fabric)] if fabric else []
    name = read_text(table.get("name", _default_name(hosts)), f"{where}: name")
    rack_link = _rack_link(table.get("rack_link"), hosts, f"{where}: rack_link")
    return Cluster(name, tuple(hosts), _inter_link(table, hosts, usual, where), rack_link)


def _inter_link(table: Mapping[str, Any], hosts: list[Host], usual: list[Link], where: str) -> Link:
    """Return the link between hosts: the link that ``table`` (the cluster file) gives, else the
    slowest of the ``usual`` links of the devices' presets. ``where`` names the file in errors."""
    at = f"{where}: inter_link"
    if "inter_link" in table:
        return _read_link(table["inter_link"], at)
    if usual:
        return min(usual, key=lambda link: link.bytes_per_second)
    if len(hosts) > 1:
        raise _missing_link("hosts", at)
    return hosts[0].link


def _rack_link(value: Any, hosts: list[Host], at: str) -> Link | None:
    """Return the link between racks that ``value`` of the cluster file describes; None if all hosts
    are in one rack. Raises ``ClusterError`` (naming location ``at``) if the link is missing
    although there are several racks, or given although there is one."""
    racks = {host.rack for host in hosts}
    if value is not None and len(racks) < 2:
        raise ClusterError(
            "a link between racks is given, but there is only one rack",
            at,
            'add rack = "NAME" to hosts',
        )
    if value is None and len(racks) > 1:
        raise _missing_link("racks", at)
    return None if value is None else _read_link(value, at)


def _missing_link(places: str, at: str) -> ClusterError:
    fix = "name a link preset, or give a table"
    return ClusterError(f"no link between the {places} is given", at, fix)


def to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return the cluster as a dict that JSON can hold, with one entry and a count for consecutive
    equal hosts. ``from_dict`` is the inverse."""
    hosts = []
    for host, run in groupby(cluster.hosts):
        group: dict[str, Any] = {
            "count": len(list(run)),
            "num_devices": host.num_devices,
            "device": _without_none(asdict(host.device)),
            "link": asdict(host.link),
        }
        if host.wires and host.detour is not None:
            group |= {"wires": [list(row) for row in host.wires], "detour": asdict(host.detour)}
        hosts.append(group | ({"rack": host.rack} if host.rack else {}))
    table: dict[str, Any] = {"name": cluster.name, "inter_link": asdict(cluster.inter_link)}
    if cluster.rack_link is not None:
        table["rack_link"] = asdict(cluster.rack_link)
    return table | {"hosts": hosts}


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _host_group(group: Mapping[str, Any], at: str) -> tuple[int, Host, str]:
    """Return (number of equal hosts, one of the hosts, name of the usual link between them or "" if
    unknown), read from ``group``, a table of the file's hosts. ``at``: its location, for errors."""
    known = ("count", "num_devices", "device", "link", "rack", "wires", "detour")
    check_keys(group, known, at)
    if "device" not in group:
        raise ClusterError("no device is given", at, 'add device = "H100", or a table')
    device, preset_name = _read_device(group["device"], f"{at}.device")
    preset = find_preset(preset_name) if preset_name else None
    if "num_devices" not in group:
        raise ClusterError("the number of devices is missing", at, "add num_devices = 8")
    num_devices = read_count(group["num_devices"], f"{at}.num_devices")
    if "link" in group:
        host = Host(device, num_devices, _read_link(group["link"], f"{at}.link"))
    elif preset:
        host = preset.host(num_devices, device)
    else:
        raise ClusterError(
            "no link within the host is given", at, 'add link = "nvlink4", or a table'
        )
    count = read_count(group.get("count", 1), f"{at}.count")
    rack = read_text(group.get("rack", ""), f"{at}.rack")
    host = _wired(replace(host, rack=rack), group, at)
    return count, host, preset.fabric if preset else ""


def _wired(host: Host, group: Mapping[str, Any], at: str) -> Host:
    """Return the host with the wires and the detour link that ``group`` gives, if any. ``group`` is
    the host's table in the cluster file, ``at`` its location, for errors."""
    if "detour" in group and "wires" not in group and not host.wires:
        raise ClusterError(
            "detour is set, but wires is not", f"{at}.detour", "add wires, as rows or a name"
        )
    detour = _read_link(group["detour"], f"{at}.detour") if "detour" in group else host.detour
    if group.get("wires") in (SWITCH, []):
        return replace(host, wires=(), detour=None)
    wires = _wires(group["wires"], host, f"{at}.wires") if "wires" in group else host.wires
    try:
        return replace(host, wires=wires, detour=detour)
    except ClusterError as error:
        raise ClusterError(error.what, f"{at}.wires", error.fix) from error


def _wires(value: Any, host: Host, at: str) -> Wires:
    """Return a host's table of wires from the file's ``value``: rows of link counts, or a name in
    ``WIRES``. ``at``: location of the value, for errors."""
    if isinstance(value, str):
        if value not in WIRES:
            raise ClusterError(
                f"unknown wires {value!r}", at, f"known: {SWITCH}, {', '.join(WIRES)}"
            )
        if host.num_devices > len(WIRES[value]):
            raise ClusterError(
                f"{value} is for {len(WIRES[value])} devices, but the host has more", at
            )
        return wires_among(WIRES[value], range(host.num_devices))
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise ClusterError(f"expected rows of counts, or a name, found {value!r}", at)
    return tuple(tuple(read_num_links(item, at) for item in row) for row in value)


def _default_name(hosts: list[Host]) -> str:
    parts = []
    for host, run in groupby(hosts):
        count = len(list(run))
        times = f"{count}x" if count > 1 else ""
        parts.append(f"{times}{host.num_devices}x{host.device.name}")
    return "+".join(parts)


def _read_device(value: Any, at: str) -> tuple[Device, str]:
    """Return the device that a cluster file's ``value`` (name of a preset, or table) describes, and
    the name of its preset ("" without a preset). ``at``: location of the value, for errors."""
    if isinstance(value, str):
        return find_preset(value, at).device, value
    table = dict(read_table(value, at))
    preset_name = read_text(table.pop("preset", ""), f"{at}.preset")
    if not preset_name:
        return read_device(table, at), ""
    values = read_fields(table, DEVICE_FIELDS, at)
    base = find_preset(preset_name, f"{at}.preset").device
    changed = {"sources": {**base.sources, **dict.fromkeys(values, at)}, **values}
    for key in ("peak_flops", "efficiency", "slowdown"):
        if key in values:
            changed[key] = {**getattr(base, key), **values[key]}
    return replace(base, **changed), preset_name


def _read_link(value: Any, at: str) -> Link:
    if isinstance(value, str):
        return find_link(value, at)
    table = dict(read_table(value, at))
    preset_name = read_text(table.pop("preset", ""), f"{at}.preset")
    if not preset_name:
        return read_link(table, at)
    values = read_fields(table, LINK_FIELDS, at)
    base = find_link(preset_name, f"{at}.preset")
    return replace(base, **{"source": f"{at}; else {base.source}", **values})
