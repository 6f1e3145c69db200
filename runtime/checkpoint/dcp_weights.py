"""The weights in a folder of ``torch.distributed.checkpoint``, read by one process.

In: a checkpoint of autoparallel (keys ``model.<name>`` beside the optimizer's), or a folder
with any state dict. Out: tensors by name, box by box. No process group is needed.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...planner.errors import UsageError
from ...planner.layout import Region
from .file_errors import reading
from .folder import STATE, complete_checkpoints
from .metadata import SafeFileSystemReader

METADATA = ".metadata"
"""The file in which torch says what a checkpoint holds."""

MODEL = "model."
OTHERS = ("optimizer.", "optim.")
"""Keys that tell a checkpoint of a whole training from one of weights alone."""


def find_checkpoint(path: str | Path) -> Path | None:
    """``path`` itself, or the newest of the checkpoints in it; None where there is none."""
    if (Path(path) / METADATA).exists():
        return Path(path)
    found = complete_checkpoints(Path(path))
    return found[-1] if found else None


class CheckpointWeights:
    """The weights of a checkpoint, by the model's own names.

    A read takes from the files the stored pieces that meet the box, one after the other.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError AP861 where the folder is damaged."""
        self.place = str(path)
        self._reader = SafeFileSystemReader(path)
        with reading(path, OSError, EOFError, pickle.UnpicklingError, AttributeError):
            self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._keys = _weights_in(self._metadata, is_training=(path / STATE).exists())

    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._stored(name).size)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored(name).properties.dtype

    def read(self, name: str, region: Region) -> Tensor:
        stored = self._stored(name)
        box = ChunkStorageMetadata(
            offsets=torch.Size(start for start, _ in region),
            sizes=torch.Size(stop - start for start, stop in region),
        )
        part = torch.empty(tuple(box.sizes), dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(self._keys[name], stored, [box])
        with reading(Path(self.place), OSError, EOFError, pickle.UnpicklingError, RuntimeError):
            self._reader.read_data(LoadPlan(items), _IntoTensor(part)).wait()
        return part

    def _stored(self, name: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata[self._keys[name]]
        assert isinstance(stored, TensorStorageMetadata)
        return stored


def _weights_in(metadata: Metadata, *, is_training: bool) -> dict[str, str]:
    """The keys of the weights, by their names without what a training puts before them."""
    tensors = [
        key
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    ]
    if not is_training and "step" not in tensors and not any(k.startswith(OTHERS) for k in tensors):
        return {key: key for key in tensors}
    return {key.removeprefix(MODEL): key for key in tensors if key.startswith(MODEL)}


class _IntoTensor(LoadPlanner):
    """Puts what is read of one tensor where its box in ``part`` is."""

    def __init__(self, part: Tensor) -> None:
        self._part = part

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._part
        bounds = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(bounds):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UsageError(
            "AP861", f"{read_item.storage_index.fqn} of the checkpoint is not a tensor"
        )

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
