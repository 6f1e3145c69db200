"""Parameters that several stages hold: their gradients are summed over the stages.

In: every rank's boxes (gathered once, at the start). Out: after ``TiedParameters.sum``, each rank's
gradient of such a parameter is the sum over all stages, though the stages may lay it out
differently, on meshes of different shapes, under different ZeRO stages, or on the same ranks. Each
rank receives, from every other stage, just the boxes that make up its own; where several ranks hold
a box, they take turns in sending it. All stages add in the same order, so the sums are equal bit by
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...passes.ops.collectives import local_tensor
from ...planner.graph.layout import Region, intersect, region_shape, region_slices
from ..messages.shared_objects import gather_values
from .parameters import StageParameter

TAG = 2**30
"""Message tag that differs from the tags of values sent between stages."""

Holding = Mapping[int, Mapping[str, Region]]
"""Index ranges of the parts of parameters that one rank holds, by stage and parameter name."""

Held = tuple[int, str]
"""A stage's index, and the name of a parameter that the stage holds."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A part of a tied parameter's gradient that a rank of one stage sends to a rank of another;
    ``region`` are its index ranges."""

    name: str
    source: int
    target: int
    source_stage: int
    target_stage: int
    region: Region


def plan_pieces(holdings: Sequence[Holding]) -> tuple[Piece, ...]:
    """Return all messages needed to sum tied parameters' gradients over stages, in the same order
    on all ranks.

    ``holdings`` tells, by rank, which part of which parameter each stage of the rank holds.

    >>> pieces = plan_pieces([{0: {"w": ((0, 4),)}}, {1: {"w": ((0, 2),)}},
    ...                       {1: {"w": ((2, 4),)}}])
    >>> [(piece.source, piece.target, piece.region) for piece in pieces]
    [(0, 1, ((0, 2),)), (0, 2, ((2, 4),)), (1, 0, ((0, 2),)), (2, 0, ((2, 4),))]
    """
    holders: dict[str, dict[int, dict[Region, list[int]]]] = {}
    for rank, stages in enumerate(holdings):
        for stage, regions in stages.items():
            for name, region in regions.items():
                by_region = holders.setdefault(name, {}).setdefault(stage, {})
                by_region.setdefault(region, []).append(rank)
    pieces: list[Piece] = []
    for name, by_stage in holders.items():
        for stage, wanted in by_stage.items():
            for other, offered in by_stage.items():
                if stage != other:
                    pieces.extend(_pieces(name, wanted, offered, (other, stage)))
    return tuple(sorted(pieces))


def _pieces(
    name: str,
    wanted: Mapping[Region, list[int]],
    offered: Mapping[Region, list[int]],
    stages: tuple[int, int],
) -> list[Piece]:
    pieces: list[Piece] = []
    for region, targets in wanted.items():
        for held, sources in offered.items():
            common = intersect(region, held)
            if common is not None:
                pieces.extend(
                    Piece(name, _source(sources, position, target), target, *stages, common)
                    for position, target in enumerate(targets)
                )
    return pieces


def _source(sources: Sequence[int], position: int, target: int) -> int:
    """Return the rank that sends a part to rank ``target``: ``target`` itself if it holds the part,
    else one of ``sources``, which take turns by ``position``, the receiver's index."""
    return target if target in sources else sources[position % len(sources)]


@dataclass(eq=False)
class TiedParameters:
    """The parameters of this rank's stages that other stages hold too, and the sum of their
    gradients. ``regions`` are the index ranges that this rank holds, ``pieces`` the messages that
    it sends or receives. ``elsewhere`` are the (stage, name) of this rank's copies that are not the
    first stage's: only the first stage counts the parameter in norms and writes it to
    checkpoints."""

    rank: int
    regions: Holding
    pieces: tuple[Piece, ...]
    elsewhere: frozenset[Held]

    @property
    def held(self) -> tuple[Held, ...]:
        """The (stage, name) of each tied parameter in this rank's stages."""
        shared = {
            (piece.name, stage)
            for piece in self.pieces
            for stage in (piece.source_stage, piece.target_stage)
        }
        return tuple(
            (stage, name)
            for stage, regions in sorted(self.regions.items())
            for name in sorted(regions)
            if (name, stage) in shared
        )

    def sum(self, parameters: Mapping[int, Mapping[str, StageParameter]]) -> None:
        """Sum the tied parameters' gradients over stages. Collective over the ranks that hold them.
        ``parameters`` are this rank's, by stage and name."""
        for name in dict.fromkeys(name for _, name in sorted(self.held, key=lambda held: held[1])):
            own = {
                held: _gradient_or_zeros(parameters[held[0]][name])
                for held in self.held
                if held[1] == name
            }
            self._sum_one(own, parameters)

    def _sum_one(
        self,
        own: Mapping[Held, Tensor],
        parameters: Mapping[int, Mapping[str, StageParameter]],
    ) -> None:
        """Sum the gradient of one tied parameter over stages; doing one at a time saves memory."""
        terms: dict[Held, dict[int, Tensor]] = {
            (stage, name): {stage: gradient} for (stage, name), gradient in own.items()
        }
        for piece, values in self._exchange(own):
            held = (piece.target_stage, piece.name)
            term = terms[held].setdefault(piece.source_stage, torch.zeros_like(own[held]))
            term[region_slices(piece.region, self.regions[held[0]][piece.name])] = values
        for (stage, name), by_stage in terms.items():
            ordered = [by_stage[each] for each in sorted(by_stage)]
            total = ordered[0].clone()
            for term in ordered[1:]:
                total += term
            parameters[stage][name].gradient = total
            parameters[stage][name].publish()

    def _exchange(self, gradients: Mapping[Held, Tensor]) -> list[tuple[Piece, Tensor]]:
        """Send and receive the parts of one parameter's ``gradients``; return the messages received
        and their values."""
        operations: list[dist.P2POp] = []
        received: list[tuple[Piece, Tensor]] = []
        names = {name for _, name in gradients}
        for piece in (each for each in self.pieces if each.name in names):
            part = buffer = None
            if piece.source == self.rank:
                frame = self.regions[piece.source_stage][piece.name]
                whole = gradients[piece.source_stage, piece.name]
                part = whole[region_slices(piece.region, frame)].contiguous()
            if piece.target == self.rank:
                like = gradients[piece.target_stage, piece.name]
                buffer = like.new_empty(region_shape(piece.region))
                received.append((piece, buffer if part is None else part))
            if part is not None and buffer is None:
                operations.append(dist.P2POp(dist.isend, part, piece.target, tag=TAG))
            if buffer is not None and part is None:
                operations.append(dist.P2POp(dist.irecv, buffer, piece.source, tag=TAG))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return received


def _gradient_or_zeros(parameter: StageParameter) -> Tensor:
    gradient = parameter.gradient
    if gradient is None:
        return parameter.no_gradient()
    return gradient.to(local_tensor(parameter.held).device)


def find_tied(parameters: Mapping[int, Mapping[str, StageParameter]]) -> TiedParameters:
    """Find the parameters that several stages hold. Collective over all ranks, once. ``parameters``
    are this rank's, by stage and name; empty on a rank without a stage."""
    rank = dist.get_rank()
    regions = {
        stage: {name: parameter.region for name, parameter in held.items()}
        for stage, held in parameters.items()
    }
    holdings: list[Holding] = gather_values(regions)
    first: dict[str, int] = {}
    for stages in holdings:
        for stage, names in stages.items():
            for name in names:
                first[name] = min(first.get(name, stage), stage)
    return TiedParameters(
        rank=rank,
        regions=regions,
        pieces=tuple(p for p in plan_pieces(holdings) if rank in (p.source, p.target)),
        elsewhere=frozenset(
            (stage, name)
            for stage, names in regions.items()
            for name in names
            if first[name] != stage
        ),
    )
