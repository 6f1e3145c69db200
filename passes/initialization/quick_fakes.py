"""Fast fake tensors for the commonest ops of a build.

In: an op that allocates or views memory, and its arguments. Out: the fake tensor that
``FakeTensorMode`` would return, made directly; None if that may differ. The mode itself, whose
cache keys contain all arguments, takes four times as long: a model of a thousand layers allocates
nine thousand parameters, and each is detached twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_ALLOCATE: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.zeros.default: torch.zeros,
    torch.ops.aten.ones.default: torch.ones,
}
_UNTOLD = frozenset({"device", "pin_memory"})
"""Arguments of allocating ops whose default values do not affect the resulting fake tensor."""


def quick_fake(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> FakeTensor | None:
    """Return the fake tensor that ``func(*args, **kwargs)`` returns under ``mode``, without a call
    of the slow ``mode``; None for ops that only ``mode`` can execute."""
    if func is torch.ops.aten.detach.default:
        return _detached(mode, args[0])
    make = _ALLOCATE.get(func)
    if make is None or kwargs.get("device", _CPU) != _CPU or kwargs.get("pin_memory"):
        return None
    if kwargs.get("layout") not in (None, torch.strided):
        return None
    told = {name: value for name, value in kwargs.items() if name not in _UNTOLD}
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, make(*args, **told, device="meta"), _CPU)


def _detached(mode: FakeTensorMode, tensor: Any) -> FakeTensor | None:
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode:
        return None
    if tensor.constant is not None:  # the mode keeps known values
        return None
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.ops.aten.detach.default(tensor), tensor.fake_device)
