"""Plans that a script carries out by the model's own forward and torch's data parallelism.

In: a plan to export. Out: a ``WholeModel`` if every rank computes on its rows what the model would:
no op of a block needs other ranks, a random number or a part of a weight, and the loss is a mean
over targets, which a rank weights by their number. Otherwise None: the script then has a function
for each kind of block.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from autoparallel.passes.local.localize import MADE_BY
from autoparallel.passes.local.stage_program import BlockProgram, StageProgram
from autoparallel.passes.ops.collectives import local_tensor
from autoparallel.passes.ops.local_loss import MEAN, cross_entropy
from autoparallel.runtime.parameters.parameters import Formats
from autoparallel.script.blocks import module_path
from autoparallel.script.expressions import INDENT, function, literal
from autoparallel.script.source import ExportedPlan
from autoparallel.script.stages import WRAPPERS, index_range, split_index


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Script that trains the user's module by ZeRO within groups of ``degree`` ranks (0: over all
    ranks). ``units`` are modules whose weights are sharded
    together; ``recomputed`` modules run again in the backward; ``rows`` are inputs with a row per
    sample."""

    zero: int
    degree: int
    units: tuple[str, ...]
    recomputed: Mapping[str, str]
    rows: tuple[str, ...]
    loss: str
    """Expression of the loss of ``model`` on the tensors ``rows``."""

    def text(self) -> str:
        """Return the text of the script's functions ``loss_of`` and ``new_trainer``."""
        head = "loss_of(model: nn.Module, rows: dict[str, Tensor]) -> Tensor"
        lines = []
        for mode, wrapper in WRAPPERS.items():
            names = [name for name, own in self.recomputed.items() if own == mode]
            option = ", use_reentrant=False" if mode == "full" else ""
            lines += [
                f"for name in {names_text(names)}:",
                f"{INDENT}module = model.get_submodule(name)",
                f"{INDENT}module.forward = partial({wrapper}, module.forward{option})",
            ] * bool(names)
        options = f", degree={self.degree}" if self.degree else ""
        options += f", units={names_text(self.units)}" if self.units else ""
        lines.append(
            f"return ModelTrainer(model, loss_of, count, device, zero={self.zero}{options})"
        )
        return "\n\n\n".join(
            [
                function(head, "Loss of the model on some rows.", [f"return {self.loss}"]),
                function(
                    "new_trainer(model: nn.Module, device: torch.device) -> ModelTrainer",
                    "Trainer of the model, which is whole.",
                    lines,
                ),
            ]
        )


def names_text(names: Sequence[str]) -> str:
    """Write a list of names as Python text, with consecutively numbered names as loops.

    >>> names_text(["layers.0", "layers.1", "head", "0"])
    '[*(f"layers.{i}" for i in range(2)), "head", "0"]'
    """

    def run(place: tuple[int, str]) -> tuple[str, int]:
        prefix, number = split_index(place[1]) or (place[1], 0)
        return prefix, number - place[0]

    parts = []
    for (prefix, offset), group in groupby(enumerate(names), run):
        places, members = zip(*group, strict=True)
        numbers = index_range(places[0] + offset, places[-1] + 1 + offset)
        several = f'*(f"{prefix}{{i}}" for i in {numbers})'
        parts.append(several if len(members) > 1 else f'"{members[0]}"')
    return f"[{', '.join(parts)}]"


def whole_model(found: ExportedPlan, module: str) -> WholeModel | None:
    """Return the parts of a script that trains the user's module by a plan; None if impossible."""
    if found.plan.has_pipeline or len(found.programs) > 1:
        return None
    (program,), (stage,), captured = found.programs, found.stages, found.made.program
    formats = Formats.of(found.plan.model.precision, found.plan.states)
    units = tuple(_units(captured.model, program.blocks))
    recomputed = {b.name: b.recompute for b in program.blocks if b.recompute != "none"}
    sizes = zip(program.mesh.axes, program.mesh.shape, strict=True)
    loss = _loss_text(found, module)
    if (
        loss is None
        or any(axis != "dp" and size > 1 for axis, size in sizes)
        or not all(map(_computes_rows, (program, *found.last_programs)))
        or captured.unused
        or recomputed.keys() - set(units)
        or (stage.zero and not _can_shard(captured.model, program, units))
        or formats.gradient != formats.master
        or found.plan.model.precision == "fp16"
        or (formats.master == torch.float64 and _names_dtypes(program))
    ):
        return None
    dims = captured.example.dims if captured.example is not None else {}
    rows = tuple(name for name, place in captured.inputs.items() if place.path in dims)
    degree = stage.shard_degree if stage.zero else 0
    return WholeModel(stage.zero, degree, units if stage.zero else (), recomputed, rows, loss)


def _units(model: nn.Module, blocks: Iterable[BlockProgram]) -> list[str]:
    """Return the paths of the blocks that are modules of ``model`` with a forward of their own."""
    modules = dict(model.named_modules())
    containers = nn.ModuleList | nn.ModuleDict
    names = [module_path(block) for block in blocks]
    return [
        name
        for name in names
        if name in modules and not isinstance(modules[name], containers) and names.count(name) == 1
    ]


def _calls(program: StageProgram) -> Iterable[fx.Node]:
    for block in program.blocks:
        yield from (n for n in block.module.graph.nodes if n.op not in ("placeholder", "get_attr"))


def _computes_rows(program: StageProgram) -> bool:
    """Return whether a rank's program is the model's own forward on the rank's samples, with one
    mean loss at its end and without sharded tensors."""
    tensors = (program.parameters, program.buffers, program.constants)
    layouts = [each.layout for group in tensors for each in dict[str, Any](group).values()]
    counting = program.counting
    if (
        counting is None
        or counting.totals
        or counting.leaves
        or len(counting.losses) > 1
        or program.updates
        or program.kept
        or any(place.is_shard for layout in layouts for place in layout)
    ):
        return False
    losses = []
    for node in _calls(program):
        called = getattr(node.target, "func", node.target)
        if called is cross_entropy:
            options = dict[str, Any](node.kwargs)
            if options["reduction"] != MEAN or options["axes"][1]:
                return False
            losses.append(node.meta[MADE_BY].name)
        elif isinstance(called, torch._ops.OpOverload):
            if called.namespace == "autoparallel":
                return False
        elif node.op != "output" and called not in (operator.getitem, local_tensor):
            return False
    return losses == [program.loss]


def _names_dtypes(program: StageProgram) -> bool:
    """Return whether the model's code may name a floating-point dtype. Verification in float64
    cannot replace such a dtype inside the model's own forward."""
    given = (each for node in _calls(program) for each in tree_leaves((node.args, node.kwargs)))
    named = any(isinstance(each, torch.dtype) and each.is_floating_point for each in given)
    return named or any("float" in each.spec.dtype for each in program.constants.values())


def _can_shard(model: nn.Module, program: StageProgram, units: Sequence[str]) -> bool:
    """Return whether each weight is read only inside the unit (sharded module) that holds it."""
    owners: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        owners.setdefault(id(weight), set()).add(unit)
    outside = [b for b in program.blocks if module_path(b) not in units]
    is_read_outside = any(
        name.startswith(f"{unit}.") for b in outside for name in b.parameters for unit in units
    )
    return not is_read_outside and all(len(each) == 1 for each in owners.values())


def _loss_text(found: ExportedPlan, module: str) -> str | None:
    """Return Python text that computes the model's loss on the tensors ``rows``; None if the batch
    or the outputs have an unsupported form."""
    captured, target = found.made.program, found.made.target
    example, form = captured.example, captured.outputs
    if example is None or example.fixed or example.inputs.keys() != captured.inputs.keys():
        return None
    names = {place.path[0]: name for name, place in captured.inputs.items()}
    rows = {key: f'rows["{name}"]' for key, name in names.items()}
    if isinstance(example.batch, dict):
        taken = inspect.signature(captured.model.forward).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        given = [f"{key}={row}" for key, row in rows.items() if takes_all or key in taken]
        batch = "{" + ", ".join(f"{literal(key)}: {row}" for key, row in rows.items()) + "}"
    elif type(example.batch) in (tuple, list):
        given = [rows[key] for key in sorted(rows)]
        batch = f"({', '.join(given)},)"
    else:
        return None
    call = f"model({', '.join(given)})"
    if target.loss_fn is not None:
        return f"{module}.loss_fn({call}, {batch})" if module else None
    return None if form is None else _loss_at(form, call)


def _loss_at(form: Any, call: str) -> str | None:
    """Return the text that reads the loss in the outputs of ``call``, None if it is not unique."""
    marks = [leaf.kind == "loss" and leaf.value in ((), None) for leaf in form.leaves]
    found, _ = tree_flatten_with_path(tree_unflatten(marks, form.structure))
    paths = [keystr(path) for path, is_loss in found if is_loss]
    return f"{call}{paths[0]}".replace("'", '"') if len(paths) == 1 else None
