"""The bytes of the tensors that are alive while code runs, now and at their peak.

In: code that is run inside the mode, on real or on fake tensors. Out: bytes now and at the peak, by
category. A storage counts once, however many tensors view it, from the op that first makes or reads
it until its memory is freed. Allocations inside of a kernel are not seen. Sizes are rounded up as
the allocator does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "transient"
SAVED = "activations"


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the bytes of the storages of all tensors that ops make or read
    inside it. ``step_bytes``: storages count as multiples of it, as in an allocator. ``resizes``:
    existing storages may change in size (FSDP's gathered parameters), so all sizes are read again
    after every op.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     x = torch.ones(1000).exp()
    >>> live.num_bytes, live.peak_bytes
    (4032, 8064)
    """

    def __init__(self, *, step_bytes: int = 64, resizes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step_bytes = step_bytes
        self._resizes = resizes
        self._numbers: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._labels: list[str] = []
        self._peak_sizes: dict[int, int] = {}
        self._label = OTHER
        self._reserved: dict[str, int] = {}
        self.num_bytes = 0
        self.peak_bytes = 0

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes of the storages that are live now, by category."""
        return self._categories(self._sizes)

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Bytes by category at the peak; each storage counts under its present category."""
        return self._categories(self._peak_sizes)

    def _categories(self, sizes: Mapping[int, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for number, size in sizes.items():
            label = self._labels[number]
            found[label] = found.get(label, 0) + size
        return found

    def mark(self, tensors: Iterable[Tensor], category: str, *, over: bool = True) -> None:
        """Assign the storages of ``tensors`` to a category, and count new storages. With ``over``
        false, storages that have a category keep it."""
        for tensor in tensors:
            for part in _plain(tensor):
                number = self._add(part)
                if over or self._labels[number] == OTHER:
                    self._labels[number] = category
        self._note()

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """Assign storages that are made within a ``with`` block to a category."""
        before, self._label = self._label, category
        try:
            yield
        finally:
            self._label = before

    def hold(self, name: str, num_bytes: int, category: str) -> None:
        """Count ``num_bytes`` of memory called ``name`` that is not really allocated; 0 frees
        it."""
        if name not in self._reserved:
            self._reserved[name] = len(self._labels)
            self._labels.append(category)
        self._set(self._reserved[name], num_bytes)
        self._note()

    def begin_peak(self) -> None:
        """Forget the peak so far; the next one is at least the bytes that are live now."""
        self.peak_bytes = 0
        self._rescan()
        self._note()

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context manager that assigns tensors saved by autograd to the category of saved
        activations."""

        def pack(tensor: Tensor) -> Tensor:
            self.mark((tensor,), SAVED, over=False)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in tree_leaves((args, dict(kwargs), result)):
            if isinstance(value, Tensor):
                self._add(value)
        if self._resizes:
            self._rescan()
        self._note()
        return result

    def _add(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        number = self._numbers.get(key)
        if number is None:
            number = len(self._labels)
            self._numbers[key] = number
            self._labels.append(self._label)
            self._alive[number] = weakref.ref(storage, lambda _: self._remove(key))
            self._set(number, storage.nbytes())
        return number

    def _set(self, number: int, num_bytes: int) -> None:
        rounded = -(-num_bytes // self._step_bytes) * self._step_bytes
        self.num_bytes += rounded - self._sizes.get(number, 0)
        self._sizes[number] = rounded

    def _remove(self, key: int) -> None:
        number = self._numbers.pop(key)
        self.num_bytes -= self._sizes.pop(number)
        del self._alive[number]

    def _rescan(self) -> None:
        for number, found in list(self._alive.items()):
            storage = found()
            if storage is not None:
                self._set(number, storage.nbytes())

    def _note(self) -> None:
        if self.num_bytes > self.peak_bytes:
            self.peak_bytes = self.num_bytes
            self._peak_sizes = dict(self._sizes)


def _plain(tensor: Tensor) -> Iterable[Tensor]:
    """Return a plain tensor itself, or the tensors inside of a wrapper such as a DTensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return (tensor,)
    names, _ = flatten()
    inner = (getattr(tensor, name) for name in names)
    return tuple(part for each in inner if isinstance(each, Tensor) for part in _plain(each))
