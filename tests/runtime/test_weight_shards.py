"""What is written in shards is read back, whatever their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoparallel.planner.graph.layout import whole_region
from autoparallel.runtime.checkpoint.weight_files import open_weights, write_shards

TENSORS = {f"t{number}": torch.full((number + 1, 3), float(number)) for number in range(6)}
SIZES = {name: tensor.nbytes for name, tensor in TENSORS.items()}


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("most_bytes", [1, 100, 10_000])
def test_shards_hold_all_tensors_and_no_more_bytes_than_allowed(
    tmp_path: Path, kind: str, most_bytes: int
) -> None:
    files = write_shards(tmp_path, SIZES, TENSORS.__getitem__, kind=kind, most_bytes=most_bytes)
    found = open_weights(tmp_path)
    assert set(found.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(found.read(name, whole_region(found.shape(name))), tensor)
    held = [open_weights(file).names() for file in files]
    assert all(
        len(names) == 1 or sum(map(SIZES.__getitem__, names)) <= most_bytes for names in held
    )
    assert len(files) == {1: 6, 100: 4, 10_000: 1}[most_bytes]
