"""Checkpoints under the model's own names, loadable under any other plan.

In and out: a folder written by ``torch.distributed.checkpoint``, with keys
``model.<name>``, ``optimizer.<name>.<state>`` and ``step``. Each rank writes its shards of
what its stage holds; a parameter of several stages is written by the first. Loading reads
each rank's shards under whatever plan is running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..planner.errors import UsageError
from .parameters import StageParameter


def save_checkpoint(
    path: str | Path,
    parameters: Iterable[StageParameter],
    optimizer: Optimizer,
    *,
    step: int,
    tied: Mapping[str, str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Write parameters, optimizer state and ``buffers``. Collective over all ranks.

    Of several stages that hold a parameter one passes it. ``tied`` maps further names of tied
    parameters to the name they are held under; they are written under all their names, so
    that a plain ``state_dict`` can be loaded from the folder.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in (tied or {}).items():
        aliases.setdefault(name, []).append(alias)
    state: dict[str, Tensor] = {"step": torch.tensor(step)}
    for parameter in parameters:
        for name in (parameter.name, *aliases.get(parameter.name, ())):
            state[f"model.{name}"] = parameter.master.detach()
        for key, value in optimizer.state.get(parameter.master, {}).items():
            state[f"optimizer.{parameter.name}.{key}"] = torch.as_tensor(value)
    state |= {f"model.{name}": buffer for name, buffer in (buffers or {}).items()}
    save(state, checkpoint_id=path)


def load_checkpoint(
    path: str | Path,
    parameters: Iterable[StageParameter],
    optimizer: Optimizer | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> int:
    """Fill parameters, optimizer state and ``buffers`` from ``path``; returns the step it was
    written at.

    Collective over all ranks. Raises UsageError (AP132) where the folder is no checkpoint or
    lacks a parameter.
    """
    found = _stored_tensors(path)
    held = list(parameters)
    wanted = [*(p.name for p in held), *(buffers or {})]
    missing = [name for name in wanted if f"model.{name}" not in found]
    if missing:
        raise UsageError(
            "AP132", f"the checkpoint has no parameter or buffer {missing[0]!r}", where=str(path)
        )
    state: dict[str, Any] = {"step": torch.zeros_like(torch.tensor(0))}
    for parameter in held:
        state[f"model.{parameter.name}"] = parameter.master.detach()
    state |= {f"model.{name}": buffer for name, buffer in (buffers or {}).items()}
    optimizer_keys = {} if optimizer is None else _optimizer_keys(held, found)
    for key, (parameter, name) in optimizer_keys.items():
        assert optimizer is not None
        state[key] = _empty_state(parameter, name, found[key], optimizer)
    load(state, checkpoint_id=path)
    for key, (parameter, name) in optimizer_keys.items():
        assert optimizer is not None
        optimizer.state[parameter.master][name] = state[key]
    for parameter in held:
        parameter.refresh()
    return int(state["step"])


def _stored_tensors(path: str | Path) -> dict[str, TensorStorageMetadata]:
    if not (Path(path) / ".metadata").exists():
        raise UsageError("AP132", f"{path} holds no checkpoint", fix="give the folder of a save")
    metadata = FileSystemReader(path).read_metadata()
    return {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }


def _optimizer_keys(
    held: list[StageParameter], found: Mapping[str, TensorStorageMetadata]
) -> dict[str, tuple[StageParameter, str]]:
    """For each stored state of a parameter that is held here: the parameter, the state's name."""
    by_name = {parameter.name: parameter for parameter in held}
    keys = {}
    for key in found:
        if key.startswith("optimizer."):
            name, _, state = key.removeprefix("optimizer.").rpartition(".")
            if name in by_name:
                keys[key] = (by_name[name], state)
    return keys


def _empty_state(
    parameter: StageParameter, name: str, stored: TensorStorageMetadata, optimizer: Optimizer
) -> Tensor:
    master = parameter.master.detach()
    dtype = stored.properties.dtype
    if name != "step" and stored.size == master.shape:
        return torch.zeros_like(master, dtype=dtype)
    on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    assert isinstance(master, DTensor)
    device = master.to_local().device if on_device else torch.device("cpu")
    return torch.zeros(stored.size, dtype=dtype, device=device)
