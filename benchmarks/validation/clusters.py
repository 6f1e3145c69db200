"""The clusters of the published runs, from what their rows say.

In: a GPU's name, how many, how many in a host, and the interconnect in words. Out: a cluster of
the cost model's presets: the device's, NVLink of the stated generation, and a network whose
stated rate is reached to the same fraction as that of the nearest preset. A device without a
preset is the nearest one with the memory and bandwidth of ``data/hardware.csv``.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError, Device, Host, Link
from autoparallel.cost_model.cluster.presets import Preset, find_link, find_preset

HARDWARE = Path(__file__).with_name("data") / "hardware.csv"
SPELLINGS = {
    "V100-16GB-SXM2": "V100-SXM2-16GB",
    "V100-32GB-SXM3": "V100-SXM3-32GB",
    "A100-80GB-SXM4": "A100-SXM4-80GB",
    "A100-40GB-SXM4": "A100-SXM4-40GB",
    "H100-80GB-SXM5": "H100-SXM5-80GB",
    "H200-141GB-SXM5": "H200-SXM5-141GB",
    "H100-96GB-HBM2e-500W": "H100-96GB",
    "B300-270GB": "B300",
    "MI355X-288GB": "MI355X",
}
WITHOUT_SWITCH = ("hybrid-cube-mesh", "p3.")
"""Words of an interconnect whose hosts have wires between their devices."""
FABRICS = (
    ("EFA", "efa-p4d", 50.0),
    ("IB", "infiniband-hdr", 200.0),
    ("RDMA", "infiniband-hdr", 200.0),
    ("RoCE", "infiniband-hdr", 200.0),
    ("Omni-Path", "infiniband-hdr", 200.0),
    ("AWS", "ethernet-100g", 100.0),
)
"""Words of an interconnect, the preset whose latency and reached fraction it takes, and the
gigabits per second and device that this preset is specified with."""


@cache
def make_cluster(
    gpu: str, num_devices: int, per_host: int, interconnect: str
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster, and what had to be assumed. Raises ClusterError where it is not known."""
    device, preset, assumed = _device(gpu)
    size = min(per_host, num_devices)
    if "NVL72" in interconnect:  # trays of 4 in one domain of NVLink
        size = max(n for n in range(1, 73) if num_devices % n == 0)
    if num_devices % size:
        raise ClusterError(f"{num_devices} devices in hosts of {per_host}")
    generation = re.search(r"NVLink\s?(\d)", interconnect)
    intra = find_link(f"nvlink{generation[1]}" if generation else preset.link)
    inter = _fabric(interconnect, size)
    if inter is None:
        inter = find_link(preset.fabric)
        assumed += ("fabric",) if num_devices > size else ()
    host = Host(device, size, intra)
    if any(word in interconnect for word in WITHOUT_SWITCH) and preset.wires:
        host = preset.host(size, device)
    name = f"{num_devices // size}x{size}x{device.name}"
    return Cluster(name, (host,) * (num_devices // size), inter), assumed


def _device(gpu: str) -> tuple[Device, Preset, tuple[str, ...]]:
    word = gpu.split()[0] if gpu else ""
    try:
        preset = find_preset(SPELLINGS.get(word, word))
    except ClusterError:
        return _nearest(gpu, word)
    return preset.device, preset, ()


def _nearest(gpu: str, word: str) -> tuple[Device, Preset, tuple[str, ...]]:
    """The preset of the same chip with another memory."""
    chip = word.partition("-")[0]
    with HARDWARE.open(newline="", encoding="utf-8") as file:
        rows = {row["device"].split()[0]: row for row in csv.DictReader(file)}
    row = rows.get(word)
    if row is None or not row["hbm_gb"].strip():
        raise ClusterError(f"no figures for the device {gpu!r}")
    try:
        preset = find_preset(chip)
    except ClusterError as error:
        raise ClusterError(f"no preset for the device {gpu!r}") from error
    num_bytes = int(float(row["hbm_gb"]) * 1e9)
    device = replace(
        preset.device,
        name=word,
        memory_bytes=num_bytes,
        usable_memory_bytes=num_bytes * 99 // 100,
        memory_bytes_per_second=float(row["hbm_GBps"]) * 1e9,
    )
    return device, preset, ("peak of the device",)


def _fabric(text: str, per_host: int) -> Link | None:
    """The link between hosts that a text states, per device; None where it states no rate."""
    gigabits = stated_gigabits(text, per_host)
    if gigabits is None:
        return None
    named = [each for each in FABRICS if each[0] in text]
    _, name, specified = named[0] if named else ("", "infiniband-hdr", 200.0)
    link = find_link(name)
    rate = link.bytes_per_second * gigabits / specified
    return replace(link, bytes_per_second=rate, source=f"{link.source}; {gigabits:g} Gb/s stated")


def stated_gigabits(text: str, per_host: int) -> float | None:
    """Gigabits per second and device between hosts.

    >>> stated_gigabits("NVLink4; 8x400Gb/s NDR IB per node", 8)
    400.0
    >>> stated_gigabits("NVLink2; 25 Gb/s per node", 8), stated_gigabits("NVLink3", 8)
    (3.125, None)
    """
    cards = re.search(r"(\d+)x\s?(\d+)\s?Gb/s", text)
    if cards:
        return float(cards[1]) * float(cards[2]) / per_host
    own = re.search(r"(\d+)\s?Gb/s[^;]*per GPU", text)
    if own:
        return float(own[1])
    host = re.search(r"(\d+)\s?Gb(?:/s|ps)", text)
    return float(host[1]) / per_host if host else None
