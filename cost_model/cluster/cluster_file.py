"""Clusters as TOML files, read with presets and overrides, and as plain dicts for JSON.

A file names what is there; a preset's name stands for its table, and a table with
``preset`` overrides some of its figures. Sizes and rates may be texts (``"70GB"``,
``"400Gbit/s"``)::

    name = "two kinds"
    inter_link = "infiniband-ndr"

    [[hosts]]
    count = 2
    num_devices = 8
    device = "H100"

    [[hosts]]
    num_devices = 4
    device = { preset = "A100-80GB", usable_memory_bytes = "70GB" }
    link = { preset = "pcie4", bytes_per_second = "20GB/s" }

``inter_link`` and ``link`` default to what the devices usually come with, between hosts to
the slowest of them. Hosts that stand together name their ``rack``, and ``rack_link`` joins
hosts of different racks, ``inter_link`` those of one::

    inter_link = "infiniband-ndr"
    rack_link = { preset = "ethernet-100g", bytes_per_second = "5GB/s" }

    [[hosts]]
    count = 2
    num_devices = 8
    device = "H100"
    rack = "north"

Without a switch, ``wires`` are the links between any two devices of a host, as rows of counts
or by a name of ``wires.WIRES``; the link's rate is of ``num_links`` of them, and devices that no
ring of wires joins take the ``detour``. V100 hosts come with theirs unless their ``link`` is
given; ``wires = "switch"`` is a host of them with a switch::

    [[hosts]]
    num_devices = 4
    device = "A100-80GB-PCIe"
    link = { preset = "nvlink3-bridge", num_links = 1 }
    wires = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    detour = "pcie4"

``slowdown`` says how much longer a device computes while a collective of gradients or parameters
runs beside it, by kind of collective::

    [[hosts]]
    num_devices = 8
    device = { preset = "H100", slowdown = { all_gather = 1.15, reduce_scatter = 1.25 } }

``message_seconds`` of a device is what its host takes to send or to receive a message of a
pipeline while the device waits (gloo): 0 by default.

What a GPU's share of its host is for states of the optimizer that are kept there: the rate of
copies between the two, and its share of the rate and of the size of the host's memory::

    device = { preset = "H100", host_link_bytes_per_second = "50GB/s",
               host_bytes_per_second = "70GB/s", host_memory_bytes = "250GB" }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, replace
from itertools import groupby
from math import isfinite
from typing import Any

from .cluster import STATE_COLLECTIVES, Cluster, ClusterError, Device, Host, Link
from .gpu_links import WIRES, Wires, wires_among
from .presets import find_link, find_preset
from .quantity import parse_bytes, parse_rate
from .tf32 import FAMILIES

SWITCH = "switch"
"""In place of wires: every device reaches every other over all of its links."""

_Convert = Callable[[Any, str], Any]


def load_cluster(text: str, where: str = "cluster file") -> Cluster:
    """The cluster that a TOML text describes. ``where`` names the file in errors.

    Raises ``ClusterError`` with the key that is wrong.

    >>> load_cluster('hosts = [{num_devices = 8, device = "H100"}]').num_devices
    8
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"the file is not valid TOML: {error}", where) from error
    return from_dict(table, where)


def from_dict(table: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """The cluster of a dict as ``to_dict`` or a TOML file gives it. Raises ``ClusterError``."""
    _check_keys(table, ("name", "inter_link", "rack_link", "hosts"), where)
    groups = table.get("hosts")
    if not isinstance(groups, list) or not groups:
        raise ClusterError("the cluster has no hosts", f"{where}: hosts", "add a [[hosts]] table")
    hosts: list[Host] = []
    usual: list[Link] = []
    for index, group in enumerate(groups):
        at = f"{where}: hosts[{index}]"
        count, host, fabric = _host_group(_table(group, at), at)
        hosts += [host] * count
        usual += [find_link(fabric)] if fabric else []
    name = _text(table.get("name", _default_name(hosts)), f"{where}: name")
    rack_link = _rack_link(table.get("rack_link"), hosts, f"{where}: rack_link")
    return Cluster(name, tuple(hosts), _inter_link(table, hosts, usual, where), rack_link)


def _inter_link(table: Mapping[str, Any], hosts: list[Host], usual: list[Link], where: str) -> Link:
    """The link between hosts: as given, else the slowest usual one."""
    at = f"{where}: inter_link"
    if "inter_link" in table:
        return _link(table["inter_link"], at)
    if usual:
        return min(usual, key=lambda link: link.bytes_per_second)
    if len(hosts) > 1:
        raise ClusterError(
            "no link between the hosts is given", at, "name a link preset, or give a table"
        )
    return hosts[0].link


def _rack_link(value: Any, hosts: list[Host], at: str) -> Link | None:
    """The link between racks; there must be one exactly where there are several racks."""
    racks = {host.rack for host in hosts}
    if value is not None and len(racks) < 2:
        raise ClusterError(
            "a link between racks is given, but there is only one rack",
            at,
            'add rack = "NAME" to hosts',
        )
    if value is None and len(racks) > 1:
        raise ClusterError(
            "no link between the racks is given", at, "name a link preset, or give a table"
        )
    return None if value is None else _link(value, at)


def to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster as JSON can hold it, equal hosts in a row counted; ``from_dict`` inverts it."""
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


def dump_cluster(cluster: Cluster) -> str:
    """The cluster as TOML with every figure; ``load_cluster`` gives an equal cluster back."""
    table = to_dict(cluster)
    lines = [f"name = {_toml(table['name'])}"]
    for key in ("inter_link", "rack_link"):
        if key in table:
            _dump_table(lines, f"[{key}]", table[key])
    for group in table["hosts"]:
        plain = ("count", "num_devices", "rack", "wires")
        _dump_table(lines, "[[hosts]]", {key: group[key] for key in plain if key in group})
        for key in ("link", "detour", "device"):
            if key in group:
                _dump_table(lines, f"[hosts.{key}]", group[key])
    return "\n".join(lines) + "\n"


def _dump_table(lines: list[str], header: str, table: Mapping[str, Any]) -> None:
    lines += ["", header]
    lines += [f"{key} = {_toml(value)}" for key, value in table.items()]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(list(value) if isinstance(value, tuple) else value)


def _host_group(group: Mapping[str, Any], at: str) -> tuple[int, Host, str]:
    """(how many equal hosts, one of them, the usual link between such hosts or "")."""
    known = ("count", "num_devices", "device", "link", "rack", "wires", "detour")
    _check_keys(group, known, at)
    if "device" not in group:
        raise ClusterError("no device is given", at, 'add device = "H100", or a table')
    device, preset_name = _device(group["device"], f"{at}.device")
    preset = find_preset(preset_name) if preset_name else None
    if "num_devices" not in group:
        raise ClusterError("the number of devices is missing", at, "add num_devices = 8")
    num_devices = _count(group["num_devices"], f"{at}.num_devices")
    if "link" in group:
        host = Host(device, num_devices, _link(group["link"], f"{at}.link"))
    elif preset:
        host = preset.host(num_devices, device)
    else:
        raise ClusterError(
            "no link within the host is given", at, 'add link = "nvlink4", or a table'
        )
    count = _count(group.get("count", 1), f"{at}.count")
    rack = _text(group.get("rack", ""), f"{at}.rack")
    host = _wired(replace(host, rack=rack), group, at)
    return count, host, preset.fabric if preset else ""


def _wired(host: Host, group: Mapping[str, Any], at: str) -> Host:
    """A host with the wires that its table has, if any."""
    if "detour" in group and "wires" not in group and not host.wires:
        raise ClusterError(
            "detour is set, but wires is not", f"{at}.detour", "add wires, as rows or a name"
        )
    detour = _link(group["detour"], f"{at}.detour") if "detour" in group else host.detour
    if group.get("wires") in (SWITCH, []):
        return replace(host, wires=(), detour=None)
    wires = _wires(group["wires"], host, f"{at}.wires") if "wires" in group else host.wires
    try:
        return replace(host, wires=wires, detour=detour)
    except ClusterError as error:
        raise ClusterError(error.what, f"{at}.wires", error.fix) from error


def _wires(value: Any, host: Host, at: str) -> Wires:
    """Rows of counts, or the first devices of wires with a name."""
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
    return tuple(tuple(_links(item, at) for item in row) for row in value)


def _links(value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ClusterError(f"expected a number of links, found {value!r}", at)
    return value


def _default_name(hosts: list[Host]) -> str:
    parts = []
    for host, run in groupby(hosts):
        count = len(list(run))
        times = f"{count}x" if count > 1 else ""
        parts.append(f"{times}{host.num_devices}x{host.device.name}")
    return "+".join(parts)


def _device(value: Any, at: str) -> tuple[Device, str]:
    """The device, and the name of its preset or ""."""
    if isinstance(value, str):
        return find_preset(value, at).device, value
    table = dict(_table(value, at))
    preset_name = _text(table.pop("preset", ""), f"{at}.preset")
    values = _fields(table, _DEVICE_FIELDS, at)
    if preset_name:
        base = find_preset(preset_name, f"{at}.preset").device
        changed = {"sources": {**base.sources, **dict.fromkeys(values, at)}, **values}
        for key in ("peak_flops", "efficiency", "slowdown"):
            if key in values:
                changed[key] = {**getattr(base, key), **values[key]}
        return replace(base, **changed), preset_name
    values.setdefault("usable_memory_bytes", values.get("memory_bytes"))
    _check_required(values, Device, at)
    if not values["peak_flops"]:
        raise ClusterError("no peak rate is given", f"{at}.peak_flops", "add { float32 = 19.5e12 }")
    return Device(**values), ""


def _link(value: Any, at: str) -> Link:
    if isinstance(value, str):
        return find_link(value, at)
    table = dict(_table(value, at))
    preset_name = _text(table.pop("preset", ""), f"{at}.preset")
    values = _fields(table, _LINK_FIELDS, at)
    if preset_name:
        base = find_link(preset_name, f"{at}.preset")
        return replace(base, **{"source": f"{at}; else {base.source}", **values})
    _check_required(values, Link, at)
    return Link(**values)


def _fields(table: Mapping[str, Any], known: Mapping[str, _Convert], at: str) -> dict[str, Any]:
    _check_keys(table, tuple(known), at)
    return {key: known[key](value, f"{at}.{key}") for key, value in table.items()}


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    for key in table:
        if key not in known:
            raise ClusterError(f"unknown key {key!r}", at, f"known: {', '.join(known)}")


def _check_required(values: Mapping[str, Any], kind: type[Device] | type[Link], at: str) -> None:
    for entry in fields(kind):
        needed = entry.default is MISSING and entry.default_factory is MISSING
        if needed and values.get(entry.name) is None:
            raise ClusterError(
                f"{entry.name} is missing", at, f"add {entry.name}, or name a preset"
            )


def _table(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ClusterError(f"expected a table, found {value!r}", at)
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise ClusterError(f"expected a string, found {value!r}", at)
    return value


def _number(value: Any, at: str, *, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ClusterError(f"expected a number, found {value!r}", at)
    if value < least:
        raise ClusterError(f"expected at least {least:g}, found {value!r}", at)
    return float(value)


def _positive(value: Any, at: str) -> float:
    number = _number(value, at)
    if number <= 0:
        raise ClusterError(f"expected more than 0, found {value!r}", at)
    return number


def _slowdowns(value: Any, at: str) -> dict[str, float]:
    found = {}
    for key, item in _table(value, at).items():
        if key not in STATE_COLLECTIVES:
            known = ", ".join(STATE_COLLECTIVES)
            raise ClusterError(f"unknown collective {key!r}", at, f"known: {known}")
        found[key] = _number(item, f"{at}.{key}")
        if not found[key] >= 1:
            raise ClusterError(f"expected at least 1, found {item!r}", f"{at}.{key}")
    return found


def _count(value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"expected a whole number of at least 1, found {value!r}", at)
    return value


def _bytes(value: Any, at: str) -> int:
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise ClusterError(str(error), at) from error
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    return _count(value, at)


def _rate(value: Any, at: str, *, convert: _Convert = _positive) -> float:
    if isinstance(value, str):
        try:
            value = parse_rate(value)
        except ValueError as error:
            raise ClusterError(str(error), at) from error
    return float(convert(value, at))


def _kind(value: Any, at: str) -> str:
    if value not in ("cuda", "cpu"):
        raise ClusterError(f"expected cuda or cpu, found {value!r}", at)
    return str(value)


def _families(value: Any, at: str) -> tuple[str, ...]:
    known = FAMILIES["all"]
    if not isinstance(value, list | tuple) or any(each not in known for each in value):
        raise ClusterError(f"expected a list of {' and '.join(known)}, found {value!r}", at)
    return tuple(sorted(set(value)))


def _map_of(convert: _Convert) -> _Convert:
    def convert_all(value: Any, at: str) -> dict[str, Any]:
        table = _table(value, at)
        return {key: convert(item, f"{at}.{key}") for key, item in table.items()}

    return convert_all


_DEVICE_FIELDS: Mapping[str, _Convert] = {
    "name": _text,
    "kind": _kind,
    "memory_bytes": _bytes,
    "usable_memory_bytes": _bytes,
    "memory_bytes_per_second": _rate,
    "peak_flops": _map_of(_positive),
    "efficiency": _map_of(_positive),
    "launch_seconds": _number,
    "issue_seconds": _number,
    "message_seconds": _number,
    "host_link_bytes_per_second": lambda value, at: _rate(value, at, convert=_number),
    "host_bytes_per_second": lambda value, at: _rate(value, at, convert=_number),
    "host_memory_bytes": lambda value, at: _bytes(value, at) if value != 0 else 0,
    "num_units": lambda value, at: _count(value, at) if value != 0 else 0,
    "dollars_per_hour": _number,
    "tf32": _families,
    "slowdown": _slowdowns,
    "sources": _map_of(_text),
}
_LINK_FIELDS: Mapping[str, _Convert] = {
    "name": _text,
    "alpha_seconds": _number,
    "bytes_per_second": _rate,
    "source": _text,
    "base_seconds": _number,
    "reduction_bytes_per_second": lambda value, at: _rate(value, at, convert=_number),
    "num_links": _links,
    "of_links": _links,
}
