"""A case's op and arguments, made anew on a device.

In: an ``OpCase`` and a device. Out: a ``Call`` that runs the op on tensors of the case's
shapes and dtypes. Values are drawn from a normal distribution, as activations are (a GPU's
power, and so its clock, depends on them). Integers are drawn within what the op may
index: rows of an embedding, classes of a loss, the dimension of a gather. A boolean mask of
attention is causal, any other is true half of the time. Arguments that an op writes to are copied
anew for every run.

Torch is imported on use: this package is part of a room that needs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .case import OpCase, ProfileError, TensorCase

if TYPE_CHECKING:
    from torch import Generator, Tensor

_PROBABILITIES = frozenset({"binary_cross_entropy", "bernoulli", "multinomial"})
_SEED = 1


class MeasureError(ProfileError):
    """Error of an op that could not be run alone to measure it; other ops can still be measured."""

    def __init__(self, why: str, case: OpCase, fix: str = "") -> None:
        shapes = ", ".join(map(str, case.tensors))
        super().__init__(f"{case.op} cannot be measured: {why}", shapes, fix)


@dataclass(frozen=True, slots=True)
class Call:
    """Call of an op with its arguments, ready to run. ``leaves``: tensors whose gradients are
    computed. ``written``: arguments that the op writes to, by position and by name."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[Tensor, ...]
    written: frozenset[int | str]

    def prepare(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return (args, kwargs) for one run, with new copies of tensors that the op writes to."""
        if not self.written:
            return self.args, self.kwargs
        args = [
            _fresh(value) if at in self.written else value for at, value in enumerate(self.args)
        ]
        kwargs = {
            name: _fresh(value) if name in self.written else value
            for name, value in self.kwargs.items()
        }
        return tuple(args), kwargs

    def another(self) -> Call:
        """Return a call of the same op on copies of all its tensors."""
        made: dict[int, Tensor] = {}
        args = tuple(_copied(value, made) for value in self.args)
        kwargs = {name: _copied(value, made) for name, value in self.kwargs.items()}
        leaves = tuple(made[id(leaf)] for leaf in self.leaves)
        return Call(self.op, args, kwargs, leaves, self.written)


def build_call(case: OpCase, device: str) -> Call:
    """Return a call of the op that ``case`` describes, on ``device`` and with random tensors of its
    shapes. Raises ``MeasureError``."""
    op = resolve(case)
    args, kwargs = _parse(case)
    values = dict(zip((each.name for each in op._schema.arguments), args, strict=False)) | kwargs
    limits = _Limits(case, values, _roles(values))
    tensors = [_tensor(case, at, device, limits) for at in range(len(case.tensors))]
    return Call(
        op=op,
        args=tuple(_rebuilt(value, tensors, device) for value in args),
        kwargs={name: _rebuilt(value, tensors, device) for name, value in kwargs.items()},
        leaves=tuple(tensor for tensor in tensors if tensor.requires_grad),
        written=_written(op),
    )


def resolve(case: OpCase) -> Any:
    """Return torch's op named ``case.op``. Raises ``MeasureError`` if torch has no such op."""
    import torch

    parts = case.op.split(".")
    if len(parts) != 3:
        raise MeasureError("it is not the path of an op of torch.ops", case)
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            raise MeasureError(
                "torch has no such op", case, "import the module that registers it first"
            )
    return found


def _parse(case: OpCase) -> tuple[list[Any], dict[str, Any]]:
    try:
        args, kwargs = json.loads(case.arguments)
        return list(args), dict(kwargs)
    except (TypeError, ValueError) as error:
        raise MeasureError(f"its arguments are not [args, kwargs]: {error}", case) from error


def _tensor_index(value: Any) -> int | None:
    """Return i if an op's JSON argument ``value`` is ``{"tensor": i}``, the i-th of
    ``OpCase.tensors``; None for any other argument."""
    return value["tensor"] if isinstance(value, dict) and set(value) == {"tensor"} else None


def _roles(values: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    """Return for each index in ``OpCase.tensors`` the name of the tensor's argument, and its index
    there if the argument is a list. ``values``: JSON arguments by name."""
    roles: dict[int, tuple[str, int]] = {}
    for name, value in values.items():
        for at, item in enumerate(value if isinstance(value, list) else [value]):
            index = _tensor_index(item)
            if index is not None:
                roles[index] = (name, at)
    return roles


def _written(op: Any) -> frozenset[int | str]:
    """Return the arguments that torch's ``op`` writes to, each by its position and by its name."""
    found: set[int | str] = set()
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= {at, str(argument.name)}
    return frozenset(found)


def _fresh(value: Any) -> Any:
    import torch

    return value.clone() if isinstance(value, torch.Tensor) else value


def _copied(value: Any, made: dict[int, Tensor]) -> Any:
    """Return an argument (tensor, list or other value) with its tensors copied. Each copy is added
    to ``made`` under the id of the original tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        copy = value.detach().clone().requires_grad_(value.requires_grad)
        made[id(value)] = copy
        return copy
    return [_copied(item, made) for item in value] if isinstance(value, list) else value


def _rebuilt(value: Any, tensors: Sequence[Tensor], device: str) -> Any:
    """Return an op's argument from its JSON form (see ``canonical``), with ``{"tensor": i}``
    replaced by ``tensors[i]`` and any device by ``device``."""
    import torch

    kind: str
    what: Any
    if isinstance(value, list):
        return [_rebuilt(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    kind, what = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind == "tensor":
        return tensors[what]
    if kind == "device":
        return torch.device(device)
    if kind == "float":
        return float(what)
    if kind == "complex":
        return complex(*what)
    if kind in ("dtype", "memory_format", "layout"):
        return getattr(torch, what)
    return {name: _rebuilt(item, tensors, device) for name, item in value.items()}


@dataclass(frozen=True, slots=True)
class _Limits:
    """Upper bounds of the integers in an op's index tensors. ``values``: the op's JSON arguments by
    name; ``roles``: by index of a tensor, the name of its argument and its place in a list."""

    case: OpCase
    values: Mapping[str, Any]
    roles: Mapping[int, tuple[str, int]]

    @property
    def name(self) -> str:
        return self.case.op.split(".")[1].rstrip("_")

    def role(self, index: int) -> str:
        return self.roles.get(index, ("", 0))[0]

    def high(self, index: int) -> int | None:
        """Return the exclusive upper bound of a tensor's integers; None if they are no indices."""
        role, at = self.roles.get(index, ("", 0))
        name = self.name
        if name in ("embedding", "embedding_bag") and role == "indices":
            return self._shape("weight")[0]
        if role == "target":  # classes of a loss
            shape = self._shape("self")
            return shape[1] if len(shape) > 1 else shape[0]
        if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put"):
            return self._shape("self")[at] if role == "indices" else None
        if name == "one_hot":
            classes = int(self.values.get("num_classes", -1))
            return classes if classes > 0 else 2
        if name == "experts" and role == "ids":
            return self._shape("up")[0]
        if role in ("index", "indices") and "dim" in self.values:
            return self._shape("self")[int(self.values["dim"])]
        if name == "take" and role == "index":
            return self.case.tensors[self._index("self")].numel
        return None

    def _index(self, role: str) -> int:
        for index, (name, _) in self.roles.items():
            if name == role or (role == "self" and name == "input"):
                return index
        raise MeasureError(f"it has no tensor argument {role!r}", self.case)

    def _shape(self, role: str) -> tuple[int, ...]:
        return self.case.tensors[self._index(role)].shape


def _tensor(case: OpCase, index: int, device: str, limits: _Limits) -> Tensor:
    import torch

    spec = case.tensors[index]
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise MeasureError(f"torch has no dtype {spec.dtype!r}", case)
    generator = torch.Generator(device).manual_seed(_SEED + index)
    if dtype is torch.bool:
        return _mask(spec, limits.role(index), generator)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _integers(case, index, generator, limits)
    made = torch.randn if limits.name not in _PROBABILITIES else torch.rand
    native = dtype if dtype.is_complex or dtype.itemsize > 1 else torch.bfloat16
    tensor = made(spec.shape, dtype=native, device=device, generator=generator).to(dtype)
    return tensor.requires_grad_(spec.requires_grad)


def _mask(spec: TensorCase, role: str, generator: Generator) -> Tensor:
    import torch

    device = generator.device
    if role == "attn_mask" and len(spec.shape) > 1:
        return torch.ones(spec.shape, dtype=torch.bool, device=device).tril()
    return torch.rand(spec.shape, device=device, generator=generator) < 0.5


def _integers(case: OpCase, index: int, generator: Generator, limits: _Limits) -> Tensor:
    """Return random integers for the op's tensor number ``index``: valid indices if the op uses
    them as indices, else 1 or 2, so that no division by zero occurs."""
    import torch

    spec, high = case.tensors[index], limits.high(index)
    if high is not None and high < 1 and spec.numel:
        raise MeasureError("it would index an empty dimension", case)
    low, end = (1, 3) if high is None else (0, max(high, 1))
    dtype = getattr(torch, spec.dtype)
    return torch.randint(
        low, end, spec.shape, dtype=dtype, device=generator.device, generator=generator
    )
