"""What a stage starts with: its parameters and buffers, and the constants that it reads.

In: a recorded build of the model or its tensors by name. Out: this rank's part of them in the
stage's module; the constants' whole values, computed once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..passes import deferred_init
from ..passes.constants import ancestors, evaluate
from ..passes.program import Program
from ..passes.stage_program import StageProgram
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
    program: Program, stage: StageProgram, weights: Weights, device: str
) -> dict[str, Tensor]:
    """The whole values of the constants that ``stage`` uses, at the program's batch size.

    With them the constants and buffers that its counting reads.
    """
    counting = stage.counting
    names = tuple({*stage.constants, *(counting.leaves if counting else ())})
    needed = sorted(ancestors(program.graph, names) & set(program.buffers))
    dtype = torch.float64 if program.dtype == "float64" else None
    buffers: dict[str, Tensor] = {}
    if isinstance(weights, deferred_init.Deferred):
        deferred_init.materialize(weights, needed, buffers.__setitem__, dtype=dtype)
    else:
        for name in needed:
            is_cast = dtype is not None and weights[name].is_floating_point()
            buffers[name] = weights[name].to(dtype) if is_cast else weights[name]
    return evaluate(program, names, device, buffers)
