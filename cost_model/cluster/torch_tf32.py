"""What torch is set to compute float32 products in, read and set in one place.

torch has two generations of settings. Those per operation (``fp32_precision``) say what its
kernels do whichever generation was used, so they are read. The older ones (``allow_tf32``) change
both, so they are set: reading an older setting after a newer one was changed alone is an error.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


def torch_families() -> tuple[str, ...]:
    """The families of float32 products that this process's torch computes in TF32."""
    return tuple(name for name in ("conv", "matmul") if _setting(name).fp32_precision == "tf32")


def set_torch(families: Collection[str]) -> None:
    """Has this process's torch compute these families in TF32, and no other."""
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
    """``set_torch`` for the length of a ``with``."""
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
