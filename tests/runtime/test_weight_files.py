"""Any box of any tensor is read from every format, and damage is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import whole_region
from autoparallel.runtime.checkpoint.weight_files import open_weights

TENSORS = {
    "a.weight": torch.arange(24.0).view(4, 6),
    "a.bias": torch.arange(4, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "cube": torch.arange(60, dtype=torch.int64).view(3, 4, 5),
}


def safetensors_file(folder: Path) -> Path:
    save_file(TENSORS, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def safetensors_folder(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def safetensors_shards(folder: Path) -> Path:
    places = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        file = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / file)
        places[name] = file
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def torch_file(folder: Path) -> Path:
    torch.save(TENSORS, folder / "weights.pt")
    return folder / "weights.pt"


def torch_container(folder: Path) -> Path:
    torch.save({"state_dict": TENSORS, "epoch": 3}, folder / "weights.pth")
    return folder / "weights.pth"


def torch_old_format(folder: Path) -> Path:
    torch.save(TENSORS, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def dcp_folder(folder: Path) -> Path:
    dcp.save(dict(TENSORS), checkpoint_id=folder, no_dist=True)
    return folder


def training_checkpoints(folder: Path) -> Path:
    """Of two steps; the first has other values."""
    for step, factor in ((1, 0), (20, 1)):
        state: dict[str, Tensor] = {f"model.{name}": t * factor for name, t in TENSORS.items()}
        state |= {"optimizer.a.weight.exp_avg": torch.zeros(4, 6), "step": torch.tensor(step)}
        dcp.save(state, checkpoint_id=folder / f"step-{step:08d}", no_dist=True)
        (folder / f"step-{step:08d}" / "checkpoint.json").write_text("{}")
    return folder


FORMATS = (
    safetensors_file,
    safetensors_folder,
    safetensors_shards,
    torch_file,
    torch_container,
    torch_old_format,
    dcp_folder,
    training_checkpoints,
)


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_a_box_of_a_tensor_is_what_slicing_the_tensor_gives(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    files = open_weights(write(tmp_path))
    assert set(files.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert files.shape(name) == tuple(tensor.shape)
        assert files.dtype(name) == tensor.dtype
        whole = files.read(name, whole_region(files.shape(name)))
        assert torch.equal(whole, tensor)
        assert whole.dtype == tensor.dtype
    assert torch.equal(files.read("a.weight", ((1, 3), (2, 6))), TENSORS["a.weight"][1:3, 2:6])
    box = files.read("cube", ((0, 3), (1, 2), (4, 5)))
    assert torch.equal(box, TENSORS["cube"][:, 1:2, 4:5])


def test_a_checkpoint_in_pieces_is_read_across_them(tmp_path: Path) -> None:
    from processes import run_processes

    run_processes(2, _save_sharded, str(tmp_path), backend="gloo")
    files = open_weights(tmp_path)
    expected = torch.arange(48.0).view(8, 6)
    assert torch.equal(files.read("w", ((2, 7), (1, 5))), expected[2:7, 1:5])


def _save_sharded(folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    dcp.save(
        {"w": distribute_tensor(torch.arange(48.0).view(8, 6), mesh, [Shard(0)])},
        checkpoint_id=folder,
    )


def test_a_place_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"AP860.*no file or folder"):
        open_weights(tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match=r"AP860.*contains no weights"):
        open_weights(tmp_path)
    (tmp_path / "weights.npz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"AP860.*is not a weight file"):
        open_weights(tmp_path / "weights.npz")
    index = {"weight_map": {"a": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"AP860.*gone.safetensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 this is no file of weights")
    with pytest.raises(UsageError, match=r"AP861.*cannot be read"):
        open_weights(tmp_path / name)


def test_a_file_of_other_python_objects_runs_nothing_and_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"a": Evil()}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="AP861"):
        open_weights(tmp_path / "weights.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"weight_map": []}', "no table weight_map"),
        ('{"weight_map": {"a": 3}}', "no table weight_map"),
        ("[1]", "no table weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not in its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not in its folder"),
        ("[" * 5000, "nested too deeply"),
        ('{"weight_map": ' + "9" * 5000 + "}", "5000 digits"),
    ],
)
def test_an_index_that_is_damaged_or_leaves_its_folder_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match="AP861") as caught:
        open_weights(tmp_path)
    assert why in caught.value.why
