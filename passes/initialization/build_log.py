"""The log of a build: every op that a model's constructor ran on tensors, in order.

``recording`` writes it; ``exact_replay`` and ``sharded_replay`` make tensors from it. Tensors have
numbers (``Slot``); a slot has the shape, strides and storage of the build's fake tensor. Real
tensors that the build received, for example from a file, are the log's constants: it refers to them
and never copies or changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CONSTANT = "constant"
"""Name of the logged call that stands for a real tensor which the build received."""

SEED = "manual_seed"
"""Name of the logged call by which a build seeds the default random generator."""

TRUNC_NORMAL = "_no_grad_trunc_normal_"
"""Name of ``torch.nn.init.trunc_normal_``, which is recorded as one call."""

UNINITIALIZED = frozenset(
    {
        "aten::empty",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
"""Names of ops that only allocate memory."""

OVERWRITES = frozenset(
    {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", TRUNC_NORMAL}
)
"""Names of ops that overwrite every element of a tensor and read no other tensor."""


class UnrecordableError(Exception):
    """Error of a model build (call of its constructor) that cannot be repeated from a log."""


class NeedsValuesError(UnrecordableError):
    """Error of a model build (call of its constructor) that needs the values of real tensors."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Reference to a tensor of a recorded model build, by its number in the log."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """Recorded call of an op in a model build. ``outputs``, ``written`` and ``reads`` are the
    numbers of tensors: its results, the arguments that it writes to, and all tensor arguments."""

    name: str
    is_random: bool

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    reads: tuple[int, ...]
    written: tuple[int, ...]


def _mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass
class Log:
    """Log of a model's build: the calls of ops in order, and the fake tensors that they were made
    on, numbered. ``reals`` are real tensors that the build received (for example from a file),
    ``constants`` has one of them per storage. The fake tensors of ``mode`` share memory exactly if
    the real ones would."""

    calls: list[Call] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    reals: list[Tensor] = field(default_factory=list)
    mode: FakeTensorMode = field(default_factory=_mode)

    def slot(self, tensor: Tensor) -> int:
        """Return the number of a tensor that a recorded op has made. Raises UnrecordableError for
        any other tensor."""
        index = self.slots.get(id(tensor))
        if index is None:
            raise UnrecordableError("a tensor that no recorded op made")
        return index

    def add(self, tensor: Tensor) -> int:
        """Return the number of a fake tensor in the log; a new tensor gets the next number."""
        index = self.slots.get(id(tensor))
        if index is None:
            index = self.slots[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return index

    def add_constant(self, real: Tensor) -> int:
        """Return the number of the fake tensor that represents the real tensor ``real`` in the
        log."""
        if id(real) in self.slots:
            return self.slots[id(real)]
        fake = self.mode.from_tensor(real)
        slot = self.slots[id(real)] = self.add(fake)
        self.calls.append(Call(CONSTANT, False, None, (), {}, (slot,), (), ()))
        self.reals.append(real)
        self.constants.setdefault(self.storage(slot), real)
        return slot

    def storage(self, slot: int) -> int:
        """Return an id of the storage of the tensor with number ``slot``."""
        return int(self.tensors[slot].untyped_storage()._cdata)

    def constant(self, slot: int, storage: torch.UntypedStorage | None = None) -> Tensor:
        """Return the real tensor with number ``slot``, which the build received, in its own storage
        or in ``storage``, a copy of that."""
        real, fake = self.constants[self.storage(slot)], self.tensors[slot]
        memory = real.untyped_storage() if storage is None else storage
        empty = torch.empty(0, dtype=fake.dtype, device=real.device)
        return empty.set_(memory, fake.storage_offset(), fake.shape, fake.stride())

    @property
    def written(self) -> frozenset[int]:
        """Ids of the storages to which some call of the log writes."""
        return frozenset(self.storage(slot) for call in self.calls for slot in call.written)


def copy_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return a copy of a tensor's storage."""
    copy: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return copy
