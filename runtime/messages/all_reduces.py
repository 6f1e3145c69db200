"""All-reduces that run beside the backward, by the algorithm that the plan names.

In: tensors, one after the other, each with an algorithm's name. Out: works to wait for, after
which every rank of the group holds the same sums, bit for bit: each part is added up in one place
or, by recursive doubling, in the same pairs everywhere, and float addition commutes.

The messages of a table (``cost_model.collectives.tables``) go through sends and receives of a
process group of their own, so that they meet no other traffic, and a thread of their own, which
runs the all-reduces one by one, in the order of the calls. A thread that waits for messages holds
no lock of Python's, and the backward goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.collectives.all_reduce import LIBRARY, hosts_of, table_for
from ...cost_model.collectives.collectives import group_of
from ...cost_model.collectives.tables import Message, Table
from .groups import gloo_group_beside

Span = tuple[int, int]
"""Half-open range of elements, ``(start, stop)``."""


class ThreadTask:
    """Handle of a function call in another thread; ``wait`` blocks and raises its error."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the current thread; store its error, which ``wait`` raises."""
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class TaskThread:
    """A thread that runs functions in the order in which they are submitted."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[ThreadTask, Callable[[], object]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], object]) -> ThreadTask:
        if self._thread is None:
            # A daemon: tasks that somebody waited for are done when the process ends.
            self._thread = threading.Thread(target=self._serve, name="lane", daemon=True)
            self._thread.start()
        work = ThreadTask()
        self._queue.put((work, function))
        return work

    def _serve(self) -> None:
        while True:
            work, function = self._queue.get()
            work.run(function)


class AllReduces:
    """The all-reduces of one rank over process groups, in the order in which they are started.
    ``cluster`` describes the ranks' hosts and the links between them. Construction is collective
    over the ranks of each of ``groups``, which all name them in the same order."""

    def __init__(self, groups: Iterable[dist.ProcessGroup], cluster: Cluster) -> None:
        self._cluster = cluster
        self._lane = TaskThread()
        self._beside = {group: gloo_group_beside(group) for group in dict.fromkeys(groups)}
        self._known: dict[tuple[str, int, dist.ProcessGroup], TableMessages] = {}

    def start(
        self, algorithm: str, tensor: Tensor, groups: Sequence[dist.ProcessGroup]
    ) -> ThreadTask:
        """Start to sum a flat tensor in place over each of ``groups``, by the ``algorithm`` of that
        name; return a handle to wait for. A thread runs the all-reduces one by one."""
        return self._lane.submit(partial(self._run, algorithm, tensor, groups))

    def _run(self, algorithm: str, tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        for group in groups:
            if algorithm == LIBRARY:
                self._beside[group].allreduce([tensor]).wait()
            else:
                self._by_messages(algorithm, tensor, group)(tensor)

    def _by_messages(
        self, algorithm: str, tensor: Tensor, group: dist.ProcessGroup
    ) -> TableMessages:
        key = algorithm, tensor.numel(), group
        if key not in self._known:
            ranks = dist.get_process_group_ranks(group)
            num_bytes, hosts = (
                tensor.numel() * tensor.element_size(),
                hosts_of(self._cluster, ranks),
            )
            table = table_for(algorithm, num_bytes, group_of(self._cluster, ranks), hosts)
            self._known[key] = TableMessages(table, tensor.numel(), self._beside[group])
        return self._known[key]


class _Arriving(NamedTuple):
    """A message that this rank receives: it fills the element ranges ``spans`` of the tensor or, if
    ``adds``, is added to them; if ``in_place``, it is received directly into the tensor."""

    sender: int
    tag: int
    spans: tuple[Span, ...]
    adds: bool
    in_place: bool


class _Leaving(NamedTuple):
    receiver: int
    tag: int
    spans: tuple[Span, ...]


class TableMessages:
    """An in-place collective on flat tensors of ``numel`` elements, run as the point-to-point
    messages that a table lists in rounds.

    A tensor is cut into parts of nearly equal size; empty parts are not sent. Where messages add to
    a part that a rank has no values for, the part must be 0 there. ``rounds`` are the messages that
    the rank receives and sends.
    """

    def __init__(self, table: Table, numel: int, group: Any) -> None:
        """Prepare the messages of this rank in ``table``; ``group`` is a ``ProcessGroupGloo``."""
        self._group, rank = group, group.rank()
        assert table.num_ranks == group.size()
        bounds = [part * numel // table.num_parts for part in range(table.num_parts + 1)]
        self.rounds = [_own_round(messages, rank, bounds) for messages in table.rounds]
        self._buffer: Tensor | None = None

    def __call__(self, tensor: Tensor) -> None:
        for arriving, leaving in self.rounds:
            if arriving or leaving:
                self._run_round(tensor, arriving, leaving)

    def _run_round(
        self, tensor: Tensor, arriving: Sequence[_Arriving], leaving: Sequence[_Leaving]
    ) -> None:
        """Send and receive all messages of a round at once. The values sent are the values before
        the round; received values enter the tensor after all messages have arrived."""
        buffers, offset, works = [], 0, []
        scratch = self._scratch(tensor, sum(_size(m.spans) for m in arriving if not m.in_place))
        for message in arriving:
            if message.in_place:
                buffer = tensor[slice(*message.spans[0])]
            else:
                size = _size(message.spans)
                buffer = scratch[offset : offset + size]
                offset += size
            buffers.append(buffer)
            works.append(self._group.recv([buffer], message.sender, message.tag))
        sent = [_gathered(tensor, message.spans) for message in leaving]
        for own, content in zip(leaving, sent, strict=True):
            works.append(self._group.send([content], own.receiver, own.tag))
        for work in works:
            work.wait()
        for message, buffer in zip(arriving, buffers, strict=True):
            if not message.in_place:
                _put(tensor, message, buffer)

    def _scratch(self, tensor: Tensor, numel: int) -> Tensor:
        """Return a buffer for received messages: the previous round's, if it is large enough."""
        if self._buffer is None or self._buffer.numel() < numel:
            self._buffer = tensor.new_empty(numel)
        return self._buffer


def _own_round(
    messages: Sequence[Message], rank: int, bounds: Sequence[int]
) -> tuple[tuple[_Arriving, ...], tuple[_Leaving, ...]]:
    """Return the messages that this rank receives and sends in a round. Part ``p`` of the tensor
    has the elements ``bounds[p]`` to ``bounds[p + 1]`` - 1. A message's tag is its index in the
    round, so that two messages between the same ranks are not confused."""
    sent = {part for message in messages if message.sender == rank for part in message.parts}
    arriving, leaving = [], []
    for tag, message in enumerate(messages):
        spans = _spans(message.parts, bounds)
        if not spans:
            continue
        if message.receiver == rank:
            in_place = not message.adds and len(spans) == 1 and sent.isdisjoint(message.parts)
            arriving.append(_Arriving(message.sender, tag, spans, message.adds, in_place))
        elif message.sender == rank:
            leaving.append(_Leaving(message.receiver, tag, spans))
    return tuple(arriving), tuple(leaving)


def _spans(parts: Sequence[int], bounds: Sequence[int]) -> tuple[Span, ...]:
    """Return the element ranges of ``parts``; part ``p`` starts at ``bounds[p]`` and stops before
    ``bounds[p + 1]``. Adjacent ranges are joined, empty ranges left out.

    >>> _spans((0, 1, 3), (0, 2, 4, 6, 7)), _spans((1,), (0, 2, 2))
    (((0, 4), (6, 7)), ())
    """
    found: list[Span] = []
    for part in parts:
        start, stop = bounds[part], bounds[part + 1]
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _gathered(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    pieces = [tensor[start:stop] for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _put(tensor: Tensor, message: _Arriving, buffer: Tensor) -> None:
    offset = 0
    for start, stop in message.spans:
        content = buffer[offset : offset + stop - start]
        offset += stop - start
        if message.adds:
            tensor[start:stop].add_(content)
        else:
            tensor[start:stop].copy_(content)
