"""What a model holds, kept without values, so that it can be captured again in training.

In: a model with whole parameters and buffers. Out: tensors on ``meta`` by name, and later the model
with these in the places of its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by every name, on ``meta``; ties stay ties."""
    made: dict[int, Tensor] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for _, tensor in named:
        if id(tensor) in made:
            continue
        is_sparse = tensor.layout != torch.strided
        empty = tensor.detach() if is_sparse else tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        made[id(tensor)] = empty
    return {name: made[id(tensor)] for name, tensor in named}


@contextmanager
def with_held(model: nn.Module, held: Mapping[str, Tensor]) -> Iterator[None]:
    """While inside, ``model`` has the tensors ``held`` in the places of its own."""
    saved: list[tuple[Any, str, Tensor | None]] = []
    for name, tensor in held.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        slots: Any = module._parameters if attribute in module._parameters else module._buffers
        saved.append((slots, attribute, slots.get(attribute)))
        slots[attribute] = tensor
    try:
        yield
    finally:
        for slots, attribute, before in reversed(saved):
            slots[attribute] = before
