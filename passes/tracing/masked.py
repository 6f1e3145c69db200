"""``x[mask]`` with a truth value for each element or row, in a form that can be captured.

In: a tensor and a mask of its first dimensions. Out: a ``Masked`` value, which stands for the
selected elements: their number depends on values, so a program keeps all elements, and sums and
means skip the others. Elementwise ops, and ops within a row, are computed for all elements; skipped
elements are replaced by a number for which such ops and their derivatives are finite. Other ops are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn import functional

from ...planner.errors import CaptureError

LEFT_OUT = 0.5
"""Number that replaces elements which a mask does not select, so that logarithms, roots and
quotients of them are finite."""

_POINTWISE = frozenset(
    {
        *("abs", "add", "bfloat16", "clamp", "clone", "contiguous", "cos", "detach", "div"),
        *("double", "eq", "exp", "expm1", "float", "ge", "gt", "half", "le", "log", "log1p"),
        *("logsigmoid", "lt", "mul", "ne", "neg", "pow", "relu", "rsub", "sigmoid", "silu"),
        *("sin", "softplus", "sqrt", "square", "sub", "tanh", "to", "true_divide", "gelu"),
        *("subtract", "multiply", "divide", "positive", "long", "int", "bool", "type_as"),
    }
)
_LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "kl_div"),
    }
)
# Functions of torch as models call them, before there are ops.
_ROWWISE = frozenset({"sum", "mean", "softmax", "log_softmax", "logsumexp", "amax", "amin"})
_SAME = ("add", "sub", "mul", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "rsub")
_OPERATORS = {**dict.fromkeys(_SAME), "truediv": "div", "radd": "add", "rmul": "mul"}
"""Names of torch's functions by the Python operators that call them; None if the names are
equal."""


@dataclass(frozen=True, eq=False)
class Masked:
    """Result of ``values[mask]``, whose size is unknown in a capture, kept as both tensors: it
    consists of the elements (or rows) of ``values`` for which ``mask``, over the first dimensions,
    is true."""

    values: Tensor
    mask: Tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _computed(getattr(func, "__name__", str(func)), func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad"):
            return getattr(self.values, name)
        function = getattr(Tensor, name, None)
        if not callable(function):
            _refuse(f"x[mask].{name}")
        return partial(_method, function, self)

    def __rtruediv__(self, other: Any) -> Any:
        return _computed("div", torch.div, (other, self), {})

    def __len__(self) -> int:
        _refuse("len(x[mask])")

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("an index into x[mask]")


def _method(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _computed(function.__name__, function, args, kwargs)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: _computed(name, getattr(torch, name), args, {})


for _name, _function in _OPERATORS.items():
    setattr(Masked, f"__{_name}__", _operator(_function or _name))


def select_masked(values: Tensor, mask: Tensor) -> Masked:
    """Return the selection of the elements or rows of a tensor where ``mask`` is true."""
    inner = (1,) * (values.dim() - mask.dim())
    whole = mask.reshape(*mask.shape, *inner)
    fill = LEFT_OUT if values.is_floating_point() else 0
    return Masked(torch.where(whole, values, fill), mask)


def is_selection(values: Any, index: Any) -> bool:
    """Return whether ``values[index]`` selects elements or rows by truth values."""
    return (
        isinstance(values, Tensor)
        and isinstance(index, Tensor)
        and index.dtype == torch.bool
        and 0 < index.dim() <= values.dim()
        and values.shape[: index.dim()] == index.shape
    )


def _computed(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = name.strip("_")
    given = [*args, *kwargs.values()]
    masks = [each.mask for each in given if isinstance(each, Masked)]
    mask = masks[0]
    if not all(_is_same(mask, each) for each in masks):
        _refuse(f"{name} of values that different masks select")
    whole = [each.values if isinstance(each, Masked) else each for each in args]
    named: dict[str, Any] = {
        key: each.values if isinstance(each, Masked) else each for key, each in kwargs.items()
    }
    has_others = any(isinstance(each, Tensor) and each.dim() for each in given)
    dim = named.get("dim", whole[1] if len(whole) > 1 else None)
    found: Any = None
    if name in _POINTWISE and not has_others:
        found = Masked(func(*whole, **named), mask)
    elif name in _LOSSES and not has_others:
        how = str(named.pop("reduction", "mean"))
        found = _reduced(func(*whole, **named, reduction="none"), mask, how)
    elif name == "cross_entropy" and not has_others and len(whole) == 2:
        found = _cross_entropy(whole[0], whole[1], mask, **named)
    elif name in ("sum", "mean") and dim is None:
        found = _reduced(whole[0], mask, name)
    elif name in _ROWWISE and isinstance(dim, int) and _is_inner(dim, whole[0], mask):
        named["dim"] = dim if dim < 0 else dim + mask.dim() - 1
        found = Masked(func(whole[0], **named), mask)
    elif name in ("numel", "nelement"):
        found = _count(whole[0], mask)
    return _refuse(f"{name} of x[mask]") if found is None else found


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two masks are equal: the same tensor, or made by the same ops of the same
    tensors."""
    mode = get_proxy_mode()
    if one is other or mode is None:  # without a recording, a capture has checked
        return True
    nodes = [get_proxy_slot(each, mode.tracer, None) for each in (one, other)]
    if any(each is None for each in nodes):
        return False
    return _are_alike(*(each.proxy.node for each in nodes))  # type: ignore[union-attr]


def _are_alike(one: Any, other: Any) -> bool:
    if one is other or not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return bool(one is other or (type(one) is type(other) and one == other))
    if one.op != "call_function" or one.target is not other.target:
        return False
    parts = (*one.args, *one.kwargs.values()), (*other.args, *other.kwargs.values())
    return len(parts[0]) == len(parts[1]) and all(map(_are_alike, *parts))


def _is_inner(dim: int, values: Tensor, mask: Tensor) -> bool:
    """Return whether dimension ``dim`` of ``values[mask]`` lies within each selected row, and does
    not count the rows."""
    inner = values.dim() - mask.dim()
    return 0 < dim <= inner if dim >= 0 else -dim <= inner


def _count(values: Tensor, mask: Tensor) -> Tensor:
    """Return the number of elements of ``values[mask]``."""
    return mask.sum() * math.prod(values.shape[mask.dim() :])


def _reduced(values: Tensor, mask: Tensor, how: str) -> Any:
    """Reduce ``values[mask]`` by ``how``, "sum" or "mean"; for "none" return the selection
    itself."""
    if how == "none":
        return Masked(values, mask)
    inner = (1,) * (values.dim() - mask.dim())
    total = torch.where(mask.reshape(*mask.shape, *inner), values, 0).sum()
    return total if how == "sum" else total / _count(values, mask)


def _cross_entropy(
    logits: Tensor, target: Tensor, mask: Tensor, ignore_index: int = -100, **options: Any
) -> Any:
    """Compute the cross entropy of the rows that ``mask`` selects, by ignoring the targets of all
    other rows."""
    if logits.dim() != mask.dim() + 1 or target.shape != mask.shape or target.is_floating_point():
        _refuse("cross_entropy of x[mask], of these shapes,")
    targets = torch.where(mask, target, ignore_index).flatten()
    logits = logits.flatten(0, -2)
    loss = functional.cross_entropy(logits, targets, ignore_index=ignore_index, **options)
    return Masked(loss.view(mask.shape), mask) if options.get("reduction") == "none" else loss


def _refuse(text: str) -> NoReturn:
    raise CaptureError(
        "AP202",
        f"{text} depends on how many elements the mask selects",
        why="ranks and micro-batches would have to agree on it in the middle of a step",
        fix="keep every element and give those that do not count no weight: for x[mask].mean() "
        "write torch.where(mask, x, 0).sum() / mask.sum()",
    )
