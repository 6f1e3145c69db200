"""Do ranks that must have the same rows have them? Their batches' hashes are compared.

In: what a rank was given for a step. Out: an error on every rank that names the ranks and the
input that differ. The first batch is compared before it is trained on; those of steps 2, 4, 8, …
while the step runs, and what was found is read when the next one begins, so no device waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...passes.local.input_rows import HeldRows
from ...planner.errors import UsageError
from ..messages.pending_results import Arrival, Progress, arrival_of
from ..messages.shared_objects import group_for

NOTHING, GLOBAL, SHARE, ALL_ROWS = range(4)
"""How a rank was given a batch: not at all, whole, its rows, or its rows, which are all."""

_CHUNK = 1 << 20
_INDEX, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def content_hash(tensor: Tensor) -> Tensor:
    """64 bits of a tensor's content, as a scalar on its device; nothing is waited for.

    A sum over the elements' bits, each mixed with its position (splitmix64's constants).

    >>> a, b = torch.tensor([1, 2]), torch.tensor([2, 1])
    >>> bool(content_hash(a) == content_hash(a.clone())), bool(content_hash(a) == content_hash(b))
    (True, False)
    """
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(-1)
    flat = flat.view(_BITS[flat.element_size()])
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.int64)
        bits = bits + torch.arange(start, start + bits.numel(), device=bits.device) * _INDEX
        bits = (bits ^ bits >> 30) * _FIRST
        bits = (bits ^ bits >> 27) * _SECOND
        total = total + (bits ^ bits >> 31).sum()
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Given:
    """What a rank was given for one step: how, of how many rows in all, and the inputs."""

    how: int
    global_rows: int
    held: HeldRows | None
    inputs: Mapping[str, Tensor]


class BatchCheck:
    """Compares the batches of all ranks, each with those that must be equal."""

    def __init__(
        self, names: Sequence[str], device: torch.device, progress: Progress | None = None
    ) -> None:
        """``names`` are the model's inputs; ``device`` is that of this rank's collectives;
        ``progress`` is told of waits, for a watchdog."""
        self._progress = progress
        self._names = tuple(sorted(names))
        self._device = device
        self._num_steps = 0
        self._running: tuple[Arrival, int] | None = None

    def see(self, given: Given) -> None:
        """Call it before each step, on every rank.

        Raises UsageError AP830 where the batches of a step differ, and AP831 where some ranks
        are given the global batch and others their rows of it.
        """
        self.read()
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) or dist.get_world_size() == 1:
            return
        own = self._message(given)
        every = own.new_empty((dist.get_world_size(), own.numel()))
        work = dist.all_gather(list(every.unbind(0)), own, group=group_for(own), async_op=True)
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        words = "waiting until all ranks' batches are compared"
        arrival = arrival_of(every, work, words, others=others, progress=self._progress)
        self._running = (arrival, self._num_steps)
        if self._num_steps == 1:
            self.read()

    def forget(self) -> None:
        """Take the last step for one that was not made."""
        self.read()
        self._num_steps -= 1

    def read(self) -> None:
        """Waits for the comparison that is under way, if any, and says what it found."""
        if self._running is None:
            return
        (arrival, step), self._running = self._running, None
        self._compare(arrival.host_value().tolist(), step)

    def _message(self, given: Given) -> Tensor:
        held = given.held
        place = (0, 0) if held is None else (held.first, held.rows)
        head = torch.tensor([given.how, given.global_rows, *place], device=self._device)
        hashes = [
            content_hash(given.inputs[name]).to(self._device, non_blocking=True)
            if name in given.inputs
            else torch.zeros((), dtype=torch.int64, device=self._device)
            for name in self._names
        ]
        return torch.cat([head, torch.stack(hashes)]) if hashes else head

    def _compare(self, table: Sequence[Sequence[int]], step: int) -> None:
        given = {rank: row for rank, row in enumerate(table) if row[0] != NOTHING}
        hows = {how: [r for r, row in given.items() if row[0] == how] for how in (GLOBAL, SHARE)}
        if all(hows.values()):
            raise _mixed(hows, step)
        sizes = {rank: row[1] for rank, row in given.items()}
        if len(set(sizes.values())) > 1:
            raise _differing("the number of rows", sizes, step)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, row in given.items():
            whole = row[0] == GLOBAL or row[0] == ALL_ROWS
            groups.setdefault((-1, -1) if whole else (row[2], row[3]), []).append(rank)
        for members in groups.values():
            for at, name in enumerate(self._names):
                hashes = {r: given[r][4 + at] for r in members if given[r][4 + at]}
                if len(set(hashes.values())) > 1:
                    raise _differing(f"input {name!r}", hashes, step)


def _mixed(hows: Mapping[int, Sequence[int]], step: int) -> UsageError:
    return UsageError(
        "AP831",
        f"in step {step} some ranks got the global batch and others a part of it",
        why=f"{_ranks(hows[GLOBAL])} the global batch, {_ranks(hows[SHARE])} a share",
        fix="give every rank the same global batch, or every rank its own samples: "
        "autoparallel.distribute(dataloader, model)",
    )


def _differing(what: str, values: Mapping[int, int], step: int) -> UsageError:
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return UsageError(
        "AP830",
        f"the batch of step {step} is not the same on all ranks: {what} differs",
        why=" and ".join(_ranks(ranks) for ranks in groups.values())
        + " need the same samples but got different ones",
        fix="draw the same batch on every rank (one seed, no DistributedSampler), "
        "or use autoparallel.distribute(dataloader, model)",
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, at most eight of them.

    >>> _ranks([0]), _ranks([1, 3])
    ('rank 0', 'ranks 1, 3')
    """
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
