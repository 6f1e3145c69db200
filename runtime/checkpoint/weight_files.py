"""Tensors in files, by name, of which any box can be read alone.

In: the path of a safetensors file, of a file of ``torch.save``, of a folder that Hugging Face
wrote (whole or in shards with an index), or of a checkpoint folder. Out: ``WeightFiles``.
Format of safetensors: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...planner.errors import UsageError
from ...planner.layout import Region
from .dcp_weights import CheckpointWeights, find_checkpoint
from .file_errors import reading

TORCH_ENDINGS = (".pt", ".pth", ".bin")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin", "model.pt")
"""What Hugging Face and ``autoparallel export`` call the file of a model, in the order tried;
with ``.index.json`` after it, the index of one in several."""

CONTAINERS = ("state_dict", "model_state_dict", "model")
"""Under which keys a file of ``torch.save`` may hold the weights beside other things."""


class WeightFiles(Protocol):
    """Tensors by name; ``place`` is the file or folder."""

    place: str

    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; nothing else of it is read."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor as it is stored."""

    def read(self, name: str, region: Region) -> Tensor:
        """The box ``region`` of a tensor, on the CPU, in the dtype that it is stored in."""


def whole_region(shape: tuple[int, ...]) -> Region:
    """The box that is all of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def open_weights(path: str | Path) -> WeightFiles:
    """The weights in a file or folder.

    Raises UsageError: AP860 where there are none, AP861 where they cannot be read.
    """
    place = Path(path)
    if place.is_dir():
        return _open_folder(place)
    if not place.exists():
        raise UsageError("AP860", f"there is no file or folder {place}", where=str(place.resolve()))
    if place.name.endswith(".index.json"):
        return _open_index(place)
    return _open_file(place)


def _open_folder(folder: Path) -> WeightFiles:
    for name in FOLDER_FILES:
        if (folder / name).exists():
            return _open_file(folder / name)
        index = folder / f"{name}.index.json"
        if index.exists():
            return _open_index(index)
    checkpoint = find_checkpoint(folder)
    if checkpoint is not None:
        return CheckpointWeights(checkpoint)
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return _open_file(single[0])
    raise UsageError(
        "AP860",
        f"the folder {folder} contains no weights",
        why=f"it has no {', no '.join(FOLDER_FILES)}, no index of them, and no checkpoint",
        where=str(folder.resolve()),
        fix="use a folder of save_pretrained, a checkpoint, or a weight file",
    )


def _open_file(path: Path) -> WeightFiles:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in TORCH_ENDINGS:
        return TorchFile(path)
    raise UsageError(
        "AP860",
        f"{path.name} is not a weight file",
        why=f"its ending is none of .safetensors, {', '.join(TORCH_ENDINGS)}",
        where=str(path.resolve()),
    )


def _open_index(index: Path) -> WeightFiles:
    with reading(index, OSError, ValueError, KeyError):
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    missing = sorted({file for file in files.values() if not (index.parent / file).exists()})
    if missing:
        raise UsageError(
            "AP860",
            f"{len(missing)} of {len(set(files.values()))} files that the index names are missing: "
            f"{', '.join(missing[:3])}",
            where=str(index.resolve()),
        )
    return ShardedFiles(index, files)


class SafetensorsFile:
    """One safetensors file, mapped into memory: a read touches the box's bytes alone."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        with reading(path, SafetensorError, OSError):
            self._file = cast(Any, safe_open(path, framework="pt"))
            self._names = tuple(self._file.keys())

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name, tuple((0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, region: Region) -> Tensor:
        with reading(Path(self.place), SafetensorError):
            if not region:
                scalar: Tensor = self._file.get_tensor(name)
                return scalar
            part: Tensor = self._file.get_slice(name)[tuple(slice(*bounds) for bounds in region)]
            return part


class TorchFile:
    """One file of ``torch.save``, mapped into memory; it may hold nothing but tensors."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        with reading(path, RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError):
            self._tensors = _tensors_of(_load_mapped(path))
        if not self._tensors:
            raise UsageError("AP860", f"{path} contains no named tensors", where=self.place)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, region: Region) -> Tensor:
        return self._tensors[name][tuple(slice(*bounds) for bounds in region)]


def _load_mapped(path: Path) -> Any:
    """What the file holds; only torch's format since 1.6, a zip file, can be mapped."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _tensors_of(value: Any) -> dict[str, Tensor]:
    for key in CONTAINERS:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
    if not isinstance(value, Mapping):
        return {}
    return {
        str(name): tensor.detach() for name, tensor in value.items() if isinstance(tensor, Tensor)
    }


class ShardedFiles:
    """Several files with an index; each is opened when a tensor of it is first asked for."""

    def __init__(self, index: Path, files: Mapping[str, str]) -> None:
        self.place = str(index)
        self._folder = index.parent
        self._files = files
        self._opened: dict[str, WeightFiles] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._of(name).dtype(name)

    def read(self, name: str, region: Region) -> Tensor:
        return self._of(name).read(name, region)

    def _of(self, name: str) -> WeightFiles:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = _open_file(self._folder / file)
        opened = self._opened[file]
        if name not in opened.names():
            raise UsageError(
                "AP861", f"{file} has no tensor {name!r}, where the index says it is",
                where=self.place,
            )  # fmt: skip
        return opened
