"""Devices by name, with the links they usually come with; every figure with its source.

Peaks are dense (no structured sparsity); those in float32 are without TF32, which has its own
("tfloat32", half of bfloat16's by the vendor's data sheets). Memory is what
nvidia-smi shows. Facts compiled from vendors' data sheets and published measurements.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .cluster import ClusterError, Device, Host, Link
from .link_presets import INTRA_PREFIXES, LINK_ALIASES, LINKS
from .wires import WIRES, wires_among

MIB = 2**20
_SPEED_MONITOR = "mosaicml/composer@003ec03 speed_monitor.py, citing NVIDIA's data sheet"
_ML_ENGINEERING = "stas00/ml-engineering@744d01e compute/accelerator/README.md"
_AZURE = "Azure/AI-benchmarking-guide@8fd0c6e"
_RECALLED = "vendor's figure, recalled and not checked"
_DATASHEET = "NVIDIA data sheet"
_LARGE_MATMUL = (
    f"x 0.94, what large square matmuls on A100 (253.7 TFLOP/s at 8192, {_AZURE}) reach of the "
    "best shape's rate (271.2)"
)
_ESTIMATE = "estimate, no published measurement at hand"
_LAUNCH = f"fitted on products of 1024 on A100 and H100 ({_AZURE})"
_ISSUE = "estimate: PyTorch's eager dispatch of an op under autograd on a server's core"
_UNITS = f"SMs: {_RECALLED}"


@dataclass(frozen=True, slots=True)
class _HostShare:
    """What a GPU has of its usual host: a link, and an eighth of the memory and of its rate."""

    link: str
    bytes_per_second: float
    memory_bytes: int
    text: str

    @property
    def sources(self) -> dict[str, str]:
        return {
            "host_link_bytes_per_second": f"{self.link}: {LINKS[self.link].source}",
            "host_bytes_per_second": f"an eighth of {self.text}; {_RECALLED}",
            "host_memory_bytes": f"an eighth of {self.text}; {_RECALLED}",
        }


_DGX_1 = _HostShare(
    "pcie3", 19.2e9, 64 * 10**9, "a DGX-1's 2 Xeons of 4 channels DDR4-2400, 512 GB"
)
_DGX_A100 = _HostShare(
    "pcie4", 51.2e9, 128 * 10**9, "a DGX A100's 2 EPYCs of 8 channels DDR4-3200, 1 TB"
)
_DGX_H100 = _HostShare(
    "pcie5", 76.8e9, 256 * 10**9, "a DGX H100's 2 Xeons of 8 channels DDR5-4800, 2 TB"
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A device, the names of the links in and between its usual hosts, the devices of a host.

    ``wires`` are the names of those of hosts without a switch, each with the most devices that
    it is for, in rising order.
    """

    device: Device
    link: str
    fabric: str
    host_size: int = 8
    wires: tuple[tuple[int, str], ...] = ()

    def host(self, num_devices: int, device: Device | None = None) -> Host:
        """So many of these devices, or of ``device``, as they are usually joined.

        >>> find_preset("V100-16GB").host(4).link_among((0, 1)).num_links
        1
        """
        own, link = device or self.device, LINKS[self.link]
        for most, name in self.wires:
            if 1 < num_devices <= most:
                wires = wires_among(WIRES[name], range(num_devices))
                return Host(own, num_devices, link, wires=wires, detour=LINKS["pcie3"])
        return Host(own, num_devices, link)


def _gpu(
    name: str,
    *,
    memory_mib: int,
    bandwidth_gb: float,
    tflops: Mapping[str, float],
    efficiency: Mapping[str, float],
    sources: Mapping[str, str],
    num_units: int,
    host: _HostShare,
) -> Device:
    memory_bytes = memory_mib * MIB
    common = {
        "memory_bytes": "nvidia-smi",
        "usable_memory_bytes": "memory less 1 % that the driver keeps",
        "launch_seconds": _LAUNCH,
        "issue_seconds": _ISSUE,
        "num_units": _UNITS,
    }
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=memory_bytes,
        usable_memory_bytes=memory_bytes * 99 // 100,
        memory_bytes_per_second=bandwidth_gb * 1e9,
        peak_flops={dtype: value * 1e12 for dtype, value in tflops.items()},
        efficiency=efficiency,
        launch_seconds=2e-6,
        issue_seconds=8e-6,
        num_units=num_units,
        sources={**common, **sources, **host.sources},
        host_link_bytes_per_second=LINKS[host.link].bytes_per_second,
        host_bytes_per_second=host.bytes_per_second,
        host_memory_bytes=host.memory_bytes,
    )


def _families(matmul: float, attention: float, conv: float, memory: float) -> dict[str, float]:
    """Efficiencies: of the peak for the first three, of the bandwidth for the rest."""
    return {
        "matmul": matmul, "attention": attention, "conv": conv,
        "norm": round(memory * 0.85, 3), "elementwise": memory, "copy": memory,
    }  # fmt: skip


def _sources(peak: str, bandwidth: str, matmul: str, attention: str, memory: str) -> dict[str, str]:
    return {
        "peak_flops": peak,
        "memory_bytes_per_second": bandwidth,
        "efficiency.matmul": matmul,
        "efficiency.attention": attention,
        "efficiency.conv": _ESTIMATE,
        "efficiency.copy": memory,
        "efficiency.elementwise": "as copy",
        "efficiency.norm": "copy x 0.85; " + _ESTIMATE,
    }


_V100_SOURCES = _sources(
    f"{_SPEED_MONITOR}; float64: {_RECALLED}",
    "Dell EMC reference guide, p. 17",
    _ESTIMATE,
    _ESTIMATE,
    _ESTIMATE,
)
_A100_ATTENTION = (
    "recalled from FlashAttention-2 (Dao 2023), not checked: 50 to 73 % forward, less backward"
)
_A100_MEMORY = f"measured 1610 to 1750 of 2039 GB/s ({_AZURE})"
_A100_TFLOPS = {"float64": 19.5, "float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312}
_A100_PEAK = f"{_SPEED_MONITOR}; float64 by tensor cores: {_RECALLED}"
_A100_MATMUL = (
    f"0.82 measured: 253.7 to 256.5 of 312 TFLOP/s at 8192 and 16384 ({_AZURE}); less 3 %, which "
    "fits training steps on 64 to 512 A100 (VIA-Research/vTrain, multi node: 0.78 to 0.8)"
)
_A100_PCIE_MATMUL = f"measured 252.9 of 312 TFLOP/s at the best shape ({_ML_ENGINEERING}) "
_HOPPER_ATTENTION = (
    "recalled, not checked: "
    "PyTorch's FlashAttention-2 kernel reaches 35 to 40 % of the peak (FlashAttention-3, "
    "Shah et al. 2024, section 1)"
)
_HOPPER_TFLOPS = {
    "float64": 67, "float32": 67, "tfloat32": 494.5, "bfloat16": 989, "float16": 989,
    "float8_e4m3fn": 1979, "float8_e5m2": 1979,
}  # fmt: skip
_HOPPER_PEAK = f"{_ML_ENGINEERING}; float64 by tensor cores: {_RECALLED}"
_HOPPER_MATMUL = (
    "0.7 is between what Llama 8B (0.66) and Nemotron 15B (0.74) fit in bfloat16 on 8 and 16 "
    "H100 (NVIDIA/dgxc-benchmarking@v25.02); bursts at the best shape reach 794.5 of 989 "
    f"TFLOP/s ({_ML_ENGINEERING}), FP8 products of 16384 and 32768 1366 to 1382 of 1979 ({_AZURE})"
)
_GRAND_TETON = (
    "fitted on one run, Llama 8B on 8 GPUs compiled in bfloat16 (pytorch/torchtitan@b5bcd76, "
    "llama3_h100_202412); a limit of 500 W where the SXM5 card has 700 W"
)


def _v100(name: str, memory_mib: int) -> Device:
    return _gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=900,
        tflops={"float64": 7.8, "float32": 15.7, "float16": 125},
        efficiency=_families(0.72, 0.3, 0.5, 0.85),
        sources=_V100_SOURCES,
        num_units=80,
        host=_DGX_1,
    )


def _a100(name: str, memory_mib: int, bandwidth_gb: float, *, pcie: bool) -> Device:
    matmul = _A100_PCIE_MATMUL + _LARGE_MATMUL if pcie else _A100_MATMUL
    bandwidth = "techpowerup; glennklockwood.com; thundercompute A100 table"
    return _gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=bandwidth_gb,
        tflops=_A100_TFLOPS,
        efficiency=_families(0.76 if pcie else 0.8, 0.5, 0.55, 0.83),
        sources=_sources(_A100_PEAK, bandwidth, matmul, _A100_ATTENTION, _A100_MEMORY),
        num_units=108,
        host=_DGX_A100,
    )


def _hopper(name: str, memory_mib: int, bandwidth_gb: float, memory: float, text: str) -> Device:
    sources = _sources(_HOPPER_PEAK, _ML_ENGINEERING, _HOPPER_MATMUL, _HOPPER_ATTENTION, text)
    return _gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=bandwidth_gb,
        tflops=_HOPPER_TFLOPS,
        efficiency=_families(0.7, 0.38, 0.5, memory),
        sources=sources,
        num_units=132,
        host=_DGX_H100,
    )


_H100_MEMORY = f"measured 2900 to 3180 of 3350 GB/s ({_AZURE})"
_H200_MEMORY = f"measured 4000 to 4480 of 4800 GB/s ({_AZURE})"

_H100_PCIE = _gpu(
    "H100-PCIe",
    memory_mib=81559,
    bandwidth_gb=2000,
    tflops={
        "float64": 51, "float32": 51, "tfloat32": 378, "bfloat16": 756, "float16": 756,
        "float8_e4m3fn": 1513, "float8_e5m2": 1513,
    },
    efficiency=_families(0.65, 0.35, 0.45, 0.9),
    sources=_sources(_HOPPER_PEAK, _ML_ENGINEERING, _ESTIMATE, _HOPPER_ATTENTION, _H100_MEMORY),
    num_units=114,
    host=_DGX_H100,
)  # fmt: skip
_H100_96GB = _hopper("H100-96GB", 97871, 2400, 0.91, _H100_MEMORY)
_H100_96GB = replace(
    _H100_96GB,
    efficiency={**_H100_96GB.efficiency, "matmul": 0.49, "attention": 0.27},
    sources={
        **_H100_96GB.sources,
        "peak_flops": f"taken as the SXM5 card's; {_ML_ENGINEERING}",
        "memory_bytes_per_second": "pytorch/torchtitan@b5bcd76 llama3_h100_202412_torchtitan.md",
        "efficiency.matmul": _GRAND_TETON,
        "efficiency.attention": "the SXM5 card's share x 0.7, as of products: the limit of 500 W",
        "memory_bytes": _RECALLED,
    },
)


def _nvl(name: str, memory_mib: int, bandwidth_gb: float, memory: float, text: str) -> Device:
    """A PCIe card of which two (H200: up to four) have a bridge, which is left out here."""
    found = _hopper(name, memory_mib, bandwidth_gb, memory, text)
    peak = {
        "float64": 60e12, "float32": 60e12, "tfloat32": 417.5e12, "bfloat16": 835e12,
        "float16": 835e12, "float8_e4m3fn": 1670.5e12, "float8_e5m2": 1670.5e12,
    }  # fmt: skip
    own = {"peak_flops": f"{_DATASHEET}, {_RECALLED}", "memory_bytes": _RECALLED}
    return replace(found, peak_flops=peak, sources={**found.sources, **own})


def _blackwell(name: str, memory_mib: int, tflops: float, matmul: str) -> Device:
    return _gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=8000,
        tflops={
            "float32": 80, "tfloat32": tflops / 2, "bfloat16": tflops, "float16": tflops,
            "float8_e4m3fn": 2 * tflops, "float8_e5m2": 2 * tflops,
        },
        efficiency=_families(0.7, 0.35, 0.45, 0.88),
        sources=_sources(_ML_ENGINEERING, _ML_ENGINEERING, matmul, _ESTIMATE, _ESTIMATE),
        num_units=148,
        host=_DGX_H100,
    )  # fmt: skip


_BLACKWELL_MATMUL = f"TFLOP/s at the best shape ({_ML_ENGINEERING}), less 6 to 10 % in long runs"
_L40S = _gpu(
    "L40S",
    memory_mib=46068,
    bandwidth_gb=864,
    tflops={
        "float32": 91.6, "tfloat32": 183, "bfloat16": 362, "float16": 362,
        "float8_e4m3fn": 733, "float8_e5m2": 733,
    },
    efficiency=_families(0.65, 0.4, 0.45, 0.85),
    sources=_sources(
        _ML_ENGINEERING, "store.sourcecode.com L40S page", _ESTIMATE, _ESTIMATE, _ESTIMATE
    ),
    num_units=142,
    host=_DGX_A100,
)  # fmt: skip
_A10G = _gpu(
    "A10G",
    memory_mib=23028,
    bandwidth_gb=600,
    tflops={"float32": 31.2, "tfloat32": 35, "bfloat16": 70, "float16": 70},
    efficiency=_families(0.75, 0.45, 0.45, 0.83),
    sources=_sources(
        "float32: Lightning throughput.py; bfloat16: commonly quoted, disputed (the A10's data "
        "sheet says 125, the A10G has fewer tensor cores); tfloat32: half of that",
        "Baseten, A10 vs A10G",
        _ESTIMATE,
        _ESTIMATE,
        _ESTIMATE,
    ),
    num_units=80,
    host=_DGX_A100,
)
_RTX4090 = _gpu(
    "RTX4090",
    memory_mib=24564,
    bandwidth_gb=1008,
    tflops={
        "float32": 82.6, "tfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2,
        "float8_e4m3fn": 330.3, "float8_e5m2": 330.3,
    },
    efficiency=_families(0.85, 0.5, 0.5, 0.88),
    sources=_sources(
        "waredb.com RTX 4090 page (float32 accumulation)",
        "waredb.com RTX 4090 page",
        _ESTIMATE,
        _ESTIMATE,
        _ESTIMATE,
    ),
    num_units=128,
    host=_DGX_A100,
)  # fmt: skip
CPU_CORE = Device(
    name="cpu",
    kind="cpu",
    memory_bytes=4 * 2**30,
    usable_memory_bytes=4 * 2**30,
    memory_bytes_per_second=10e9,
    peak_flops={"float32": 60e9, "float64": 30e9, "bfloat16": 60e9},
    efficiency={
        "matmul": 0.85, "attention": 0.6, "conv": 0.6,
        "norm": 0.5, "elementwise": 0.5, "copy": 0.9,
    },
    launch_seconds=5e-6,
    sources={"*": "spec: typical of one core of a server with AVX2; detect the machine instead"},
)  # fmt: skip

_PRESETS = (
    Preset(
        _v100("V100-16GB", 16160),
        "nvlink2",
        "infiniband-edr-shared",
        wires=((8, "hybrid-cube-mesh"),),
    ),
    Preset(
        _v100("V100-32GB", 32510),
        "nvlink2",
        "infiniband-edr-shared",
        16,
        ((4, "all-pairs-twice"), (8, "hybrid-cube-mesh")),
    ),
    Preset(_a100("A100-40GB", 40536, 1555, pcie=False), "nvlink3", "infiniband-hdr", 16),
    Preset(_a100("A100-80GB", 81251, 2039, pcie=False), "nvlink3", "infiniband-hdr"),
    Preset(_a100("A100-40GB-PCIe", 40536, 1555, pcie=True), "pcie4", "infiniband-hdr"),
    Preset(_a100("A100-80GB-PCIe", 81251, 1935, pcie=True), "pcie4", "infiniband-hdr"),
    Preset(_hopper("H100", 81559, 3350, 0.91, _H100_MEMORY), "nvlink4", "infiniband-ndr"),
    Preset(_H100_PCIE, "pcie5", "infiniband-ndr"),
    Preset(_nvl("H100-NVL", 95830, 3938, 0.91, _H100_MEMORY), "pcie5", "infiniband-ndr"),
    Preset(_nvl("H200-NVL", 143771, 4800, 0.88, _H200_MEMORY), "pcie5", "infiniband-ndr"),
    Preset(_hopper("H200", 143771, 4800, 0.88, _H200_MEMORY), "nvlink4", "infiniband-ndr"),
    Preset(_H100_96GB, "nvlink4", "infiniband-ndr"),
    Preset(
        _blackwell("B200", 183359, 2250, f"measured 1745 of 2250 {_BLACKWELL_MATMUL}"),
        "nvlink5",
        "infiniband-ndr",
    ),
    Preset(
        _blackwell("GB200", 189471, 2500, f"measured 1822 of 2500 {_BLACKWELL_MATMUL}"),
        "nvlink5",
        "infiniband-ndr",
        72,
    ),
    Preset(_L40S, "pcie4", "ethernet-100g"),
    Preset(_A10G, "pcie4", "ethernet-10g"),
    Preset(_RTX4090, "pcie4", "ethernet-10g"),
    Preset(CPU_CORE, "loopback", "ethernet-10g", 256),
)

PRESETS: Mapping[str, Preset] = {preset.device.name: preset for preset in _PRESETS}

DEVICE_ALIASES: Mapping[str, str] = {
    "V100": "V100-16GB", "V100-SXM2-16GB": "V100-16GB", "V100-SXM2-32GB": "V100-32GB",
    "V100-SXM3-32GB": "V100-32GB", "A100": "A100-80GB", "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB", "A100-PCIe": "A100-80GB-PCIe",
    "A100-PCIe-40GB": "A100-40GB-PCIe", "A100-PCIe-80GB": "A100-80GB-PCIe",
    "H100-80GB": "H100", "H100-SXM": "H100", "H100-SXM5": "H100", "H100-SXM5-80GB": "H100",
    "H100-PCIe-80GB": "H100-PCIe", "H100-80GB-PCIe": "H100-PCIe", "H200-141GB": "H200",
    "H200-SXM": "H200", "H200-SXM5-141GB": "H200", "B200-180GB": "B200",
    "B200-SXM-180GB": "B200", "GB200-186GB": "GB200",
    "H100-96GB-HBM2e": "H100-96GB", "L40S-48GB": "L40S", "A10G-24GB": "A10G", "4090": "RTX4090",
    "RTX4090-24GB": "RTX4090", "RTX-4090": "RTX4090",
}  # fmt: skip


def find_preset(name: str, where: str = "") -> Preset:
    """The device of this name or alias, in any case.

    >>> find_preset("a100-sxm4-40gb").device.name
    'A100-40GB'
    """
    return PRESETS[_canonical(name, PRESETS, DEVICE_ALIASES, what="device", where=where)]


def find_link(name: str, where: str = "") -> Link:
    """The link of this name or alias, in any case.

    >>> find_link("NDR").name
    'infiniband-ndr'
    """
    return LINKS[_canonical(name, LINKS, LINK_ALIASES, what="link", where=where)]


def joins_devices(link: Link) -> bool:
    """Whether a preset link is one within a host."""
    return link.name.startswith(INTRA_PREFIXES)


def _canonical(
    name: str, names: Iterable[str], aliases: Mapping[str, str], *, what: str, where: str
) -> str:
    known = {known.lower(): known for known in names}
    known.update({alias.lower(): target for alias, target in aliases.items()})
    if name.lower() in known:
        return known[name.lower()]
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    near = list(dict.fromkeys(known[key] for key in close))
    fix = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    raise ClusterError(f"unknown {what} {name!r}", where, fix)
