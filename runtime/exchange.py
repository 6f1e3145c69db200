"""Messages between stages: the values that cross, and the gradients that come back.

In: the boundaries of a rank's stage and where each stage's devices are. Out: asynchronous
sends and receives of exactly the boxes each rank needs, by direction, stage and
micro-batch. A receive is posted first and waited for later; a send never waits, and what it
sends is kept alive until it has gone.

On gloo every message has its own tag in the default group, so messages cannot be taken for
one another whatever the order. NCCL knows no tags and runs the messages of a group in
order, so there each ordered pair of ranks has a group of its own, joined in one global
order before the first step (a first message would else wait for its peer inside the send).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..planner.errors import WorkerError
from ..planner.layout import Layout, Mesh, local_region, local_shape
from ..planner.pricing.transfer import relative, transfers
from .arriving import shared_sum
from .outbox import Outbox

if TYPE_CHECKING:
    from ..passes.stage_cut import Boundary

Direction = Literal["forward", "backward"]


_Message = tuple[int, Tensor, int]
"""The other rank, what is sent or filled, the tag."""

Progress = Callable[[str, tuple[int, ...]], None]
"""Is told what the rank waits for, and from which ranks, before each wait."""


class StagePlace(Protocol):
    """Where a stage is: its mesh and the global ranks of its devices, in row-major order."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """One message: ``slices`` of this rank's part of a boundary's value, to or from ``peer``.

    No slices are the whole part.
    """

    peer: int
    slices: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Port:
    """One boundary as this rank sees it in one direction: its part, and the messages of it.

    ``sender`` is the stage that it comes from.
    ``tag + microbatch * tag_stride`` is the same on both sides and no other message's between
    the two ranks.
    """

    key: str
    sender: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tag: int
    tag_stride: int
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Started:
    """A message under way, or several to or from one rank: its work and its memory."""

    peer: int
    work: dist.Work
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Posted:
    """A receive under way: the whole part, and the pieces to copy into it when they arrive."""

    port: _Port
    whole: Tensor
    started: tuple[_Started, ...]
    copies: tuple[tuple[tuple[slice, ...], Tensor], ...]


class Exchange:
    """The messages of one rank. Every rank of the world makes its own, at the same time."""

    def __init__(
        self,
        boundaries: Sequence[Sequence[Boundary]],
        *,
        stages: Sequence[StagePlace],
        rank: int,
        device: torch.device,
        pair_groups: bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``boundaries`` are at least those of the rank's own stage, for each slice of the
        sequences; of one where these are whole. A message is of a slice: slice ``j`` of
        micro-batch ``m`` counts as micro-batch ``m * num_slices + j``.

        ``pair_groups``: one group per ordered pair of ranks; by default on devices other than
        the CPU.
        """
        self._progress = progress
        self._rank = rank
        self._device = device
        self._stages = stages
        self._ports = [_make_ports(each, stages, rank) for each in boundaries]
        self._posted: dict[tuple[Direction, int, int], list[_Posted]] = {}
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._outbox = Outbox(polls=device.type != "cpu")
        if device.type != "cpu" if pair_groups is None else pair_groups:
            self._make_groups()

    def post(self, direction: Direction, stage: int, microbatch: int) -> None:
        """Post the receives of what ``stage`` needs from other stages."""
        key = (direction, stage, microbatch)
        receives = self._ports[microbatch % len(self._ports)][1]
        ports = receives.get((direction, stage), ())
        self._posted[key] = [self._post_one(port, microbatch) for port in ports]

    def receive(self, direction: Direction, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Wait for what was posted; this rank's part of every value, by key.

        Gradients of a value that went to several stages are summed.
        """
        received: dict[str, Tensor] = {}
        for posted in self._posted.pop((direction, stage, microbatch), ()):
            for each in posted.started:
                if self._progress is not None:
                    unit = _unit(microbatch, len(self._ports))
                    what = _waiting(direction, stage, unit, sender=posted.port.sender)
                    self._progress(f"{what} of rank {each.peer}", (each.peer,))
                each.work.wait()
            for slices, piece in posted.copies:
                posted.whole[slices] = piece
            key = posted.port.key
            known = received.get(key)
            received[key] = posted.whole if known is None else known + posted.whole
        return received

    def send(
        self, direction: Direction, stage: int, microbatch: int, values: Mapping[str, Tensor]
    ) -> None:
        """Send this rank's share of what ``stage`` has computed; returns at once.

        ``values`` holds the rank's part of every value by key; a gradient that is missing is
        zero. They must not be written to afterwards.
        """
        messages: list[_Message] = []
        unit = _unit(microbatch, len(self._ports))
        what = f"{stage}SEND_{'F' if direction == 'forward' else 'B'}{unit}"
        sends = self._ports[microbatch % len(self._ports)][0]
        for port in sends.get((direction, stage), ()):
            value = values.get(port.key)
            if value is None and direction == "backward":
                value = torch.zeros(port.shape, dtype=port.dtype, device=self._device)
            if value is None or tuple(value.shape) != port.shape or value.dtype != port.dtype:
                raise _mismatch(port, value, stage)
            value = value.detach()
            for piece in port.pieces:
                packed = (value[piece.slices] if piece.slices else value).contiguous()
                messages.append(
                    (piece.peer, _wire(packed), port.tag + microbatch * port.tag_stride)
                )
        for each in self._start(messages, sends=True):
            self._outbox.add(each.peer, each.work, each.tensors, what)

    def finish(self) -> None:
        """Wait until everything sent has gone."""
        first, peers = self._outbox.waiting()
        if self._progress is not None and peers:
            names = ", ".join(map(str, peers))
            self._progress(f"waiting for rank {names} to receive, first {first}", peers)
        self._outbox.finish()

    def share_loss(self, part: Tensor | None, stages: Sequence[int] = (-1,)) -> Tensor:
        """The sum of the parts of the loss on every rank of the world, as a float64 scalar.

        ``part`` is this rank's, None where it has none; ``stages`` are those that make the loss.
        It travels while the ranks go on: who reads it waits for it.
        """
        own = torch.zeros((), dtype=torch.float64, device=self._device)
        if part is not None:
            own.copy_(part.detach())
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        makers = {rank for index in stages for rank in self._stages[index].devices}
        others = sorted(makers - {dist.get_rank()})
        return shared_sum(own, others=others, progress=self._progress)

    def _post_one(self, port: _Port, microbatch: int) -> _Posted:
        whole = torch.empty(port.shape, dtype=port.dtype, device=self._device)
        copies: list[tuple[tuple[slice, ...], Tensor]] = []
        messages: list[_Message] = []
        for piece in port.pieces:
            place = whole[piece.slices] if piece.slices else whole
            if not place.is_contiguous():
                place = torch.empty_like(place, memory_format=torch.contiguous_format)
                copies.append((piece.slices, place))
            messages.append((piece.peer, _wire(place), port.tag + microbatch * port.tag_stride))
        return _Posted(port, whole, self._start(messages, sends=False), tuple(copies))

    def _start(self, messages: Sequence[_Message], *, sends: bool) -> tuple[_Started, ...]:
        """Starts the messages: by tag in the default group, or batched in the pairs' groups."""
        operation = dist.isend if sends else dist.irecv
        started: list[_Started] = []
        if not self._groups:
            for peer, tensor, tag in messages:
                work = operation(tensor, peer, tag=tag)
                assert work is not None
                started.append(_Started(peer, work, (tensor,)))
            return tuple(started)
        for peer in dict.fromkeys(peer for peer, _, _ in messages):
            pair = (self._rank, peer) if sends else (peer, self._rank)
            tensors = tuple(tensor for to, tensor, _ in messages if to == peer)
            batch = [
                dist.P2POp(operation, tensor, peer, group=self._groups[pair]) for tensor in tensors
            ]
            started += [_Started(peer, work, tensors) for work in dist.batch_isend_irecv(batch)]
        return tuple(started)

    def _make_groups(self) -> None:
        """Makes the groups of all ordered pairs and tries each, in one order for all ranks."""
        mine = [
            (self._rank, piece.peer)
            for ports in self._ports[0][0].values() for port in ports for piece in port.pieces
        ]  # fmt: skip
        gathered: list[list[tuple[int, int]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        pairs = sorted({pair for found in gathered if found is not None for pair in found})
        groups = {pair: dist.new_group(sorted(pair)) for pair in pairs}
        for pair in pairs:
            if self._rank in pair:
                self._groups[pair] = groups[pair]
                token = torch.zeros(1, device=self._device)
                sends = pair[0] == self._rank
                for each in self._start([(pair[1] if sends else pair[0], token, 0)], sends=sends):
                    each.work.wait()


_PortTable = dict[tuple[Direction, int], tuple[_Port, ...]]


def _make_ports(
    boundaries: Sequence[Boundary],
    stages: Sequence[StagePlace],
    rank: int,
) -> tuple[_PortTable, _PortTable]:
    """What the rank sends and what it receives, by direction and stage."""
    sends: _PortTable = {}
    receives: _PortTable = {}
    between: dict[tuple[int, int], list[Boundary]] = {}
    for boundary in sorted(boundaries, key=lambda boundary: boundary.key):
        between.setdefault((boundary.source_stage, boundary.target_stage), []).append(boundary)
    for pair, crossing in sorted(between.items()):
        for index, boundary in enumerate(crossing):
            for direction in _directions(boundary):
                tag = ((index * len(stages) + pair[0]) * len(stages) + pair[1]) * 2
                numbers = (
                    tag + (direction == "backward"),
                    2 * len(crossing) * len(stages) ** 2,
                )
                source, target = pair if direction == "forward" else pair[::-1]
                for table, stage, is_sender in ((sends, source, True), (receives, target, False)):
                    if rank in stages[stage].devices:
                        port = _port(
                            boundary, direction, stages, rank=rank, is_sender=is_sender,
                            numbers=numbers,
                        )  # fmt: skip
                        table[direction, stage] = (*table.get((direction, stage), ()), port)
    return sends, receives


def _directions(boundary: Boundary) -> tuple[Direction, ...]:
    return ("forward", "backward") if boundary.spec.requires_grad else ("forward",)


def _port(
    boundary: Boundary,
    direction: Direction,
    stages: Sequence[StagePlace],
    *,
    rank: int,
    is_sender: bool,
    numbers: tuple[int, int],
) -> _Port:
    """The port of ``rank`` for one boundary in one direction."""
    ends: list[tuple[StagePlace, Layout]] = [
        (stages[boundary.source_stage], boundary.source_layout),
        (stages[boundary.target_stage], boundary.target_layout),
    ]
    if direction == "backward":
        ends.reverse()
    (source, source_layout), (target, target_layout) = ends
    shape = boundary.spec.shape
    messages = transfers(shape, source_layout, source.mesh, target_layout, target.mesh)
    place, layout = ends[0] if is_sender else ends[1]
    mine = place.devices.index(rank)
    frame = local_region(shape, layout, place.mesh, place.mesh.coordinates(mine))
    pieces = tuple(
        _Piece(
            target.devices[message.target] if is_sender else source.devices[message.source],
            () if message.box == frame else relative(message.box, frame),
        )
        for message in messages
        if mine == (message.source if is_sender else message.target)
    )
    return _Port(
        boundary.key,
        boundary.source_stage if direction == "forward" else boundary.target_stage,
        local_shape(shape, layout, place.mesh.shape),
        getattr(torch, boundary.spec.dtype),
        numbers[0],
        numbers[1],
        pieces,
    )


def _unit(microbatch: int, num_slices: int) -> str:
    """A micro-batch, or its slice, as actions print it.

    >>> _unit(3, 1), _unit(4, 3), _unit(3, 3)
    ('3', '1.1', '1')
    """
    microbatch, part = divmod(microbatch, num_slices)
    return f"{microbatch}.{part}" if part else str(microbatch)


def _waiting(direction: Direction, stage: int, microbatch: str, *, sender: int) -> str:
    """A wait in words: the receive that was posted, and the send that it waits for.

    >>> _waiting("forward", 2, "3", sender=1)
    '2RECV_F3: stage 2 waits in micro-batch 3 for 1SEND_F3'
    """
    letter = "F" if direction == "forward" else "B"
    return (
        f"{stage}RECV_{letter}{microbatch}: stage {stage} waits in micro-batch {microbatch}"
        f" for {sender}SEND_{letter}{microbatch}"
    )


def _wire(tensor: Tensor) -> Tensor:
    """The same memory as bytes if it is boolean, which backends do not know."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _mismatch(port: _Port, value: Tensor | None, stage: int) -> WorkerError:
    found = "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}"
    return WorkerError(
        "AP810",
        f"stage {stage} made {found} for {port.key!r}, which it sends",
        why=f"the plan's boundary is {port.shape} {port.dtype} on each rank",
        fix="report it as a bug; the stage's program and its plan disagree",
    )
