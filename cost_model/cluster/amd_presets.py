"""AMD's accelerators, which PyTorch drives as CUDA devices and RCCL joins.

Their 8-bit format until CDNA 3 is not the one that plans in fp8 compute in (float8_e4m3fnuz
instead of float8_e4m3fn), and PyTorch multiplies float32 there without TF32; so neither is given.
"""

from __future__ import annotations

from .preset_parts import (
    DGX_H100,
    ESTIMATE,
    LARGE_MATMUL,
    Preset,
    device_sources,
    families,
    gpu,
)
from .preset_references import (
    ML_ENGINEERING,
    ROCM_MI250,
    ROCM_MI300,
    ROCM_SPECS,
    TORCHTITAN,
    read,
)

_CDNA3_TFLOPS = {"float64": 163.4, "float32": 163.4, "bfloat16": 1307.4, "float16": 1307.4}
_AMD = {
    "memory_bytes": f"{ROCM_SPECS}, less 16 MiB: "
    f"{read('what drivers show of MI300X and MI250X, in files on GitHub')}",
    "num_units": f"compute units: {ROCM_SPECS}",
}

_MI250X = gpu(
    "MI250X",
    memory_mib=65520,
    bandwidth_gb=1638,
    tflops={"float64": 47.9, "float32": 47.9, "bfloat16": 191.5, "float16": 191.5},
    efficiency=families(0.6, 0.3, 0.4, 0.8),
    sources={
        **device_sources(
            f"one of a module's two dies, which each are a device: {TORCHTITAN}; float32 and "
            f"float64: MI250's operations per clock and unit, {ROCM_MI250}, by 110 at 1.7 GHz",
            f"{ROCM_MI250}: 1.6 TB/s per die",
            ESTIMATE,
            ESTIMATE,
            ESTIMATE,
        ),
        **_AMD,
    },
    num_units=110,
)
_MI300X = gpu(
    "MI300X",
    memory_mib=196592,
    bandwidth_gb=5300,
    tflops=_CDNA3_TFLOPS,
    efficiency=families(0.48, 0.25, 0.35, 0.8),
    sources={
        **device_sources(
            f"{ROCM_MI300}; float32 and float64 by matrix cores",
            ROCM_MI300,
            f"measured 668.4 of 1307 TFLOP/s at the best shape ({ML_ENGINEERING}) {LARGE_MATMUL}",
            ESTIMATE,
            ESTIMATE,
        ),
        **_AMD,
    },
    num_units=304,
    host=DGX_H100,
)
_MI325X = gpu(
    "MI325X",
    memory_mib=262128,
    bandwidth_gb=6000,
    tflops=_CDNA3_TFLOPS,
    efficiency=families(0.56, 0.28, 0.4, 0.8),
    sources={
        **device_sources(
            f"as MI300X's, which has as many units: {ROCM_MI300}; {ROCM_SPECS}",
            ML_ENGINEERING,
            f"measured 784.9 of 1307 TFLOP/s at the best shape ({ML_ENGINEERING}) {LARGE_MATMUL}",
            ESTIMATE,
            ESTIMATE,
        ),
        **_AMD,
    },
    num_units=304,
    host=DGX_H100,
)
_ROOFLINE_NOTES = read("rooflinenotes.dev/accelerators", "2026-11-27")
_SVET = read("svethardware.cz, AMD's MI350X and MI355X", "2026-11-27")
_MI355X = gpu(
    "MI355X",
    memory_mib=294896,
    bandwidth_gb=8000,
    tflops={
        "float32": 157.3, "bfloat16": 2516, "float16": 2516,
        "float8_e4m3fn": 5033, "float8_e5m2": 5033,
    },
    efficiency=families(0.59, 0.28, 0.4, 0.8),
    sources={
        **device_sources(
            f"bfloat16, 8 bits (float8_e4m3fn from CDNA 4 on): {_ROOFLINE_NOTES}, as 256 units at "
            f"2400 MHz; float32: {_SVET}; float64 as 1/64 of it",
            _ROOFLINE_NOTES,
            f"measured 1565 TFLOP/s at the best shape ({ML_ENGINEERING}) {LARGE_MATMUL}",
            ESTIMATE,
            ESTIMATE,
        ),
        **_AMD,
        "memory_bytes": f"288 GiB: {ROCM_SPECS}, less 16 MiB as MI300X's",
    },
    num_units=256,
    host=DGX_H100,
)  # fmt: skip

_MESH = ((8, "all-pairs-once"),)
AMD = (
    Preset(_MI250X, "infinity-fabric-2", "infiniband-hdr-shared"),
    Preset(_MI300X, "infinity-fabric-3", "infiniband-ndr", wires=_MESH, detour="pcie5"),
    Preset(_MI355X, "infinity-fabric-3", "infiniband-ndr", wires=_MESH, detour="pcie5"),
    Preset(_MI325X, "infinity-fabric-3", "infiniband-ndr", wires=_MESH, detour="pcie5"),
)
