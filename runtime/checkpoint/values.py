"""Nested states (of schedulers, scalers, data loaders) as JSON text and tensors apart.

In: what a ``state_dict()`` returns: numbers, strings, None, tensors, bytes, and dicts, lists,
tuples and sets of them. Out: JSON in which each tensor is a number, and the tensors; and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...planner.errors import UsageError

TAG = "!"
"""The key of a JSON object that stands for something else than a dict of strings."""


def encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """``value`` as what ``json.dumps`` takes; its tensors are appended to ``tensors``.

    ``where`` names the value in errors. Raises UsageError (AP882) for any other type.

    >>> encode({"epochs": (1, 2), 3: None}, [], "data")
    {'!': 'dict', 'items': [['epochs', {'!': 'tuple', 'items': [1, 2]}], [3, None]]}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return _plain(value)
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        tensors.append(value.detach())
        return {TAG: "tensor", "index": len(tensors) - 1}
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "hex": bytes(value).hex()}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        items = [[key, encode(part, tensors, f"{where}.{key}")] for key, part in value.items()]
        if isinstance(value, Counter) or TAG in value or not _has_string_keys(value):
            kind = "counter" if isinstance(value, Counter) else "dict"
            keys = [encode(key, tensors, where) for key in value]
            return {TAG: kind, "items": [[k, part] for k, (_, part) in zip(keys, items)]}  # noqa: B905
        return dict(items)
    if isinstance(value, list):
        return [encode(part, tensors, f"{where}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        return {TAG: kind, "items": [encode(part, tensors, where) for part in value]}
    if hasattr(value, "__array__") and hasattr(value, "item") and not getattr(value, "ndim", 1):
        return encode(value.item(), tensors, where)  # A number of numpy's.
    kind = type(value).__name__
    raise UsageError(
        "AP882",
        f"{where} is a {kind}, which a checkpoint cannot hold",
        why="states are stored as JSON and plain tensors, so that loading one runs no code",
        fix="have state_dict() return numbers, strings, tensors, and dicts and lists of them",
    )


def decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    """What ``encode`` was given.

    >>> decode(encode({"epochs": (1, 2), 3: None}, [], "data"), [])
    {'epochs': (1, 2), 3: None}
    """
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: decode(part, tensors) for key, part in value.items()}
    if kind == "tensor":
        return tensors[value["index"]]
    if kind == "bytes":
        return bytes.fromhex(value["hex"])
    if kind == "dtype":
        found = getattr(torch, value["name"])
        assert isinstance(found, torch.dtype)
        return found
    items = [decode(part, tensors) for part in value["items"]]
    if kind == "tuple":
        return tuple(items)
    if kind == "set":
        return set(items)
    pairs = {key: part for key, part in items}  # noqa: C416
    return Counter(pairs) if kind == "counter" else pairs


def _plain(value: Any) -> Any:
    """A number or string without its subclass (an enum's, numpy's)."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None


def _has_string_keys(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)
