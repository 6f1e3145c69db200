"""Initial values of stages: of their parameters and buffers, and of the constants that they read.

In: a recorded build of the model, its tensors by name, or files of weights. Out: the stages' memory
filled in place, each rank with its own shards; the constants' whole values, computed once. At most
one whole tensor is kept at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ...passes.initialization import deferred_init
from ...passes.local.stage_program import StageProgram
from ...passes.programs.constants import ancestors, evaluate
from ...passes.programs.program import Program
from ...planner.errors import UsageError
from ...planner.graph.layout import Region, region_slices, whole_region
from .pretrained import Pretrained
from .stage import StageModule

Source = Callable[[str], Tensor] | Mapping[str, Tensor]


def fill(stage: StageModule, name: str, whole: Tensor) -> None:
    """Cut this rank's part from ``whole`` and copy it into the stage's parameter or buffer
    ``name``. Raises UsageError (AP131) where the shape of ``whole`` differs from the plan's."""
    held = stage.by_name if name in stage.by_name else stage.program.buffers
    shape = held[name].spec.shape
    if tuple(whole.shape) != shape:
        raise UsageError(
            "AP131",
            f"{name!r} has shape {tuple(whole.shape)}",
            why=f"the plan was made for {shape}",
        )
    stage.fill(name, whole.detach()[region_slices(stage.region_of(name))])


def materialize(stage: StageModule, source: Source) -> None:
    """Fill a stage's parameters and buffers, of each this rank's part, from ``source``, which gives
    whole tensors by name."""
    get = source if callable(source) else source.__getitem__
    for name in stage.held_names():
        fill(stage, name, get(name))


Weights = deferred_init.Deferred | Mapping[str, Tensor] | Pretrained
"""Sources of initial values: the model's recorded construction, tensors by name, or files."""


def fill_stages(
    stages: Collection[StageModule],
    weights: Weights,
    program: Program,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Tensor]:
    """Fill this rank's part of the stages' parameters and buffers with initial values.

    ``weights`` may be the recorded construction of the model: it is replayed once, for all stages;
    tensors that it lists as ``given`` stay as they are. ``progress`` is called repeatedly
    meanwhile. Returns, by name, the whole values of the buffers from which the stages' constants
    (values that depend on no input or parameter) are computed.
    """
    needed = {name for stage in stages for name in buffers_read(program, stage.program)}
    dtype = torch.float64 if program.dtype == "float64" else None
    buffers: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        is_cast = dtype is not None and whole.is_floating_point()
        buffers[name] = deferred_init.compact(whole.to(dtype) if is_cast else whole)

    filled: set[str] = set()
    if isinstance(weights, Pretrained):
        filled.update(name for stage in stages for name in weights.fill(stage))
        for name in needed & weights.sources.keys():
            keep(name, weights.whole(name).to(program.model.get_buffer(name).dtype))
        needed -= weights.sources.keys()
        weights = weights.rest
    for stage in stages:
        for name in stage.held_names():
            if name in program.literals:
                fill(stage, name, program.literals[name])
            elif isinstance(weights, Mapping) and name not in filled:
                fill(stage, name, weights[name])
    if isinstance(weights, Mapping):
        for name in needed:
            keep(name, weights[name])
        return buffers
    boxes, takers = _boxes(stages, weights.without(weights.given | filled), program)
    for name in needed:
        whole = whole_region(weights.shape(name))
        boxes.setdefault(name, []).append(whole)
        takers.setdefault((name, whole), []).append(keep)

    def give(name: str, box: Region, part: Tensor) -> None:
        for take in takers[name, box]:
            take(name, part)

    def tick() -> None:
        if progress is not None:
            progress("making initial values")

    deferred_init.materialize_boxes(weights, boxes, give, tick)
    return buffers


Take = Callable[[str, Tensor], None]


def _boxes(
    stages: Collection[StageModule], weights: deferred_init.Deferred, program: Program
) -> tuple[dict[str, list[Region]], dict[tuple[str, Region], list[Take]]]:
    """Return the index ranges (start and stop in each dimension) of the tensors that the stages
    hold, by tensor name; and for each name and range the functions that copy its values into a
    stage."""
    boxes: dict[str, list[Region]] = {}
    takers: dict[tuple[str, Region], list[Take]] = {}
    for stage in stages:
        for name in stage.held_names():
            if name in program.literals or name in weights.given:
                continue
            box = stage.region_of(name)
            boxes.setdefault(name, []).append(box)
            takers.setdefault((name, box), []).append(stage.fill)
    return boxes, takers


def buffers_read(program: Program, stage: StageProgram) -> set[str]:
    """Return the names of the buffers from which the constants of ``stage`` are computed; a
    constant is a value of the graph that depends on no input or parameter."""
    return ancestors(program.graph, _constants(stage)) & set(program.buffers)


def constants_of(
    program: Program, stage: StageProgram, buffers: Mapping[str, Tensor], device: str
) -> dict[str, Tensor]:
    """Compute the constants that ``stage`` uses (values that depend on no input or parameter),
    whole, by name; also the constants and buffers from which it counts a loss's rows. ``buffers``
    has the buffers that they depend on, as ``fill_stages`` returns them."""
    read = {name: buffers[name] for name in sorted(buffers_read(program, stage))}
    return evaluate(program, _constants(stage), device, read)


def _constants(stage: StageProgram) -> tuple[str, ...]:
    counting = stage.counting
    return tuple({*stage.constants, *(counting.leaves if counting else ())})


def whole_tensors(names: Sequence[str], weights: Weights) -> dict[str, Tensor]:
    """Return copies of the whole initial values of the tensors ``names``."""
    found: dict[str, Tensor] = {}
    if isinstance(weights, Pretrained):
        stored = [name for name in names if name in weights.sources]
        rest = [name for name in names if name not in weights.sources]
        return {
            **{name: weights.whole(name) for name in stored},
            **whole_tensors(rest, weights.rest),
        }
    if isinstance(weights, deferred_init.Deferred):
        deferred_init.materialize(weights, names, found.__setitem__)
        return found
    return {name: weights[name].detach().clone() for name in names}
