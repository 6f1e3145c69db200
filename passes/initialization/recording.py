"""Recording of a model constructor's ops on tensors.

``Recorder`` notes every op of a build that runs on fake CPU tensors, so that nothing is allocated
and code that looks at devices takes its CPU path. Real tensors that the build receives (from a
file, from NumPy, from outside) stay unchanged, as the constants of the log. ``exact_replay`` and
``sharded_replay`` make the tensors of a log.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .build_log import SEED, TRUNC_NORMAL, Call, Log, NeedsValuesError, Slot, UnrecordableError
from .exact_replay import deterministic_value

_FILLS = {
    op: (str(op._schema.name), torch.Tag.nondeterministic_seeded in op.tags)
    for op in (
        torch.ops.aten.normal_.default,
        torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default,
        torch.ops.aten.fill_.Scalar,
    )
}
"""Name, and whether it is random, of each op that only overwrites a tensor: such ops are recorded
without executing them on fake tensors."""

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
"""Types of op arguments that hold no tensor."""

_LITERAL = torch.ops.aten.lift_fresh.default


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that appends every op of a model's build to ``log``. It must be entered inside
    of the log's fake tensor mode."""

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.seed = torch.initial_seed()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.initial_seed() != self.seed:
            raise UnrecordableError("the build seeds the random generator")
        if func in _FILLS and isinstance(args[0], FakeTensor) and not kwargs:
            return self._fill(func, args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func is _LITERAL and not isinstance(args[0], FakeTensor):
            return self._literal(args[0])
        reads: list[int] = []
        noted = tuple([self._noted(value, reads) for value in args])
        named = {name: self._noted(value, reads) for name, value in kwargs.items()}
        if self.log.reals:
            args, kwargs = tree_map(self._fake, (args, kwargs))
        result = quick_fake(self.log.mode, func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        made = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        outputs = tuple([self.log.add(t) for t in made if isinstance(t, Tensor)])
        form = _form(func)
        written = form.written(noted, named) if form.writes else ()
        slots = (*written, *outputs)
        is_random = form.is_random and not _is_on_meta(self.log.tensors[slots[0]])
        self.log.calls.append(
            Call(form.name, is_random, func, noted, named, outputs, tuple(reads), written)
        )
        return result

    def _fake(self, value: Any) -> Any:
        """Return the fake tensor that represents a real tensor in the log: with a real argument an
        op would be executed. Other values are returned as they are."""
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        return self.log.tensors[self.log.add_constant(value)] if is_real else value

    def _literal(self, tensor: Tensor) -> Any:
        """Record a tensor made of Python numbers or a NumPy array, with its present values, as a
        constant; return the fake tensor that represents it."""
        result = _LITERAL(tensor)
        with unset_fake_temporarily():
            values = tensor.detach().clone()
        op = torch.ops.aten.lift_fresh_copy.default
        outputs = (self.log.add(result),)
        self.log.calls.append(Call(op._schema.name, False, op, (values,), {}, outputs, (), ()))
        return result

    def _fill(self, func: Any, args: tuple[Any, ...]) -> Any:
        slot = self.log.slot(args[0])
        name, is_random = _FILLS[func]
        noted = (Slot(slot), *args[1:])
        is_random = is_random and not _is_on_meta(args[0])
        self.log.calls.append(Call(name, is_random, func, noted, {}, (slot,), (slot,), (slot,)))
        return args[0]

    def _noted(self, value: Any, reads: list[int]) -> Any:
        """Return an op's argument with each tensor replaced by its ``Slot`` (number in the log);
        add these numbers to ``reads``."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            return kind([self._noted(each, reads) for each in value])
        if isinstance(value, FakeTensor):
            slot = self.log.slot(value)
            reads.append(slot)
            return Slot(slot)
        if isinstance(value, Tensor):
            slot = self.log.add_constant(value)
            reads.append(slot)
            return Slot(slot)
        if isinstance(value, torch.Generator):
            raise UnrecordableError("the build uses a random generator of its own")
        leaves, structure = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        return tree_unflatten([self._noted(each, reads) for each in leaves], structure)

    def _scalar(self, tensor: Tensor) -> Any:
        """Return the number in a tensor that the model's constructor reads (``item()``). Raises
        UnrecordableError if the number is random."""
        if not isinstance(tensor, FakeTensor):
            return tensor.item()
        with unset_fake_temporarily():
            return deterministic_value(self.log, self.log.slot(tensor)).item()

    def seeds(self, seed: int) -> None:
        """Record that the build has just seeded torch's default generator with ``seed``."""
        self.seed = torch.initial_seed()
        op = torch.default_generator.manual_seed
        self.log.calls.append(Call(SEED, True, op, (int(seed),), {}, (), (), ()))


def _is_on_meta(tensor: Tensor) -> bool:
    """Return whether a tensor of the build is on ``meta``: random ops on it draw no numbers."""
    return tensor.device.type == "meta"


class _Form(NamedTuple):
    """Properties of an op that the log needs: its name, whether it draws random numbers, and the
    (position, name) of each argument that it writes to."""

    name: str
    is_random: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the numbers of the tensors that a recorded call with these arguments writes to."""
        values = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes]
        return tuple(leaf.index for leaf in tree_leaves(values) if isinstance(leaf, Slot))


@cache
def _form(func: Any) -> _Form:
    arguments = enumerate(func._schema.arguments)
    return _Form(
        func._schema.name,
        torch.Tag.nondeterministic_seeded in func.tags,
        tuple(
            (at, each.name)
            for at, each in arguments
            if each.alias_info is not None and each.alias_info.is_write
        ),
    )


def record(build: Callable[[], Any]) -> tuple[Any, Log]:
    """Call ``build`` on fake tensors; return its result and the log of its ops."""
    log = Log()
    recorder = Recorder(log)
    with ExitStack() as stack:
        for module, name, replacement in _replacements(recorder):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        stack.enter_context(log.mode)
        stack.enter_context(recorder)
        return build(), log


def _replacements(recorder: Recorder) -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    """Return the functions to replace during recording, as (module, name of the function,
    replacement)."""
    seed = _seeding(recorder, torch.manual_seed)
    return (
        (torch, "load", _load(torch.load)),
        (torch, "asarray", _for_real(torch.asarray)),
        (torch, "frombuffer", _for_real(torch.frombuffer)),
        (torch, "from_file", _for_real(torch.from_file)),
        (torch, "save", _refuse_save),
        (torch, "manual_seed", seed),
        (torch.random, "manual_seed", seed),
        (torch, "set_rng_state", _refuse_state),
        (torch.random, "set_rng_state", _refuse_state),
        (torch.nn.init, TRUNC_NORMAL, _whole_trunc_normal(recorder.log)),
    )


def _for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``function``, which reads memory or a file, that executes it on real
    tensors without recording."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _load(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``torch.load`` that loads real tensors. Files are memory-mapped if
    possible, so that only the used parts are read."""

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap") is None and isinstance(f, str | PathLike) and zipfile.is_zipfile(f):
            kwargs["mmap"] = True
        with _disable_current_modes():
            return function(f, *args, **kwargs)

    return load


def _seeding(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    def manual_seed(seed: int) -> Any:
        generator = function(seed)
        recorder.seeds(seed)
        return generator

    return manual_seed


def _refuse_save(*_: Any, **__: Any) -> None:
    raise NeedsValuesError("the build writes tensors to a file")


def _refuse_state(new_state: Tensor) -> None:
    raise UnrecordableError("the build sets the state of the random generator")


def _whole_trunc_normal(log: Log) -> Callable[..., Any]:
    """Return a replacement of ``trunc_normal_`` that is recorded as one call: the original rejects
    samples in a loop by their values, which fake tensors do not have."""
    original = getattr(torch.nn.init, TRUNC_NORMAL)

    def recorded(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        if generator is not None:
            raise UnrecordableError("the build uses a random generator of its own")
        slot = log.slot(tensor)
        args = (Slot(slot), mean, std, a, b)
        log.calls.append(Call(TRUNC_NORMAL, True, original, args, {}, (), (slot,), (slot,)))
        return tensor

    return recorded


_CPU = torch.device("cpu")
_ALLOCATE: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.zeros.default: torch.zeros,
    torch.ops.aten.ones.default: torch.ones,
}
_UNTOLD = frozenset({"device", "pin_memory"})
"""Arguments of allocating ops whose default values do not affect the resulting fake tensor."""


def quick_fake(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> FakeTensor | None:
    """Return the fake tensor that ``func(*args, **kwargs)`` returns under ``mode``, without a call
    of the slow ``mode``; None for ops that only ``mode`` can execute."""
    if func is torch.ops.aten.detach.default:
        return _detached(mode, args[0])
    make = _ALLOCATE.get(func)
    if make is None or kwargs.get("device", _CPU) != _CPU or kwargs.get("pin_memory"):
        return None
    if kwargs.get("layout") not in (None, torch.strided):
        return None
    told = {name: value for name, value in kwargs.items() if name not in _UNTOLD}
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, make(*args, **told, device="meta"), _CPU)


def _detached(mode: FakeTensorMode, tensor: Any) -> FakeTensor | None:
    if type(tensor) is not FakeTensor or tensor.fake_mode is not mode:
        return None
    if tensor.constant is not None:  # the mode keeps known values
        return None
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.ops.aten.detach.default(tensor), tensor.fake_device)
