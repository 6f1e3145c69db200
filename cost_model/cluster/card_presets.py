"""PCIe cards without a switch between them: inference cards of clouds, workstations, games.

Bridges between two cards are left out, as a bridge joins no more than two. GeForce cards have no
peer-to-peer copies with the vendor's driver; ``8xRTX4090@pcie3`` is nearer to them where that
matters than the rate of their slots.
"""

from __future__ import annotations

from .preset_parts import DGX_1, DGX_H100, ESTIMATE, Preset, device_sources, families, gpu
from .preset_references import (
    DEVICE_PROPERTIES,
    GPU_SPECS,
    GPUMAP,
    LIGHTNING,
    LLM_ANALYSIS,
    ML_ENGINEERING,
    NANOCHAT,
    TORCHAO,
    TORCHTITAN,
    WAREDB,
    read,
)

_ACCUMULATION = "the rate with float32 accumulation, half of that with float16"
_POWER = "estimate: a limit of {} W keeps long runs below the clock that the peak is for"
_RTX3090_PAGE = read("holynerdvana.blogspot.com/2022/10, RTX 3090 specifications")
_T4 = gpu(
    "T4",
    memory_mib=15360,
    bandwidth_gb=320,
    tflops={"float32": 8.1, "float16": 65},
    efficiency=families(0.4, 0.25, 0.4, 0.78),
    sources={
        **device_sources(
            f"{LIGHTNING}; neither bfloat16 nor TF32: compute capability 7.5",
            f"{read('RajBhope/gpu-runtime-predictor on huggingface.co, gpu_catalog.json')}; "
            f"300 in {GPU_SPECS}",
            _POWER.format(70),
            _POWER.format(70),
            ESTIMATE,
        ),
        "num_units": DEVICE_PROPERTIES,
    },
    num_units=40,
    host=DGX_1,
)
_L4 = gpu(
    "L4",
    memory_mib=23034,
    bandwidth_gb=300,
    tflops={
        "float32": 30.3, "tfloat32": 60, "bfloat16": 121, "float16": 121,
        "float8_e4m3fn": 242, "float8_e5m2": 242,
    },
    efficiency=families(0.6, 0.4, 0.45, 0.85),
    sources={
        **device_sources(GPU_SPECS, GPU_SPECS, _POWER.format(72), _POWER.format(72), ESTIMATE),
        "num_units": f"{GPUMAP}: 7424 cores, 128 to a unit",
    },
    num_units=58,
)  # fmt: skip
_A30 = gpu(
    "A30",
    memory_mib=24576,
    bandwidth_gb=933,
    tflops={"float64": 10.3, "float32": 10.3, "tfloat32": 82, "bfloat16": 165, "float16": 165},
    efficiency=families(0.72, 0.45, 0.5, 0.83),
    sources={
        **device_sources(
            f"{GPUMAP}; bfloat16: {NANOCHAT}; float64 by tensor cores",
            GPUMAP,
            "estimate: the A100 PCIe card's share, less a limit of 165 W",
            ESTIMATE,
            "as A100's",
        ),
        "num_units": GPUMAP,
    },
    num_units=56,
)
_A6000 = gpu(
    "A6000",
    memory_mib=49140,
    bandwidth_gb=768,
    tflops={"float32": 38.7, "tfloat32": 77.4, "bfloat16": 154.8, "float16": 154.8},
    efficiency=families(0.72, 0.45, 0.5, 0.85),
    sources={
        **device_sources(
            f"{TORCHTITAN}; {GPUMAP}", f"{LLM_ANALYSIS}; {GPUMAP}", ESTIMATE, ESTIMATE, ESTIMATE
        ),
        "num_units": f"{GPUMAP}; {DEVICE_PROPERTIES}",
    },
    num_units=84,
)
_RTX3090 = gpu(
    "RTX3090",
    memory_mib=24576,
    bandwidth_gb=936,
    tflops={"float32": 35.6, "tfloat32": 35.6, "bfloat16": 71, "float16": 71},
    efficiency=families(0.85, 0.5, 0.5, 0.88),
    sources={
        **device_sources(
            f"{NANOCHAT}: {_ACCUMULATION}; float32: {_RTX3090_PAGE}",
            _RTX3090_PAGE,
            "estimate: as RTX4090, whose tensor cores are also held to half of their rate",
            ESTIMATE,
            ESTIMATE,
        ),
        "num_units": _RTX3090_PAGE,
    },
    num_units=82,
)
_L40S = gpu(
    "L40S",
    memory_mib=46068,
    bandwidth_gb=864,
    tflops={
        "float32": 91.6, "tfloat32": 183, "bfloat16": 362, "float16": 362,
        "float8_e4m3fn": 733, "float8_e5m2": 733,
    },
    efficiency=families(0.65, 0.4, 0.45, 0.85),
    sources={
        **device_sources(
            f"{ML_ENGINEERING}; bfloat16: {TORCHTITAN}", GPU_SPECS, ESTIMATE, ESTIMATE, ESTIMATE
        ),
        "num_units": DEVICE_PROPERTIES,
    },
    num_units=142,
)  # fmt: skip
_A10G = gpu(
    "A10G",
    memory_mib=23028,
    bandwidth_gb=600,
    tflops={"float32": 35, "tfloat32": 35, "bfloat16": 70, "float16": 70},
    efficiency=families(0.75, 0.45, 0.45, 0.83),
    sources={
        **device_sources(
            f"{LLM_ANALYSIS}, as 80 units at 1710 MHz with half of the A10's rate each ask for "
            "(the A10 has 125, and 31.2 in float32)",
            f"{LLM_ANALYSIS}; {read('www.baseten.co/blog, A10 against A10G')}",
            ESTIMATE,
            ESTIMATE,
            ESTIMATE,
        ),
        "num_units": DEVICE_PROPERTIES,
    },
    num_units=80,
)
_RTX4090 = gpu(
    "RTX4090",
    memory_mib=24564,
    bandwidth_gb=1008,
    tflops={
        "float32": 82.6, "tfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2,
        "float8_e4m3fn": 330.3, "float8_e5m2": 330.3,
    },
    efficiency=families(0.85, 0.5, 0.5, 0.88),
    sources={
        **device_sources(
            f"{WAREDB}; {NANOCHAT}: {_ACCUMULATION}", WAREDB, ESTIMATE, ESTIMATE, ESTIMATE
        ),
        "num_units": GPUMAP,
    },
    num_units=128,
)  # fmt: skip
_RTX5090 = gpu(
    "RTX5090",
    memory_mib=32607,
    bandwidth_gb=1792,
    tflops={
        "float32": 104.8, "tfloat32": 104.8, "bfloat16": 209.5, "float16": 209.5,
        "float8_e4m3fn": 419, "float8_e5m2": 419,
    },
    efficiency=families(0.85, 0.5, 0.5, 0.88),
    sources={
        **device_sources(
            f"{TORCHAO}, citing NVIDIA's whitepaper: {_ACCUMULATION}; float32: {GPUMAP}",
            f"{TORCHAO}; {GPUMAP}",
            "estimate: as RTX4090",
            ESTIMATE,
            ESTIMATE,
        ),
        "num_units": GPUMAP,
    },
    num_units=170,
    host=DGX_H100,
)  # fmt: skip

CARDS = (
    Preset(_T4, "pcie3", "ethernet-10g"),
    Preset(_L4, "pcie4", "ethernet-25g"),
    Preset(_A10G, "pcie4", "ethernet-10g"),
    Preset(_A30, "pcie4", "ethernet-25g"),
    Preset(_A6000, "pcie4", "ethernet-10g"),
    Preset(_L40S, "pcie4", "ethernet-100g"),
    Preset(_RTX3090, "pcie4", "ethernet-10g"),
    Preset(_RTX4090, "pcie4", "ethernet-10g"),
    Preset(_RTX5090, "pcie5", "ethernet-10g"),
)
