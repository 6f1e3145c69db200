"""The calls of torch that a forward makes, with the numbers and tensors that it makes itself.

In: a model, its batch and its loss. Out: a ``CallTrace``: every call of a function of torch in
order, without the values of tensors that come from the batch or the model. Two forwards with equal
traces are the same program. Numbers with a fraction are stored separately from their calls, as are
tensors that the model's code makes of numbers (``torch.tensor(mask)``): traces that differ in these
alone are the same program with other values.

The forward runs on fake tensors, so that a trace costs the time of its Python code.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..programs.outputs import OutputForm
from .locate import user_source

Place = tuple[int, int]
"""Place of a number in a trace: the number of its call, and its position among the call's
numbers."""

_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_DATA = ("data", "obj")
_ARITHMETIC = frozenset(
    {
        "add",
        "__add__",
        "__radd__",
        "sub",
        "__sub__",
        "__rsub__",
        "mul",
        "__mul__",
        "__rmul__",
        "div",
        "__truediv__",
        "__rtruediv__",
    }
)
_OWN_PATHS = frozenset({0.0, 1.0, -1.0})
"""Numbers for which functions of torch have special code paths (``p=0.0``, ``alpha=1.0``)."""
_NUMBER, _TENSOR = "a number", "a tensor"


@dataclass
class CallTrace:
    """Trace of a forward's calls of torch functions. ``calls`` has each call with everything that
    its result depends on, except for ``numbers`` of the model's Python code (by place in the trace)
    and values of ``tensors`` that this code makes. ``outputs`` is the structure of the model's
    outputs."""

    calls: list[Any] = field(default_factory=list)
    numbers: dict[Place, float] = field(default_factory=dict)
    tensors: list[np.ndarray[Any, Any]] = field(default_factory=list)
    outputs: OutputForm | None = None
    source: str = ""
    """Line of the user's code of the call that ``tracing_calls`` watches."""

    def is_like(self, other: CallTrace) -> bool:
        """Return whether two traces are equal but for numbers and values of tensors."""
        return (
            self.calls == other.calls
            and self.numbers.keys() == other.numbers.keys()
            and (None in (self.outputs, other.outputs) or _kinds(self) == _kinds(other))
            and list(map(_form, self.tensors)) == list(map(_form, other.tensors))
        )

    def changed_numbers(self, other: CallTrace) -> set[Place]:
        """Return the places in the trace at which ``other``, an equivalent trace, has other
        numbers."""
        return {place for place, value in self.numbers.items() if other.numbers[place] != value}

    def changed_tensors(self, other: CallTrace) -> set[int]:
        """Return the indices of the tensors that have other values in ``other``, an equivalent
        trace."""
        pairs = enumerate(zip(self.tensors, other.tensors, strict=True))
        return {at for at, (one, another) in pairs if one.tobytes() != another.tobytes()}


def _kinds(trace: CallTrace) -> tuple[Any, ...]:
    """Return the structure of a trace's outputs with the kind of each leaf (loss, tensor, plain
    value), to compare traces; plain values are left out."""
    assert trace.outputs is not None
    leaves = [(leaf.kind, leaf.is_differentiable) for leaf in trace.outputs.leaves]
    return trace.outputs.structure, leaves


def _form(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype


@dataclass(frozen=True, slots=True)
class _TraceRequest:
    """Request to trace the next forward into ``trace``, with ``numbers`` and ``tensors`` in place
    of values of the model's code."""

    trace: CallTrace
    numbers: Mapping[Place, float]
    tensors: Mapping[int, np.ndarray[Any, Any]]
    before: Callable[[], None]
    watched: int | None


_WANTED: ContextVar[_TraceRequest | None] = ContextVar("wanted trace", default=None)


@contextmanager
def tracing_calls(
    numbers: Mapping[Place, float] | None = None,
    tensors: Mapping[int, np.ndarray[Any, Any]] | None = None,
    before: Callable[[], None] = lambda: None,
    watched: int | None = None,
) -> Iterator[CallTrace]:
    """Trace each forward within a ``with`` block; each overwrites the trace that is yielded. In the
    forward, ``numbers`` (by place in the trace) and ``tensors`` (by index there) replace values of
    the model's code. ``before`` is called before each forward. The user's source line of call
    number ``watched`` is recorded."""
    trace = CallTrace()
    token = _WANTED.set(_TraceRequest(trace, numbers or {}, tensors or {}, before, watched))
    try:
        yield trace
    finally:
        _WANTED.reset(token)


@contextmanager
def traced_if_wanted() -> Iterator[None]:
    """Trace the forward in a ``with`` block if it is inside of ``tracing_calls``."""
    wanted = _WANTED.get()
    if wanted is None:
        yield
        return
    wanted.trace.calls.clear()
    wanted.trace.numbers.clear()
    wanted.trace.tensors.clear()
    wanted.before()
    with _Recorder(wanted):
        yield


def replaces_values() -> bool:
    """Return whether ``tracing_calls`` is active and replaces values of the model's code."""
    wanted = _WANTED.get()
    return wanted is not None and bool(wanted.numbers or wanted.tensors)


class _Recorder(TorchFunctionMode):
    """Mode that records a forward's calls of torch functions in a trace, and replaces values of the
    model's code as requested."""

    def __init__(self, wanted: _TraceRequest) -> None:
        super().__init__()
        self._wanted, self._trace = wanted, wanted.trace
        self._numbers: list[float] = []
        self._positions: dict[int, int] = {}
        self._swapped: dict[int, Tensor] = {}
        self._held: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS and (data := _data(args, kwargs)) is not None:
            return self._make(func, data, args, kwargs)
        self._numbers = []
        takes_any = getattr(func, "__name__", "") in _ARITHMETIC
        found = func, self._form(args, takes_any), self._form(kwargs, takes_any)
        call = len(self._trace.calls)
        if call == self._wanted.watched:
            self._trace.source = user_source("".join(traceback.format_stack()))
        self._trace.calls.append((*found, torch.is_grad_enabled()))
        numbers = {(call, at): value for at, value in enumerate(self._numbers)}
        self._trace.numbers.update(numbers)
        if not self._wanted.numbers.keys().isdisjoint(numbers):
            given = self._wanted.numbers
            values = iter([given.get(place, value) for place, value in numbers.items()])
            args, kwargs = _with_numbers((args, kwargs), values, takes_any)
        if self._swapped:
            args, kwargs = tree_map_only(
                Tensor, lambda each: self._swapped.get(id(each), each), (args, kwargs)
            )
        return func(*args, **kwargs)

    def _make(
        self, func: Callable[..., Any], data: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``func``, which makes a tensor of numbers (``data``) in the model's code, and record
        the tensor; its numbers are replaced if requested."""
        position = len(self._trace.tensors)
        value = np.asarray(data)
        if position in self._wanted.tensors:
            other = self._wanted.tensors[position]
            data = other if isinstance(data, np.ndarray) else other.tolist()
            kwargs = {key: each for key, each in kwargs.items() if key not in _DATA}
            args = (data, *args[1:])
        made = func(*args, **kwargs)
        self._hold(made, value)
        return made

    def _hold(self, tensor: Tensor, value: np.ndarray[Any, Any]) -> None:
        self._positions[id(tensor)] = len(self._trace.tensors)
        self._held.append(tensor)  # keeps its id unique
        self._trace.tensors.append(value.copy())

    def _form(self, value: Any, takes_any: bool) -> Any:
        """Return an argument of a call in a form that can be compared; floats that may change are
        stored apart. ``takes_any``: the function has no special path for any number."""
        kind = type(value)
        if kind is float:
            if not _is_free(value, takes_any):
                return kind, repr(value)
            self._numbers.append(value)
            return _NUMBER
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) and id(value) not in self._positions:
                self._hold_real(value)
            return self._positions.get(id(value), _TENSOR)
        if kind in (list, tuple):
            return kind, *(self._form(each, takes_any) for each in value)
        if kind is dict:
            return tuple((key, self._form(each, takes_any)) for key, each in value.items())
        if kind is slice:
            return kind, self._form((value.start, value.stop, value.step), takes_any)
        if kind is np.ndarray:
            return kind, value.dtype.str, value.shape, value.tobytes()
        return kind, value

    def _hold_real(self, tensor: Tensor) -> None:
        """Record the values of a real tensor that is neither in the batch nor in the model's
        state."""
        if tensor.is_meta or tensor.layout != torch.strided:
            return
        position = len(self._trace.tensors)
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # nothing is recorded
            plain = tensor.detach().cpu()
            plain = plain.float() if plain.dtype == torch.bfloat16 else plain
            self._hold(tensor, plain.numpy())
            if position in self._wanted.tensors:
                other = torch.from_numpy(self._wanted.tensors[position].copy())
                self._swapped[id(tensor)] = other.to(tensor.dtype)


def _data(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument from which a call such as ``torch.tensor`` makes a tensor; None if it is
    or contains a tensor."""
    data = args[0] if args else next((kwargs[key] for key in _DATA if key in kwargs), None)
    return None if isinstance(data, Tensor) or _holds_tensors(data) else data


def _is_free(value: float, takes_any: bool) -> bool:
    """Return whether a float may be replaced without other branches inside torch. ``takes_any``:
    the function has no special path for any number."""
    return math.isfinite(value) and (takes_any or value not in _OWN_PATHS)


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, list | tuple) and any(
        isinstance(each, Tensor) or _holds_tensors(each) for each in data
    )


def _with_numbers(value: Any, numbers: Iterator[float], takes_any: bool) -> Any:
    """Return an argument with its floats that may change replaced by the next of ``numbers``."""
    kind = type(value)
    if kind is float and _is_free(value, takes_any):
        return next(numbers)
    if kind in (list, tuple):
        return kind(_with_numbers(each, numbers, takes_any) for each in value)
    if kind is dict:
        return {key: _with_numbers(each, numbers, takes_any) for key, each in value.items()}
    if kind is slice:
        return slice(*_with_numbers((value.start, value.stop, value.step), numbers, takes_any))
    return value
