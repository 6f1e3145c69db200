"""Lanes: the messages from one rank to another, which keep their order.

In: pairs of ranks. Out: sends and receives without tags. On gloo a lane is a pair of ranks in the
default group. NCCL runs the messages of a communicator one after the other in both directions, so
there each lane has a communicator of two ranks of its own, made and tried before the first step (a
first message would else wait for its peer inside the send).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import new_group
from .shared import control_group, gather_values

TAG = 2**30 - 1
"""Apart from the messages of a script in the default group."""

Lane = tuple[int, int]
"""The rank that sends, and the one that receives."""


@dataclass(slots=True)
class Lanes:
    """The lanes that one process sends or receives on. All exchanges of a trainer share them.

    ``has_groups``: each has a communicator of its own; by default where the backend is not gloo.
    """

    device: torch.device
    has_groups: bool | None = None
    _groups: dict[Lane, dist.ProcessGroup] = field(default_factory=dict)
    _known: set[Lane] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.has_groups is None:
            self.has_groups = self.device.type != "cpu" or control_group() is not None

    def join(self, rank: int, lanes: Set[Lane]) -> None:
        """Makes the ``lanes`` of ``rank``, and those of others. Collective over all ranks."""
        if not self.has_groups:
            return
        for lane in sorted(set[Lane]().union(*gather_values(lanes - self._known)) - self._known):
            self._known.add(lane)
            group = new_group(sorted(lane))
            if rank in lane:
                self._groups[lane] = group
                token = torch.zeros(1, device=self.device)
                start = self.send if rank == lane[0] else self.receive
                for work in start([token], *lane):
                    work.wait()

    def send(self, tensors: Sequence[Tensor], source: int, target: int) -> Sequence[dist.Work]:
        """Starts to send ``tensors``; a work for each, or one for all."""
        return self._start(dist.isend, tensors, (source, target), target)

    def receive(self, tensors: Sequence[Tensor], source: int, target: int) -> Sequence[dist.Work]:
        """Starts to fill ``tensors`` with what is sent at once; works as of ``send``."""
        return self._start(dist.irecv, tensors, (source, target), source)

    def _start(
        self, operation: Callable[..., Any], tensors: Sequence[Tensor], lane: Lane, peer: int
    ) -> Sequence[dist.Work]:
        group = self._groups.get(lane)
        tag = TAG if group is None else 0
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, each, peer, group=group, tag=tag) for each in tensors]
        )
