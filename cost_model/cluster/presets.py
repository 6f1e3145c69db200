"""Devices by name, with the links they usually come with; every figure with its source.

Here are NVIDIA's devices of servers; ``card_presets`` has PCIe cards, ``amd_presets`` AMD's. Facts
compiled from vendors' data sheets and published measurements.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .amd_presets import AMD
from .card_presets import CARDS
from .cluster import ClusterError, Device, Link
from .link_presets import INTRA_PREFIXES, LINK_ALIASES, LINKS
from .preset_parts import (
    DGX_1,
    DGX_A100,
    DGX_H100,
    ESTIMATE,
    LARGE_MATMUL,
    Preset,
    device_sources,
    families,
    gpu,
)
from .preset_references import (
    AZURE,
    FLASH_ATTENTION,
    GPUMAP,
    H20_TABLE,
    H100_TABLE,
    H800_TABLE,
    LLM_ANALYSIS,
    ML_ENGINEERING,
    NANOCHAT,
    NVIDIA_SMI,
    NVIDIA_TABLES,
    SPEED_MONITOR,
    TORCHAO,
    TORCHTITAN,
    read,
)

_V100_SOURCES = device_sources(SPEED_MONITOR, LLM_ANALYSIS, ESTIMATE, ESTIMATE, ESTIMATE)
_V100_UNITS = read("lijun99/GPU-Resources NVIDIA_GPU_SM.md")
_A100_ATTENTION = (
    "forward with backward of FlashAttention-2, causal, 2048 to 8192 tokens: 140 to 182 of 312 "
    f"TFLOP/s ({FLASH_ATTENTION})"
)
_A100_MEMORY = f"measured 1610 to 1750 of 2039 GB/s ({AZURE})"
_A100_TFLOPS = {"float64": 19.5, "float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312}
_A100_PEAK = f"{SPEED_MONITOR}; float64 by tensor cores"
_A100_MATMUL = (
    f"0.82 measured: 253.7 to 256.5 of 312 TFLOP/s at 8192 and 16384 ({AZURE}); less 3 %, which "
    "fits training steps on 64 to 512 A100 (VIA-Research/vTrain, multi node: 0.78 to 0.8)"
)
_A100_PCIE_MATMUL = f"measured 252.9 of 312 TFLOP/s at the best shape ({ML_ENGINEERING}) "
_HOPPER_ATTENTION = (
    "forward with backward of FlashAttention-2, heads of 128: 328 of 989 TFLOP/s at 8192 tokens "
    f"({AZURE}), 265 to 308 causal at 2048 to 8192 ({FLASH_ATTENTION})"
)
_HOPPER_TFLOPS = {
    "float64": 67, "float32": 67, "tfloat32": 494.5, "bfloat16": 989, "float16": 989,
    "float8_e4m3fn": 1979, "float8_e5m2": 1979,
}  # fmt: skip
_HOPPER_PEAK = f"{SPEED_MONITOR}; float64 by tensor cores"
_HOPPER_MATMUL = (
    "0.7 is between what Llama 8B (0.66) and Nemotron 15B (0.74) fit in bfloat16 on 8 and 16 "
    "H100 (NVIDIA/dgxc-benchmarking@v25.02); bursts at the best shape reach 794.5 of 989 "
    f"TFLOP/s ({ML_ENGINEERING}), FP8 products of 16384 and 32768 1366 to 1382 of 1979 ({AZURE})"
)
_GRAND_TETON = (
    "fitted on one run, Llama 8B on 8 GPUs compiled in bfloat16 (pytorch/torchtitan@b5bcd76, "
    "llama3_h100_202412); a limit of 500 W where the SXM5 card has 700 W"
)


def _v100(name: str, memory_mib: int) -> Device:
    return gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=900,
        tflops={"float64": 7.8, "float32": 15.7, "float16": 125},
        efficiency=families(0.72, 0.3, 0.5, 0.85),
        sources={**_V100_SOURCES, "num_units": _V100_UNITS},
        num_units=80,
        host=DGX_1,
    )


def _a100(name: str, memory_mib: int, bandwidth_gb: float, *, pcie: bool) -> Device:
    matmul = _A100_PCIE_MATMUL + LARGE_MATMUL if pcie else _A100_MATMUL
    bandwidth = f"{LLM_ANALYSIS}; {GPUMAP}" if pcie else LLM_ANALYSIS
    return gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=bandwidth_gb,
        tflops=_A100_TFLOPS,
        efficiency=families(0.76 if pcie else 0.8, 0.5, 0.55, 0.83),
        sources={
            **device_sources(_A100_PEAK, bandwidth, matmul, _A100_ATTENTION, _A100_MEMORY),
            "num_units": GPUMAP,
        },
        num_units=108,
        host=DGX_A100,
    )


_HOPPER_CUDNN = (
    "chosen on Llama 8B and Nemotron 15B in bfloat16 (NVIDIA/dgxc-benchmarking@v25.02); 0.50 of "
    "989 TFLOP/s forward and backward together at 4096 tokens (NVIDIA/cudnn-frontend@3929da2, "
    "benchmark/sdpa_benchmark_training/results, H200, Llama 3.1)"
)


def _hopper(name: str, memory_mib: int, bandwidth_gb: float, memory: float, text: str) -> Device:
    sources = device_sources(_HOPPER_PEAK, ML_ENGINEERING, _HOPPER_MATMUL, _HOPPER_ATTENTION, text)
    return gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=bandwidth_gb,
        tflops=_HOPPER_TFLOPS,
        efficiency={**families(0.7, 0.33, 0.5, memory), "attention_cudnn": 0.5},
        sources={
            **sources,
            "efficiency.attention_cudnn": _HOPPER_CUDNN,
            "num_units": f"{GPUMAP}; {H100_TABLE}",
        },
        num_units=132,
        host=DGX_H100,
    )


_H100_MEMORY = f"measured 2900 to 3180 of 3350 GB/s ({AZURE})"
_H200_MEMORY = f"measured 4000 to 4480 of 4800 GB/s ({AZURE})"

_H100_PCIE = gpu(
    "H100-PCIe",
    memory_mib=81559,
    bandwidth_gb=2000,
    tflops={
        "float64": 51, "float32": 51, "tfloat32": 378, "bfloat16": 756, "float16": 756,
        "float8_e4m3fn": 1513, "float8_e5m2": 1513,
    },
    efficiency=families(0.65, 0.31, 0.45, 0.9),
    sources={
        **device_sources(H100_TABLE, H100_TABLE, ESTIMATE, _HOPPER_ATTENTION, _H100_MEMORY),
        "num_units": H100_TABLE,
    },
    num_units=114,
    host=DGX_H100,
)  # fmt: skip
_H100_96GB = _hopper("H100-96GB", 97871, 2400, 0.91, _H100_MEMORY)
_H100_96GB = replace(
    _H100_96GB,
    efficiency={**_H100_96GB.efficiency, "matmul": 0.52, "attention": 0.24},
    sources={
        **_H100_96GB.sources,
        "peak_flops": f"taken as the SXM5 card's; {_HOPPER_PEAK}",
        "memory_bytes_per_second": f"Meta's H100: {TORCHAO}",
        "efficiency.matmul": _GRAND_TETON,
        "efficiency.attention": "the SXM5 card's share x 0.74, as of products: the limit of 500 W",
        "memory_bytes": f"as H20 and GH200 of 96 GB: {NVIDIA_SMI}",
    },
)


_NVL_PEAK = (
    f"half of the rates with sparsity of H200 NVL ({NVIDIA_TABLES}), which H100 NVL shares "
    f"({TORCHTITAN})"
)
_NVL_BANDWIDTH = (
    f"H200 NVL: {NVIDIA_TABLES}; H100 NVL: "
    f"{read('product brief PB-11773 as tables on GitHub cite it')}"
)


def _nvl(name: str, memory_mib: int, bandwidth_gb: float, memory: float, text: str) -> Device:
    """A PCIe card of which two (H200: up to four) have a bridge, which is left out here."""
    found = _hopper(name, memory_mib, bandwidth_gb, memory, text)
    peak = {
        "float64": 60e12, "float32": 60e12, "tfloat32": 417.5e12, "bfloat16": 835e12,
        "float16": 835e12, "float8_e4m3fn": 1670.5e12, "float8_e5m2": 1670.5e12,
    }  # fmt: skip
    own = {"peak_flops": _NVL_PEAK, "memory_bytes_per_second": _NVL_BANDWIDTH}
    return replace(found, peak_flops=peak, sources={**found.sources, **own})


_H800 = _hopper("H800", 81559, 3350, 0.91, _H100_MEMORY)
_H800 = replace(
    _H800,
    peak_flops={**_H800.peak_flops, "float64": 1e12},
    sources={**_H800.sources, "peak_flops": f"H100's, {NANOCHAT}; float64: {H800_TABLE}"},
)
_H20 = gpu(
    "H20",
    memory_mib=97871,
    bandwidth_gb=4000,
    tflops={
        "float64": 1, "float32": 44, "tfloat32": 74, "bfloat16": 148, "float16": 148,
        "float8_e4m3fn": 296, "float8_e5m2": 296,
    },
    efficiency=families(0.85, 0.6, 0.6, 0.88),
    sources={
        **device_sources(
            f"{H20_TABLE}; bfloat16: {TORCHTITAN}; float8: {GPUMAP}",
            f"{H20_TABLE}; {read('willitrunai.com/gpus/h20-96gb')}",
            "estimate: with a seventh of the H100's rate, nothing holds products back",
            "estimate, as for products",
            "as H200's",
        ),
        "num_units": f"{H20_TABLE}; {GPUMAP}",
    },
    num_units=78,
    host=DGX_H100,
)  # fmt: skip


_BLACKWELL_MATMUL = (
    f"at the best shape ({ML_ENGINEERING}); long runs hold less: fitted on {{}} published runs in "
    "bfloat16 (benchmarks/validation)"
)
_BLACKWELL_FP8 = "fitted on NVIDIA's published runs in 8 bits (benchmarks/validation)"
_DGXC = read("NVIDIA/dgxc-benchmarking@841f546 README.md, peak rates", "2026-11-27")
_BLACKWELL_MEMORY = f"measured on B300: {TORCHAO}"
_BLACKWELL_FP32 = f"{NVIDIA_TABLES}; the others: {TORCHTITAN}; {ML_ENGINEERING}"
_GB200_UNITS = read("152 by device properties, in files on GitHub")


def _blackwell(
    name: str,
    memory_mib: int,
    bandwidth_gb: float,
    tflops: Mapping[str, float],
    sources: Mapping[str, str],
    *,
    num_units: int = 148,
) -> Device:
    """``tflops``: what is special to the card, with its rate in bfloat16."""
    half = tflops["bfloat16"]
    peaks = {
        **tflops, "tfloat32": half / 2, "float16": half,
        "float8_e4m3fn": 2 * half, "float8_e5m2": 2 * half,
    }  # fmt: skip
    common = device_sources(
        f"{_BLACKWELL_FP32}; nvfp4: {_DGXC}", NVIDIA_TABLES, ESTIMATE, ESTIMATE, _BLACKWELL_MEMORY
    )
    return gpu(
        name,
        memory_mib=memory_mib,
        bandwidth_gb=bandwidth_gb,
        tflops=peaks,
        efficiency={**families(0.55, 0.35, 0.45, 0.84), "matmul_float8_e4m3fn": 0.64},
        sources={**common, "efficiency.matmul_float8_e4m3fn": _BLACKWELL_FP8, **sources},
        num_units=num_units,
        host=DGX_H100,
    )


_B200 = _blackwell(
    "B200",
    183359,
    7700,
    {"float64": 37, "float32": 75, "bfloat16": 2250, "nvfp4": 9000},
    {
        "memory_bytes_per_second": f"{NVIDIA_TABLES}; 7672 by the driver: {TORCHAO}",
        "efficiency.matmul": f"measured 1745 of 2250 TFLOP/s {_BLACKWELL_MATMUL}",
        "num_units": read("pytorch/ao#4002"),
    },
)
_GB200 = _blackwell(
    "GB200",
    189471,
    8000,
    {"float64": 40, "float32": 80, "bfloat16": 2500, "nvfp4": 10000},
    {
        "efficiency.matmul": f"measured 1822 of 2500 TFLOP/s {_BLACKWELL_MATMUL}",
        "num_units": _GB200_UNITS,
    },
    num_units=152,
)
_GB300 = _blackwell(
    "GB300",
    284208,
    8000,
    {"float32": 80, "bfloat16": 2500, "nvfp4": 15000},
    {
        "peak_flops": f"as GB200's; nvfp4: {_DGXC}; float64 as 1/64 of float32",
        "memory_bytes": f"279 GB of 288: {_DGXC}",
        "memory_bytes_per_second": _DGXC,
        "efficiency.matmul": "as GB200's",
        "num_units": _GB200_UNITS,
    },
    num_units=152,
)
_B300 = _blackwell(
    "B300",
    275040,
    8000,
    {"float32": 80, "bfloat16": 2250, "nvfp4": 13500},
    {
        "peak_flops": f"{TORCHAO}; float32: {ML_ENGINEERING}; float64 as 1/64 of it",
        "memory_bytes_per_second": TORCHAO,
        "efficiency.matmul": f"measured 1769 of 2250 TFLOP/s {_BLACKWELL_MATMUL}",
        "num_units": read("148 by device queries, in files on GitHub"),
    },
)
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
    Preset(_H800, "nvlink4-h800", "infiniband-ndr"),
    Preset(_H20, "nvlink4", "infiniband-ndr"),
    Preset(_B200, "nvlink5", "infiniband-ndr"),
    Preset(_GB200, "nvlink5", "infiniband-ndr", 72),
    Preset(_GB300, "nvlink5", "infiniband-xdr", 72),
    Preset(_B300, "nvlink5", "infiniband-xdr"),
    *CARDS,
    *AMD,
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
    "B200-SXM-180GB": "B200", "GB200-186GB": "GB200", "GB300-288GB": "GB300",
    "H100-96GB-HBM2e": "H100-96GB", "L40S-48GB": "L40S", "A10G-24GB": "A10G", "4090": "RTX4090",
    "RTX4090-24GB": "RTX4090", "RTX-4090": "RTX4090", "3090": "RTX3090", "RTX-3090": "RTX3090",
    "RTX3090-24GB": "RTX3090", "5090": "RTX5090", "RTX-5090": "RTX5090", "RTX5090-32GB": "RTX5090",
    "T4-16GB": "T4", "L4-24GB": "L4", "A30-24GB": "A30", "A6000-48GB": "A6000",
    "RTX-A6000": "A6000", "RTXA6000": "A6000", "H20-96GB": "H20", "H800-80GB": "H800",
    "H800-SXM": "H800", "B300-288GB": "B300", "MI250X-64GB": "MI250X", "MI300X-192GB": "MI300X",
    "MI325X-256GB": "MI325X", "MI355X-288GB": "MI355X",
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
