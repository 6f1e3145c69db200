"""Cache of captured models, and of the memory of plans on fake tensors, between commands.

In: a target, the options of its capture, a cache. Out: its ``Program``. The model is always built
again, without weights, because the key covers its parts:

- the sources of all loaded modules of the user, and the versions of the packages that the
  model's classes come from;
- for each submodule its class, the shapes of its parameters and buffers, and its attributes that
  are numbers, texts or configurations;
- the shapes of the example batch, the precision, and the user's registered ops.

Values that a forward reads while it runs (an environment variable, a file) are not covered. ``run``
captures the model itself, and refuses a plan of an outdated graph.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache as once
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoparallel.cache.codec import Codec, NamedType, TextCodec
from autoparallel.cache.plan_cache import MISSING, Cache, UnkeyedError, graph_digest
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.memory.stage_memory import runs_stages, with_memory, with_stage_memory
from autoparallel.passes.programs.batch import Example, InputPlace
from autoparallel.passes.programs.program import Program
from autoparallel.planner.graph.graph import (
    Accumulation,
    Block,
    Blocks,
    Graph,
    Node,
    OpRule,
    Ref,
    TensorSpec,
)
from autoparallel.planner.kernels.fusion import with_fusion
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps
from autoparallel.planner.schedules.schedules import table_text
from autoparallel.target.register_op import registered_rules
from autoparallel.target.target import Target, example_batches

CAPTURE, MEMORY = "capture", "memory"


@dataclass(frozen=True)
class StoredProgram:
    """Captured ``Program`` in the form that is cached, without the model. A literal, a constant
    tensor of the graph, is stored as (dtype, shape, values)."""

    graph: Graph
    blocks: Blocks
    dtype: str
    inputs: dict[str, tuple[tuple[str | int, ...], int]]
    literals: dict[str, tuple[str, tuple[int, ...], tuple[Any, ...]]]
    unused: tuple[str, ...]


_CLASSES = (StoredProgram, Graph, Blocks, Block, Node, Ref, TensorSpec, Accumulation, OpRule)
_MEMORY = TextCodec(json.dumps, json.loads)


@once
def _program_codec() -> Codec:
    """Return the codec of captured programs, in which torch's dtypes, layouts, memory formats and
    devices are stored by name."""

    def find(kind: type) -> Callable[[str], Any]:
        def found(text: str) -> Any:
            value = getattr(torch, text.removeprefix("torch."))
            if not isinstance(value, kind):
                raise TypeError(f"{text} is no {kind.__name__}")
            return value

        return found

    enumerated = (torch.dtype, torch.layout, torch.memory_format)
    names = [NamedType(kind, str, find(kind)) for kind in enumerated]
    return Codec(_CLASSES, (*names, NamedType(torch.device, str, torch.device)))


def cached_program(
    cache: Cache,
    target: Target,
    model: nn.Module,
    options: PlanOptions,
    capture: Callable[[], Program],
) -> Program:
    """Return the cached program of ``model``, or capture it and cache the program.

    Only captures that can be rescaled to any batch, and contain no functions, are stored.
    """
    if cache.shelf is None:
        return capture()
    example, _ = example_batches(target, options.global_batch, options.seq)
    key = program_key(target, model, example, options)
    found = cache.get(CAPTURE, _program_codec(), *key)
    if found is MISSING:
        program = capture()
        if program.graph.batch_dims:
            cache.put(_pack(program), CAPTURE, _program_codec(), *key)
        return program
    return Program(
        found.graph,
        found.blocks,
        model,
        found.dtype,
        {name: InputPlace(*place) for name, place in found.inputs.items()},
        {name: _literal(each) for name, each in found.literals.items()},
        found.unused,
        example=example,
    )


def _pack(program: Program) -> StoredProgram:
    literals = {
        name: (
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            tuple(value.flatten().tolist()),
        )
        for name, value in program.literals.items()
    }
    return StoredProgram(
        program.graph,
        program.blocks,
        program.dtype,
        {name: (place.path, place.dim) for name, place in program.inputs.items()},
        literals,
        program.unused,
    )


def _literal(kept: tuple[str, tuple[int, ...], tuple[Any, ...]]) -> Any:

    dtype, shape, values = kept
    return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)


def program_key(
    target: Target, model: nn.Module, example: Example, options: PlanOptions
) -> tuple[object, ...]:
    """Return all inputs that a captured program depends on, as parts of its key in the cache."""
    return (
        target.name,
        sorted(target.settings.items()),
        options.precision,
        options.global_batch,
        options.autocasts,
        model_text(model),
        _example_text(example),
        sorted(registered_rules()),
        user_sources(),
        _versions({type(each).__module__.partition(".")[0] for each in model.modules()}),
    )


def model_text(model: nn.Module) -> str:
    """Return a hash of the structure and attributes of a model on ``meta``."""
    made, known = hashlib.sha256(), dict[int, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        parts = [name, kind.__module__, kind.__qualname__, str(module.training)]
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_"):
                if id(value) not in known:
                    known[id(value)] = _attribute_text(value)
                parts.append(f"{key}={known[id(value)]}")
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        parts += [
            f"{key}:{tuple(each.shape)}{each.dtype}{each.requires_grad}{id(each) in known}"
            for key, each in own
        ]
        known |= {id(each): "" for _, each in own}  # a repeated tensor is tied
        made.update("\0".join(parts).encode())
    return made.hexdigest()


def _attribute_text(value: object) -> str:
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _example_text(example: Example) -> tuple[str, ...]:
    tensors = (
        f"{place}:{tuple(each.shape)}{each.dtype}{each.requires_grad}"
        for place, each in zip(example.places, example.tensors(), strict=True)
    )
    return (*tensors, repr(example.fixed))


def user_sources() -> str:
    """Return a hash of the sources of all loaded modules that are not of installed packages."""
    made = hashlib.sha256()
    for file in sorted(user_modules().values()):
        try:
            made.update(f"{file}\0".encode() + file.read_bytes())
        except OSError:
            made.update(b"unreadable")
    return made.hexdigest()


def user_modules() -> dict[str, Path]:
    """Map the names of all loaded modules outside of distributions and libraries to their files."""
    places = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in places)
    found = {}
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if not isinstance(place, str) or place.startswith(libraries):
            continue
        path = Path(place)
        is_installed = {"site-packages", "dist-packages"} & set(path.parts)
        if not is_installed and name.partition(".")[0] != "autoparallel":
            found[name] = path
    return found


def _versions(packages: set[str]) -> tuple[str, ...]:
    """Return the versions of packages by import name; a package that is not installed has ""."""
    return tuple(f"{name} {_version(name)}" for name in sorted(packages))


@once
def _version(package: str) -> str:
    try:
        return metadata.version(package)  # most are installed under the name of their import
    except metadata.PackageNotFoundError:
        owners = metadata.packages_distributions().get(package, ())
        return ", ".join(f"{owner} {metadata.version(owner)}" for owner in sorted(set(owners)))


def with_cached_memory(plan: Plan, program: Program, cache: Cache) -> Plan:
    """Return a plan with simulated memory. If its stages must be executed (on fake tensors) for
    that, the result is cached."""
    graph, blocks = program.graph, program.blocks
    if not runs_stages(plan, blocks):
        graph = with_fusion(graph, blocks) if plan.compiled else graph
        return with_stage_memory(plan, graph, blocks, runs=False)

    def made() -> tuple[dict[str, int], ...]:
        found = with_stage_memory(plan, graph, blocks)
        return tuple(dict(stage.prediction.memory_bytes) for stage in found.stages)

    bare = replace(plan, solver=replace(plan.solver, seconds={}, is_reused=False))
    try:
        table = table_text(plan.schedule, len(plan.stages), plan.num_microbatches, plan.num_chunks)
        key = (graph_digest(graph, blocks), dumps(bare), table)
    except UnkeyedError:
        return with_stage_memory(plan, graph, blocks)
    bytes_of = cache.get_or_make(made, MEMORY, _MEMORY, *key)
    return with_memory(plan, bytes_of)
