"""Parts of the tensors of a recorded build, with random numbers by position.

In: a log and boxes of its tensors. Out: their values, where each draw's numbers depend on the key
of the build, the place of the draw in the log and the place of the element in the tensor
(``tiles``): the same on any rank, and distributed as in a plain build.

A wanted box is followed backward through the log: fills, copies and exactly rounded arithmetic need
the same box of their inputs, so only that is ever made. Any other op (``orthogonal_``, a sort) is
run on whole tensors. Only exactly rounded ops are run in part, because torch computes the others
(an exponential) differently in the last bit at the edges of a vector.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...planner.graph.layout import Region
from .box_views import BoxView, box_view
from .build_log import CONSTANT, SEED, TRUNC_NORMAL, UNINITIALIZED, Call, Log, Slot, copy_storage
from .tiles import draw_box, num_tiles, tile_seed

_DRAWS_IN_PLACE = frozenset(
    {
        TRUNC_NORMAL,
        "aten::normal_",
        "aten::uniform_",
        "aten::bernoulli_",
        "aten::exponential_",
        "aten::log_normal_",
        "aten::cauchy_",
        "aten::geometric_",
        "aten::random_",
    }
)
"""Names of in-place ops that draw every element independently, from the same distribution."""

_DRAWS: Mapping[str, Callable[[Tensor], object]] = {
    "aten::randn": Tensor.normal_,
    "aten::randn_like": Tensor.normal_,
    "aten::rand": Tensor.uniform_,
    "aten::rand_like": Tensor.uniform_,
}

_VALUES: Mapping[str, int | None] = {
    "aten::zeros": None,
    "aten::zeros_like": None,
    "aten::new_zeros": None,
    "aten::ones": None,
    "aten::ones_like": None,
    "aten::new_ones": None,
    "aten::full": 1,
    "aten::full_like": 1,
    "aten::new_full": 2,
}
"""Position of the fill value among the arguments of ops that fill a tensor with one value; None if
the op's name says the value."""

_OVERWRITES = frozenset({"aten::zero", "aten::fill", "aten::copy"})
_EXACT = _OVERWRITES | {
    "aten::add",
    "aten::sub",
    "aten::mul",
    "aten::div",
    "aten::neg",
    "aten::abs",
    "aten::sqrt",
    "aten::clamp",
    "aten::clamp_min",
    "aten::clamp_max",
    "aten::minimum",
    "aten::maximum",
    "aten::where",
    "aten::masked_fill",
    "aten::clone",
    "aten::_to_copy",
}
"""Names of ops, without the underscore of in-place ops, that compute each element only from the
elements at the same position, with the same rounding on any part of the tensors."""


def sharded_replay(
    log: Log,
    wanted: Mapping[tuple[str, Region], int],
    on_part: Callable[[str, Region, Tensor], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Compute boxes (ranges of indices per dimension) of a recorded build's tensors; call
    ``on_part`` (name, box, values) for each. ``wanted`` maps (name, box) to the tensor's number in
    the log. The caller seeds the default generator; one number drawn from it is the key of all
    random numbers here. ``tick`` is called before each box."""
    parts = SharedLog(log, _drawn_key())
    for (name, box), slot in wanted.items():
        tick()
        on_part(name, box, parts.make(slot, box))


def _drawn_key() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


class SharedLog:
    """Recorded build with data that the replays of all boxes share: the calls on each storage, and
    the seeds of each random call."""

    def __init__(self, log: Log, key: int) -> None:
        self.log = log
        self.calls: dict[int, list[int]] = {}
        self.bases: dict[int, Tensor] = {}
        self.seeds: dict[int, Callable[[int], int]] = {}
        self._views: dict[int, BoxView | None] = {}
        first = 0
        for index, call in enumerate(log.calls):
            for slot in call.outputs:
                self.bases.setdefault(log.storage(slot), log.tensors[slot])
            for storage in {log.storage(slot) for slot in (*call.outputs, *call.written)}:
                self.calls.setdefault(storage, []).append(index)
            if call.name == SEED:
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(call.args[0])
                    key, first = _drawn_key(), 0
            elif call.is_random:
                self.seeds[index] = partial(_seed, key, first)
                first += num_tiles(tuple(log.tensors[drawn_slot(call)].shape))

    def make(self, slot: int, box: Region) -> Tensor:
        """Return the values of ``box`` (range of indices per dimension) of tensor number ``slot``
        at the end of the recorded build."""
        replay = _PartReplay(self)
        if not all(stop > start for start, stop in box):
            fake = self.log.tensors[slot]
            return torch.empty([stop - start for start, stop in box], dtype=fake.dtype)
        replay.follow(slot, box)
        return replay.run(slot, box)

    def view(self, slot: int) -> BoxView | None:
        """Return the position of tensor number ``slot`` within the first tensor made on its
        storage; None if it is no box of that."""
        if slot not in self._views:
            base = self.bases[self.log.storage(slot)]
            self._views[slot] = box_view(self.log.tensors[slot], base)
        return self._views[slot]


def _seed(key: int, first: int, tile: int) -> int:
    return tile_seed(key, first + tile)


def drawn_slot(call: Call) -> int:
    """Return the number in the log of the tensor that a random call fills."""
    return call.written[0] if call.written else call.outputs[0]


@dataclass(slots=True)
class _PartReplay:
    """Replay of a recorded build for one box (range of indices per dimension) of one tensor:
    ``follow`` finds the calls on which the box depends, ``run`` executes them. Boxes of a storage
    are boxes of the first tensor on it. ``live`` has the box of each storage that earlier calls
    must still produce, ``held`` the box of all that is ever needed (None: the whole storage).
    ``steps`` has the output box of each call to execute (None: whole tensors)."""

    shared: SharedLog
    live: dict[int, Region | None] = field(default_factory=dict)
    held: dict[int, Region | None] = field(default_factory=dict)
    steps: dict[int, Region | None] = field(default_factory=dict)
    buffers: dict[int, Tensor] = field(default_factory=dict)
    whole: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)

    @property
    def log(self) -> Log:
        return self.shared.log

    def follow(self, slot: int, box: Region) -> None:
        """Find every call on which a box of the finished tensor number ``slot`` depends."""
        self._need(slot, box, before=len(self.log.calls))
        done = len(self.log.calls)
        while self.pending:
            index = -heapq.heappop(self.pending)
            if index < done:
                done = index
                self._explain(index)

    def _need(self, slot: int, box: Region, *, before: int) -> None:
        storage, view = self.log.storage(slot), self.shared.view(slot)
        needed = None if view is None else view.in_base(box)
        if storage in self.live:
            self.live[storage] = _hull(self.live[storage], needed)
        else:
            self.live[storage] = needed
            for index in self.shared.calls.get(storage, ()):
                if index < before:
                    heapq.heappush(self.pending, -index)
        self.held[storage] = _hull(self.held[storage], needed) if storage in self.held else needed

    def _explain(self, index: int) -> None:
        """Record call number ``index`` in ``steps`` if it makes a needed value, and mark the boxes
        that it needs of its inputs."""
        call = self.log.calls[index]
        slots = call.written or call.outputs
        if not any(self.log.storage(slot) in self.live for slot in slots):
            return
        if not call.written and self._is_view(call):
            return
        if call.name == CONSTANT:
            return
        if self._runs_in_part(call):
            self._explain_part(index, call, slots[0])
        else:
            self._explain_whole(index, call)

    def _explain_part(self, index: int, call: Call, slot: int) -> None:
        storage, view = self.log.storage(slot), self.shared.view(slot)
        assert view is not None
        live = self.live[storage]
        box = full_box(self.log.tensors[slot].shape) if live is None else view.in_view(live)
        if box is None:
            return
        self.steps[index] = box
        everything = full_box(self.shared.bases[storage].shape) if live is None else live
        is_covered = is_packed(view) and view.in_base(box) == everything
        if not call.written or (overwrites(call) and is_covered):
            del self.live[storage]
        for leaf in tree_leaves((call.args, dict(call.kwargs))):
            if isinstance(leaf, Slot) and not (call.written and leaf.index == slot):
                self._need(
                    leaf.index, broadcast_box(box, self.log.tensors[leaf.index]), before=index
                )

    def _explain_whole(self, index: int, call: Call) -> None:
        self.steps[index] = None
        for slot in call.outputs:
            if not call.written and self.log.storage(slot) not in self._read_storages(call):
                self._need(slot, full_box(self.log.tensors[slot].shape), before=index)
                self.live.pop(self.log.storage(slot), None)
        for slot in (*call.written, *call.reads):
            self._need(slot, full_box(self.log.tensors[slot].shape), before=index)

    def _is_view(self, call: Call) -> bool:
        """Return whether a call only allocates memory, or makes a view of its argument."""
        if call.name in UNINITIALIZED:
            for slot in call.outputs:
                self.live.pop(self.log.storage(slot), None)
            return True
        sources = self._read_storages(call)
        return bool(sources) and {self.log.storage(slot) for slot in call.outputs} <= sources

    def _read_storages(self, call: Call) -> set[int]:
        return {self.log.storage(slot) for slot in call.reads}

    def _runs_in_part(self, call: Call) -> bool:
        slots = call.written or call.outputs
        if len(slots) != 1 or self.shared.view(slots[0]) is None:
            return False
        others = [
            leaf
            for leaf in tree_leaves((call.args[1:], dict(call.kwargs)))
            if isinstance(leaf, Slot)
        ]
        if call.is_random:
            return call.name in (_DRAWS_IN_PLACE if call.written else _DRAWS) and not others
        return call.name in _VALUES or _is_exact(call)

    def run(self, slot: int, box: Region) -> Tensor:
        """Execute the calls that ``follow`` found for a box; return the values of the box."""
        for index in sorted(self.steps):
            call, part = self.log.calls[index], self.steps[index]
            if part is None:
                self._run_whole(index, call)
            else:
                self._run_part(index, call, part)
        return self._value(slot, box)

    def _run_part(self, index: int, call: Call, box: Region) -> None:
        slot = drawn_slot(call)
        target = self._value(slot, box)
        shape = tuple(self.log.tensors[slot].shape)
        if call.is_random:
            draw = _DRAWS.get(call.name) or partial(_call_on, call)
            draw_box(target, shape, box, draw, self.shared.seeds[index])
        elif call.name in _VALUES:
            target.fill_(_value_of(call))
        else:

            def real(leaf: Any) -> Any:
                if not isinstance(leaf, Slot):
                    return leaf
                if call.written and leaf.index == slot:
                    return result
                fake = self.log.tensors[leaf.index]
                return self._value(leaf.index, broadcast_box(box, fake))

            result = target.contiguous() if call.written else target
            args, kwargs = tree_map(real, (call.args, dict(call.kwargs)))
            made = call.op(*args, **kwargs)
            if made.data_ptr() != target.data_ptr():
                target.copy_(made)

    def _run_whole(self, index: int, call: Call) -> None:
        written = {slot: self._whole(slot).contiguous() for slot in call.written}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Slot):
                return leaf
            return written.get(leaf.index, self._whole(leaf.index))

        args, kwargs = tree_map(real, (call.args, dict(call.kwargs)))
        if call.is_random:
            torch.default_generator.manual_seed(self.shared.seeds[index](0))
        result = call.op(*args, **kwargs)
        for slot, tensor in written.items():
            self._whole(slot).copy_(tensor)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not call.written:
            for slot, tensor in zip(call.outputs, made, strict=True):
                self._whole(slot).copy_(tensor)

    def _whole(self, slot: int) -> Tensor:
        return self._value(slot, full_box(self.log.tensors[slot].shape))

    def _value(self, slot: int, box: Region) -> Tensor:
        """Return a box of tensor number ``slot`` as a view of the memory that holds the needed part
        of its storage."""
        storage, view = self.log.storage(slot), self.shared.view(slot)
        held = self.held[storage]
        if storage in self.log.constants or held is None or view is None:
            whole = self._in_whole(slot, storage)
            return whole[tuple(slice(start, stop) for start, stop in box)]
        if storage not in self.buffers:
            base = self.shared.bases[storage]
            sizes = [stop - start for start, stop in held]
            self.buffers[storage] = torch.empty(sizes, dtype=base.dtype)
        return view.of_buffer(self.buffers[storage], held, box)

    def _in_whole(self, slot: int, storage: int) -> Tensor:
        """Return tensor number ``slot``, whose ``storage`` is held whole: the storage of a tensor
        that the build received (a copy if calls write to it), or a storage of which no box is
        known."""
        fake = self.log.tensors[slot]
        if storage in self.log.constants:
            if not self._is_written(storage):
                return self.log.constant(slot)
            if storage not in self.whole:
                self.whole[storage] = copy_storage(self.log.constants[storage])
            return self.log.constant(slot, self.whole[storage])
        if storage not in self.whole:
            self.whole[storage] = _allocated(fake.untyped_storage().nbytes())
        empty = torch.empty(0, dtype=fake.dtype)
        return empty.set_(self.whole[storage], fake.storage_offset(), fake.shape, fake.stride())

    def _is_written(self, storage: int) -> bool:
        return any(
            self.log.storage(slot) == storage
            for index in self.steps
            for slot in self.log.calls[index].written
        )


def full_box(shape: Sequence[int]) -> Region:
    """Return the box (range of indices per dimension) that covers a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def broadcast_box(box: Region, tensor: Tensor) -> Region:
    """Return the box of an op's operand ``tensor`` that ``box`` of the op's broadcast result
    reads."""
    offset = len(box) - tensor.dim()
    return tuple(
        (0, 1) if size == 1 else box[offset + dim] for dim, size in enumerate(tensor.shape)
    )


def is_packed(view: BoxView) -> bool:
    """Return whether a view contains every element of the base within the range that it spans."""
    return all(along is None or along[1] == 1 for along in view.dims)


def overwrites(call: Call) -> bool:
    """Return whether a recorded call overwrites every element of the tensor that it writes to."""
    return call.is_random or call.name.removesuffix("_") in _OVERWRITES


def _is_exact(call: Call) -> bool:
    if call.name.removesuffix("_") not in _EXACT or call.kwargs.get("rounding_mode"):
        return False
    return bool(call.kwargs.get("alpha", 1) == 1)


def _value_of(call: Call) -> Any:
    at = _VALUES[call.name]
    return call.args[at] if at is not None else int("ones" in call.name)


def _call_on(call: Call, tile: Tensor) -> None:
    call.op(tile, *call.args[1:], **call.kwargs)


def _hull(first: Region | None, second: Region | None) -> Region | None:
    """Return the smallest box (range of indices per dimension) that contains two boxes; None stands
    for the whole tensor."""
    if first is None or second is None:
        return None
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


def _allocated(num_bytes: int) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
