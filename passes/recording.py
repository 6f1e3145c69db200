"""Recording what a model's constructor does to tensors, and doing it again on real ones.

``Recorder`` notes every op of a build that runs on fake CPU tensors, so that nothing is
allocated and code that looks at devices takes its CPU path. ``Log.replay`` repeats them
in order on real tensors from the same seed, so every value is bit for bit that of a
plain build; values that are overwritten before anyone reads them are only drawn, to
advance the generator, and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .quick_fakes import quick_fake

_WHOLE = "_no_grad_trunc_normal_"
_OVERWRITES = frozenset({"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", _WHOLE})
_FILLS = {
    op: (str(op._schema.name), torch.Tag.nondeterministic_seeded in op.tags)
    for op in (
        torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default,
        torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar,
    )
}  # fmt: skip
"""Ops that overwrite a tensor and change nothing else: noted, there is nothing to run."""

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
"""Types of arguments that hold no tensor."""

_UNINITIALIZED = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like"})


class UnrecordableError(Exception):
    """A build did something that cannot be repeated from a log."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a recorded build, by number."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded op. ``outputs`` and ``written`` are slots; ``reads`` all tensor arguments."""

    name: str
    is_random: bool

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    reads: tuple[int, ...]
    written: tuple[int, ...]


@dataclass
class Log:
    """The calls of a build and the fake tensors they were made on."""

    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)

    def slot(self, tensor: Tensor) -> int:
        """The number of a tensor that the build made."""
        index = self.slots.get(id(tensor))
        if index is None:
            raise UnrecordableError("a tensor that no recorded op made")
        return index

    def add(self, tensor: Tensor) -> int:
        index = self.slots.get(id(tensor))
        if index is None:
            index = self.slots[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return index

    def storage(self, slot: int) -> int:
        return int(self.tensors[slot].untyped_storage()._cdata)

    def replay(self, wanted: Mapping[str, int], on_tensor: Callable[[str, Tensor], None]) -> None:
        """Repeat the build, handing over each tensor of ``wanted`` when it is finished.

        The default generator is to be seeded by the caller.
        """
        _Replay(self, wanted, on_tensor).run()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends every op to ``log``. To be entered inside ``mode``."""

    def __init__(self, log: Log, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.mode = mode
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
        reads: list[int] = []
        noted = tuple([self._noted(value, reads) for value in args])
        named = {name: self._noted(value, reads) for name, value in kwargs.items()}
        result = quick_fake(self.mode, func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        made = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        outputs = tuple([self.log.add(t) for t in made if isinstance(t, Tensor)])
        form = _form(func)
        written = form.written(noted, named) if form.writes else ()
        self.log.calls.append(
            Call(form.name, form.is_random, func, noted, named, outputs, tuple(reads), written)
        )
        return result

    def _fill(self, func: Any, args: tuple[Any, ...]) -> Any:
        slot = self.log.slot(args[0])
        name, is_random = _FILLS[func]
        noted = (Slot(slot), *args[1:])
        self.log.calls.append(Call(name, is_random, func, noted, {}, (slot,), (slot,), (slot,)))
        return args[0]

    def _noted(self, value: Any, reads: list[int]) -> Any:
        """An argument with the build's tensors as slots, which are added to ``reads``."""
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
            with unset_fake_temporarily():
                return value.detach().clone()
        if isinstance(value, torch.Generator):
            raise UnrecordableError("the build uses a random generator of its own")
        leaves, structure = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        return tree_unflatten([self._noted(each, reads) for each in leaves], structure)

    def _scalar(self, tensor: Tensor) -> Any:
        """A number that the constructor reads, from ops that draw nothing at random."""
        if not isinstance(tensor, FakeTensor):
            return tensor.item()
        found: list[Tensor] = []
        replay = _Replay(self.log, {"": self.log.slot(tensor)}, lambda _, t: found.append(t))
        if replay.is_random:
            raise UnrecordableError("the build reads a random number")
        with unset_fake_temporarily(), torch.no_grad():
            replay.run(ghosts=False)
            return found[0].item()


class _Form(NamedTuple):
    """What a record needs of an op: its name, whether it draws, the arguments that it writes to
    by position and name."""

    name: str
    is_random: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """The slots that a call of noted arguments writes to."""
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


class _Replay:
    """One replay: which calls to run, which only to draw, and when each storage is done."""

    def __init__(
        self, log: Log, wanted: Mapping[str, int], on_tensor: Callable[[str, Tensor], None]
    ) -> None:
        self.log = log
        self.wanted = wanted
        self.on_tensor = on_tensor
        self.values: dict[int, Tensor] = {}
        self.producer = _producers(log)
        self.needed = self._needed_calls()
        self.last_touch: dict[int, int] = {}
        for index in sorted(self.needed):
            if not self._is_lazy(index):
                call = log.calls[index]
                for slot in (*call.reads, *call.outputs):
                    self.last_touch[log.storage(slot)] = index

    @property
    def is_random(self) -> bool:
        return any(self.log.calls[index].is_random for index in self.needed)

    def _needed_calls(self) -> set[int]:
        """Walking backward: the calls whose effect on a wanted tensor is not overwritten."""
        log, needed = self.log, set()
        slots = set(self.wanted.values())
        live = {log.storage(slot) for slot in slots}
        for index in range(len(log.calls) - 1, -1, -1):
            call = log.calls[index]
            if call.written:
                if not any(log.storage(slot) in live for slot in call.written):
                    continue
                if call.name in _OVERWRITES and _covers(log.tensors[call.written[0]]):
                    live.discard(log.storage(call.written[0]))
                content = set(call.reads) - set(call.written)
            elif slots.isdisjoint(call.outputs):
                continue
            else:
                made = {log.storage(slot) for slot in call.outputs}
                content = {slot for slot in call.reads if log.storage(slot) not in made}
                if content or not call.reads:
                    live -= made
            needed.add(index)
            slots.update(call.reads)
            live.update(log.storage(slot) for slot in content)
        return needed

    def _is_lazy(self, index: int) -> bool:
        """Whether a call only names memory: an empty allocation, or a view of one."""
        call = self.log.calls[index]
        if call.written:
            return False
        if call.name in _UNINITIALIZED:
            return True
        if not call.reads or not call.outputs:
            return False
        source = self.log.storage(call.reads[0])
        return all(self.log.storage(slot) == source for slot in call.outputs)

    def run(self, *, ghosts: bool = True) -> None:
        """Run the needed calls in order; with ``ghosts``, draw what the others would draw."""
        handed: set[str] = set()
        by_storage: dict[int, list[str]] = {}
        for name, slot in self.wanted.items():
            by_storage.setdefault(self.log.storage(slot), []).append(name)
        for index, call in enumerate(self.log.calls):
            if index in self.needed:
                if not self._is_lazy(index):
                    self._run(call)
                    self._finish(index, call, by_storage, handed)
            elif ghosts and call.is_random:
                self._draw(call)
        self._hand_over([name for name in self.wanted if name not in handed], handed)

    def _value(self, slot: int) -> Tensor:
        if slot not in self.values:
            self._run(self.log.calls[self.producer[slot]])
        return self.values[slot]

    def _run(self, call: Call) -> None:
        def real(leaf: Any) -> Any:
            return self._value(leaf.index) if isinstance(leaf, Slot) else leaf

        args, kwargs = tree_map(real, (call.args, dict(call.kwargs)))
        result = call.op(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for slot, tensor in zip(call.outputs, tensors, strict=call.name != _WHOLE):
            self.values.setdefault(slot, tensor)

    def _draw(self, call: Call) -> None:
        """Advance the generator as ``call`` would, on scratch memory of the same shape."""

        def scratch(leaf: Any) -> Any:
            if not isinstance(leaf, Slot):
                return leaf
            fake = self.log.tensors[leaf.index]
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(0)

        if call.written and call.name in _OVERWRITES:
            fake = self.log.tensors[call.written[0]]
            memory = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            call.op(memory, *call.args[1:], **call.kwargs)
        else:
            args, kwargs = tree_map(scratch, (call.args, dict(call.kwargs)))
            call.op(*args, **kwargs)

    def _finish(
        self, index: int, call: Call, by_storage: Mapping[int, list[str]], handed: set[str]
    ) -> None:
        done = {
            storage
            for storage in map(self.log.storage, (*call.reads, *call.outputs))
            if self.last_touch[storage] == index
        }
        for storage in done:
            self._hand_over(by_storage.get(storage, ()), handed)
        for slot in [slot for slot in self.values if self.log.storage(slot) in done]:
            del self.values[slot]

    def _hand_over(self, names: Iterable[str], handed: set[str]) -> None:
        for name in names:
            self.on_tensor(name, self._value(self.wanted[name]))
            handed.add(name)


def _producers(log: Log) -> dict[int, int]:
    producers: dict[int, int] = {}
    for index, call in enumerate(log.calls):
        for slot in call.outputs:
            producers.setdefault(slot, index)
    return producers


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def record(build: Callable[[], Any]) -> tuple[Any, Log]:
    """What ``build`` returns, made of fake tensors, and the log of how."""
    log = Log()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Recorder(log, mode), _whole_trunc_normal(log):
        return build(), log


@contextmanager
def _whole_trunc_normal(log: Log) -> Iterator[None]:
    """Record ``trunc_normal_`` as one call: it rejects samples by their values, in a loop."""
    original = getattr(torch.nn.init, _WHOLE)

    def recorded(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        if generator is not None:
            raise UnrecordableError("the build uses a random generator of its own")
        slot = log.slot(tensor)
        args = (Slot(slot), mean, std, a, b)
        log.calls.append(Call(_WHOLE, True, original, args, {}, (), (slot,), (slot,)))
        return tensor

    setattr(torch.nn.init, _WHOLE, recorded)
    try:
        yield
    finally:
        setattr(torch.nn.init, _WHOLE, original)
