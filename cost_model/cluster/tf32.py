"""TensorFloat-32: which float32 products of a device run on its tensor cores.

Ampere and later GPUs multiply float32 matrices either in full float32 or, with 10 bits of
mantissa, on tensor cores several times as fast. torch has one setting for matrix products (off
by default) and one for convolutions (on). ``Device.tf32`` holds the families that are set;
``product_dtype`` gives the dtype whose peak a product runs at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from .cluster import Cluster, Device

TFLOAT32 = "tfloat32"
"""The name of the format among a device's ``peak_flops``."""

Tf32 = Literal["none", "convolutions", "all"]
"""What a user may ask for; "convolutions" is torch's default."""

FAMILIES: Mapping[Tf32, tuple[str, ...]] = {
    "none": (),
    "convolutions": ("conv",),
    "all": ("conv", "matmul"),
}


def has_tf32(device: Device) -> bool:
    """Whether a device computes in TF32: whether it has a peak of its own for it."""
    return TFLOAT32 in device.peak_flops


def with_tf32(cluster: Cluster, families: Collection[str]) -> Cluster:
    """The cluster with float32 products of ``families`` in TF32 on the devices that have it.

    >>> from .presets import find_preset
    >>> host = find_preset("V100").host(1)
    >>> with_tf32(Cluster("v100", (host,), host.link), ("conv",)).device(0).tf32
    ()
    """

    def changed(device: Device) -> Device:
        own = tuple(sorted(families)) if has_tf32(device) else ()
        return replace(device, tf32=own)

    return cluster.with_devices(changed)


def product_dtype(device: Device, family: str, dtype: str) -> str:
    """The dtype that a device multiplies in, for an op of ``family`` on tensors of ``dtype``."""
    is_set = dtype == "float32" and family in (device.tf32 or ())
    return TFLOAT32 if is_set and has_tf32(device) else dtype
