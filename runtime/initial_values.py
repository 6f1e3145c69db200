"""What a stage starts with: its parameters and buffers, and the constants that it reads.

In: a recorded build of the model or its tensors by name. Out: this rank's part of them in the
stage's module; the constants' whole values, computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..passes import deferred_init
from ..passes.constants import ancestors, evaluate
from ..passes.program import Program
from .materialize import materialize, materialize_deferred
from .stage import StageModule

Weights = deferred_init.Deferred | Mapping[str, Tensor]
"""Where initial parameters and buffers come from: a recorded build, or tensors by name."""


def fill_stage(stage: StageModule, weights: Weights, program: Program) -> None:
    """Gives the stage's parameters and buffers their initial values, this rank's part."""
    if isinstance(weights, deferred_init.Deferred):
        materialize_deferred(stage, weights, program.literals)
    else:
        materialize(stage, {**weights, **program.literals})


def constants_of(
    program: Program, stage: StageModule, leaves: Mapping[str, Tensor], device: str
) -> dict[str, Tensor]:
    """The whole values of the constants that ``stage`` uses, at the program's batch size.

    With them the constants and buffers that its counting reads. ``leaves`` has at least the
    buffers of ``constant_leaves``.
    """
    names, needed = _constant_names(program, stage)
    buffers = {name: leaves[name] for name in needed}
    return evaluate(program, names, device, buffers)


def constant_leaves(program: Program, stage: StageModule, weights: Weights) -> dict[str, Tensor]:
    """The whole buffers that the constants of ``stage`` are computed from."""
    _, needed = _constant_names(program, stage)
    return whole_tensors(needed, weights, torch.float64 if program.dtype == "float64" else None)


def whole_tensors(
    names: Sequence[str], weights: Weights, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Copies of the initial values of ``names``; floating ones in ``dtype``, if given."""
    found: dict[str, Tensor] = {}
    if isinstance(weights, deferred_init.Deferred):
        deferred_init.materialize(weights, names, found.__setitem__, dtype=dtype)
        return found
    for name in names:
        target = dtype if weights[name].is_floating_point() else None
        found[name] = weights[name].detach().to(dtype=target, copy=True)
    return found


def _constant_names(program: Program, stage: StageModule) -> tuple[tuple[str, ...], list[str]]:
    """The constants of ``stage``, and the buffers that they are computed from."""
    counting = stage.program.counting
    names = tuple({*stage.program.constants, *(counting.leaves if counting else ())})
    return names, sorted(ancestors(program.graph, names) & set(program.buffers))
