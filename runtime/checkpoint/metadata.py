"""Reading a checkpoint's index without running code from it.

``torch.distributed.checkpoint`` keeps the index (``.metadata``) as a pickle. In: the folder. Out:
its ``Metadata``, unpickled with an allowlist of the classes that an index consists of, and checked;
any other class is refused. Tensors are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from ...planner.errors import AutoparallelError, UsageError

METADATA = ".metadata"

ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "collections": ("OrderedDict",),
}
"""Classes, by module, that a checkpoint's unpickled index may use, besides torch dtypes."""


def _member(owner: Any, name: Any) -> Any:
    """Return the member ``name`` of the enumeration ``owner``. Python 3.11.0 to 3.11.3 pickle
    members as calls of ``getattr``. While an index is unpickled, this function stands for
    ``getattr`` and raises ``UnpicklingError`` for any other object."""
    if isinstance(owner, EnumType) and isinstance(name, str) and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"{name!r} of {owner!r} is no part of an index")


class _Unpickler(pickle.Unpickler):
    """Unpickler of a checkpoint's index that refuses all classes but the few in ``ALLOWED``."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")


class SafeFileSystemReader(FileSystemReader):
    """A ``FileSystemReader`` of checkpoints that never executes code pickled in their files.
    ``hosts`` are the hosts that the ranks ran on when the checkpoint was written; an error about a
    missing file names the host that wrote it."""

    def __init__(self, path: str | Path, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(path)
        self.folder = Path(path)
        self.hosts = hosts

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's index. Raise UsageError (AP880) if it is damaged or refers to
        classes that are not in ``ALLOWED``."""
        try:
            metadata = _Unpickler(io.BytesIO((self.folder / METADATA).read_bytes())).load()
            _check(metadata)
        except FileNotFoundError:
            raise UsageError("AP132", f"{self.folder} contains no checkpoint") from None
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged bytes can raise anything
            raise UsageError(
                "AP880",
                "the index of the checkpoint is damaged",
                why=f"{type(error).__name__}: {error}",
                where=str(self.folder / METADATA),
                fix="do not use this checkpoint unless you know where it comes from",
            ) from None
        if metadata.storage_meta is None:
            metadata.storage_meta = index.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata  # type: ignore[no-any-return]

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read the tensors that ``plan`` lists and pass them to ``planner``, which stores them.
        Raise UsageError: AP881 missing file, AP880 damaged file."""
        needed = {self._file_of(item) for item in plan.items}
        missing = sorted(name for name in needed if not (self.folder / name).exists())
        if missing:
            raise missing_files(self.folder, missing, self.hosts)
        for name in sorted(needed):
            items = [i for i in plan.items if self._file_of(i) == name]
            try:
                self._check_sums(name, items)
                super().read_data(replace(plan, items=items), planner)
            except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
                raise damaged_file(self.folder / name, f"{type(error).__name__}: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_sums(self, name: str, items: Iterable[ReadItem]) -> None:
        """Raise ValueError if the tensors ``items`` in file ``name`` do not match their stored
        checksums. ``torch.save`` writes each tensor as a zip archive, whose CRC-32 ``torch.load``
        ignores."""
        stored = [self.storage_data[item.storage_index] for item in items]
        with (self.folder / name).open("rb") as file:
            for offset, length in sorted({(info.offset, info.length) for info in stored}):
                file.seek(offset)
                try:
                    with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                        wrong = archive.testzip()
                except zipfile.BadZipFile as error:
                    raise ValueError(str(error)) from None
                if wrong is not None:
                    raise ValueError(f"the checksum of {wrong} is not that of its bytes")

    def _file_of(self, item: ReadItem) -> str:
        name: str = self.storage_data[item.storage_index].relative_path
        return name


class TensorsOnly(DefaultLoadPlanner):
    """Load planner for ``torch.distributed.checkpoint`` that raises UsageError (AP880) for a
    pickled object; torch's default planner would unpickle it, and so run its code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        raise UsageError("AP880", f"the checkpoint has a pickled object in place of {name!r}")


def read_tensors(reader: SafeFileSystemReader, state: Mapping[str, Tensor]) -> None:
    """Read tensors of a checkpoint in place: into each tensor of ``state`` the tensor stored under
    the same key (into a DTensor, this rank's shard). Not a collective: every rank reads for itself.
    Raises UsageError (AP880, AP881)."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(state), storage_reader=reader, planner=TensorsOnly(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, AutoparallelError):
            raise cause from None
        raise UsageError(
            "AP880",
            "the checkpoint cannot be read",
            why=f"{type(cause).__name__}: {cause}",
            where=str(reader.folder),
            fix="use another checkpoint: --resume DIR/step-N",
        ) from error


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the index's entry (shape, dtype, chunks) of each tensor in a checkpoint, by key."""
    return {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }


def damaged_file(file: Path, why: str) -> UsageError:
    """Return the error (AP880) about a damaged file of a checkpoint."""
    return UsageError(
        "AP880",
        f"the file {file.name} of the checkpoint is damaged",
        why=why,
        where=str(file),
        fix="use another checkpoint: --resume DIR/step-N; --resume DIR takes the newest whole one",
    )


def missing_files(folder: Path, missing: list[str], hosts: tuple[str, ...]) -> UsageError:
    """Return the error (AP881) about files of a checkpoint that are not on this host. ``hosts[r]``
    is the host of rank ``r`` when the checkpoint was written."""
    writers = []
    for name in missing:
        given = name.removeprefix("__").partition("_")[0]
        rank = int(given) if given.isdigit() else 0
        host = hosts[rank] if rank < len(hosts) else ""
        writers.append(f"{name} (written by rank {rank}{f' on {host}' if host else ''})")
    return UsageError(
        "AP881",
        f"{len(missing)} files of the checkpoint are missing: {', '.join(writers[:4])}",
        why="a rank on another host wrote them to a disk that this host cannot read",
        where=str(folder),
        fix="save to a folder that all hosts share, or copy the files together",
    )


def _check(metadata: Any) -> None:
    """Raise UnpicklingError if the index has fields of wrong types, or files outside its folder."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError(f"the index is a {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            raise pickle.UnpicklingError(f"the index names a file outside of its folder: {name!r}")
