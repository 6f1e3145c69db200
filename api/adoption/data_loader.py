"""``distribute``: make a torch DataLoader load each rank's own rows of every global batch.

In: a DataLoader of global batches, and the parallel model. Out: a loader of this rank's rows, in
the order in which its plan reads them. All ranks together load the batches of the DataLoader. All
draw the same order, since it starts from rank 0's random state.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from autoparallel.adoption.module import JOINED
from autoparallel.options.environment import under_torchrun
from autoparallel.passes.local.input_rows import HeldRows
from autoparallel.planner.errors import UsageError
from autoparallel.runtime.data.batches import StepBatches
from autoparallel.runtime.messages.shared_objects import share_tensor
from autoparallel.training.loaders import copied_options, has_rows, with_sampler

_PART_SEED = 1_000_003


def distribute(dataloader: Any, model: nn.Module | None = None) -> Any:
    """Return a loader of this rank's rows of the batches of ``dataloader``, a torch DataLoader.

    Write ``dataloader`` as for one device: with global batches and without a DistributedSampler.
    ``model`` comes from ``parallelize`` and is planned now if it has no plan yet; None takes the
    only model of the process that has a plan. Pass the batches to ``Step`` or the model unchanged;
    a rank whose stages read no inputs gets empty batches. From an IterableDataset every rank reads
    all samples and keeps its own. Collective over all ranks. Outside torchrun the loader yields the
    batches of ``dataloader`` unchanged, and only adds a position, which checkpoints can save.

    Raises UsageError AP832 for a DistributedSampler, AP833 for an object that is no DataLoader of
    global batches, AP834 if ``model`` is missing.
    """
    _check_loader(dataloader)
    if not under_torchrun():
        return LoneLoader(dataloader)
    batches = _parallel_model(model).join().runner.batches
    planned = batches.global_rows
    size = dataloader.batch_size
    if size is not None and size != planned:
        raise UsageError(
            "AP833",
            f"the DataLoader makes batches of {size} samples, but the plan is for {planned}",
            why="distribute takes global batches and loads each rank's samples of them",
            fix=f"batch_size={planned}",
        )
    return DistributedLoader(dataloader, batches)


def _check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            "AP833",
            f"a {type(loader).__name__} is not a DataLoader",
            fix="pass a torch.utils.data.DataLoader; pass other data to Step directly",
        )
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(each, DistributedSampler) for each in samplers):
        raise UsageError(
            "AP832",
            "the DataLoader has a DistributedSampler",
            why="distribute itself gives each rank its samples of the global batches",
            fix="remove the DistributedSampler: DataLoader(..., shuffle=True)",
        )
    if not getattr(loader, "in_order", True):
        raise UsageError(
            "AP833",
            "the DataLoader returns batches in the order in which its workers finish",
            why="ranks would use different batches in one step",
            fix="set in_order=True",
        )


def _parallel_model(model: nn.Module | None) -> Any:
    if model is None and len(JOINED) == 1:
        return next(iter(JOINED))
    if hasattr(model, "join"):
        return model
    if isinstance(model, nn.Module):
        why = f"a {type(model).__name__} is none that parallelize made"
    else:
        why = f"{len(JOINED)} models of this process have a plan"
    raise UsageError(
        "AP834",
        "distribute needs the parallel model",
        why=why,
        fix="distribute(dataloader, model) with what autoparallel.parallelize returned; "
        "call it after the optimizer or the Step is made",
    )


class DistributedLoader:
    """Loader of a rank's rows of each global batch, made by ``distribute``. Attributes that it
    lacks are read from the DataLoader."""

    def __init__(self, loader: DataLoader[Any], batches: StepBatches | _AllRows) -> None:
        self._loader, self._batches = loader, batches
        self._order = _Order(loader)
        self._rows: deque[int] = deque()
        self._inner: DataLoader[Any] | None = None
        self._workers = torch.Generator()
        self._epoch = -1
        self._position = 0
        self._start = 0
        self._skipped = 0
        self._loader_state: Any = None

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch; the first call is collective over all ranks."""
        self._order.begin()
        start, self._start = self._start, 0
        self._epoch += 1
        self._position = start
        seed = self._order.worker_seed()
        if has_rows(self._loader):
            # Ranks of one part load the same rows, and draw the same random numbers for them.
            place = self._batches.place
            part = place[0] if place is not None else 0
            self._workers.manual_seed((seed + part * _PART_SEED) % 2**63)
            return self._tag_batches(self._by_row(start))
        self._workers.manual_seed(seed % 2**63)
        if self._loader.batch_size is None:
            return self._count_batches(islice(self._order.draw_items(self._loader), start, None))
        return self._tag_batches(self._keep_rows(start))

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, the number of batches read in it, and their order.

        It is the same on all ranks, and valid for plans with any number of ranks.
        """
        state = {"epoch": self._epoch, "batches": self._position, "order": self._order.state()}
        inner: Any = self._inner
        if not has_rows(self._loader) and hasattr(inner, "state_dict"):
            state["loader"] = inner.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at the position ``state``; call it on every rank."""
        if state["epoch"] < 0:
            return  # saved before the first epoch
        self._epoch = int(state["epoch"]) - 1
        self._start = int(state["batches"])
        self._order.restore(state["order"])
        self._loader_state = state.get("loader")

    def _tag_batches(self, batches: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        for rows, batch in batches:
            self._position += 1
            self._batches.announce(rows)
            yield tag_rows(batch, rows)

    def _count_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._position += 1
            yield batch

    def _held_rows(self, rows: int) -> tuple[int, ...]:
        held = self._batches.held(rows)
        return () if held is None else held.indices()

    def _by_row(self, start: int) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch, and this rank's rows of it, for a dataset with
        indices. ``start`` is the number of the first batch."""
        if not self._held_rows(self._batches.global_rows):
            for indices in islice(self._order.batches(), start, None):
                rows = [indices[row] for row in self._held_rows(len(indices))]
                yield len(indices), self._load_rows(rows) if rows else {}
            return
        self._rows.clear()
        if self._inner is None:
            self._inner = with_sampler(self._loader, _RowSampler(self), self._workers)
        self._skipped = start
        for batch in self._inner:
            yield self._rows.popleft(), batch

    def sampled(self) -> Iterator[list[int]]:
        """Yield the indices of the rows of each batch that this rank loads."""
        for indices in islice(self._order.batches(), self._skipped, None):
            self._rows.append(len(indices))
            yield [indices[row] for row in self._held_rows(len(indices))]

    def _load_rows(self, rows: Sequence[int]) -> Any:
        dataset = self._loader.dataset
        return self._loader.collate_fn([dataset[row] for row in rows])

    def _keep_rows(self, start: int) -> Iterator[tuple[int, Any]]:
        """Yield the size of each global batch, and this rank's rows of it, for an iterable dataset.
        ``start`` is the number of the first batch."""
        loader, planned = self._loader, self._batches.global_rows
        if self._inner is None:
            self._inner = type(loader)(
                loader.dataset,
                batch_size=loader.batch_size,
                drop_last=loader.drop_last,
                collate_fn=_KeepRows(loader.collate_fn, self._held_rows(planned), planned),
                generator=self._workers,
                **copied_options(loader),
            )
        if self._loader_state is not None and hasattr(self._inner, "load_state_dict"):
            self._inner.load_state_dict(self._loader_state)
            self._loader_state, start = None, 0
        for rows, batch in islice(self._order.draw_items(self._inner), start, None):
            if rows != planned:
                own = [batch[row] for row in self._held_rows(rows)]
                yield rows, loader.collate_fn(own) if own else {}
            else:
                yield rows, batch


class _AllRows:
    """Stand-in, in a single process, for ``StepBatches``, which selects a rank's rows: all rows."""

    place = (0, 1)

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.global_rows = loader.batch_size or 1

    def announce(self, rows: int) -> None:
        """Do nothing: no other rank needs the number of rows."""

    def held(self, rows: int) -> HeldRows:
        return HeldRows(first=0, rows=rows, total=rows, num_microbatches=1)


class LoneLoader(DistributedLoader):
    """Loader of a single process; its batches are the DataLoader's.

    It draws the same random numbers as the DataLoader. Only an epoch resumed in its middle, after
    ``load_state_dict``, repeats the order of the interrupted epoch instead.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader, _AllRows(loader))
        self._is_restored = False

    def __iter__(self) -> Iterator[Any]:
        if self._is_restored:
            self._is_restored = False
            return super().__iter__()
        self._epoch += 1
        self._position = 0
        self._order.follow()
        return self._count_batches(iter(self._loader))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_restored = state["epoch"] >= 0

    def _tag_batches(self, batches: Iterator[tuple[int, Any]]) -> Iterator[Any]:
        return self._count_batches(batch for _, batch in batches)


class _RowSampler:
    """Batch sampler that yields the indices of the rows that this rank loads of each batch."""

    def __init__(self, owner: DistributedLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        return self._owner.sampled()

    def __len__(self) -> int:
        return len(self._owner)


class _KeepRows:
    """Collate function that returns the size of a batch and this rank's samples, collated.

    A batch of another size than planned is returned uncollated: the caller selects the rows.
    """

    def __init__(self, collate: Callable[[Any], Any], rows: Sequence[int], planned: int) -> None:
        self._collate, self._rows, self._planned = collate, rows, planned

    def __call__(self, samples: Sequence[Any]) -> tuple[int, Any]:
        if len(samples) != self._planned:
            return len(samples), list(samples)
        own = [samples[row] for row in self._rows]
        return len(samples), self._collate(own) if own else {}


class _Order:
    """Random order of a DataLoader, the same on every rank as on one device.

    A sampler draws from the generators given to it or to the loader, else from torch's default.
    Given generators are set to rank 0's state. The default generator is replaced by a stream of
    random numbers that starts from rank 0's state at the first epoch and serves only this loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        batch_sampler = loader.batch_sampler
        owners = (loader, loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        found = (getattr(owner, "generator", None) for owner in owners)
        self._generators = list({id(each): each for each in found if each is not None}.values())
        self._stream: Tensor | None = None
        self._began: list[Tensor] = []

    def begin(self) -> None:
        """Store the states of the random generators at the beginning of an epoch.

        The first call replaces the states by rank 0's, and is collective over all ranks.
        """
        if self._stream is None:
            for generator in self._generators:
                generator.set_state(share_tensor(generator.get_state()))
            self._stream = share_tensor(torch.get_rng_state())
        self._began = [self._stream, *(each.get_state() for each in self._generators)]

    def follow(self) -> None:
        """Store the states of torch's default generator and of the given generators, from which the
        next epoch draws its order."""
        self._began = [torch.get_rng_state(), *(each.get_state() for each in self._generators)]

    def worker_seed(self) -> int:
        """Draw the seed for the workers, as a DataLoader does before it asks its sampler."""
        with self._draw_from_stream():
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return int(drawn)

    def batches(self) -> Iterator[Sequence[int]]:
        """Return an iterator over the row indices of each global batch."""
        assert self._loader.batch_sampler is not None
        return self.draw_items(self._loader.batch_sampler)

    def draw_items(self, source: Any) -> Iterator[Any]:
        """Yield each item of ``source``, drawn with this loader's own stream of random numbers."""
        with self._draw_from_stream():
            iterator = iter(source)
        while True:
            with self._draw_from_stream():
                try:
                    value = next(iterator)
                except StopIteration:
                    return
            yield value

    def state(self) -> list[str]:
        """Return the states of the generators at the beginning of the epoch, base64-encoded."""
        return [base64.b64encode(bytes(each.tolist())).decode() for each in self._began]

    def restore(self, states: Sequence[str]) -> None:
        """Set the generators to the result of ``state``, so that the same epoch begins again."""
        tensors = [torch.tensor(list(base64.b64decode(each)), dtype=torch.uint8) for each in states]
        if len(tensors) != 1 + len(self._generators):
            raise UsageError(
                "AP837",
                "the state belongs to another DataLoader",
                why=f"it has {len(tensors) - 1} generators, this one {len(self._generators)}",
                fix="give the DataLoader and its sampler the same generators as when the state "
                "was saved",
            )
        self._stream = tensors[0]
        for generator, state in zip(self._generators, tensors[1:], strict=True):
            generator.set_state(state)

    @contextmanager
    def _draw_from_stream(self) -> Iterator[None]:
        """Make torch's default generator continue this loader's stream inside the context."""
        assert self._stream is not None
        outside = torch.get_rng_state()
        torch.set_rng_state(self._stream)
        try:
            yield
        finally:
            self._stream = torch.get_rng_state()
            torch.set_rng_state(outside)


class _Dict(dict[Any, Any]):
    """Dict of a rank's part of a batch; ``global_rows`` is the size of the global batch."""

    global_rows: int


class _Tuple(tuple[Any, ...]):
    """Tuple of a rank's part of a batch; ``global_rows`` is the size of the global batch."""

    global_rows: int


def tag_rows(batch: Any, rows: int) -> Any:
    """Set ``global_rows``, the size of the global batch, on a rank's part and on its tensors."""
    made: Any = _Dict(batch) if isinstance(batch, Mapping) else batch
    made = _Tuple(batch) if isinstance(batch, tuple | list) else made
    made.global_rows = rows
    for value in tree_leaves(batch):
        if isinstance(value, Tensor):
            value.global_rows = rows  # type: ignore[attr-defined]
    return made
