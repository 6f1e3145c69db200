"""Modes of a model's forward during capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ...planner.errors import CaptureError
from .masked import is_selection, select_masked

_PROMOTED = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}
_CAST_METHODS: dict[Callable[..., Any], torch.dtype] = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
    torch.Tensor.long: torch.int64,
    torch.Tensor.int: torch.int32,
    torch.Tensor.bool: torch.bool,
}
_FLOAT_METHODS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})

_GET_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _Promote(TorchFunctionMode):
    """Mode that turns every floating dtype that a call requests into float64, and casts tensors
    that the model's code holds outside of parameters and buffers. A capture records no such casts
    (but one per tensor held), so that its graph is the same as in any other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _FLOAT_METHODS:
            return args[0].double()
        args = tuple(map(self._promoted, args))
        kwargs = {key: self._promoted(arg) for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def _promoted(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _PROMOTED.get(value, value)
        if type(value) is not Tensor or value.dtype not in _PROMOTED:
            return value
        if not torch.compiler.is_exporting():
            return value.to(_PROMOTED[value.dtype])
        if id(value) not in self._held:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._held[id(value)] = value, value.to(_PROMOTED[value.dtype])
        return self._held[id(value)][1]


@contextmanager
def promote_to_float64() -> Iterator[None]:
    """Compute in float64 within a ``with`` block, even if the model's code requests another
    floating dtype. The model's parameters and buffers and the batch's floating tensors must be
    float64 already. Rounding then cannot hide or fake a difference between two executions."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote():
            yield
    finally:
        torch.set_default_dtype(default)


class explicit_ops(TorchFunctionMode):  # noqa: N801
    """Mode that makes explicit ops of those effects of calls that ``torch.export`` would not
    record:

    - A cast is an op even where it changes nothing. ``x.to(x.dtype)`` returns ``x`` itself, so the
      wiring of a captured graph would depend on the dtype that it was captured in.
    - ``tensor.data`` is a view without gradients, and assigning to it is a write.
    - ``instance_norm`` writes its running statistics by ops of their own.
    - ``x[mask]`` keeps all elements (``masked``).
    - ``gaussian_nll_loss`` does not look for negative variances.
    - Devices that a forward names are ignored.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _GET_DATA:
            return args[0].detach()
        if func == _SET_DATA:
            return _assign(args[0], args[1])
        if func is torch.Tensor.__getitem__ and is_selection(*args):
            return select_masked(*args)
        if func is torch.masked_select or func is torch.Tensor.masked_select:
            return select_masked(args[0], args[1].expand_as(args[0]))
        if func is functional.instance_norm:
            return _instance_norm(*args, **kwargs)
        if func is functional.gaussian_nll_loss:
            return _gaussian_nll_loss(*args, **kwargs)
        if func in _CAST_METHODS:
            return _cast(args[0], _CAST_METHODS[func])
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if func is torch.Tensor.to:
            dtype = _asked_dtype(args[1:], kwargs)
            cast = args[0] if dtype is None else _cast(args[0], dtype)
            return cast.clone() if _asks_for_copy(args[1:], kwargs) else cast
        if func is torch.Tensor.type_as:
            return _cast(args[0], args[1].dtype)
        if kwargs.get("device") not in (None, "meta", torch.device("meta")):
            kwargs = {**kwargs, "device": None}
        return func(*args, **kwargs)


@contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Make ``torch.inference_mode`` turn gradients off as ``torch.no_grad`` does, in a ``with``
    block. ``torch.export`` records ``torch.no_grad`` alone."""
    kind = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def entered(self: Any) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def left(self: Any, *error: object) -> None:
        torch.set_grad_enabled(self.before)

    kind.__enter__, kind.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]


@contextmanager
def undetected_causal_masks() -> Iterator[None]:
    """Make ``nn.TransformerEncoder`` apply its mask without reading the mask's values, in a
    ``with`` block: it would look for causal masks, which have faster kernels, but a capture has no
    values."""
    library: Any = torch.nn.modules.transformer
    detect = library._detect_is_causal_mask

    def undetected(
        mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
    ) -> bool:
        return is_causal is True

    library._detect_is_causal_mask = undetected
    try:
        yield
    finally:
        library._detect_is_causal_mask = detect


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = torch.ops.aten._to_copy.default(tensor, dtype=dtype)
    return result


def _assign(tensor: Tensor, value: Tensor) -> None:
    """Write ``value`` to ``tensor`` in place, as ``tensor.data = value`` would. Raises CaptureError
    AP208 if the value has another shape."""
    if value.shape != tensor.shape:
        raise CaptureError(
            "AP208",
            "the forward changes the shape of a tensor by assigning its data",
            why=f"it was {tuple(tensor.shape)} and becomes {tuple(value.shape)}",
            fix="make the tensor with its final shape",
        )
    with torch.no_grad():
        tensor.copy_(value)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``instance_norm``, and update its running statistics with the mean over samples of
    each sample's statistics."""
    mean, variance = running_mean, running_var
    if mean is not None and variance is not None and use_input_stats:
        with torch.no_grad():
            samples = input.to(mean.dtype).flatten(2)
            mean.mul_(1 - momentum).add_(samples.mean(2).mean(0), alpha=momentum)
            variance.mul_(1 - momentum).add_(samples.var(2).mean(0), alpha=momentum)
        mean = variance = None
    return functional.instance_norm(
        input, mean, variance, weight, bias, use_input_stats, momentum, eps
    )


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute ``gaussian_nll_loss``. Its gradient ignores that variances are clamped to ``eps``
    (Nix and Weigend 1994)."""
    if not isinstance(var, Tensor):
        var = torch.full_like(input, var)
    elif var.shape == input.shape[:-1] != input.shape:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = (torch.log(var) + (input - target).square() / var + full * math.log(2 * math.pi)) / 2
    reduced: dict[str, Callable[[], Tensor]] = {"mean": loss.mean, "sum": loss.sum}
    return reduced[reduction]() if reduction in reduced else loss


def _asks_for_copy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``Tensor.to`` has ``copy=True``, by name or by position."""
    flags = [arg for arg in args if isinstance(arg, bool)]
    return bool(kwargs.get("copy", len(flags) > 1 and flags[1]))


def _asked_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, Tensor):
            return value.dtype
    return None


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Make ``torch.distributions`` skip the validation of parameters within a ``with`` block."""
    held = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(held)


@contextmanager
def unmoved_modules(within: nn.Module | None = None) -> Iterator[None]:
    """Prevent modules of ``within`` (None: all modules) from being moved to other devices within a
    ``with`` block."""
    apply = nn.Module._apply
    known = None if within is None else {*within.modules()}

    def changed(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        dtypes = {each.dtype for each in (*self.parameters(), *self.buffers())}
        is_move = all(fn(torch.empty(0, dtype=dtype)).dtype == dtype for dtype in dtypes)
        if is_move and (known is None or self in known):
            return self
        found: nn.Module = apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        return found

    nn.Module._apply = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]
