"""``autoparallel show cluster``: devices and links that a cluster's name means, with sources."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from autoparallel.actions.terminal import stdout_console
from autoparallel.cache.database import find_profile
from autoparallel.cost_model.cluster.cluster import Cluster, Device, Link
from autoparallel.cost_model.cluster.cluster_file import to_dict
from autoparallel.cost_model.cluster.gpu_links import Wires
from autoparallel.cost_model.cluster.presets import device_presets
from autoparallel.options.results import say_json
from autoparallel.options.words import bytes_text, percent_text, rate_text, seconds_text
from autoparallel.planning.plan import find_cluster
from autoparallel.report.printing import plain_table


def cluster(*, text: str, json: bool) -> None:
    """Print the devices and links of the cluster ``text``, or all presets if ``text`` is ""."""
    if not text:
        _show_presets(json)
        return
    found = find_cluster(text)
    if json:
        say_json("cluster", to_dict(found))
        return
    hosts = f"{len(found.hosts)} host" + ("s" if len(found.hosts) > 1 else "")
    devices = f"{found.num_devices} device" + ("s" if found.num_devices > 1 else "")
    console = stdout_console()
    console.print(f"[bold]{found.name}[/]  {devices} on {hosts}")
    for device in dict.fromkeys(host.device.name for host in found.hosts):
        host = next(host for host in found.hosts if host.device.name == device)
        console.print(f"\n[bold]{device}[/]")
        console.print(figure_table(device_figures(host.device)))
    for place, link in _links(found):
        console.print(f"\n[bold]{link.name}[/] {place}")
        console.print(figure_table(link_figures(link)))
    for wires, size in dict.fromkeys((host.wires, host.num_devices) for host in found.hosts):
        if wires:
            console.print(f"\n[bold]links between two devices[/] of a host of {size}")
            console.print(wires_table(wires))
    show_measured(found, console)


def show_measured(cluster: Cluster, console: Console) -> None:
    """Print the number of measurements in the user's database for the cluster's devices, if any."""
    profile = find_profile(cluster, "auto", None)
    if profile is None:
        console.print("\nnothing measured yet (autoparallel profile TARGET)", style="dim")
        return
    counts = f"{len(profile.ops)} ops and {len(profile.transfers)} transfers"
    console.print(f"\n[bold]measured[/] {counts} on {profile.environment}")
    if profile.mismatch:
        console.print(profile.mismatch, style="yellow", markup=False)


def _links(cluster: Cluster) -> list[tuple[str, Link]]:
    hosts = [host for host in cluster.hosts if host.num_devices > 1]
    links = [("within a host", host.link) for host in hosts]
    links += [("where links form no ring", host.detour) for host in hosts if host.detour]
    if len(cluster.hosts) > 1:
        links.append(("between hosts", cluster.inter_link))
    if cluster.rack_link is not None:
        links.append(("between racks", cluster.rack_link))
    return list(dict.fromkeys(links))


Figures = list[tuple[str, str, str]]
"""Rows of the name, value and source of a number that describes a device or link."""


def device_figures(device: Device) -> Figures:
    """Return the name, value and source of each number that describes a device."""
    bandwidth = rate_text(device.memory_bytes_per_second, "B/s")
    rows = [
        ("memory", bytes_text(device.memory_bytes), "memory_bytes"),
        ("usable memory", bytes_text(device.usable_memory_bytes), "usable_memory_bytes"),
        ("bandwidth", bandwidth, "memory_bytes_per_second"),
        ("launch", seconds_text(device.launch_seconds), "launch_seconds"),
        ("launch on the host", seconds_text(device.issue_seconds), "issue_seconds"),
        ("message on the host", seconds_text(device.message_seconds), "message_seconds"),
        ("units", str(device.num_units), "num_units"),
    ]
    if device.host_link_bytes_per_second:
        link = rate_text(device.host_link_bytes_per_second, "B/s")
        share = rate_text(device.host_bytes_per_second, "B/s")
        memory = bytes_text(device.host_memory_bytes)
        rows += [
            ("link to the host", link, "host_link_bytes_per_second"),
            ("share of its bandwidth", share, "host_bytes_per_second"),
            ("share of its memory", memory, "host_memory_bytes"),
        ]
    rows += [
        (f"peak {dtype}", rate_text(rate, "FLOP/s"), "peak_flops")
        for dtype, rate in device.peak_flops.items()
    ]
    rows += [
        (f"efficiency of {family}", percent_text(share), f"efficiency.{family}")
        for family, share in device.efficiency.items()
    ]
    return [
        (name, value, device.sources.get(key, device.sources.get(key.partition(".")[0], "")))
        for name, value, key in rows
    ]


def link_figures(link: Link) -> Figures:
    """Return the name, value and source of each number that describes a link between devices."""
    rows = [
        ("bandwidth", rate_text(link.bytes_per_second, "B/s"), link.source),
        ("latency", seconds_text(link.alpha_seconds), link.source),
    ]
    if link.base_seconds:
        rows.append(("start", seconds_text(link.base_seconds), link.source))
    if link.reduction_bytes_per_second:
        rate = rate_text(link.reduction_bytes_per_second, "B/s")
        rows.append(("all-reduce in the switch", rate, link.source))
    if link.num_links:
        rows.append(("number of links", str(link.num_links), link.source))
    return rows


def wires_table(wires: Wires) -> Table:
    """Return a table of the number of direct links between each pair of devices of a host."""
    table = plain_table(("device", "right"), *((str(n), "right") for n in range(len(wires))))
    for number, row in enumerate(wires):
        table.add_row(str(number), *("-" if n == number else str(c) for n, c in enumerate(row)))
    return table


def figure_table(figures: Figures) -> Table:
    """Return a table with a row (name, value, source) per figure; a source equal to that of the row
    above is printed as "as above"."""
    table = plain_table(("figure", "left"), ("value", "right"), ("source", "left"))
    before = ""
    for name, value, source in figures:
        table.add_row(name, value, "as above" if source and source == before else source)
        before = source
    return table


def _show_presets(json: bool) -> None:

    if json:
        say_json("cluster", {name: asdict(each) for name, each in device_presets().items()})
        return
    table = plain_table(
        ("preset", "left"),
        ("memory", "right"),
        ("bandwidth", "right"),
        ("best", "right"),
        ("within a host", "left"),
    )
    for name, preset in device_presets().items():
        device = preset.device
        dtype = next((d for d in BEST_DTYPES if d in device.peak_flops), "float32")
        table.add_row(
            name,
            bytes_text(device.memory_bytes),
            rate_text(device.memory_bytes_per_second, "B/s"),
            f"{rate_text(device.peak_flops[dtype], 'FLOP/s')} {dtype}",
            preset.link,
        )
    console = stdout_console()
    console.print(table)
    console.print("\nautoparallel show cluster 8xNAME shows each figure's source", style="dim")


BEST_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes in order of preference, for the single peak FLOPS shown of each preset in the list."""
