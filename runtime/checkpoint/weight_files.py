"""Files of weights: any box of a tensor is read by name, and tensors are written in shards.

In: the path of a safetensors file, of a file of ``torch.save``, of a folder that Hugging Face
wrote (whole or in shards with an index), or of a checkpoint folder of
``torch.distributed.checkpoint`` (ours, with keys ``model.<name>`` beside the optimizer's, or any
state dict). Out: ``WeightFiles``; no process group is needed. Files are written as
``model.safetensors`` or ``model.pt``, or as shards and an index, named as Hugging Face names them,
with one shard in memory at a time.
Format of safetensors: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...cost_model.cluster.given_text import parse_json, read_text, shortened
from ...planner.errors import AutoparallelError, UsageError
from ...planner.graph.layout import Region, region_shape, region_slices
from .folder import STATE, complete_checkpoints
from .metadata import SafeFileSystemReader, TensorsOnly, stored_tensors


@contextmanager
def reading_file(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions of classes ``kinds`` in the context to UsageError AP861 about ``path``."""
    try:
        yield
    except AutoparallelError:
        raise
    except kinds as error:
        lines = str(error).strip().splitlines()
        raise UsageError(
            "AP861",
            f"the weights in {path} cannot be read",
            why=f"{type(error).__name__}: {lines[0] if lines else ''}",
            where=str(path.resolve()),
            fix="write the file again; a .pt file may contain only tensors by name",
        ) from error


INDEX = ".metadata"
"""Name of the file in which torch lists a checkpoint's tensors."""

MODEL = "model."
OTHERS = ("optimizer.", "optim.")
"""Prefixes of optimizer keys: a checkpoint with such keys is of a training run."""


def find_checkpoint(path: str | Path) -> Path | None:
    """Return ``path`` if it is a checkpoint, else the newest checkpoint in that folder, or None."""
    if (Path(path) / INDEX).exists():
        return Path(path)
    found = complete_checkpoints(Path(path))
    return found[-1] if found else None


class CheckpointWeights:
    """Reader of the model's weights in a checkpoint, by the model's own names. To read a box (a
    range of indices in each dimension), only the stored chunks that overlap it are loaded, one
    after the other."""

    def __init__(self, path: Path) -> None:
        """Read the index of folder ``path``. Raise UsageError AP861 if it is damaged."""
        self.place = str(path)
        self._reader = SafeFileSystemReader(path)
        with reading_file(path, OSError, EOFError, pickle.UnpicklingError, AttributeError):
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
            sizes=torch.Size(region_shape(region)),
        )
        part = torch.empty(tuple(box.sizes), dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(self._keys[name], stored, [box])
        with reading_file(
            Path(self.place), OSError, EOFError, pickle.UnpicklingError, RuntimeError
        ):
            self._reader.read_data(LoadPlan(items), _IntoTensor(part)).wait()
        return part

    def _stored(self, name: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata[self._keys[name]]
        assert isinstance(stored, TensorStorageMetadata)
        return stored


def _weights_in(metadata: Metadata, *, is_training: bool) -> dict[str, str]:
    """Return the checkpoint key of each of the model's weights, by name. In the checkpoint of a
    training run, the keys of weights have a prefix, and all other tensors are left out."""
    tensors = tuple(stored_tensors(metadata))
    if not is_training and "step" not in tensors and not any(k.startswith(OTHERS) for k in tensors):
        return {key: key for key in tensors}
    return {key.removeprefix(MODEL): key for key in tensors if key.startswith(MODEL)}


class _IntoTensor(TensorsOnly):
    """Load planner that reads a box (a range of indices in each dimension) of one tensor into
    ``part``, which has the box's shape: of each stored chunk the overlap with the box."""

    def __init__(self, part: Tensor) -> None:
        super().__init__()
        self._part = part

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        starts = read_item.dest_offsets
        bounds = zip(starts, read_item.lengths, strict=True)
        return self._part[tuple(slice(start, start + length) for start, length in bounds)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the chunk was read directly into its memory."""


TORCH_ENDINGS = (".pt", ".pth", ".bin")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin", "model.pt")
"""File names of a model from Hugging Face or ``autoparallel export``, in the order tried; with
``.index.json`` appended, the index of a model in several files."""

CONTAINERS = ("state_dict", "model_state_dict", "model")
"""Keys of a ``torch.save`` dict under which the weights may be, if it also holds other objects."""


LISTED = 5
"""Largest number of tensor names that an error or a summary lists."""


def few_names(names: Collection[str], most: int = LISTED) -> str:
    """Return the first ``most`` names as text, with the number of further names.

    >>> few_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    rest = len(names) - most
    return ", ".join(islice(names, most)) + (f" and {rest} more" if rest > 0 else "")


class WeightFiles(Protocol):
    """Interface to the named tensors in a weight file or folder, whose path is ``place``."""

    place: str

    def names(self) -> tuple[str, ...]:
        """The names of all tensors in the file or folder."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, read without its data."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor as it is stored."""

    def read(self, name: str, region: Region) -> Tensor:
        """Read the box ``region`` (start and stop in each dimension) of a tensor: on the CPU, in
        the stored dtype."""


def open_weights(path: str | Path) -> WeightFiles:
    """Open the weights in a file or folder.

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
    with reading_file(index, OSError, ValueError):
        table = parse_json(read_text(index))
        files = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("it has no table weight_map from names to file names")
        outside = [file for file in files.values() if file in ("", "..") or Path(file).name != file]
        if outside:
            raise ValueError(f"it names {shortened(outside[0])!r}, which is not in its folder")
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
    """Reader of one safetensors file, mapped into memory: touches only the bytes that are read."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        with reading_file(path, SafetensorError, OSError):
            self._file = cast(Any, safe_open(path, framework="pt"))
            self._names = tuple(self._file.keys())

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name, tuple((0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, region: Region) -> Tensor:
        with reading_file(Path(self.place), SafetensorError):
            if not region:
                scalar: Tensor = self._file.get_tensor(name)
                return scalar
            part: Tensor = self._file.get_slice(name)[region_slices(region)]
            return part


class TorchFile:
    """Reader of one file of ``torch.save``, mapped into memory, loaded with
    ``weights_only=True``."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        with reading_file(
            path, RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError
        ):
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
        return self._tensors[name][region_slices(region)]


def _load_mapped(path: Path) -> Any:
    """Load a file of ``torch.save``, mapped into memory if it has torch's zip format (1.6)."""
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
    """Reader of weights in several files with an index; opens a file when first read."""

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
                "AP861",
                f"{file} has no tensor {name!r}, where the index says it is",
                where=self.place,
            )
        return opened


ENDINGS = {"safetensors": ".safetensors", "pt": ".pt"}


def split_by_size(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Split the names, in order, into lists whose tensors have at most ``most_bytes`` together; a
    tensor larger than that gets a list of its own.

    >>> split_by_size({"a": 3, "b": 2, "c": 9, "d": 1}, most_bytes=5)
    [['a', 'b'], ['c'], ['d']]
    """
    found: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if found[-1] and held + size > most_bytes:
            found.append([])
            held = 0
        found[-1].append(name)
        held += size
    return found


def write_shards(
    folder: Path,
    sizes: Mapping[str, int],
    tensor: Callable[[str], Tensor],
    *,
    kind: str,
    most_bytes: int,
) -> list[Path]:
    """Write the tensors named in ``sizes`` (bytes by name) into files of format ``kind``
    (safetensors or pt), each of at most ``most_bytes``; return the files. ``tensor(name)`` returns
    a tensor. Several files get an index."""
    ending = ENDINGS[kind]
    parts = split_by_size(sizes, most_bytes)
    files = [folder / _file_name(number, len(parts), ending) for number in range(len(parts))]
    for file, names in zip(files, parts, strict=True):
        _write_shard(file, names, tensor, kind)
    if len(parts) > 1:
        places = {
            name: file.name for file, names in zip(files, parts, strict=True) for name in names
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / f"model{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files


def _file_name(number: int, count: int, ending: str) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}{ending}" if count > 1 else f"model{ending}"


def _write_shard(
    file: Path, names: Sequence[str], tensor: Callable[[str], Tensor], kind: str
) -> None:
    tensors = {name: tensor(name).contiguous() for name in names}
    if kind == "safetensors":
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        torch.save(tensors, file)
