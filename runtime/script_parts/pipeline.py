"""Pipelines in a script: the messages between stages, and a row of the schedule.

Every rank posts its receives in the order in which the sender sends, so messages need no tags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .stages import Stage
from .training import Trainer
from .weights import GRADIENT, Split, own

CROSSINGS: list[Crossing] = []
SCHEDULE: list[str] = []


Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Crossing:
    """Value that goes from one stage to another, and its gradient that comes back.

    ``shape`` is of one micro-batch on all ranks of a stage together.
    """

    key: str
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source_split: Split
    target_split: Split
    has_gradient: bool = True


Box = tuple[tuple[int, int], ...]


def boxes(stage: Stage, shape: tuple[int, ...], split: Split) -> dict[int, Box]:
    """Return for each rank of a stage the start and stop of its part in each dimension."""
    found = {}
    for rank, place in zip(stage.devices, product(*map(range, stage.mesh.values())), strict=True):
        box = [(0, size) for size in shape]
        for axis, dim in split.items():
            start, stop = box[dim]
            size = (stop - start) // stage.mesh[axis]
            start += place[list(stage.mesh).index(axis)] * size
            box[dim] = start, start + size
        found[rank] = tuple(box)
    return found


def overlap(*boxes: Box) -> list[tuple[slice, ...]]:
    """Intersect boxes; return the slices that cut the intersection from each, [] if empty."""
    shared = [(max(s for s, _ in dim), min(s for _, s in dim)) for dim in zip(*boxes, strict=True)]
    if any(start >= stop for start, stop in shared):
        return []
    return [
        tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(shared, box, strict=True))
        for box in boxes
    ]


@dataclass(frozen=True)
class Piece:
    """Message of a rank: ``cut`` of the source's tensor goes to ``place`` in the target's."""

    source: int
    target: int
    cut: tuple[slice, ...]
    place: tuple[slice, ...]


@dataclass(frozen=True)
class Transfer:
    """Value (or its gradient) on its way from stage ``sender`` to stage ``receiver``.

    ``shape`` is of the part that each rank of the receiver holds; ``pieces`` are all its messages.
    """

    key: str
    direction: Direction
    sender: int
    receiver: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def transfer_of(crossing: Crossing, direction: Direction, stages: list[Stage]) -> Transfer:
    """Return the messages that carry a value, or its gradient, between two stages."""
    ends = [(crossing.source, crossing.source_split), (crossing.target, crossing.target_split)]
    (sender, made), (receiver, taken) = ends if direction == "forward" else ends[::-1]
    offered = boxes(stages[sender], crossing.shape, made)
    wanted = boxes(stages[receiver], crossing.shape, taken)
    holders: dict[Box, list[int]] = {}
    for rank, box in offered.items():
        holders.setdefault(box, []).append(rank)
    pieces = []
    for number, (target, box) in enumerate(wanted.items()):
        for frame, ranks in holders.items():
            source = target if target in ranks else ranks[number % len(ranks)]
            if shared := overlap(frame, box):
                pieces.append(Piece(source, target, *shared))
    shape = tuple(stop - start for start, stop in next(iter(wanted.values())))
    return Transfer(crossing.key, direction, sender, receiver, shape, crossing.dtype, tuple(pieces))


Arriving = tuple[Tensor, list[tuple[Any, tuple[slice, ...], Tensor]]]


class Messages:
    """Messages of this rank's stages to and from other stages.

    The messages from one rank to another keep their order: every rank posts its receives in the
    order in which the sender sends.
    """

    def __init__(
        self, crossings: list[Crossing], stages: list[Stage], device: torch.device
    ) -> None:
        """Find the messages that carry ``crossings``; make groups. Collective over all ranks."""
        self.rank, self.device = dist.get_rank(), device
        self.mine = {n for n, stage in enumerate(stages) if self.rank in stage.devices}
        forward = [transfer_of(each, "forward", stages) for each in crossings]
        backward = [transfer_of(c, "backward", stages) for c in crossings if c.has_gradient]
        self.transfers = sorted([*forward, *backward], key=lambda each: (each.receiver, each.key))
        pieces = [piece for transfer in self.transfers for piece in transfer.pieces]
        pairs = {(each.source, each.target) for each in pieces if each.source != each.target}
        # With NCCL a send would wait behind a receive of the same group.
        alone = dist.get_backend() != "nccl"
        self.lanes = {
            pair: None if alone else dist.new_group(sorted(pair)) for pair in sorted(pairs)
        }
        self.with_gradient = {(each.key, each.target) for each in crossings if each.has_gradient}
        self.sent: list[tuple[Any, Tensor]] = []
        self.arriving: dict[tuple[Direction, int, int], dict[tuple[str, int], Arriving]] = {}

    def send(
        self,
        direction: Direction,
        stage: int,
        microbatch: int,
        values: dict[str, Tensor],
        *,
        to_own: bool,
    ) -> None:
        """Send results of ``stage`` to this rank's stages (``to_own``) or to other ranks'."""
        for transfer in self.transfers:
            is_own = transfer.receiver in self.mine
            if (transfer.direction, transfer.sender, is_own) != (direction, stage, to_own):
                continue
            value = values[transfer.key].detach()
            for piece in transfer.pieces:
                if piece.source == self.rank != piece.target:
                    packed = value[piece.cut].contiguous()
                    lane = self.lanes[piece.source, piece.target]
                    self.sent.append((dist.isend(packed, piece.target, group=lane), packed))
            if to_own:
                self._take(transfer, microbatch, value)

    def post(self, direction: Direction, stage: int, microbatch: int) -> None:
        """Begin to receive inputs of ``stage`` from the stages of other ranks."""
        for transfer in self.transfers:
            is_wanted = (transfer.direction, transfer.receiver) == (direction, stage)
            if is_wanted and transfer.sender not in self.mine:
                self._take(transfer, microbatch, None)

    def _take(self, transfer: Transfer, microbatch: int, given: Tensor | None) -> None:
        """Begin to receive a value; ``given`` is the part that this rank itself made, if any."""
        place = transfer.direction, transfer.receiver, microbatch
        whole = torch.empty(transfer.shape, dtype=transfer.dtype, device=self.device)
        parts: list[tuple[Any, tuple[slice, ...], Tensor]] = []
        for piece in transfer.pieces:
            if piece.target != self.rank:
                continue
            if piece.source == self.rank:
                assert given is not None
                parts.append((None, piece.place, given[piece.cut]))
                continue
            part = torch.empty_like(whole[piece.place], memory_format=torch.contiguous_format)
            lane = self.lanes[piece.source, piece.target]
            parts.append((dist.irecv(part, piece.source, group=lane), piece.place, part))
        self.arriving.setdefault(place, {})[transfer.key, transfer.sender] = whole, parts

    def receive(self, direction: Direction, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Wait for a stage's inputs, by key; gradients from several stages are summed."""
        received: dict[str, Tensor] = {}
        arriving = self.arriving.pop((direction, stage, microbatch), {})
        for (key, _), (whole, parts) in sorted(arriving.items(), key=lambda item: item[0]):
            for work, place, part in parts:
                if work is not None:
                    work.wait()
                whole[place] = part
            received[key] = received[key] + whole if key in received else whole
        return received

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


class PipelineTrainer(Trainer):
    """Trainer of a rank in a pipeline; its stages exchange values with stages of other ranks."""

    def __init__(self, stages: list[Stage], *given: Any) -> None:
        super().__init__(stages, *given)
        self.messages = Messages(CROSSINGS, stages, self.device)
        self.holders: dict[str, list[int]] = {}
        for number, stage in enumerate(stages):
            for name in stage.parameters:
                self.holders.setdefault(name, []).append(number)
        self.groups = {
            name: dist.new_group(sorted({r for number in held for r in stages[number].devices}))
            for name, held in self.holders.items()
            if len(held) > 1
        }
        own_row = re.compile("|".join(rf"\b{number}F" for number in self.stages) or "$.")
        self.row = next(filter(own_row.search, SCHEDULE), "")

    def run(self, share: float, *, is_last: bool) -> None:
        """Run this rank's row of the schedule for a batch with weight ``share`` in the update."""
        made: dict[tuple[Direction, int, int], dict[str, Tensor]] = {}
        for action in self.row.split():
            found = re.fullmatch(r"(\d+)([A-Z]+(?:_[FB])?)(\d*)", action)
            assert found is not None
            stage, kind, microbatch = int(found[1]), found[2], int(found[3] or 0)
            direction: Direction = "forward" if kind[-1] == "F" else "backward"
            if kind in ("F", "B", "I"):
                made[direction, stage, microbatch] = self.compute(
                    direction, stage, microbatch, share
                )
            elif kind.startswith("RECV"):
                self.messages.post(direction, stage, microbatch)
            elif kind.startswith("SEND"):
                values = made.pop((direction, stage, microbatch))
                self.messages.send(direction, stage, microbatch, values, to_own=False)
            elif kind == "REDUCE" and is_last:
                self.stages[stage].complete()
        self.messages.finish()
        if is_last:
            self.sum_tied()

    def compute(
        self, direction: Direction, stage: int, microbatch: int, share: float
    ) -> dict[str, Tensor]:
        """Run a forward or backward; return its results, kept too for stages of the same rank."""
        received = self.messages.receive(direction, stage, microbatch)
        if direction == "forward":
            for key, value in received.items():
                value.requires_grad_((key, stage) in self.messages.with_gradient)
            made = self.stages[stage].forward(microbatch, received)
        else:
            made = self.stages[stage].backward(microbatch, received, share * self.scale)
        self.messages.send(direction, stage, microbatch, made, to_own=True)
        return made

    def is_counted(self, stage: int, name: str) -> bool:
        """Return whether the stage is the first holder of a weight, and counts its gradient."""
        return self.holders[name][0] == stage

    def sum_tied(self) -> None:
        """Sum the gradients of weights that several stages hold."""
        for name, group in self.groups.items():
            stages = [self.stages[n] for n in self.holders[name] if n in self.stages]
            held = [stage.weights[name] for stage in stages]
            if not held or not held[0].master.requires_grad:
                continue
            total = torch.zeros(held[0].shape, dtype=GRADIENT, device=self.device)
            for weight in held:
                if weight.gradient is not None:
                    whole = weight.whole(weight.gradient)
                    total += 0 if any(weight.mesh.place.values()) else whole
            dist.all_reduce(total, group=group)
            for weight in held:
                weight.gradient = weight.share(own(total, weight.split, weight.mesh)).clone()
