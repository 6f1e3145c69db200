"""Messages between stages: the values that cross, and the gradients that come back.

In: the boundaries of a rank's stage, the devices of each stage, the schedule. Out: asynchronous
sends and receives of exactly the boxes each rank needs, by direction, stage and micro-batch. A
receive is posted first and waited for later; sent tensors are kept alive until they have gone, the
latest few of each lane (``ordered_channels``).

No message has a tag. The messages from one rank to another are a lane, which keeps their order
(NCCL does so in each communicator, gloo for each pair of ranks). Both sides know the order from the
sender's row of the schedule: a receiver posts its receives in this order, including those that
other stages or micro-batches need later. So messages cannot be confused under any schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...cost_model.simulator.actions import (
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    ActionKind,
    Schedule,
)
from ...planner.costs.conversions import transfers
from ...planner.errors import WorkerError
from ...planner.graph.layout import Layout, Mesh, local_region, local_shape, region_slices
from ...planner.schedules.held import sends_kept
from .communicator import as_bytes
from .ordered_channels import Lane, Lanes, PendingSends
from .pending_results import Progress, shared_sum

if TYPE_CHECKING:
    from ...passes.local.stage_cut import Boundary

Direction = Literal["forward", "backward"]


Sent = tuple[Direction, int, int]
"""Key of the messages that a stage sends together, after one forward or backward: direction, stage,
and micro-batch (or slice of one)."""


class StagePlace(Protocol):
    """A stage's location: its mesh, and its devices' global ranks in row-major order."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def devices(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Point-to-point message that is a part of a value sent between stages: the ``slices`` of this
    rank's part of the value, to or from rank ``peer``. Empty ``slices`` mean this rank's whole
    part."""

    peer: int
    slices: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Port:
    """A value sent between two stages (or its gradient) as this rank sends or receives it: the
    shape of this rank's part, and the messages that carry it. ``sender`` is the sending stage,
    ``taker`` the receiving stage."""

    key: str
    direction: Direction
    sender: int
    taker: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class _Arriving:
    """A value that is being received: ``whole`` is the memory for this rank's part of it. ``works``
    are the pending receives, each with the sending rank. ``copies`` are pairs of slices of
    ``whole`` and a buffer, which is copied there when it has arrived."""

    port: _Port
    whole: Tensor
    works: list[tuple[int, dist.Work]]
    copies: list[tuple[tuple[slice, ...], Tensor]]


class Exchange:
    """Point-to-point messages between the stages of this rank and stages on other ranks.
    Construction is collective over all ranks."""

    def __init__(
        self,
        boundaries: Sequence[Sequence[Boundary]],
        *,
        schedule: Schedule,
        stages: Sequence[StagePlace],
        rank: int,
        device: torch.device,
        lanes: Lanes | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Make the messages. ``boundaries`` has, for each slice of the sequences (one if they are
        whole), the values sent between stages, at least of this rank's stages. Slice ``j`` of
        micro-batch ``m`` has the number ``m * num_slices + j``, which ``microbatch`` means in the
        other methods. ``lanes`` are the connections to other ranks, by default new connections."""
        self._progress = progress
        self._rank = rank
        self._device = device
        self._schedule = schedule
        self._stages = stages
        self._peers = [tuple(r for r in stage.devices if r != rank) for stage in stages]
        self._ports = [_make_ports(each, stages, rank) for each in boundaries]
        self._posted: dict[Sent, dict[tuple[str, int], _Arriving]] = {}
        self._lanes = Lanes(device) if lanes is None else lanes
        self._outbox = PendingSends(
            sends_kept(schedule, is_gpu=bool(self._lanes.has_groups)), progress
        )
        self._messages: dict[tuple[int, Direction, int, int], list[tuple[_Port, Piece]]] = {}
        lanes_of_rank: set[Lane] = set()
        for part, (sends, receives) in enumerate(self._ports):
            lanes_of_rank.update((rank, piece.peer) for _, piece in _pieces(sends))
            for port, piece in _pieces(receives):
                lanes_of_rank.add((piece.peer, rank))
                key = (piece.peer, port.direction, port.sender, part)
                self._messages.setdefault(key, []).append((port, piece))
        for messages in self._messages.values():  # in the sender's order
            messages.sort(key=lambda message: (message[0].taker, message[0].key))
        self._order = {
            peer: [sent for sent in sends_of(schedule, stages, peer) if self._from(peer, sent)]
            for peer, target in sorted(lanes_of_rank)
            if target == rank
        }
        self._lanes.join(rank, lanes_of_rank)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step: all messages of the schedule are expected anew from the other ranks."""
        self._expected = {peer: deque(order) for peer, order in self._order.items()}
        self._taken: set[tuple[int, Sent]] = set()

    def peers(self, stage: int) -> tuple[int, ...]:
        """Return the other ranks that hold a part of ``stage``, one of this rank's stages."""
        return self._peers[stage]

    def post(self, direction: Direction, stage: int, microbatch: int) -> None:
        """Start to receive the values (in the backward: gradients) that ``stage`` needs from other
        stages in a micro-batch."""
        for peer, sent in self._wanted(direction, stage, microbatch):
            for each in self._up_to(peer, sent):
                self._post_all(peer, each)

    def receive(self, direction: Direction, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Wait for the receives that ``post`` has started; return this rank's part of each value,
        by key. Gradients of a value that went to several stages are summed."""
        received: dict[str, Tensor] = {}
        arriving = self._posted.pop((direction, stage, microbatch), {})
        for _, posted in sorted(arriving.items()):
            for peer, work in posted.works:
                if self._progress is not None:
                    unit = _unit(microbatch, len(self._ports))
                    what = _waiting(direction, stage, unit, sender=posted.port.sender)
                    self._progress(f"{what} of rank {peer}", (peer,))
                work.wait()
            for slices, piece in posted.copies:
                posted.whole[slices] = piece
            key = posted.port.key
            known = received.get(key)
            received[key] = posted.whole if known is None else known + posted.whole
        return received

    def send(
        self, direction: Direction, stage: int, microbatch: int, values: Mapping[str, Tensor]
    ) -> None:
        """Send this rank's parts of the values that ``stage`` has computed; wait only if too many
        sends are pending. ``values`` has them by key; a missing gradient is sent as zeros. The
        caller must not write to them afterwards."""
        messages: dict[int, list[Tensor]] = {}
        what = _send(direction, stage, microbatch, len(self._ports))
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
                messages.setdefault(piece.peer, []).append(as_bytes(packed))
        for peer, tensors in messages.items():
            works = self._lanes.send(tensors, self._rank, peer)
            self._outbox.add(peer, works, tuple(tensors), what)

    def finish(self) -> None:
        """Wait until all messages that were sent have left this rank."""
        self._outbox.finish()

    def share_loss(self, part: Tensor | None, stages: Sequence[int] = (-1,)) -> Tensor:
        """Return the sum of all ranks' parts of the loss on every rank, as a float64 scalar.
        ``part`` is this rank's part (None: it has none); ``stages`` are the stages that compute the
        loss. The sum runs in the background: only a read of the result waits for it."""
        own = torch.zeros((), dtype=torch.float64, device=self._device)
        if part is not None:
            own.copy_(part.detach())
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        makers = {rank for index in stages for rank in self._stages[index].devices}
        others = sorted(makers - {dist.get_rank()})
        return shared_sum(own, others=others, progress=self._progress)

    def sequences(self) -> tuple[dict[Lane, list[str]], dict[Lane, list[str]]]:
        """Return texts that describe the messages which this rank sends in a step, and the messages
        which it receives, both by (sender, receiver)."""
        sent: dict[Lane, list[str]] = {}
        taken: dict[Lane, list[str]] = {}
        for direction, stage, unit in sends_of(self._schedule, self._stages, self._rank):
            for port in self._ports[unit % len(self._ports)][0].get((direction, stage), ()):
                for piece in port.pieces:
                    words = _words(port, piece, unit, len(self._ports))
                    sent.setdefault((self._rank, piece.peer), []).append(words)
        self.begin_step()
        for direction, stage, unit in receives_of(self._schedule, self._stages, self._rank):
            for peer, each in self._wanted(direction, stage, unit):
                lane = taken.setdefault((peer, self._rank), [])
                lane += [
                    _words(port, piece, own[2], len(self._ports))
                    for own in self._up_to(peer, each)
                    for port, piece in self._from(peer, own)
                ]
                if (peer, each) not in self._taken:
                    lane.append(f"{_send(*each, len(self._ports))}, which is not sent,")
        self.begin_step()
        return sent, taken

    def _wanted(self, direction: Direction, stage: int, unit: int) -> Iterator[tuple[int, Sent]]:
        """Yield, for each message that ``stage`` needs in micro-batch ``unit``, the sending rank
        and the key of the sending rank's send: (direction, stage, micro-batch)."""
        receives = self._ports[unit % len(self._ports)][1]
        for port in receives.get((direction, stage), ()):
            for piece in port.pieces:
                yield piece.peer, (direction, port.sender, unit)

    def _up_to(self, peer: int, wanted: Sent) -> Iterator[Sent]:
        """Yield, in the order of the schedule, the sends of rank ``peer`` that are still to be
        received, up to and including ``wanted``; nothing if ``wanted`` was yielded before."""
        expected = self._expected[peer]
        while (peer, wanted) not in self._taken and expected:
            self._taken.add((peer, expected[0]))
            yield expected.popleft()

    def _post_all(self, peer: int, sent: Sent) -> None:
        """Start to receive all messages to this rank that rank ``peer`` sends after one forward or
        backward, ``sent``."""
        direction, _, microbatch = sent
        tensors: list[Tensor] = []
        filled: list[_Arriving] = []
        for port, piece in self._from(peer, sent):
            ports = self._posted.setdefault((direction, port.taker, microbatch), {})
            name = (port.key, port.sender)
            if name not in ports:
                whole = torch.empty(port.shape, dtype=port.dtype, device=self._device)
                ports[name] = _Arriving(port, whole, [], [])
            arriving = ports[name]
            place = arriving.whole[piece.slices] if piece.slices else arriving.whole
            if not place.is_contiguous():
                place = torch.empty_like(place, memory_format=torch.contiguous_format)
                arriving.copies.append((piece.slices, place))
            tensors.append(as_bytes(place))
            filled.append(arriving)
        works = self._lanes.receive(tensors, peer, self._rank)
        for index, arriving in enumerate(filled):
            arriving.works.append((peer, works[min(index, len(works) - 1)]))

    def _from(self, peer: int, sent: Sent) -> Sequence[tuple[_Port, Piece]]:
        """Return the messages to this rank that rank ``peer`` sends after one forward or backward,
        ``sent``, in the order in which it sends them."""
        direction, stage, microbatch = sent
        return self._messages.get((peer, direction, stage, microbatch % len(self._ports)), ())


def sends_of(schedule: Schedule, stages: Sequence[StagePlace], rank: int) -> list[Sent]:
    """Return the keys (direction, stage, micro-batch) of all sends of ``rank`` in a step, in the
    order of the schedule."""
    return _units(schedule, stages, rank, {SEND_FORWARD: "forward", SEND_BACKWARD: "backward"})


def receives_of(schedule: Schedule, stages: Sequence[StagePlace], rank: int) -> list[Sent]:
    """Return the keys (direction, receiving stage, micro-batch) of all receives of ``rank`` in a
    step, in the order of the schedule."""
    return _units(schedule, stages, rank, {RECV_FORWARD: "forward", RECV_BACKWARD: "backward"})


def _units(
    schedule: Schedule,
    stages: Sequence[StagePlace],
    rank: int,
    directions: Mapping[ActionKind, Direction],
) -> list[Sent]:
    rows = (
        schedule.table[row]
        for row, place in zip(schedule.stage_rank, stages, strict=True)
        if rank in place.devices
    )
    return [
        (directions[kind], stage, m * schedule.num_slices + part)
        for kind, stage, m, part in next(rows, ())
        if kind in directions
    ]


_PortTable = dict[tuple[Direction, int], tuple[_Port, ...]]


def _pieces(table: _PortTable) -> Iterator[tuple[_Port, Piece]]:
    return ((port, piece) for ports in table.values() for port in ports for piece in port.pieces)


def _make_ports(
    boundaries: Sequence[Boundary],
    stages: Sequence[StagePlace],
    rank: int,
) -> tuple[_PortTable, _PortTable]:
    """Return two dicts by direction and stage: the values that ``rank`` sends as a part of that
    stage, and the values that it receives."""
    sends: _PortTable = {}
    receives: _PortTable = {}
    between: dict[tuple[int, int], list[Boundary]] = {}
    for boundary in sorted(boundaries, key=lambda boundary: boundary.key):
        between.setdefault((boundary.source_stage, boundary.target_stage), []).append(boundary)
    for pair, crossing in sorted(between.items()):
        for boundary, direction in ((b, way) for b in crossing for way in directions_of(b)):
            source, target = pair if direction == "forward" else pair[::-1]
            for table, stage, is_sender in ((sends, source, True), (receives, target, False)):
                if rank in stages[stage].devices:
                    port = _port(boundary, direction, stages, rank=rank, is_sender=is_sender)
                    table[direction, stage] = (*table.get((direction, stage), ()), port)
    return sends, receives


def directions_of(boundary: Boundary) -> tuple[Direction, ...]:
    """Return the directions in which a value between stages travels: forward, and backward if it
    has a gradient."""
    return ("forward", "backward") if boundary.spec.requires_grad else ("forward",)


def _port(
    boundary: Boundary,
    direction: Direction,
    stages: Sequence[StagePlace],
    *,
    rank: int,
    is_sender: bool,
) -> _Port:
    """Describe one value between stages, in one direction, as ``rank`` sends or receives it."""
    ends: list[tuple[StagePlace, Layout]] = [
        (stages[boundary.source_stage], boundary.source_layout),
        (stages[boundary.target_stage], boundary.target_layout),
    ]
    sender, taker = boundary.source_stage, boundary.target_stage
    if direction == "backward":
        ends.reverse()
        sender, taker = taker, sender
    end = 0 if is_sender else 1
    places, layouts = [place for place, _ in ends], [layout for _, layout in ends]
    shape = boundary.spec.shape
    return _Port(
        boundary.key,
        direction,
        sender,
        taker,
        local_shape(shape, layouts[end], places[end].mesh.shape),
        getattr(torch, boundary.spec.dtype),
        find_pieces(shape, places, layouts, rank=rank, is_sender=is_sender),
    )


def find_pieces(
    shape: tuple[int, ...],
    places: Sequence[StagePlace],
    layouts: Sequence[Layout],
    *,
    rank: int,
    is_sender: bool,
) -> tuple[Piece, ...]:
    """Return the messages that ``rank`` sends (or receives) so that a value of ``shape`` gets from
    the stage ``places[0]`` with layout ``layouts[0]`` to the stage ``places[1]``."""
    (source, target), (source_layout, target_layout) = places, layouts
    messages = transfers(shape, source_layout, source.mesh, target_layout, target.mesh)
    place, layout = (source, source_layout) if is_sender else (target, target_layout)
    mine = place.devices.index(rank)
    frame = local_region(shape, layout, place.mesh, place.mesh.coordinates(mine))
    return tuple(
        Piece(
            target.devices[message.target] if is_sender else source.devices[message.source],
            () if message.box == frame else region_slices(message.box, frame),
        )
        for message in messages
        if mine == (message.source if is_sender else message.target)
    )


def _words(port: _Port, piece: Piece, unit: int, num_slices: int) -> str:
    """Describe a message of micro-batch (or slice) ``unit`` as text that is equal on its sender and
    its receiver."""
    send = _send(port.direction, port.sender, unit, num_slices)
    shape = tuple(
        len(range(*piece.slices[dim].indices(size))) if piece.slices else size
        for dim, size in enumerate(port.shape)
    )
    return f"{send} to stage {port.taker}: {port.key} {shape} {port.dtype}"


def _send(direction: Direction, stage: int, unit: int, num_slices: int) -> str:
    """Format a send as the schedule's actions are written: ``1SEND_F3`` is stage 1's send after the
    forward of micro-batch 3, B stands for backward."""
    return f"{stage}SEND_{'F' if direction == 'forward' else 'B'}{_unit(unit, num_slices)}"


def _unit(microbatch: int, num_slices: int) -> str:
    """Format the number of a micro-batch, or of a slice of it, as in the schedule's actions.

    >>> _unit(3, 1), _unit(4, 3), _unit(3, 3)
    ('3', '1.1', '1')
    """
    microbatch, part = divmod(microbatch, num_slices)
    return f"{microbatch}.{part}" if part else str(microbatch)


def _waiting(direction: Direction, stage: int, microbatch: str, *, sender: int) -> str:
    """Describe a wait: the receive that was posted, and the send that it waits for.

    >>> _waiting("forward", 2, "3", sender=1)
    '2RECV_F3: stage 2 waits in micro-batch 3 for 1SEND_F3'
    """
    letter = "F" if direction == "forward" else "B"
    return (
        f"{stage}RECV_{letter}{microbatch}: stage {stage} waits in micro-batch {microbatch}"
        f" for {sender}SEND_{letter}{microbatch}"
    )


def _mismatch(port: _Port, value: Tensor | None, stage: int) -> WorkerError:
    found = "nothing" if value is None else f"{tuple(value.shape)} {value.dtype}"
    return WorkerError(
        "AP810",
        f"stage {stage} computed {found} for {port.key!r}, which it sends",
        why=f"the plan's boundary is {port.shape} {port.dtype} on each rank",
        fix="report it as a bug; the stage's program and its plan disagree",
    )
