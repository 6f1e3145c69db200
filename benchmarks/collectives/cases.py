"""Published collective times as cases for the cost model, and the error over them.

In: ``data/nccl.csv``, facts compiled from public sources, one row per measurement with its
source. Out: for each row that says a size and a time, or a bandwidth from which the time
follows, the group of ranks it ran on; and why each other row was left out.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

from autoparallel.cost_model.cluster.cluster import Link
from autoparallel.cost_model.cluster.presets import Protocols, find_link
from autoparallel.cost_model.collectives.collectives import Group, collective_seconds, p2p_seconds

DATA = Path(__file__).parent / "data" / "nccl.csv"
SMALLEST_BYTES = 16384
"""Below, a time is the start of a collective and little else."""

INTRA = {
    "V100": "nvlink2",
    "A100": "nvlink3",
    "not stated": "nvlink3",
    "H100": "nvlink4",
    "H200": "nvlink4",
    "B200": "nvlink5",
    "GB300": "nvlink5",
}
INTER = {
    "EFA v1 4x100": "efa-p4d",
    "EFA v2 32x100": "efa-p5",
    "EFA v3 16x200": "efa-p5",
    "EFA v4 8x400": "efa-p5",
    "TCPXO": "gpudirect-tcpxo",
    "4x200Gb/s IB": "infiniband-hdr-shared",
    "HDR 200Gb/s": "infiniband-hdr-shared",
    "8x400Gb/s": "infiniband-ndr",
    "A4X Max": "infiniband-xdr",
}
"""By what the interconnect's text holds."""
FAULTY = {
    "bigscience-workshop": "the authors report a fault of NCCL on Omni-Path",
    "NVIDIA/nccl#1031": "an issue about a degraded network",
    "NVIDIA/nccl#1048": "no size; an issue about a slow network",
    "NVIDIA/nccl#652": "the network is not stated",
}
BANDS = ((SMALLEST_BYTES, 2**20), (2**20, 2**22), (2**22, 2**26), (2**26, 2**28), (2**28, 2**40))


@dataclass(frozen=True, slots=True)
class Case:
    """One published time and the group it was measured on."""

    source: str
    gpu: str
    kind: str
    group: Group
    num_bytes: int
    seconds: float
    notes: str

    @property
    def network(self) -> str:
        """The link that it is a measurement of."""
        return self.group.inter.name if self.group.num_hosts > 1 else self.group.intra.name


def read_cases(path: Path = DATA) -> tuple[list[Case], dict[str, int]]:
    """The cases, and how many rows were left out for which reason."""
    cases: list[Case] = []
    left_out: dict[str, int] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            case = _case(row)
            if isinstance(case, Case):
                cases.append(case)
            else:
                left_out[case] = left_out.get(case, 0) + 1
    return cases, left_out


def _case(row: Mapping[str, str]) -> Case | str:
    if row["kind"] != "measured":
        return f"not a measurement but a {row['kind']}"
    if row["gpu_type"].startswith("MI"):
        return "a device without a preset"
    faulty = row["source"] + row["interconnect"]
    for text, reason in FAULTY.items():
        if text in faulty and row["n_nodes"] != "1":
            return reason
    if "copy" in row["collective"] or not row["size_bytes"]:
        return "no size" if "copy" not in row["collective"] else "a copy, not a message"
    if "forced" in row["algo"] and "NVLSTree" in row["algo"]:
        return "an algorithm that NCCL does not choose there"
    num_bytes, ranks = int(row["size_bytes"]), int(row["n_gpus"])
    if num_bytes < SMALLEST_BYTES:
        return f"under {SMALLEST_BYTES} bytes"
    seconds = _seconds(row, num_bytes, ranks)
    if seconds is None:
        return "no time"
    group = _group(row, ranks)
    source = row["source"].split(" ")[0] if "GitHub" not in row["source"] else row["source"]
    source += " ND" + row["gpu_type"][:4] if source.startswith("Azure") else ""
    gpu = row["gpu_type"].split("-")[0].split(" (")[0]
    return Case(source, gpu, row["collective"], group, num_bytes, seconds, row["notes"])


def _seconds(row: Mapping[str, str], num_bytes: int, ranks: int) -> float | None:
    """The time, or what follows from the bus bandwidth as nccl-tests defines it."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    if not row["busbw_GBps"] or float(row["busbw_GBps"]) < 1.0:
        return None
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "sendrecv": 1.0}
    return (
        share.get(row["collective"], (ranks - 1) / ranks)
        * num_bytes
        / float(row["busbw_GBps"])
        / 1e9
    )


def _group(row: Mapping[str, str], ranks: int) -> Group:
    hosts = int(row["n_nodes"])
    intra = next(name for text, name in INTRA.items() if row["gpu_type"].startswith(text))
    wire = row["interconnect"]
    inter = next((name for text, name in INTER.items() if text in wire), "infiniband-ndr")
    link = find_link(intra)
    if (
        "off" in row["algo"]
        or "NVLS_ENABLE=0" in row["algo"]
        or "NVLS apparently off" in row["notes"]
    ):
        link = without_switch(link)
    return Group(ranks, ranks // hosts, hosts, link, find_link(inter), library="nccl")


def without_switch(link: Link) -> Link:
    """The link where the switch's sums are turned off."""
    return replace(link, reduction_bytes_per_second=0.0)


def predicted_seconds(case: Case, protocols: Mapping[str, Protocols] | None = None) -> float:
    """What the cost model says."""
    if case.kind == "sendrecv":
        return p2p_seconds(case.num_bytes, case.group.intra, protocols=protocols)
    return collective_seconds(case.kind, case.num_bytes, case.group, protocols=protocols)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Error:
    """Over cases: the mean of |log(predicted/measured)|, and of its signed value."""

    num_cases: int
    mean_abs_log: float
    bias: float

    def text(self) -> str:
        """In percent, as factors."""
        return (
            f"{self.num_cases:4d}  {100 * (exp(self.mean_abs_log) - 1):5.1f} %"
            f"  {100 * (exp(self.bias) - 1):+6.1f} %"
        )


def error(cases: Iterable[Case], predict: Callable[[Case], float] = predicted_seconds) -> Error:
    """The error of ``predict`` over ``cases``."""
    logs = [log(predict(case) / case.seconds) for case in cases]
    count = max(len(logs), 1)
    return Error(len(logs), sum(map(abs, logs)) / count, sum(logs) / count)


def band_of(num_bytes: int) -> str:
    """The name of a size's band."""
    low, high = next(band for band in BANDS if band[0] <= num_bytes < band[1])
    return f"{_size(low)}-{_size(high) if high < 2**40 else ''}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 2**20 else f"{num_bytes >> 10} KiB"


def grouped(
    cases: Sequence[Case], key: Callable[[Case], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Case]]:
    """The cases by ``key``, in the order they come."""
    found: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        found.setdefault(key(case), []).append(case)
    return found
