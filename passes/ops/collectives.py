"""Conversion of a tensor's layout at run time: the collectives, each with its dual in the backward.

A change of placement on one axis is a pair of moves, one for the value and one for the gradient;
``MOVES`` lists them for every entry of ``planner.graph.graph.layout.CONVERSIONS``. The duals follow
from the meaning of a gradient in each placement (a partial sum in R, whole elsewhere): R→I, for
example, leaves the value and divides the gradient by n, because the n equal gradients of I must add
up to a single gradient.

An exchange of rows runs beside other work: ``send`` starts it and ``arrived`` waits for it. In the
backward ``arrived`` starts the exchange of the gradients and ``send`` waits for it. Autograd runs
the backward of later calls first, so this exchange runs beside the backward of the same work.

Source: Megatron-LM's f and g (Shoeybi et al. 2019, section 3) are I→R and P→I.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ...planner.graph.layout import Kind, Mesh, Placement, Step, parse_placement
from ...planner.variants.shares import RowShare
from .random_ops import Draws


class Parts:
    """Numbers of rows of one exchange. ``sent`` and ``received``: by the rank that this rank sends
    to, or receives from. ``totals``: rows received in all, by rank along other axes. The host waits
    for the device when it first reads one of them."""

    def __init__(self, read: Callable[[], Sequence[tuple[int, ...]]]) -> None:
        """Make parts; ``read`` waits, and returns ``sent``, ``received`` and ``totals``."""
        self._numbers = cache(read)

    @staticmethod
    def of(read: Callable[[], list[int]], ranks: int, place: int) -> Parts:
        """Return the numbers of rows. ``read`` waits for the device, and returns the numbers of
        rows to send to each of ``ranks`` ranks, then for each rank of other axes, among which this
        rank has ``place``, the numbers of rows that it receives from each."""

        def numbers() -> Sequence[tuple[int, ...]]:
            sums = read()
            sent, *received = (tuple(sums[at : at + ranks]) for at in range(0, len(sums), ranks))
            return sent, received[place], tuple(map(sum, received))

        return Parts(numbers)

    @property
    def sent(self) -> tuple[int, ...]:
        return self._numbers()[0]

    @property
    def received(self) -> tuple[int, ...]:
        return self._numbers()[1]

    @property
    def totals(self) -> tuple[int, ...]:
        return self._numbers()[2]

    def back(self) -> Parts:
        """Return the numbers of rows of the exchange that returns all rows."""
        return Parts(lambda: (self.received, self.sent, ()))

    def copies(self) -> Parts:
        """Return the numbers of rows of the exchange in which each rank of the other axes sends all
        rows that it received to every rank."""
        return Parts(lambda: ((sum(self.received),) * len(self.totals), self.totals, ()))


def parts_of(
    read: Callable[[], list[list[int]]], num: int, ranks: int, place: int
) -> tuple[Parts, ...]:
    """Return the numbers of rows by rank for each of ``num`` exchanges. ``read`` waits for the
    device, and returns for each exchange the numbers that ``Parts.of`` reads."""
    once = cache(read)
    return tuple(Parts.of(lambda at=at: once()[at], ranks, place) for at in range(num))  # type: ignore[misc]


UNKNOWN = Parts(lambda: ((), (), ()))
"""Numbers of rows where none are sent."""


@dataclass(frozen=True, slots=True)
class Running:
    """Exchange of ``rows``; without ``work`` it is over. It holds both tensors until ``wait``, as
    the device reads and writes them beside its other work."""

    received: Tensor
    rows: Tensor | None = None
    work: Any = None

    def wait(self) -> Tensor:
        """Return the received rows, in rank order; the device's later work waits for them."""
        if self.work is not None:
            self.work.wait()
        return self.received


class Communicator(Protocol):
    """Interface of one rank's collectives along a mesh axis, that is, among the ranks that differ
    from it only in their coordinate on this axis. They do not record autograd; each returns a new
    tensor."""

    def size(self, axis: int) -> int:
        """Return the number of ranks along mesh axis ``axis``."""
        ...

    def coordinate(self, axis: int) -> int:
        """Return this rank's coordinate on mesh axis ``axis``."""
        ...

    def all_reduce(self, tensor: Tensor, axis: int, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum (or maximum) of the tensors of all ranks along mesh axis ``axis``."""
        ...

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        """Return the tensors of the ranks along mesh axis ``axis``, joined on ``dim`` by rank."""
        ...

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of the sum of the tensors of the ranks along
        mesh axis ``axis``."""
        ...

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        """Send shard i along ``split_dim`` to rank i of mesh axis ``axis``; return the received
        shards, concatenated along ``concat_dim``."""
        ...

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the tensor of the mirrored rank along mesh axis ``axis``: of coordinate n - 1 - i
        for coordinate i of n. Both tensors have the same shape and dtype."""
        ...

    def parts(
        self, counts: Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        """Tell each rank along mesh axes ``axes`` together, in row-major order, how many rows of
        each of M classes it will get in each of N exchanges: ``counts[i]`` (N, M) for rank i.
        Return the rows by rank for each exchange, and the counts that were told to each rank along
        mesh axes ``gathered`` (ranks of ``gathered`` × ranks, N, M). The host waits for the device
        when it first uses the rows by rank."""
        ...

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
        """Start to send the first ``parts.sent[0]`` rows to the first rank along mesh axes ``axes``
        together, the next to the second, and so on. Its ``wait`` returns the received rows in rank
        order; until then ``rows`` must not change."""
        ...


def place_along(communicator: Communicator, axes: tuple[int, ...]) -> int:
    """Return this rank's position among the ranks along mesh axes ``axes`` together, in row-major
    order; 0 without axes."""
    place = 0
    for axis in axes:
        place = place * communicator.size(axis) + communicator.coordinate(axis)
    return place


class Alone:
    """Communicator of a mesh of one rank, which never sends anything."""

    def size(self, axis: int) -> int:
        return 1

    def coordinate(self, axis: int) -> int:
        return 0

    def all_reduce(self, tensor: Tensor, axis: int, op: str = "sum") -> Tensor:
        return tensor.clone()

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        return tensor.clone()

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        return tensor.clone()

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        return tensor.clone()

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.clone()

    def parts(
        self, counts: Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        return (UNKNOWN,) * counts.shape[1], counts

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
        return Running(rows.clone())


Placed = tuple[tuple[int, tuple[int, ...]], ...]
"""Experts that not only their owner computes, each with the ranks that do."""


@dataclass(frozen=True, eq=False)
class Rank:
    """Rank that executes a program: its coordinates on a mesh, its communicator, and its state of
    random ops (``draws``). ``share``: its part of the rows if mesh axis 0 splits the batch
    unevenly; ``placements``: of hot experts, by layer."""

    mesh: Mesh
    coordinates: tuple[int, ...]
    communicator: Communicator
    draws: Draws = field(default_factory=Draws, repr=False)
    share: RowShare | None = None
    placements: Mapping[str, Placed] = field(default_factory=dict, repr=False)
    _bound: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict, repr=False)

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with this rank bound as its first argument, under the same name,
        which generated code shows."""
        if function not in self._bound:
            call = partial(function, self)
            call.__name__ = function.__name__  # type: ignore[attr-defined]
            call.__module__ = function.__module__
            self._bound[function] = call
        return self._bound[function]


Move = Callable[[Tensor, int, Placement, Communicator], Tensor]


def _same(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    return tensor.view_as(tensor)


def _scaled(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    return tensor / communicator.size(axis)


def _part(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    size = tensor.shape[split.dim] // communicator.size(axis)
    own = tensor.narrow(split.dim, communicator.coordinate(axis) * size, size)
    return own.clone(memory_format=torch.contiguous_format)  # a view would keep the whole in memory


def _padded(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    size, shape = tensor.shape[split.dim], list(tensor.shape)
    shape[split.dim] *= communicator.size(axis)
    whole = tensor.new_zeros(shape)
    whole.narrow(split.dim, communicator.coordinate(axis) * size, size).copy_(tensor)
    return whole


def _reduced(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    return communicator.all_reduce(tensor.contiguous(), axis)


def _gathered(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    return communicator.all_gather(tensor.contiguous(), axis, split.dim)


def _scattered(tensor: Tensor, axis: int, split: Placement, communicator: Communicator) -> Tensor:
    return communicator.reduce_scatter(tensor.contiguous(), axis, split.dim)


MOVES: dict[tuple[Kind, Kind], tuple[Move, Move]] = {
    ("S", "R"): (_gathered, _scattered),
    ("S", "I"): (_gathered, _part),
    ("S", "P"): (_padded, _part),
    ("R", "S"): (_part, _padded),
    ("R", "I"): (_same, _scaled),
    ("R", "P"): (_scaled, _scaled),
    ("I", "S"): (_part, _gathered),
    ("I", "R"): (_same, _reduced),
    ("I", "P"): (_scaled, _same),
    ("P", "I"): (_reduced, _same),
    ("P", "R"): (_reduced, _reduced),
    ("P", "S"): (_scattered, _gathered),
}
"""Functions that change the placement on one mesh axis: for each (old, new) placement, except
S(i)→S(j), one for the value and one for its gradient."""


def _value_of(tensor: Tensor, step: Step, communicator: Communicator) -> Tensor:
    source, target = step.source, step.target
    if source.is_shard and target.is_shard:
        return communicator.all_to_all(tensor.contiguous(), step.axis, target.dim, source.dim)
    move = MOVES[source.kind, target.kind][0]
    return move(tensor, step.axis, source if source.is_shard else target, communicator)


def _gradient_of(tensor: Tensor, step: Step, communicator: Communicator) -> Tensor:
    source, target = step.source, step.target
    if source.is_shard and target.is_shard:
        return communicator.all_to_all(tensor.contiguous(), step.axis, source.dim, target.dim)
    move = MOVES[source.kind, target.kind][1]
    return move(tensor, step.axis, source if source.is_shard else target, communicator)


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, step: Step, communicator: Communicator) -> Tensor:
        ctx.step, ctx.communicator = step, communicator
        return _value_of(tensor, step, communicator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gradient_of(gradients[0], ctx.step, ctx.communicator), None, None


def convert(tensor: Tensor, steps: tuple[Step, ...], communicator: Communicator) -> Tensor:
    """Convert a rank's local tensor to another layout by collectives, differentiably. ``steps``,
    from ``planner.graph.graph.layout.conversion_steps``, are one change of placement each. Integers
    and booleans, which have no gradient, are converted forward only; along a mesh axis of one rank
    nothing is done."""
    for step in steps:
        if communicator.size(step.axis) == 1:
            continue
        if tensor.is_floating_point() or tensor.is_complex():
            tensor = _Conversion.apply(tensor, step, communicator)  # type: ignore[no-untyped-call]
        else:
            tensor = _value_of(tensor, step, communicator)
    return tensor


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: int, communicator: Communicator) -> Tensor:
        ctx.axis, ctx.communicator = axis, communicator
        return communicator.swap(tensor.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicator.swap(gradients[0].contiguous(), ctx.axis), None, None


def swap(tensor: Tensor, axes: tuple[int, ...], communicator: Communicator) -> Tensor:
    """Return, differentiably, the tensor of the rank whose coordinate on each of ``axes`` is
    mirrored (n - 1 - i for i of n)."""
    for axis in axes:
        tensor = _Swap.apply(tensor, axis, communicator)  # type: ignore[no-untyped-call]
    return tensor


@dataclass(slots=True, eq=False)
class Exchange:
    """Exchange of rows among ranks along mesh axes ``axes`` together, or of their gradients in the
    backward. ``under_way`` is the one that was started and not yet waited for; ``token`` is an
    empty tensor that stands for the rows in autograd until they have arrived."""

    rank: Rank
    parts: Parts
    axes: tuple[int, ...]
    under_way: Running | None = None
    token: Tensor | None = None

    def start(self, rows: Tensor, parts: Parts) -> None:
        assert self.under_way is None
        self.under_way = self.rank.communicator.exchange(rows.contiguous(), parts, self.axes)

    def wait(self) -> Tensor:
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        return under_way.wait()


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows, exchange.parts)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.exchange.start(gradient, ctx.exchange.parts.back())
        return gradient.new_empty(0), None


def send(rank: Rank, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Exchange:
    """Start to send consecutive rows to the ranks along mesh axes ``axes`` together, as many to
    each as ``parts`` says; ``arrived`` returns the received rows. Without axes nothing is sent."""
    exchange = Exchange(rank, parts, axes)
    exchange.token = _Send.apply(rows, exchange) if axes else rows  # type: ignore[no-untyped-call]
    return exchange


def arrived(exchange: Exchange) -> Tensor:
    """Wait for an exchange and return the received rows, in rank order."""
    token, exchange.token = exchange.token, None
    assert token is not None
    rows: Tensor = _Arrived.apply(token, exchange) if exchange.axes else token  # type: ignore[no-untyped-call]
    return rows


def exchange(rank: Rank, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Tensor:
    """Send rows to the ranks along mesh axes ``axes`` together, and return the received rows."""
    return arrived(send(rank, rows, parts, axes))


def format_steps(steps: tuple[Step, ...], axes: tuple[str, ...]) -> str:
    """Return the steps of a layout conversion as text for generated code; ``axes`` are the names of
    mesh axes.

    >>> format_steps((Step(1, Placement("P"), Placement("S", 0)),), ("dp", "tp"))
    'tp: P -> S(0)'
    """
    return ", ".join(f"{axes[step.axis]}: {step.source} -> {step.target}" for step in steps)


@cache
def parse_steps(text: str, axes: tuple[str, ...]) -> tuple[Step, ...]:
    """Return the steps of a layout conversion that ``format_steps`` wrote as ``text``; ``axes`` are
    the names of mesh axes."""
    steps = []
    for part in text.split(", "):
        axis, change = part.split(": ")
        source, target = change.split(" -> ")
        steps.append(Step(axes.index(axis), parse_placement(source), parse_placement(target)))
    return tuple(steps)


def apply_steps(rank: Rank, tensor: Tensor, steps: str) -> Tensor:
    """Convert a rank's local tensor to another layout by steps given as text: ``apply_steps(rank,
    x, "tp: P -> I")``."""
    return convert(tensor, parse_steps(steps, rank.mesh.axes), rank.communicator)


def local_tensor(parameter: Tensor) -> Tensor:
    """Return a parameter's part on this rank: the local shard of a DTensor, or a plain tensor
    itself."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
