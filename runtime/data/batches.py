"""Inputs of a step on a rank: the global batch, or the rank's own rows of it.

In: a rank's inputs by name. Out: the inputs as the executors read them, and the number of rows of
the global batch. The inputs' rows tell which of the two they are; a batch of
``autoparallel.distribute`` states it (``global_rows``).

Ranks that must have the same rows compare hashes of their batches: an error on every rank names the
ranks and the input that differ. The first batch is compared before it is trained on; later batches,
of steps 2, 4, 8, …, while the step runs. The result is read at the next step: no device waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...passes.local.input_rows import HeldRows, data_place, rows_of_rank, rows_of_stages
from ...passes.programs.batch import LeafPath, is_same, leaf_at, path_text
from ...passes.programs.program import Program
from ...planner.errors import UsageError
from ...planner.graph.graph import TensorSpec
from ...planner.plan import Plan
from ..messages.pending_results import Arrival, Progress, arrival_of
from ..messages.shared_objects import gather_values, group_for
from .rank_batch import ShareBatch, check_batch, whole_batch
from .variants import SmallerBatch, smaller_batch

NOTHING, GLOBAL, SHARE, ALL_ROWS = range(4)
"""Forms in which a rank gets a batch: not at all, as the global batch, as its share of the rows, or
as a share that has all rows."""

_CHUNK = 1 << 20
_INDEX, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def content_hash(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's content, as a scalar on its device, without synchronizing.

    It is the sum of each element's bits mixed with its position, by splitmix64's constants.

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
    """The batch that a rank is given for a step. ``how`` is its form: ``NOTHING``, ``GLOBAL`` (the
    global batch), ``SHARE`` (only the rank's rows) or ``ALL_ROWS`` (a share with all rows).
    ``global_rows`` is the number of rows of the global batch, ``held`` the rows that the rank
    reads."""

    how: int
    global_rows: int
    held: HeldRows | None
    inputs: Mapping[str, Tensor]


class BatchCheck:
    """Check that ranks which read the same rows of a batch were given equal inputs."""

    def __init__(
        self, names: Sequence[str], device: torch.device, progress: Progress | None = None
    ) -> None:
        """Compare the model's inputs ``names`` by collectives on ``device``; ``progress`` is called
        before each wait, to inform a watchdog."""
        self._progress = progress
        self._names = tuple(sorted(names))
        self._device = device
        self._num_steps = 0
        self._running: tuple[Arrival, int] | None = None

    def see(self, given: Given) -> None:
        """Start to compare the ranks' batches of a step (``given``: this rank's). Every rank calls
        it before each step; steps 1, 2, 4, 8 and so on are compared.

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
        """Undo the last call of ``see``, because the step was not run."""
        self.read()
        self._num_steps -= 1

    def read(self) -> None:
        """Wait for the comparison that runs in the background, if any, and raise its error."""
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
    """Return text that names the ranks, at most eight of them.

    >>> _ranks([0]), _ranks([1, 3])
    ('rank 0', 'ranks 1, 3')
    """
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class RankInputs(dict[str, Tensor]):
    """Dict of a rank's inputs by name; ``global_rows`` is the number of rows of the global batch
    from which the inputs come, None if unknown."""

    global_rows: int | None = None


def mark_inputs(inputs: Mapping[str, Tensor], batch: object = None) -> RankInputs:
    """Return ``inputs`` as ``RankInputs``. The number of rows of the global batch is taken from the
    attribute ``global_rows`` of ``batch`` or of one of the tensors; None if none has it."""
    found = RankInputs(inputs)
    marks = [batch, *found.values()]
    found.global_rows = next(
        (each.global_rows for each in marks if hasattr(each, "global_rows")), None
    )
    return found


def named_inputs(batch: Any, program: Program) -> dict[str, Tensor]:
    """Return the tensors of a batch by their names in the program. Raises UsageError AP130 where
    the batch lacks a tensor, AP920 where an object in it that is not a tensor differs from the
    example batch's."""
    named = {}
    if isinstance(batch, Tensor):
        batch = (batch,)
    for name, place in program.inputs.items():
        with _lacking(place.path):
            named[name] = torch.as_tensor(place.read(batch))
    fixed = {} if program.example is None else program.example.fixed
    for path, planned in fixed.items():
        with _lacking(path):
            given = leaf_at(batch, path)
        if not is_same(given, planned):
            raise UsageError(
                "AP920",
                f"a batch has {given!r} as {path_text(path)}, and the plan is for {planned!r}",
                why="parts of a batch that are no tensors are fixed when the model is planned",
                fix="give every batch the example batch's",
            )
    return named


@contextmanager
def _lacking(path: LeafPath) -> Iterator[None]:
    """Convert lookup errors raised in the context to UsageError AP130: the batch has nothing at
    ``path``."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(
            "AP130",
            f"the batch has no {path_text(path)}, which the example batch has",
            why=f"{type(error).__name__}: {error}",
        ) from error


class DataSource(Protocol):
    """Interface to the batches of a training run on one rank.

    ``place`` is the pair ``(rank, world)`` by which a sampler divides the data for this rank, None
    where the rank needs no data. ``teller`` is the rank that tells the ranks without data how many
    rows each batch has; None where all ranks read data.
    """

    place: tuple[int, int] | None

    @property
    def teller(self) -> int | None: ...
    def rows_of(self, inputs: Mapping[str, Tensor]) -> int: ...
    def named(self, batch: Any) -> RankInputs: ...


class StepBatches:
    """The batches of a training run, as one rank gets them step by step. ``place`` is the pair
    ``(rank, world)`` by which a sampler divides the data for this rank; None where the rank needs
    no data."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        *,
        rank: int,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        """Find the rows that rank ``rank`` reads under ``plan``. ``program`` must have the plan's
        micro-batch size; ``progress`` is called before each wait for other ranks."""
        self._program, self._plan, self._rank = program, plan, rank
        self._device = device
        counts = plan.num_microbatches > 1 or bool(plan.slices)
        rows = rows_of_stages(program.graph, program.blocks, plan, counts=counts)
        self._batches = {plan.model.global_batch: SmallerBatch(plan, rows)}
        self._held: dict[int, HeldRows | None] = {}
        self._specs: dict[int, dict[str, TensorSpec]] = {}
        self._check = BatchCheck(tuple(program.inputs), device, progress)
        self._is_share: bool | None = None
        self._was_share: bool | None = None
        self._announced: dict[int, None] = {}
        self._last = plan.model.global_batch
        self.place = data_place(rows, plan, rank)

    @property
    def global_rows(self) -> int:
        """The number of rows in a global batch of the planned size."""
        return self._plan.model.global_batch

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that read data."""
        found = self._batches[self.global_rows].rows
        ranks = sorted({each for stage in self._plan.stages for each in stage.devices})
        return tuple(r for r in ranks if rows_of_rank(found, self._plan, r) is not None)

    @property
    def teller(self) -> int | None:
        """The first rank that reads data, where some ranks read none; else None."""
        sources = self.sources
        return sources[0] if len(sources) not in (0, dist.get_world_size()) else None

    def rows_of(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the number of rows of the global batch from which a rank's ``inputs`` come."""
        return self._recognize(inputs)[1]

    def batch(self, rows: int) -> SmallerBatch:
        """Return the plan for a global batch of ``rows`` rows, and the rows that each stage's ranks
        read. Raises UsageError AP836 where the plan cannot run a batch of that size."""
        if rows not in self._batches:
            made = smaller_batch(self._program, self._plan, rows)
            self._batches[rows] = made
        return self._batches[rows]

    def held(self, rows: int) -> HeldRows | None:
        """Return the rows that this rank reads of a global batch of ``rows`` rows, or None."""
        if rows not in self._held:
            found = self.batch(rows)
            self._held[rows] = rows_of_rank(found.rows, found.plan, self._rank)
        return self._held[rows]

    def announce(self, rows: int) -> None:
        """Record that the next global batch, of which every rank is given only its own rows, has
        ``rows`` rows in all."""
        self._last = rows
        self._announced[rows] = None

    def named(self, batch: Any) -> RankInputs:
        """Return a batch's tensors by their names in the plan.

        A rank that needs no data may be given an empty batch.
        """
        is_empty = batch is None or (isinstance(batch, Sized) and not len(batch))
        return mark_inputs({} if is_empty else named_inputs(batch, self._program), batch)

    def take(self, inputs: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], int]:
        """Check the ``inputs`` that this rank is given for a step. Return them in the form that the
        stages read (if they are only the rank's rows, as a ``ShareBatch``), and the number of rows
        of the global batch.

        Raises UsageError AP830 and AP831 where the ranks' batches do not belong together, AP835 for
        the rows of a global batch of unknown size.
        """
        is_share, rows = self._recognize(inputs)
        held = self.held(rows)
        self._was_share = self._is_share
        how = SHARE if is_share else GLOBAL
        if not inputs:
            how = NOTHING
        elif held is not None and held.is_whole:
            how = ALL_ROWS
        elif self._is_share is None:
            self._is_share = is_share
        self._check.see(Given(how, rows, held, inputs))
        if is_share and held is not None:
            return ShareBatch(inputs, held, self._dims), rows
        return inputs, rows

    def whole(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Assemble the global batch from all ranks' ``inputs``, on every rank. Return None if the
        global batch is smaller than planned. Collective over all ranks."""
        is_share, rows = self._recognize(inputs)
        held = self.held(rows)
        has_all = bool(inputs) and (not is_share or (held is not None and held.is_whole))
        found = gather_values((has_all, rows))
        if any(each != self.global_rows for _, each in found):
            return None
        if all(has_it for has_it, _ in found):
            return inputs
        cpu = {name: tensor.cpu() for name, tensor in inputs.items()}
        shares = gather_values((held, cpu, has_all))
        whole = next((share for _, share, has_it in shares if has_it), None)
        if whole is None:
            parts = [(of, share) for of, share, _ in shares if of is not None and share]
            whole = whole_batch(parts, self._dims)
        return {name: tensor.to(self._device) for name, tensor in whole.items()}

    def forget(self) -> None:
        """Undo the last call of ``take``, because the step was not run."""
        self._check.forget()
        self._is_share = self._was_share

    def check_shapes(self, batch: Mapping[str, Tensor], rows: int) -> None:
        """Raise UsageError AP130 unless the inputs in ``batch`` have the shapes that a global batch
        of ``rows`` rows requires."""
        if not batch and self.held(rows) is None:
            return
        if rows not in self._specs:
            graph = self._program.graph.with_batch_size(self.batch(rows).plan.microbatch_size)
            self._specs[rows] = {name: graph[name].spec for name in self._program.inputs}
        check_batch(batch, self._specs[rows], self.batch(rows).plan.num_microbatches)

    @cached_property
    def _dims(self) -> dict[str, int]:
        """The batch dimension of each input that has one, by the input's name."""
        graph = self._program.graph
        dims = {name: graph.batch_dims.get(name, (None,))[0] for name in self._program.inputs}
        return {name: dim for name, dim in dims.items() if dim is not None}

    def _recognize(self, inputs: Mapping[str, Tensor]) -> tuple[bool, int]:
        """Return whether ``inputs`` are only this rank's share of a global batch, and the number of
        rows of the global batch."""
        told = getattr(inputs, "global_rows", None)
        if told is not None or not inputs:
            return True, self._last if told is None else told
        given, planned = self._num_rows(inputs), self.global_rows
        held = self.held(planned)
        if given is None or held is None or given == planned:
            is_share = held is not None and held.is_whole and bool(self._is_share)
            return is_share, planned if given is None else min(given, planned)
        if self._is_share is False and given < planned:
            return False, given
        if given == held.size or (self._is_share and given < held.size):
            return True, planned if given == held.size else self._told_before(given)
        # ``check_shapes`` refuses more rows than planned that are no bucket's.
        is_known = given < planned or given in self._batches
        return False, given if is_known and self._dims else planned

    def _num_rows(self, inputs: Mapping[str, Tensor]) -> int | None:
        """Return the number of rows of a rank's inputs; None if no input has a batch dimension."""
        for name, dim in self._dims.items():
            if name in inputs and inputs[name].dim() > dim:
                size = self._program.graph[name].spec.shape[dim]
                return inputs[name].shape[dim] * self._program.graph.batch_size // size
        return None

    def _told_before(self, given: int) -> int:
        """Return the number of rows of a global batch of which this rank's share has ``given``
        rows. It is one of the sizes passed to ``announce``; raise UsageError AP835 unless exactly
        one fits."""
        planned = self.held(self.global_rows)
        assert planned is not None
        fitting = []
        for rows in self._announced:
            found, held = self.batch(rows), self.held(rows)
            most = max(max(each.sizes) for each in found.rows if each is not None)
            is_smaller = most * found.plan.num_microbatches < planned.size
            if held is not None and held.size == given and is_smaller:
                fitting.append(rows)
        if len(fitting) != 1:
            raise UsageError(
                "AP835",
                f"this rank got {given} samples of a batch, but its part of a full batch is "
                f"{planned.size}",
                why="the sizes of the other ranks' parts are unknown",
                fix="pass the batches of autoparallel.distribute unchanged, give every "
                "rank the global batch, or drop smaller batches: drop_last=True",
            )
        return fitting[0]
