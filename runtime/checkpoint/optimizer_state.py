"""States of objects and optimizers, encoded as JSON and a list of tensors.

In: the result of ``state_dict()``: numbers, strings, None, tensors, bytes, and dicts, lists,
tuples and sets of them. Out: JSON in which each tensor is a number, and the tensors; and back.

Plans divide an optimizer's ``param_groups`` differently, so hyperparameters are stored as each
group's options with the names of its parameters, and tensors as ``optimizer.<name>.<state>``. A
scheduler's lists with one value per group are stored with these names too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as distributed
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...planner.errors import UsageError

TAG = "!"
"""Key that marks a JSON object which encodes another Python value than a dict with string keys."""


def encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """Encode ``value`` as an object for ``json.dumps``; append the tensors in it to ``tensors``.

    ``where`` names the value in errors. Raises UsageError (AP882) for a type without an encoding.

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
        return encode(value.item(), tensors, where)  # a numpy number
    kind = type(value).__name__
    raise UsageError(
        "AP882",
        f"{where} is a {kind}, which a checkpoint cannot hold",
        why="states are stored as JSON and plain tensors, so that loading one runs no code",
        fix="have state_dict() return numbers, strings, tensors, and dicts and lists of them",
    )


def decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the original value, given ``encode``'s result ``value`` and its list ``tensors``.

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
    """Convert a number or string of a subclass (an enum's, a numpy scalar) to its built-in type."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return None


def _has_string_keys(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


PREFIX = "optimizer."
HOW = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Options of a parameter group that change how an update is computed, but not its result."""
PER_GROUP = frozenset(
    ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
)
"""Entries of a scheduler's state that are lists with one value for each parameter group."""

Path = tuple[str | int, ...]
ByNames = list[tuple[Any, list[str]]]
"""Values of parameter groups, each with the names of the parameters in its groups."""


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer with its parameters' names; ``names`` maps ``id(parameter)`` to the name."""

    optimizer: Optimizer
    names: Mapping[int, str]

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Return each parameter group's options, encoded for JSON, and its parameters' names."""
        return [
            (
                {
                    key: encode(_number(value), [], f"the optimizer's {key}")
                    for key, value in group.items()
                    if key not in HOW
                },
                self.group_names(group),
            )
            for group in self.optimizer.param_groups
        ]

    def group_names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a group's parameters. Raise UsageError (AP883) if one has no name."""
        names = [self.names.get(id(each)) for each in group["params"]]
        if None in names:
            raise UsageError(
                "AP883",
                "the optimizer has a parameter that the model does not",
                why=f"parameter {names.index(None)} of a group of {len(names)} is not among "
                "model.parameters()",
                fix="create the optimizer from model.parameters(), after parallelize",
            )
        return [name for name in names if name is not None]

    def tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors in the optimizer state of ``parameters`` (by name), by their keys in a
        checkpoint."""
        return {
            f"{PREFIX}{name}.{key}": value
            for name, key, value in self._entries(parameters)
            if isinstance(value, Tensor)
        }

    def values(self, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of ``parameters`` other than tensors, encoded for JSON: by
        parameter name, then by the name of the state."""
        found: dict[str, dict[str, Any]] = {}
        for name, key, value in self._entries(parameters):
            if not isinstance(value, Tensor):
                where = f"the optimizer's {key} of {name}"
                found.setdefault(name, {})[key] = encode(value, [], where)
        return found

    def _entries(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Any]]:
        for name, parameter in parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield name, key, value

    def options_to_load(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the options (learning rate etc.) to load into each parameter group of this
        optimizer: the options with which its parameters were ``saved``, found by name; {} for a
        group without saved parameters. Raises UsageError (AP884) where parameters of one group were
        saved with different options."""
        options = {
            name: {key: decode(value, []) for key, value in group["options"].items()}
            for group in saved
            for name in group["parameters"]
        }
        taken = []
        for group in self.optimizer.param_groups:
            names = [name for name in self.group_names(group) if name in options]
            for name in names[1:]:
                if options[name] != options[names[0]]:
                    raise _split_group(names[0], name, options)
            taken.append(options[names[0]] if names else {})
        return taken

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set the options of each group to ``options``, a result of ``options_to_load``."""
        for group, found in zip(self.optimizer.param_groups, options, strict=True):
            for key, value in found.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value


def empty_state(
    parameter: Tensor, key: str, stored: TensorStorageMetadata, optimizer: Optimizer
) -> Tensor:
    """Make a zero tensor to load the optimizer state ``key`` of ``parameter`` into. A state of the
    parameter's shape is sharded like the parameter; any other state is replicated."""
    dtype, size = stored.properties.dtype, stored.size
    parameter = parameter.detach()
    if key != "step" and size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype)
    if len(size) and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        everywhere = [Replicate()] * mesh.ndim
        return distributed.zeros(*size, dtype=dtype, device_mesh=mesh, placements=everywhere)
    on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return torch.zeros(size, dtype=dtype, device=local.device if on_device else "cpu")


def take_group_values(scheduler: LRScheduler, named: NamedOptimizer) -> tuple[Any, dict[Path, Any]]:
    """Split a scheduler's state: return the state without its lists of one value per parameter
    group (``PER_GROUP`` has their names), and these lists by their path in the state. Each value in
    them is paired with the names of the parameters in its group."""
    names = [named.group_names(group) for group in named.optimizer.param_groups]
    found: dict[Path, Any] = {}

    def taken(state: Any, path: Path) -> Any:
        if isinstance(state, list):
            return [taken(part, (*path, index)) for index, part in enumerate(state)]
        if not isinstance(state, dict) or type(state) is not dict:
            return state
        rest = {}
        for key, part in state.items():
            here = (*path, key)
            if key in PER_GROUP and isinstance(part, list) and len(part) == len(names):
                found[here] = list(zip(map(_number, part), names, strict=True))
            else:
                rest[key] = taken(part, here)
        return rest

    return taken(scheduler.state_dict(), ()), found


def put_group_values(
    state: Any, path: Sequence[str | int], values: ByNames, named: NamedOptimizer
) -> None:
    """Insert a list at ``path`` of a scheduler's ``state``: for each parameter group of ``named``
    the value that ``values`` pairs with its parameters' names. It undoes ``take_group_values``."""
    by_name = {name: value for value, names in values for name in names}
    found = []
    for group in named.optimizer.param_groups:
        known = [name for name in named.group_names(group) if name in by_name]
        found.append(by_name[known[0]] if known else values[0][0])
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = found


def _number(value: Any) -> Any:
    """Convert a one-element tensor (a learning rate may be one) to a number; keep other values."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _split_group(first: str, second: str, options: Mapping[str, Mapping[str, Any]]) -> UsageError:
    one, other = options[first], options[second]
    key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
    return UsageError(
        "AP884",
        f"{first!r} and {second!r} are in one group of the optimizer, but were saved with "
        f"{key} {one.get(key)} and {other.get(key)}",
        fix="create the optimizer with the parameter groups that it had when the checkpoint was "
        "saved",
    )
