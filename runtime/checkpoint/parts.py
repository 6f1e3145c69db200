"""Parts of a checkpoint: objects of the caller, such as schedulers, scalers and data loaders.

In: objects with ``state_dict`` and ``load_state_dict``, by name. Out: for each object an entry of
the checkpoint's JSON, and its tensors under ``part.<name>.<rank>.<number>``; and back. A state that
is equal on all ranks is stored once.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ...planner.errors import UsageError
from ..messages.shared_objects import gather_values
from .optimizer_state import (
    NamedOptimizer,
    Path,
    decode,
    encode,
    put_group_values,
    take_group_values,
)

PREFIX = "part."
GENERATORS = "generators"
"""Name of the built-in part: states of the random generators of Python, numpy and torch."""


class Stateful(Protocol):
    """Interface of an object whose state a checkpoint can hold, as an entry called a part."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Generators:
    """Part of a checkpoint that holds the states of this process's random generators. A plan's
    forward draws no numbers from these generators, but a script's data may."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the random generators' states: of Python, torch, the GPU, numpy (if imported)."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            kind, key, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = (kind, torch.from_numpy(key.astype("int64")), *rest)
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: Any) -> None:
        """Restore the generators from ``state``; skip the states of generators missing here."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state and "numpy" in sys.modules:
            kind, key, *rest = state["numpy"]
            sys.modules["numpy"].random.set_state((kind, key.numpy().astype("uint32"), *rest))
        if "cuda" in state and self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Encoded state of a part on one rank: its JSON, a digest of its tensors, and the values that a
    scheduler has per parameter group."""

    text: str
    digest: str
    num_tensors: int
    per_group: tuple[tuple[Path, Any], ...] = ()


def save_parts(
    parts: Mapping[str, Stateful], names: Mapping[int, str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON entries of all ``parts`` (objects saved beside the model), and the tensors
    that this rank is to write, by checkpoint key. Collective over all ranks.

    ``names`` maps ``id(parameter)`` to its name: schedulers' values are stored by these names.

    Raises UsageError (AP882) where a state has something that a checkpoint cannot hold.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    encoded, own = {}, {}
    for name, part in parts.items():
        found: list[Tensor] = []
        encoded[name] = _encode(name, part, names, found)
        own[name] = found
    ranks = _gathered(encoded)
    entries: dict[str, Any] = {}
    written: dict[str, Tensor] = {}
    for name in parts:
        states = [each[name] for each in ranks]
        is_one = all((s.text, s.digest) == (states[0].text, states[0].digest) for s in states)
        entries[name] = _entry(states[:1] if is_one else states, states)
        if rank == 0 or not is_one:
            written |= {f"{PREFIX}{name}.{rank}.{i}": t for i, t in enumerate(own[name])}
    return entries, written


def _encode(name: str, part: Stateful, names: Mapping[int, str], tensors: list[Tensor]) -> _Encoded:
    per_group: dict[Path, Any] = {}
    if isinstance(part, LRScheduler):
        state, per_group = take_group_values(part, NamedOptimizer(part.optimizer, names))
    else:
        state = part.state_dict()
    text = json.dumps(encode(state, tensors, name))
    groups = [
        (path, [(encode(value, [], name), members) for value, members in values])
        for path, values in per_group.items()
    ]
    return _Encoded(text, _digest(tensors), len(tensors), tuple(groups))


def _digest(tensors: list[Tensor]) -> str:
    """Return a SHA-256 digest of the values, dtypes and shapes of all tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(flat.numpy().tobytes())
    return found.hexdigest()


def _gathered(mine: Mapping[str, _Encoded]) -> list[Mapping[str, _Encoded]]:
    found = gather_values(mine)
    for rank, each in enumerate(found):
        if list(each) != list(found[0]):
            raise UsageError(
                "AP887",
                f"rank {rank} saves {', '.join(each) or 'nothing'} beside the model, and rank 0 "
                f"{', '.join(found[0]) or 'nothing'}",
                fix="call save on every rank with the same arguments",
            )
    return found


def _entry(states: list[_Encoded], ranks: list[_Encoded]) -> dict[str, Any]:
    """Return the JSON entry of a part. ``states`` is the list of states to store: one if the state
    is equal on all ranks, else one per rank. From ``ranks``, the states of all ranks, a scheduler's
    values per parameter group are merged."""
    merged: dict[Path, list[Any]] = {}
    for each in ranks:
        for path, values in each.per_group:
            merged.setdefault(path, []).extend(values)
    return {
        "states": [json.loads(state.text) for state in states],
        "tensors": [state.num_tensors for state in states],
        "per_group": [[list(path), merge_groups(values)] for path, values in merged.items()],
    }


def merge_groups(values: list[Any]) -> list[Any]:
    """Merge pairs (value, names): pairs of equal values become one pair with the names of them all.

    >>> merge_groups([(0.1, ["a"]), (0.2, ["b"]), (0.1, ["c", "a"])])
    [[0.1, ['a', 'c']], [0.2, ['b']]]
    """
    merged: list[tuple[Any, dict[str, None]]] = []
    for value, names in values:
        found = next((members for each, members in merged if each == value), None)
        if found is None:
            merged.append((value, dict.fromkeys(names)))
        else:
            found.update(dict.fromkeys(names))
    return [[value, list(names)] for value, names in merged]


def part_tensors(name: str, entry: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Find the saved state that this rank loads for part ``name``: return its index in ``entry``
    and the checkpoint keys of its tensors. Raises UsageError (AP887) where the ranks saved
    different states and the number of ranks has changed since."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    count = len(entry["states"])
    rank = dist.get_rank() if dist.is_initialized() and count > 1 else 0
    if count > 1 and count != world_size:
        if name != GENERATORS:
            raise UsageError(
                "AP887",
                f"{name!r} was saved with one state for each of {count} ranks; now there are "
                f"{world_size}",
                fix=f"resume with {count} processes, or give {name} a state that is equal on "
                "every rank",
            )
        rank = 0
    return rank, [f"{PREFIX}{name}.{rank}.{i}" for i in range(entry["tensors"][rank])]


def load_part(
    part: Stateful,
    entry: Mapping[str, Any],
    rank: int,
    tensors: list[Tensor],
    names: Mapping[int, str],
) -> None:
    """Load a saved state into ``part``: number ``rank`` of the states in its JSON ``entry``, with
    the ``tensors`` read for it. ``names`` maps ``id(parameter)`` to the parameter's name."""
    state = decode(entry["states"][rank], tensors)
    for path, values in entry["per_group"]:
        if isinstance(part, LRScheduler):
            decoded = [(decode(value, []), members) for value, members in values]
            put_group_values(state, path, decoded, NamedOptimizer(part.optimizer, names))
    part.load_state_dict(state)
