"""TensorFloat-32: which float32 products run on tensor cores, of a device and in torch.

Ampere and later GPUs multiply float32 matrices either in full float32 or, with 10 bits of
mantissa, on tensor cores several times as fast. torch has one setting for matrix products (off
by default) and one for convolutions (on). ``Device.tf32`` holds the families that are set;
``product_dtype`` gives the dtype whose peak a product runs at.

torch has two generations of settings. The newer ones, per operation (``fp32_precision``), tell
how its kernels compute whichever generation was used, so they are read. The older ones
(``allow_tf32``) change both, so they are set: reading an older setting after a newer one was
changed alone is an error. Torch is imported on use.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from .cluster import Cluster, Device

TFLOAT32 = "tfloat32"
"""Name of the TF32 format among a device's ``peak_flops``."""

Tf32 = Literal["none", "convolutions", "all"]
"""Choice of the user for which float32 products may use TF32; "convolutions" is torch's default."""

FAMILIES: Mapping[Tf32, tuple[str, ...]] = {
    "none": (),
    "convolutions": ("conv",),
    "all": ("conv", "matmul"),
}
"""Families of ops whose float32 products are computed in TF32, by the user's choice."""


def has_tf32(device: Device) -> bool:
    """Return true if a device has a peak rate for TF32 products."""
    return TFLOAT32 in device.peak_flops


def with_tf32(cluster: Cluster, families: Collection[str]) -> Cluster:
    """Return the cluster with TF32 on for these op families alone, on devices that support it.

    >>> from .presets import find_preset
    >>> host = find_preset("V100").host(1)
    >>> with_tf32(Cluster("v100", (host,), host.link), ("conv",)).device(0).tf32
    ()
    """

    def changed(device: Device) -> Device:
        return replace(device, tf32=tuple(sorted(families)) if has_tf32(device) else ())

    return cluster.with_devices(changed)


def product_dtype(device: Device, family: str, dtype: str) -> str:
    """Return the name of the format in which a device computes the products of an op of ``family``
    (such as "matmul") on tensors of ``dtype``: "tfloat32", or ``dtype`` itself."""
    is_set = dtype == "float32" and family in (device.tf32 or ())
    return TFLOAT32 if is_set and has_tf32(device) else dtype


def torch_families() -> tuple[str, ...]:
    """Return the op families ("conv", "matmul") whose float32 products torch now computes in
    TF32."""
    return tuple(name for name in FAMILIES["all"] if _setting(name).fp32_precision == "tf32")


def set_torch(families: Collection[str]) -> None:
    """Set torch in this process to use TF32 for float32 products of ``families`` alone."""
    import torch

    now = torch_families()
    older: dict[str, Any] = {"conv": torch.backends.cudnn, "matmul": torch.backends.cuda.matmul}
    for name, place in older.items():
        if (name in families) != (name in now):
            place.allow_tf32 = name in families
    for name in older:  # A setting for all operations outlasts the older settings.
        if (name in families) != (name in torch_families()):
            _setting(name).fp32_precision = "tf32" if name in families else "ieee"


@contextmanager
def torch_computing(families: Collection[str]) -> Iterator[None]:
    """Set torch within a ``with`` block to compute float32 products of ``families``, and of no
    others, in TF32; restore the settings after the block."""
    before = torch_families()
    set_torch(families)
    try:
        yield
    finally:
        set_torch(before)


def _setting(family: str) -> Any:
    import torch

    cudnn: Any = torch.backends.cudnn  # Its attribute "conv" has no type.
    return cudnn.conv if family == "conv" else torch.backends.cuda.matmul
