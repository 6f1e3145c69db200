"""Filling a stage's parameters and buffers: each rank keeps its own shards only.

In: whole tensors by name, one at a time (from a deferred initialization, a state dict, any
function). Out: the stage's memory filled in place. Never is more than one whole tensor kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from ..passes import deferred_init
from ..planner.errors import UsageError
from ..planner.layout import Region
from .stage import StageModule

Source = Callable[[str], Tensor] | Mapping[str, Tensor]


def tensor_names(stage: StageModule) -> tuple[str, ...]:
    """The names of the parameters and buffers that the stage holds."""
    return (*stage.by_name, *stage.buffer_regions)


def fill(stage: StageModule, name: str, whole: Tensor) -> None:
    """Copy this rank's box of ``whole`` into the stage's parameter or buffer ``name``.

    Raises UsageError (AP131) where the shape differs from the plan's.
    """
    if name in stage.by_name:
        parameter = stage.by_name[name]
        _copy(name, parameter.local, whole, parameter.spec.shape, parameter.region)
        parameter.refresh()
    else:
        shape = stage.program.buffers[name].spec.shape
        _copy(name, stage.buffer(name), whole, shape, stage.buffer_regions[name])


def materialize(stage: StageModule, source: Source, filled: Collection[str] = ()) -> None:
    """Fill all but ``filled`` from ``source``, which gives the whole tensor of a name."""
    get = source if callable(source) else source.__getitem__
    for name in tensor_names(stage):
        if name not in filled:
            fill(stage, name, get(name))


def materialize_deferred(
    stage: StageModule,
    deferred: deferred_init.Deferred,
    literals: Mapping[str, Tensor] | None = None,
    filled: Collection[str] = (),
) -> None:
    """Fill all but ``filled`` as a plain build would; ``literals`` are other buffers."""
    given = literals or {}
    for name in tensor_names(stage):
        if name in given:
            fill(stage, name, given[name])
    wanted = [name for name in tensor_names(stage) if name not in given and name not in filled]
    deferred_init.materialize(deferred, wanted, partial(fill, stage))


def _copy(name: str, target: Tensor, whole: Tensor, shape: tuple[int, ...], box: Region) -> None:
    if tuple(whole.shape) != shape:
        raise UsageError(
            "AP131",
            f"{name!r} has shape {tuple(whole.shape)}",
            why=f"the plan was made for {shape}",
        )
    with torch.no_grad():
        target.copy_(whole.detach()[tuple(slice(start, stop) for start, stop in box)])
