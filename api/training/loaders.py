"""Copies of DataLoaders with another batch sampler, and the same dataset, collation and workers.

In: a torch DataLoader. Out: a DataLoader that reads the rows of the given batch sampler.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

_COPIED = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def has_rows(loader: DataLoader[Any]) -> bool:
    """Return whether the loader indexes the rows of a dataset and batches them itself."""
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def with_sampler(
    loader: DataLoader[Any],
    batch_sampler: Iterable[list[int]],
    generator: torch.Generator | None = None,
) -> DataLoader[Any]:
    """Return a copy of the loader that loads the rows of ``batch_sampler``.

    ``generator`` seeds the workers.
    """
    options = copied_options(loader) | {"collate_fn": loader.collate_fn, "generator": generator}
    made: DataLoader[Any] = type(loader)(loader.dataset, batch_sampler=batch_sampler, **options)
    return made


def copied_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the loader's options about workers, as keyword arguments for another loader."""
    known = inspect.signature(DataLoader.__init__).parameters
    names = (name for name in _COPIED if name in known and getattr(loader, name, None))
    return {name: getattr(loader, name) for name in names}


def skip_batches(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    """Return a copy of the loader that skips its first batches without loading them."""
    assert loader.batch_sampler is not None
    rest = _Rest(loader.batch_sampler, num_batches)
    return with_sampler(loader, rest, loader.generator)


class _Rest:
    """Batch sampler that skips the first batches of another batch sampler."""

    def __init__(self, batch_sampler: Iterable[list[int]], num_batches: int) -> None:
        self._batch_sampler, self._num_batches = batch_sampler, num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._batch_sampler), self._num_batches, None)

    def __len__(self) -> int:
        return len(self._batch_sampler) - self._num_batches  # type: ignore[arg-type]
