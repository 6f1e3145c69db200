"""Tied tensors: one storage under several names is one logical parameter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..initialization.deferred_init import named_tensors


def find_tied(model: nn.Module) -> dict[str, str]:
    """Map each name of a tied parameter or buffer, except the first, to the first name. Two names
    are tied if they are the same tensor, or the same part of one storage in the same shape. Works
    on the ``meta`` device."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors(model):
        canonical = first.setdefault(_identity(tensor), name)
        if canonical != name:
            tied[name] = canonical
    return tied


def _identity(tensor: Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
