"""State of a trainer's rank, or of a plain module, for a checkpoint.

In: a ``RankModel``, or a module in one process. Out: a ``TrainingState`` over its memory. Both have
the names and shapes of the model's ``state_dict``, so that either loads the other's.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...passes.initialization import deferred_init
from ...passes.initialization.deferred_init import named_tensors
from ...passes.programs.program import Program
from ...planner.plan_file import dumps
from ..checkpoint.checkpoint import Slot, TrainingState
from ..checkpoint.parts import GENERATORS, Generators, Stateful
from ..parameters.initial_values import Weights
from ..parameters.pretrained import Pretrained, persistent_tensors

if TYPE_CHECKING:
    from .rank_model import RankModel


def rank_state(
    model: RankModel,
    optimizer: Optimizer | None,
    parts: Mapping[str, Stateful],
    *,
    draws: Mapping[str, int] | None,
    optional: Container[str] = (),
) -> TrainingState:
    """Return the state that this rank saves to or loads from checkpoints. ``draws`` decides the
    random numbers of the next batch; ``optional`` names the ``parts`` that a checkpoint may
    lack."""
    persistent = model.persistent
    slots = [Slot({}, model.untrained)]
    changing: set[str] = set()
    for stage in model.stages.values():
        parameters: dict[str, Tensor] = {
            name: parameter.master for name, parameter in stage.by_name.items()
        }
        held = set(stage.program.buffers)
        updated = set(stage.program.updates)
        changing |= updated & set(persistent)
        slots.append(
            Slot(
                parameters,
                stage.distributed_buffers(sorted(held & set(persistent))),
                stage.distributed_buffers(sorted(updated - set(persistent))),
            )
        )
    leaves = {name: tensor for name, tensor in model.leaves.items() if name in persistent}
    slots.append(Slot({}, leaves))
    own = {parameter.name for parameter in model.own_parameters()}
    return TrainingState(
        shapes={**persistent, **_packed_shapes(model.program)},
        slots=tuple(slots),
        beside=model.beside,
        aliases=model.program.graph.tied,
        written=frozenset(own | changing | set(model.untrained)),
        optimizer=optimizer,
        parts={GENERATORS: Generators(model.device), **parts},
        optional=frozenset((GENERATORS, *(name for name in parts if name in optional))),
        facts={"plan": json.loads(dumps(model.plan)), "draws": draws},
    )


def _packed_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the shapes of quantized weights, which a checkpoint holds as their bytes."""
    graph = program.graph
    held = {node.name: node.spec for node in graph.parameters if node.spec.stored}
    return {name: (spec.stored_bytes,) for name, spec in held.items()}


def module_state(
    module: nn.Module, optimizer: Optimizer | None, parts: Mapping[str, Stateful]
) -> TrainingState:
    """Return the checkpoint state of a process that trains ``module`` alone, without a plan."""
    shapes = persistent_shapes(module)
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named_tensors(module):
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
        first.setdefault(id(tensor), name)
    buffers = {name: each.detach() for name, each in module.named_buffers()}
    slot = Slot(
        dict(module.named_parameters()),
        {name: buffer for name, buffer in buffers.items() if name in shapes},
        {name: buffer for name, buffer in buffers.items() if name not in shapes},
    )
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return TrainingState(
        shapes=shapes,
        slots=(slot,),
        aliases=aliases,
        optimizer=optimizer,
        parts={GENERATORS: Generators(device), **parts},
    )


def untrained_names(program: Program, weights: Weights) -> list[str]:
    """Return the names in the model's ``state_dict`` of tensors that no stage trains or changes; a
    tied tensor is listed once."""
    graph = program.graph
    trained = {node.name for node in graph.nodes if node.kind == "parameter"} | set(graph.updates)
    given = weights.rest if isinstance(weights, Pretrained) else weights
    known = dict(named_tensors(given.model)) if isinstance(given, deferred_init.Deferred) else given
    return [
        name
        for name in persistent_shapes(program.model)
        if name not in trained and name not in graph.tied and name in known
    ]


def persistent_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a module's ``state_dict``, of tied tensors under each name."""
    return {name: tuple(each.shape) for name, each in persistent_tensors(module).items()}
