"""Checkpoints: the complete state of a training run, loadable under any plan of the model.

In: the ``TrainingState`` of a process. Out: a folder ``step-N`` with

- tensors, written by ``torch.distributed.checkpoint``: ``model.<name>`` for every entry of the
  model's ``state_dict``, ``buffer.<name>`` for other buffers that training changes,
  ``optimizer.<name>.<state>``, ``part.<name>...``;
- ``checkpoint.json``: step, plan, random state, hyperparameters by parameter, parts' states.

Each rank writes its shards, and reads the shards that it needs under the plan that is running.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...planner.errors import UsageError
from ..messages.shared_objects import gather_values
from .folder import STATE, choose_checkpoint
from .metadata import SafeFileSystemReader, missing_files, read_tensors, stored_tensors
from .optimizer_state import PREFIX, NamedOptimizer, decode, empty_state
from .parts import GENERATORS, Stateful, load_part, merge_groups, part_tensors, save_parts
from .weight_files import few_names
from .writer import CheckpointWriter, PendingSave, Snapshot

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Slot:
    """The parameters and buffers of one stage in this process, by the model's names; loading a
    checkpoint overwrites them in place. ``transient`` are the stage's non-persistent buffers, which
    the model's ``state_dict`` leaves out."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    transient: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """State of a training run that this process saves to, or loads from, a checkpoint.

    ``shapes`` has every entry of the whole model's ``state_dict``; ``aliases`` maps each further
    name of a tied tensor to its first name. ``slots`` hold the tensors in this process's memory, by
    stage, and ``written`` names the tensors that this process writes (None: all). ``facts`` is JSON
    of the caller, such as the plan; ``parts`` are further objects to save, such as schedulers, with
    ``state_dict`` and ``load_state_dict``; a checkpoint may lack the parts in ``optional``.
    ``beside`` are parameters that the optimizer updates and that are in none of the ``slots``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    slots: tuple[Slot, ...]
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    written: frozenset[str] | None = None
    optimizer: Optimizer | None = None
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    optional: frozenset[str] = frozenset((GENERATORS,))
    facts: Mapping[str, Any] = field(default_factory=dict)

    def names(self) -> dict[int, str]:
        """Return the names of this process's parameters by ``id(parameter)``."""
        held = {id(p): name for slot in self.slots for name, p in slot.parameters.items()}
        return {**{id(p): name for name, p in self.beside.items()}, **held}

    def same(self, name: str) -> tuple[str, ...]:
        """Return ``name`` and, if its tensor is tied, all other names of the tensor."""
        first = self.aliases.get(name, name)
        others = (alias for alias, held in self.aliases.items() if held == first)
        return tuple(dict.fromkeys((name, first, *others)))


@dataclass(frozen=True, slots=True)
class Loaded:
    """The step after which a loaded checkpoint was written, and ``facts``, the JSON that the caller
    of ``save_checkpoint`` stored in it."""

    step: int
    facts: Mapping[str, Any]


def save_checkpoint(
    folder: str | Path,
    state: TrainingState,
    writer: CheckpointWriter,
    *,
    step: int,
    keep: int | None = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Write ``state`` after step N into ``folder/step-N``. Collective over all ranks.

    If ``asynchronous``, return once the tensors are copied; the handle that is returned waits for
    the files. ``keep`` is the number of newest checkpoints to keep (None: all). Raises UsageError
    (AP882, AP883, AP887) for a state that cannot be saved and MachineError (AP886) where writing
    fails.
    """
    writer.wait()
    entries, tensors = save_parts(state.parts, state.names())
    tensors |= _model_tensors(state)
    own: dict[str, Any] = {"host": socket.gethostname(), "optimizer": None}
    if state.optimizer is not None:
        named = NamedOptimizer(state.optimizer, state.names())
        written = {
            name: parameter
            for slot in reversed(state.slots)
            for name, parameter in slot.parameters.items()
            if state.written is None or name in state.written
        }
        tensors |= named.tensors(written)
        own["optimizer"] = {
            "kind": type(state.optimizer).__name__,
            "groups": named.groups(),
            "values": named.values(written),
        }
    ranks = gather_values(own)
    document = {
        "format": FORMAT,
        "step": step,
        "saved_at": time.time(),
        "hosts": [each["host"] for each in ranks],
        "torch": str(torch.__version__),
        "facts": dict(state.facts),
        "optimizer": _optimizer_entry([each["optimizer"] for each in ranks]),
        "parts": entries,
    }
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    snapshot = Snapshot(Path(folder), step, tensors, document if is_first else None, keep)
    return writer.write(snapshot, asynchronous=asynchronous)


def _model_tensors(state: TrainingState) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for slot in reversed(state.slots):
        held = {f"buffer.{name}": tensor for name, tensor in slot.transient.items()}
        for name, tensor in {**slot.parameters, **slot.buffers}.items():
            if state.written is None or name in state.written:
                held |= {f"model.{each}": tensor.detach() for each in state.same(name)}
        tensors |= held
    return tensors


def _optimizer_entry(ranks: list[Any]) -> dict[str, Any] | None:
    """Merge the optimizer entries of ``ranks`` (optimizer class, parameter groups, values that are
    not tensors) into the entry of the whole checkpoint. Return None if no rank has an optimizer.
    Groups of ranks that train no parameter are ignored."""
    saved = [each for each in ranks if each is not None]
    if not saved:
        return None
    training = [each for each in saved if any(names for _, names in each["groups"])] or saved
    merged = merge_groups([pair for each in training for pair in each["groups"]])
    return {
        "kind": training[0]["kind"],
        "groups": [{"options": options, "parameters": names} for options, names in merged],
        "values": {name: value for each in saved for name, value in each["values"].items()},
    }


def load_checkpoint(path: str | Path, state: TrainingState) -> Loaded:
    """Fill ``state`` from the checkpoint ``path``, or the newest in the folder ``path``.

    Damaged checkpoints in a folder are skipped. Collective over all ranks: rank 0 lists the
    checkpoints. Everything but the content of the tensors is checked before anything is changed.
    Raises UsageError: AP132 no checkpoint, AP880 damaged, AP881 files on another host, AP885
    another model, AP887 to AP889 parts or optimizer that do not fit.
    """
    path = choose_checkpoint(path)
    document = _read_document(path)
    reader = SafeFileSystemReader(path, tuple(document["hosts"]))
    stored = stored_tensors(reader.read_metadata())
    _check_model(
        path,
        state,
        {k.removeprefix("model."): v.size for k, v in stored.items() if k.startswith("model.")},
    )
    found_parts = {
        name: part_tensors(name, document["parts"][name])
        for name in _parts_to_load(path, state, document)
    }
    named = None
    if state.optimizer is not None:
        _check_optimizer(path, state, document)
        named = NamedOptimizer(state.optimizer, state.names())
        options = named.options_to_load(_renamed_groups(state, document["optimizer"]["groups"]))
    for slot in state.slots:
        _fill(reader, slot, state, stored, document)
    if named is not None:
        named.set_options(options)
    for name, (rank, keys) in found_parts.items():
        tensors = {
            key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in keys
        }
        read_tensors(reader, tensors)
        load_part(
            state.parts[name], document["parts"][name], rank, list(tensors.values()), state.names()
        )
    return Loaded(int(document["step"]), document["facts"])


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads((path / STATE).read_text())
        version = document["format"]
        missing = {"step", "hosts", "facts", "optimizer", "parts"} - set(document)
    except FileNotFoundError:
        raise missing_files(path, [STATE], ()) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "AP880", "the checkpoint's JSON is damaged", why=str(error), where=str(path / STATE)
        ) from None
    if version != FORMAT or missing:
        raise UsageError(
            "AP880",
            f"the checkpoint has format {version}, but this version reads {FORMAT}",
            where=str(path / STATE),
            fix="use the version of autoparallel that wrote it",
        )
    return document  # type: ignore[no-any-return]


def _check_model(path: Path, state: TrainingState, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError AP885 unless the checkpoint's tensors have the model's names and shapes."""
    lacking = [name for name in state.shapes if name not in stored]
    unknown = [name for name in stored if name not in state.shapes]
    other = [
        f"{name} is {tuple(stored[name])} in the checkpoint and {tuple(shape)} in the model"
        for name, shape in state.shapes.items()
        if name in stored and tuple(stored[name]) != tuple(shape)
    ]
    differences = [
        text
        for names, text in (
            (lacking, f"the checkpoint lacks {few_names(lacking, 3)}"),
            (unknown, f"the model lacks {few_names(unknown, 3)}"),
            (other, few_names(other, 3)),
        )
        if names
    ]
    if differences:
        raise UsageError(
            "AP885",
            "the checkpoint belongs to another model",
            why="; ".join(differences),
            where=str(path),
            fix="use the model and settings that the checkpoint was saved with",
        )


def _parts_to_load(path: Path, state: TrainingState, document: Mapping[str, Any]) -> list[str]:
    saved = document["parts"]
    for name in state.parts:
        if name not in saved and name not in state.optional:
            others = ", ".join(n for n in saved if n != GENERATORS)
            raise UsageError(
                "AP888",
                f"the checkpoint has no state of {name!r}",
                why=f"it has the states of {others}" if others else "it was saved without any",
                where=str(path),
                fix="load without it, or use the name that it was saved under",
            )
    return [name for name in state.parts if name in saved]


def _check_optimizer(path: Path, state: TrainingState, document: Mapping[str, Any]) -> None:
    saved, optimizer = document["optimizer"], state.optimizer
    if saved is None:
        raise UsageError(
            "AP889",
            "the checkpoint has no optimizer state",
            why="it was saved without an optimizer",
            where=str(path),
            fix="autoparallel.save(path, model, optimizer, ...); or load only the model",
        )
    assert optimizer is not None
    kind = type(optimizer).__name__
    is_used = any(group["params"] for group in optimizer.param_groups)
    if is_used and kind != saved["kind"]:
        raise UsageError(
            "AP889",
            f"the checkpoint has the state of {saved['kind']}, but the optimizer is {kind}",
            where=str(path),
            fix=f"train with {saved['kind']}, or load only the model",
        )


def _renamed_groups(state: TrainingState, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved parameter groups, adding to each all other names of its tied parameters."""
    return [
        {**group, "parameters": [each for name in group["parameters"] for each in state.same(name)]}
        for group in groups
    ]


def _fill(
    reader: SafeFileSystemReader,
    slot: Slot,
    state: TrainingState,
    stored: Mapping[str, Any],
    document: Mapping[str, Any],
) -> None:
    """Load the tensors of ``slot`` (one stage) in place, and the optimizer state of its parameters.
    ``stored`` has the checkpoint's index entries by key, ``document`` its ``checkpoint.json``."""
    wanted = {
        f"model.{name}": tensor.detach()
        for name, tensor in {**slot.parameters, **slot.buffers}.items()
    }
    wanted |= {
        key: tensor
        for name, tensor in slot.transient.items()
        if (key := f"buffer.{name}") in stored and tuple(stored[key].size) == tuple(tensor.shape)
    }
    optimizer = state.optimizer
    made: list[tuple[Tensor, str, str]] = []
    if optimizer is not None:
        keys = _optimizer_keys(stored)
        for name, parameter in slot.parameters.items():
            saved = next((each for each in state.same(name) if each in keys), name)
            for key, entry in keys.get(saved, {}).items():
                wanted[entry] = empty_state(parameter, key, stored[entry], optimizer)
                made.append((parameter, key, entry))
    read_tensors(reader, wanted)
    if optimizer is None:
        return
    for name, parameter in slot.parameters.items():
        optimizer.state.pop(parameter, None)
        for each in state.same(name):
            values = document["optimizer"]["values"].get(each, {})
            if values:
                optimizer.state[parameter].update(
                    {key: decode(value, []) for key, value in values.items()}
                )
    for parameter, key, entry in made:
        optimizer.state[parameter][key] = wanted[entry]


def _optimizer_keys(stored: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the keys of the optimizer state tensors in a checkpoint: by parameter name, then by
    the name of the state, such as "exp_avg". ``stored`` has the keys of all tensors."""
    found: dict[str, dict[str, str]] = {}
    for entry in stored:
        if entry.startswith(PREFIX):
            name, _, key = entry.removeprefix(PREFIX).rpartition(".")
            found.setdefault(name, {})[key] = entry
    return found
