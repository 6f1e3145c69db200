"""A checkpoint from somebody else runs no code when it is loaded."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.checkpoint.checkpoint import (
    Slot,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from autoparallel.runtime.checkpoint.metadata import SafeFileSystemReader
from autoparallel.runtime.checkpoint.writer import CheckpointWriter


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def state(value: float = 1.0) -> TrainingState:
    weight = torch.full((2, 3), value, dtype=torch.bfloat16)
    return TrainingState({"weight": (2, 3)}, (Slot({"weight": weight}),))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "run", state(), CheckpointWriter(), step=1).path


def weight_of(held: TrainingState) -> torch.Tensor:
    return held.slots[0].parameters["weight"]


def test_an_index_that_torch_wrote_is_read_as_torch_reads_it(saved: Path) -> None:
    plain = pickle.loads((saved / ".metadata").read_bytes())
    found = SafeFileSystemReader(saved).read_metadata()
    assert found.state_dict_metadata == plain.state_dict_metadata
    assert found.storage_data == plain.storage_data
    held = state(0.0)
    assert load_checkpoint(saved, held).step == 1
    assert torch.equal(weight_of(held), weight_of(state()))


def test_code_in_an_index_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = Touch(tmp_path / "touched")
    for hostile in (Touch(tmp_path / "touched"), metadata):
        (saved / ".metadata").write_bytes(pickle.dumps(hostile))
        with pytest.raises(UsageError, match=r"AP880[\s\S]*mkdir is no part of an index"):
            load_checkpoint(saved, state())
    assert not (tmp_path / "touched").exists()


class Named:
    """Pickled as ``getattr(owner, name)``, which is how Python 3.11.2 pickles an enum's member."""

    def __init__(self, owner: object, name: str) -> None:
        self.pair = (owner, name)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, self.pair


def test_members_of_enumerations_are_read_as_python_3_11_2_writes_them(saved: Path) -> None:
    metadata: Any = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = Named(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    read = SafeFileSystemReader(saved).read_metadata()
    assert read.planner_data is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for owner, name in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")):
        metadata.planner_data = Named(owner, name)
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(UsageError, match=f"AP880[\\s\\S]*{name}.*is no part of an index"):
            SafeFileSystemReader(saved).read_metadata()


@pytest.mark.parametrize("content", [b"", b"\x80\x04junk", pickle.dumps([1, 2])])
def test_a_damaged_index_is_refused(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(UsageError, match="AP880"):
        load_checkpoint(saved, state())


def test_a_pickled_object_in_place_of_a_tensor_is_not_unpickled(
    saved: Path, tmp_path: Path
) -> None:
    metadata: Metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save(Touch(tmp_path / "touched"), saved / "__0_0.distcp")
    with pytest.raises(UsageError):
        load_checkpoint(saved, state())
    assert not (tmp_path / "touched").exists()


def test_a_hostile_shard_is_not_unpickled(saved: Path, tmp_path: Path) -> None:
    torch.save(Touch(tmp_path / "touched"), saved / "__0_0.distcp")
    with pytest.raises(UsageError, match="AP880"):
        load_checkpoint(saved, state())
    assert not (tmp_path / "touched").exists()


def test_an_index_that_names_files_outside_of_its_folder_is_refused(saved: Path) -> None:
    metadata: Metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere.distcp"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UsageError, match="outside of its folder"):
        load_checkpoint(saved, state())


def test_a_shard_that_another_host_wrote_is_named(saved: Path) -> None:
    shutil.move(saved / "__0_0.distcp", saved.parent / "elsewhere")
    held = state(0.0)
    with pytest.raises(UsageError, match=r"AP881.*__0_0.distcp \(written by rank 0 on \S+\)"):
        load_checkpoint(saved, held)
    assert torch.equal(weight_of(held), weight_of(state(0.0)))
