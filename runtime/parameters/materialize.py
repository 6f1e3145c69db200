"""Filling a stage's parameters and buffers: each rank keeps its own shards only.

In: tensors by name, whole or this rank's box of them, one at a time. Out: the stage's memory
filled in place. Never is more than one whole tensor kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...planner.errors import UsageError
from ...planner.layout import Region
from .stage import StageModule

Source = Callable[[str], Tensor] | Mapping[str, Tensor]


def tensor_names(stage: StageModule) -> tuple[str, ...]:
    """The names of the parameters and buffers that the stage holds."""
    return (*stage.by_name, *stage.buffer_regions)


def fill(stage: StageModule, name: str, whole: Tensor) -> None:
    """Copy this rank's box of ``whole`` into the stage's parameter or buffer ``name``.

    Raises UsageError (AP131) where the shape differs from the plan's.
    """
    held = stage.by_name if name in stage.by_name else stage.program.buffers
    shape = held[name].spec.shape
    if tuple(whole.shape) != shape:
        raise UsageError(
            "AP131",
            f"{name!r} has shape {tuple(whole.shape)}",
            why=f"the plan was made for {shape}",
        )
    box = box_of(stage, name)
    fill_box(stage, name, whole.detach()[tuple(slice(start, stop) for start, stop in box)])


def box_of(stage: StageModule, name: str) -> Region:
    """The box of the whole parameter or buffer ``name`` that this rank holds."""
    parameter = stage.by_name.get(name)
    return stage.buffer_regions[name] if parameter is None else parameter.region


def fill_box(stage: StageModule, name: str, part: Tensor) -> None:
    """Copy ``part``, this rank's box, into the stage's parameter or buffer ``name``."""
    parameter = stage.by_name.get(name)
    with torch.no_grad():
        if parameter is None:
            stage.buffer(name).copy_(part)
        else:
            parameter.local.copy_(part)
            parameter.refresh()


def materialize(stage: StageModule, source: Source) -> None:
    """Fill everything from ``source``, which gives the whole tensor of a name."""
    get = source if callable(source) else source.__getitem__
    for name in tensor_names(stage):
        fill(stage, name, get(name))
