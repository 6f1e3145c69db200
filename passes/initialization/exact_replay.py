"""Tensors of a recorded build, bit for bit as a plain build makes them.

The log's ops are repeated in order on real tensors from the same seed. The generator is a sequence,
so every number up to the last one wanted has to be drawn; values that are overwritten before they
are read, or not requested, are drawn and discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .build_log import (
    CONSTANT,
    OVERWRITES,
    TRUNC_NORMAL,
    UNINITIALIZED,
    Call,
    Log,
    Slot,
    UnrecordableError,
    copy_storage,
)

_SCRATCH = 1 << 15
"""Number of random numbers drawn at a time into scratch memory to advance the generator: 200
million per second, against 60 million with newly allocated memory for whole tensors."""


def exact_replay(
    log: Log,
    wanted: Mapping[str, int],
    on_tensor: Callable[[str, Tensor], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Repeat a recorded model build on real tensors; call ``on_tensor(name, tensor)`` once each
    wanted tensor is finished. ``wanted`` maps names to numbers of tensors in the log. The caller
    seeds the default generator. ``tick`` is called before each op."""
    if wanted:
        _Replay(log, wanted, on_tensor, tick).run()


def draw_all(log: Log) -> None:
    """Advance torch's default generator as the recorded build would, without making its tensors."""
    replay = _Replay(log, {}, lambda _, tensor: None, lambda: None)
    for call in log.calls:
        if call.is_random:
            replay.draw(call)


def num_drawn(log: Log) -> int:
    """Return how many random numbers the recorded build draws."""
    slots = [(*call.written, *call.outputs)[:1] for call in log.calls if call.is_random]
    return sum(log.tensors[slot].numel() for own in slots for slot in own)


def deterministic_value(log: Log, slot: int) -> Tensor:
    """Return the value of tensor number ``slot`` at the end of the recorded build. Raises
    UnrecordableError if the value is random."""
    found: list[Tensor] = []
    replay = _Replay(log, {"": slot}, lambda _, tensor: found.append(tensor), lambda: None)
    if replay.last_draw >= 0:
        raise UnrecordableError("the build reads a random number")
    with torch.no_grad():
        replay.run()
    return found[0]


class _Replay:
    """Replay of a recorded build. It finds the calls to execute, the random calls whose numbers are
    only drawn and discarded, and the last use of each storage."""

    def __init__(
        self,
        log: Log,
        wanted: Mapping[str, int],
        on_tensor: Callable[[str, Tensor], None],
        tick: Callable[[], None],
    ) -> None:
        self.log = log
        self.wanted = wanted
        self.on_tensor = on_tensor
        self.tick = tick
        self.values: dict[int, Tensor] = {}
        self.copies: dict[int, torch.UntypedStorage] = {}
        self.producer = _producers(log)
        self.needed = self._needed_calls()
        random = [index for index in self.needed if log.calls[index].is_random]
        self.last_draw = max(random, default=-1)
        self.last_touch: dict[int, int] = {}
        for index in sorted(self.needed):
            if not self._is_lazy(index):
                call = log.calls[index]
                for slot in (*call.reads, *call.outputs):
                    self.last_touch[log.storage(slot)] = index

    def _needed_calls(self) -> set[int]:
        """Return the indices of the calls on which the final value of a wanted tensor depends,
        found by following the log from its end."""
        log, needed = self.log, set()
        slots = set(self.wanted.values())
        live = {log.storage(slot) for slot in slots}
        for index in range(len(log.calls) - 1, -1, -1):
            call = log.calls[index]
            if call.written:
                if not any(log.storage(slot) in live for slot in call.written):
                    continue
                if call.name in OVERWRITES and _covers(log.tensors[call.written[0]]):
                    live.discard(log.storage(call.written[0]))
                content = set(call.reads) - set(call.written)
            elif slots.isdisjoint(call.outputs):
                continue
            else:
                made = {log.storage(slot) for slot in call.outputs}
                content = {slot for slot in call.reads if log.storage(slot) not in made}
                if (content or not call.reads) and call.name != CONSTANT:
                    live -= made
            needed.add(index)
            slots.update(call.reads)
            live.update(log.storage(slot) for slot in content)
        return needed

    def _is_lazy(self, index: int) -> bool:
        """Return whether call number ``index`` only allocates memory or makes a view, so that it is
        executed when its result is first used."""
        call = self.log.calls[index]
        if call.written:
            return False
        if call.name in UNINITIALIZED:
            return True
        if not call.reads or not call.outputs:
            return False
        source = self.log.storage(call.reads[0])
        return all(self.log.storage(slot) == source for slot in call.outputs)

    def run(self) -> None:
        """Execute the needed calls in order. For a random call that is not needed, but precedes a
        needed random call, only advance the generator."""
        handed: set[str] = set()
        by_storage: dict[int, list[str]] = {}
        for name, slot in self.wanted.items():
            by_storage.setdefault(self.log.storage(slot), []).append(name)
        last = max(self.needed, default=-1)
        for index, call in enumerate(self.log.calls[: last + 1]):
            if index in self.needed:
                if not self._is_lazy(index):
                    self.tick()
                    self._run(call)
                    self._finish(index, call, by_storage, handed)
            elif call.is_random and index < self.last_draw:
                self.tick()
                self.draw(call)
        self._hand_over([name for name in self.wanted if name not in handed], handed)

    def _value(self, slot: int) -> Tensor:
        if slot not in self.values:
            self._run(self.log.calls[self.producer[slot]])
        return self.values[slot]

    def _run(self, call: Call) -> None:
        if call.name == CONSTANT:
            self.values.setdefault(call.outputs[0], self._constant(call.outputs[0]))
            return

        def real(leaf: Any) -> Any:
            return self._value(leaf.index) if isinstance(leaf, Slot) else leaf

        args, kwargs = tree_map(real, (call.args, dict(call.kwargs)))
        result = call.op(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for slot, tensor in zip(call.outputs, tensors, strict=call.name != TRUNC_NORMAL):
            self.values.setdefault(slot, tensor)

    def _constant(self, slot: int) -> Tensor:
        """Return the real tensor with number ``slot``, which the build received. If the build
        writes to its storage, return it in a copy of the storage, so that the log stays
        unchanged."""
        storage = self.log.storage(slot)
        if storage not in self.log.written:
            return self.log.constant(slot)
        if storage not in self.copies:
            self.copies[storage] = copy_storage(self.log.constants[storage])
        return self.log.constant(slot, self.copies[storage])

    def draw(self, call: Call) -> None:
        """Advance the random generator as ``call`` would, on scratch memory of the same shape."""

        def scratch(leaf: Any) -> Any:
            if not isinstance(leaf, Slot):
                return leaf
            fake = self.log.tensors[leaf.index]
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(0)

        numbers = self._uniform_numbers(call)
        if numbers is not None:
            memory = torch.empty(min(numbers, _SCRATCH))
            for start in range(0, numbers, _SCRATCH):
                memory[: numbers - start].uniform_()
        elif call.written and call.name in OVERWRITES:
            fake = self.log.tensors[call.written[0]]
            memory = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            call.op(memory, *call.args[1:], **call.kwargs)
        else:
            args, kwargs = tree_map(scratch, (call.args, dict(call.kwargs)))
            call.op(*args, **kwargs)

    def _uniform_numbers(self, call: Call) -> int | None:
        """Return the number of uniform random numbers whose drawing advances the generator as far
        as ``call`` does; None if unknown."""
        if call.name not in ("aten::uniform_", "aten::normal_"):
            return None
        fake = self.log.tensors[call.written[0]]
        if fake.dtype != torch.float32 or not fake.is_contiguous() or not _draws_add_up():
            return None
        if call.name == "aten::uniform_":
            return fake.numel()
        return _normal_numbers(fake.numel()) if fake.numel() >= 16 else None

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


def _normal_numbers(size: int) -> int:
    """Return the number of uniform random numbers that torch draws to make ``size`` normal numbers:
    groups of 16, and another 16 for the last 16 elements if the last group is not full."""
    return size + (16 if size % 16 else 0)


@cache
def _draws_add_up() -> bool:
    """Return whether torch's CPU generator has the same state after drawing normal numbers as after
    drawing the uniform numbers they are made of. True in torch 2.11 to 2.13, but tested here."""
    state = torch.get_rng_state()
    found = []
    for size in (16, 37, 4096 + 5):
        torch.set_rng_state(state)
        torch.empty(size).normal_(1.0, 2.0)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        for part in (7, _normal_numbers(size) - 7):
            torch.empty(part).uniform_()
        found.append(torch.equal(after, torch.get_rng_state()))
    torch.set_rng_state(state)
    return all(found)


def _producers(log: Log) -> dict[int, int]:
    producers: dict[int, int] = {}
    for index, call in enumerate(log.calls):
        for slot in call.outputs:
            producers.setdefault(slot, index)
    return producers


def _covers(tensor: Tensor) -> bool:
    """Return whether a tensor has as many elements as its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
