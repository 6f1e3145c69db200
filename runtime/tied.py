"""Parameters that several stages hold: their gradients are summed over the stages.

In: every rank's boxes (gathered once, at the start). Out: after ``TiedParameters.sum``, each
rank's gradient of such a parameter is the sum over all stages, though the stages may lay it
out differently, on meshes of different shapes, under different ZeRO stages. Each rank asks,
of every other stage, for just the boxes that make up its own; where several ranks hold a
box, the asking is spread over them. All stages add in the same order, so the sums are equal
bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..planner.layout import Region
from .parameters import StageParameter
from .shards import intersection, within

TAG = 2**30
"""Apart from the tags of the values that cross stages."""

Holding = tuple[int | None, Mapping[str, Region]]
"""What a rank holds: its stage, and its box of each parameter."""


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A box of a parameter that goes from a rank of one stage to a rank of another."""

    name: str
    source: int
    target: int
    source_stage: int
    region: Region


def plan_pieces(holdings: list[Holding]) -> tuple[Piece, ...]:
    """Every transfer that the sum over stages needs, in one order for all ranks.

    ``holdings`` is indexed by rank.

    >>> pieces = plan_pieces([(0, {"w": ((0, 4),)}), (1, {"w": ((0, 2),)}),
    ...                       (1, {"w": ((2, 4),)})])
    >>> [(piece.source, piece.target, piece.region) for piece in pieces]
    [(0, 1, ((0, 2),)), (0, 2, ((2, 4),)), (1, 0, ((0, 2),)), (2, 0, ((2, 4),))]
    """
    holders: dict[str, dict[int, dict[Region, list[int]]]] = {}
    for rank, (stage, regions) in enumerate(holdings):
        for name, region in regions.items():
            if stage is not None:
                by_region = holders.setdefault(name, {}).setdefault(stage, {})
                by_region.setdefault(region, []).append(rank)
    pieces: list[Piece] = []
    for name, stages in holders.items():
        for stage, wanted in stages.items():
            for other, offered in stages.items():
                if stage != other:
                    pieces.extend(_pieces(name, wanted, offered, other))
    return tuple(sorted(pieces))


def _pieces(
    name: str,
    wanted: Mapping[Region, list[int]],
    offered: Mapping[Region, list[int]],
    source_stage: int,
) -> list[Piece]:
    pieces: list[Piece] = []
    for region, targets in wanted.items():
        for held, sources in offered.items():
            common = intersection(region, held)
            if common is not None:
                pieces.extend(
                    Piece(name, sources[position % len(sources)], target, source_stage, common)
                    for position, target in enumerate(targets)
                )
    return pieces


@dataclass(eq=False)
class TiedParameters:
    """The parameters of this rank that other stages hold too.

    ``elsewhere`` are the names that an earlier stage holds: that stage counts them in norms
    and writes them to checkpoints.
    """

    rank: int
    stage: int | None
    regions: Mapping[str, Region]
    pieces: tuple[Piece, ...]
    elsewhere: frozenset[str]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(
            sorted({piece.name for piece in self.pieces if piece.name in self.regions})
        )

    def sum(self, parameters: Mapping[str, StageParameter]) -> None:
        """Sum the gradients over the stages. Collective over the ranks that hold them."""
        gradients = {name: _gradient_or_zeros(parameters[name]) for name in self.names}
        received = self._exchange(gradients)
        assert self.stage is not None or not self.names
        for name, own in gradients.items():
            terms: dict[int, Tensor] = {}
            for piece, values in received:
                if piece.name == name:
                    term = terms.setdefault(piece.source_stage, torch.zeros_like(own))
                    term[within(piece.region, self.regions[name])] = values
            if self.stage is not None:
                terms[self.stage] = own
            ordered = [terms[stage] for stage in sorted(terms)]
            total = ordered[0].clone()
            for term in ordered[1:]:
                total += term
            parameters[name].gradient = total

    def _exchange(self, gradients: Mapping[str, Tensor]) -> list[tuple[Piece, Tensor]]:
        """What the other stages' ranks hold of this rank's boxes."""
        operations: list[dist.P2POp] = []
        received: list[tuple[Piece, Tensor]] = []
        for piece in self.pieces:
            shape = [stop - start for start, stop in piece.region]
            if piece.source == self.rank:
                part = gradients[piece.name][within(piece.region, self.regions[piece.name])]
                operations.append(dist.P2POp(dist.isend, part.contiguous(), piece.target, tag=TAG))
            if piece.target == self.rank:
                buffer = gradients[piece.name].new_empty(shape)
                operations.append(dist.P2POp(dist.irecv, buffer, piece.source, tag=TAG))
                received.append((piece, buffer))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return received


def _gradient_or_zeros(parameter: StageParameter) -> Tensor:
    gradient = parameter.gradient
    return torch.zeros_like(parameter.local) if gradient is None else gradient


def find_tied(stage: int | None, parameters: Mapping[str, StageParameter]) -> TiedParameters:
    """Find the parameters that several stages hold. Collective over all ranks, once.

    A rank that works for no stage passes None and no parameters.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    regions = {name: parameter.region for name, parameter in parameters.items()}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (stage, regions))
    holdings: list[Holding] = gathered
    first: dict[str, int] = {}
    for held_by, names in holdings:
        if held_by is not None:
            for name in names:
                first[name] = min(first.get(name, held_by), held_by)
    return TiedParameters(
        rank=rank,
        stage=stage,
        regions=regions,
        pieces=tuple(p for p in plan_pieces(holdings) if rank in (p.source, p.target)),
        elsewhere=frozenset(name for name in regions if first[name] != stage),
    )
