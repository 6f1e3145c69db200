"""Seconds of one op on one device: products in waves, everything else by a roofline.

In: a device, an op's work (family, FLOPs, bytes and matrix products at local shapes), its
dtype. Out: seconds forward and backward. On a device whose products come in waves (a GPU of
known ``num_units``) a "matmul" is the sum of its products, of which the backward has one per
factor that needs a gradient, and the time of the bytes that no product moves; a fused
"attention" takes the waves of its blocks: see ``products``. Every other op takes::

    launch + max(ramp + flops / (peak[dtype] · efficiency[family]),
                 bytes / (bandwidth · efficiency[family]))

where a family that computes ("matmul", "attention", "conv") takes its efficiency from the
peak and one that moves data from the bandwidth. ``ramp`` is the time in which a kernel of
a computing family is filled and drained; it makes the efficiency of small ops fall as
f / (f + half), half being the FLOPs that full speed would do in that time.

These are times of the device. The host issues kernels meanwhile: ``host_seconds`` of a run
of ops, summed, is the least that the run takes.

Sources: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009; the ramp from square
matmuls of 1024 and 2048 on A100 (119.4 and 221.8 TFLOP/s, against 256.5 at 16384: 10 µs;
Azure/AI-benchmarking-guide) and on H100 in FP8 (4 to 6 µs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from ..cluster.cluster import Cluster, Device
from ..cluster.tf32 import product_dtype
from .products import Product, alignment, attention_seconds, product_bytes, product_seconds

COMPUTE_FAMILIES = frozenset({"matmul", "attention", "conv"})
MEMORY_FAMILIES = frozenset({"norm", "elementwise", "copy"})

_RAMP_SECONDS = {"cuda": 6e-6, "cpu": 0.0}
_FALLBACK_DTYPES = {
    "bfloat16": (("float32", 1.0),),
    "float16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float64": (("float32", 1 / 64),),
    "float8_e4m3fn": (("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.0)),
    "float8_e5m2": (("bfloat16", 1.0), ("float16", 1.0), ("float32", 1.0)),
    "float8_rowwise": (("float8_e4m3fn", 1.0), ("bfloat16", 1.0)),
    "mxfp8": (("float8_e4m3fn", 1.0), ("bfloat16", 1.0)),
    "nvfp4": (("float8_e4m3fn", 1.0), ("bfloat16", 1.0)),
}
SCALED_RATES = {"float8_rowwise": 0.78, "mxfp8": 0.9}
"""Rate of 8-bit products with a scale per row, or per 32 elements (MXFP8), as a share of the rate
with one scale per tensor. With such scales a training step of Llama 8B takes 13.6 % longer on H100
(rowwise) and 4.6 % on B200 (MXFP8; pytorch/ao, torchao/float8 and torchao/prototype/mx_formats)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Speed of a device for one dtype and one op family (kind of ops with a common efficiency, such
    as "matmul"). ``ramp_seconds`` is the time to fill and drain a kernel of matrix products."""

    launch_seconds: float
    ramp_seconds: float
    seconds_per_flop: float
    seconds_per_byte: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return the seconds of an op with these FLOPs and bytes moved; 0 if both are 0 (a
        view)."""
        if flops <= 0 and num_bytes <= 0:
            return 0.0
        compute = self.ramp_seconds + flops * self.seconds_per_flop if flops > 0 else 0.0
        return self.launch_seconds + max(compute, num_bytes * self.seconds_per_byte)


def rate(device: Device, family: str, dtype: str) -> Rate:
    """Return the speed of ops of ``family`` in ``dtype`` on ``device``. An unknown family counts as
    "elementwise". The family's efficiency in this dtype is used if the device has a figure for it.
    Float32 products of families for which TF32 is turned on run at the peak of TF32."""
    computes = family in COMPUTE_FAMILIES
    known = family if computes or family in MEMORY_FAMILIES else "elementwise"
    efficiency = _efficiency(device, known, dtype)
    if computes:
        flops_per_second = peak_flops(device, product_dtype(device, known, dtype)) * efficiency
        bytes_per_second = device.memory_bytes_per_second * device.efficiency.get("copy", 1.0)
    else:
        flops_per_second = peak_flops(device, "float64" if dtype == "float64" else "float32")
        bytes_per_second = device.memory_bytes_per_second * efficiency
    return Rate(
        launch_seconds=device.launch_seconds,
        ramp_seconds=_RAMP_SECONDS[device.kind] if computes else 0.0,
        seconds_per_flop=1 / flops_per_second,
        seconds_per_byte=1 / bytes_per_second,
    )


def with_attention(device: Device, kernel: str) -> Device:
    """Return a copy of ``device`` in which the efficiency of attention is the figure for ``kernel``
    (such as "cudnn"), or ``device`` itself if it has no figure for this kernel."""
    own = device.efficiency.get(f"attention_{kernel}")
    if own is None:
        return device
    return replace(device, efficiency={**device.efficiency, "attention": own})


def _efficiency(device: Device, family: str, dtype: str) -> float:
    own = device.efficiency.get(f"{family}_{dtype}")
    if own is None and dtype in SCALED_RATES:
        return SCALED_RATES[dtype] * _efficiency(device, family, "float8_e4m3fn")
    return device.efficiency.get(family, 1.0) if own is None else own


class OpWork(Protocol):
    """Work of one op on one rank: FLOPs, bytes, matrix products and kernels of its forward and its
    backward. ``planner.ops.work`` explains each property."""

    @property
    def family(self) -> str: ...
    @property
    def flops_forward(self) -> int: ...
    @property
    def flops_backward(self) -> int: ...
    @property
    def bytes_forward(self) -> int: ...
    @property
    def bytes_backward(self) -> int: ...
    @property
    def products_forward(self) -> tuple[Product, ...]: ...
    @property
    def products_backward(self) -> tuple[Product, ...]: ...
    @property
    def kernels_forward(self) -> int: ...
    @property
    def kernels_backward(self) -> int: ...
    @property
    def drawn(self) -> int: ...


_DRAWN_BYTES = 64
"""Bytes whose movement takes a CPU as long as drawing one 32-bit random number, which takes several
passes over an int32 tensor. A GPU draws it in the kernel that reads and writes the tensor."""


def work_seconds(device: Device, work: OpWork, dtype: str) -> tuple[float, float]:
    """Return the seconds (forward, backward) that an op on one rank keeps the device busy."""
    own = rate(device, work.family, dtype)
    if device.num_units and work.products_forward:
        if work.family == "matmul":
            return _matmul_seconds(device, own, work, dtype)
        if work.family == "attention":
            return _attention_seconds(device, own, work)
    drawn = work.drawn * _DRAWN_BYTES if device.kind == "cpu" else 0
    backward = work.bytes_backward + drawn if work.bytes_backward else 0
    without = replace(own, launch_seconds=0.0)  # of what another op's kernel computes
    return (
        (own if work.kernels_forward else without).seconds(
            work.flops_forward, work.bytes_forward + drawn
        ),
        (own if work.kernels_backward else without).seconds(work.flops_backward, backward),
    )


def host_seconds(device: Device, work: OpWork) -> tuple[float, float]:
    """Return the seconds (forward, backward) that the host takes to issue the kernels of an op. The
    host runs ahead of the device: a long sequence of ops takes either the sum of these seconds or
    the sum of ``work_seconds`` (plus collectives), whichever is longer."""
    return (
        device.issue_seconds * work.kernels_forward,
        device.issue_seconds * work.kernels_backward,
    )


def eight_bit_seconds(
    device: Device, work: OpWork, dtype: str, factor_dtype: str, cast_bytes: float
) -> tuple[float, float]:
    """Return the seconds (forward, backward) of a matrix product that casts its factors from
    ``dtype`` to the 8-bit ``factor_dtype``. Casting moves ``cast_bytes`` per element, by one kernel
    per cast tensor: both factors in the forward, the output's gradient in the backward."""
    plain = replace(rate(device, "matmul", dtype), ramp_seconds=0.0)
    own = replace(plain, seconds_per_flop=rate(device, "matmul", factor_dtype).seconds_per_flop)
    comes_in_waves = device.num_units and work.products_forward
    forward, backward = (
        _matmul_seconds(device, own, work, dtype)
        if comes_in_waves
        else work_seconds(device, work, factor_dtype)
    )
    factors = [size for b, m, n, k in work.products_forward for size in (b * m * k, b * k * n)]
    gradients = [b * m * n for b, m, n, k in work.products_forward]
    cast_forward = sum(plain.seconds(0.0, cast_bytes * size) for size in factors)
    cast_backward = sum(plain.seconds(0.0, cast_bytes * size) for size in gradients)
    return forward + cast_forward, backward + cast_backward


def _matmul_seconds(device: Device, own: Rate, work: OpWork, dtype: str) -> tuple[float, float]:
    aligned = alignment(work.products_forward[0], dtype)

    def seconds(products: tuple[Product, ...], num_bytes: float, kernels: int) -> float:
        if num_bytes <= 0:
            return 0.0
        total = 0.0
        for product in products:
            num_bytes -= product_bytes(product, dtype)
            total += product_seconds(
                device,
                product,
                dtype,
                flops_per_second=1 / own.seconds_per_flop,
                bytes_per_second=1 / own.seconds_per_byte,
                aligned=aligned,
            )
        rest = max(0.0, num_bytes) * own.seconds_per_byte
        return own.launch_seconds * max(kernels, 1) + total + rest

    return (
        seconds(work.products_forward, work.bytes_forward, work.kernels_forward),
        seconds(work.products_backward, work.bytes_backward, work.kernels_backward),
    )


def _attention_seconds(device: Device, own: Rate, work: OpWork) -> tuple[float, float]:
    def seconds(flops: float, num_bytes: float, *, backward: bool) -> float:
        if flops <= 0 and num_bytes <= 0:
            return 0.0
        all_pairs = sum(map(prod, work.products_forward))
        busy = sum(
            attention_seconds(
                device,
                product,
                flops * prod(product) / all_pairs,
                flops_per_second=1 / own.seconds_per_flop,
                backward=backward,
            )
            for product in work.products_forward
        )
        kernels = work.kernels_backward if backward else work.kernels_forward
        launches = own.launch_seconds * max(kernels, 1)
        return launches + max(busy, num_bytes * own.seconds_per_byte)

    return (
        seconds(work.flops_forward, work.bytes_forward, backward=False),
        seconds(work.flops_backward, work.bytes_backward, backward=True),
    )


def peak_flops(device: Device, dtype: str) -> float:
    """Return a device's dense peak FLOP/s in ``dtype``. Without a figure, float16 has the peak of
    bfloat16, else of float32, and bfloat16 the peak of float32, in which GPUs without units for it
    compute; float64 has 1/64 of float32's (the ratio of GPUs for graphics), 8-bit formats the peak
    of bfloat16, and integers the peak of float32."""
    peaks = device.peak_flops
    if dtype in peaks:
        return peaks[dtype]
    for other, factor in _FALLBACK_DTYPES.get(dtype, ()):
        if other in peaks:
            return peaks[other] * factor
    return peaks["float32"] if "float32" in peaks else max(peaks.values())


def least_seconds(cluster: Cluster, flops: Mapping[str, float], dtype: str) -> float:
    """Return a lower bound of the seconds for ``flops`` (FLOPs by op family, such as "matmul"): all
    devices of a cluster work on them in ``dtype`` at their peaks."""
    by_peak: dict[float, float] = {}
    for family, number in flops.items():
        peak = sum(
            peak_flops(host.device, product_dtype(host.device, family, dtype)) * host.num_devices
            for host in cluster.hosts
        )
        by_peak[peak] = by_peak.get(peak, 0.0) + number
    return sum(number / peak for peak, number in by_peak.items())
