"""Weights into files: as many tensors in one as its size allows, with an index of several.

In: the names of tensors with their bytes, and a function that gives each. Out: a folder with
``model.safetensors`` or ``model.pt``, or their shards and index, named as Hugging Face names
them. One shard is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

ENDINGS = {"safetensors": ".safetensors", "pt": ".pt"}


def shards(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """The names cut, in their order, into lists of at most ``most_bytes``, or one name.

    >>> shards({"a": 3, "b": 2, "c": 9, "d": 1}, most_bytes=5)
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
    """Writes the tensors, ``kind`` safetensors or pt; returns the files with tensors."""
    ending = ENDINGS[kind]
    parts = shards(sizes, most_bytes)
    files = [folder / _file_name(number, len(parts), ending) for number in range(len(parts))]
    for file, names in zip(files, parts, strict=True):
        _write(file, names, tensor, kind)
    if len(parts) > 1:
        places = {
            name: file.name for file, names in zip(files, parts, strict=True) for name in names
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / f"model{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files


def _file_name(number: int, count: int, ending: str) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}{ending}" if count > 1 else f"model{ending}"


def _write(file: Path, names: Sequence[str], tensor: Callable[[str], Tensor], kind: str) -> None:
    tensors = {name: tensor(name).contiguous() for name in names}
    if kind == "safetensors":
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        torch.save(tensors, file)
