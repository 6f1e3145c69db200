"""Recomputation of a block without values that no gradient reads, and without kept values.

In: a block's graph, with ops marked by ``replayed`` according to ``planner.kernels.recompute``.
Out: the same graph, whose marked ops know whether they run in a forward or again in a backward, and
a pair of contexts for ``torch.utils.checkpoint``. A ``kept`` sum is stored in the forward and
returned in the backward; a ``spared`` op or collective is not run there; for a spared ``product``
autograd keeps its inputs, and the product itself is not computed. The results of other matrix
products, convolutions and attention are kept, except inside of an op that is run ``again``.

A value that is not computed is a hollow tensor, a single NaN that is read as every element: if an
op reads it after all, the gradients show it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ...planner.kernels.recompute import without_offload
from ...planner.plan import Recompute
from .replayed import AGAIN, KEPT, MARK, PRODUCT, SPARED, TILED

aten = torch.ops.aten

COSTLY = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Ops whose results recomputation may keep: they are expensive for their size."""


@dataclass(frozen=True, slots=True)
class _Hollow:
    """Shape, dtype and device of a tensor that the backward does not recompute. In its place the
    repeated forward gets a tensor of this shape whose storage has a single element."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> _Hollow:
        return _Hollow(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)

    def tensor(self) -> Tensor:
        nothing = float("nan") if self.dtype.is_floating_point else 0
        one = torch.full((), nothing, dtype=self.dtype, device=self.device)
        return one.expand(self.shape).requires_grad_(self.requires_grad)


@dataclass
class Recomputing:
    """State of a block (layer) whose backward repeats its forward: which of the two runs now
    (``is_again``: the repetition), and the values kept between them. ``keeps_costly``: results of
    expensive kernels are kept, too, unless an op that calls them is run again as a whole."""

    keeps_costly: bool
    memory: deque[Any] | None = None
    is_again: bool = False
    is_spared: bool = False

    @staticmethod
    def of(mode: Recompute) -> Recomputing:
        """Return the state of a block whose backward repeats its forward as ``mode`` says."""
        return Recomputing(keeps_costly=without_offload(mode) != "full")

    @contextmanager
    def keeping_nothing(self) -> Iterator[None]:
        """Return a context in which no result of an expensive kernel is kept."""
        keeps, self.keeps_costly = self.keeps_costly, False
        try:
            yield
        finally:  # a repetition ends within an op
            self.keeps_costly = keeps

    def contexts(self, hooks: Hooks | None = None) -> tuple[Context, Context]:
        """Return the context managers of one forward and of its repetition in the backward, for
        ``torch.utils.checkpoint``. ``hooks``: functions that store and restore a kept tensor."""
        memory: deque[Any] = deque() if hooks is None else _Stored(*hooks)
        return Context(self, memory, is_again=False), Context(self, memory, is_again=True)

    def mark(self, graph: fx.GraphModule) -> None:
        """Replace, in place, each marked op of a block's graph by a callable that recomputes it as
        its mark says: keep its result, skip it, or run it again."""
        for node in graph.graph.nodes:
            how = node.meta.get(MARK)
            if how is None or isinstance(node.target, _MarkedOp):
                continue
            called = graph.get_submodule(node.target) if node.op == "call_module" else node.target
            node.op, node.target = "call_function", _MARKED[how](self, called)
        graph.recompile()


class Context(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode for a block's forward or its repetition in the backward: the forward keeps the
    results of expensive kernels, the repetition returns them instead of running the kernels."""

    def __init__(self, block: Recomputing, memory: deque[Any], *, is_again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block, self._memory, self._is_again = block, memory, is_again

    def __enter__(self) -> Context:
        block = self._block
        block.memory, block.is_again, block.is_spared = self._memory, self._is_again, False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.memory = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept from the forward for its repetition in the backward."""
        return _tensors(self._memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        block = self._block
        if func not in COSTLY or not (block.keeps_costly or block.is_spared):
            return func(*args, **(kwargs or {}))
        if self._is_again:
            return _given_back(self._memory.popleft())
        results = func(*args, **(kwargs or {}))
        self._memory.append(_remembered(results, hollow=block.is_spared))
        return results

    def once(self, compute: Callable[[], Any]) -> Any:
        """Return the results of ``compute``, of which the repetition runs no part if results of
        expensive kernels are kept."""
        block = self._block
        if not block.keeps_costly:
            return compute()
        if self._is_again:
            return _given_back(self._memory.popleft())
        with block.keeping_nothing():
            results = compute()
        self._memory.append(_remembered(results, hollow=False))
        return results


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Functions that store and restore a tensor, as ``saved_tensors_hooks`` of torch takes them."""


class _Stored(deque[Any]):
    """Queue of kept values whose tensors are stored by ``hooks``."""

    def __init__(self, store: Callable[[Tensor], Any], restore: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._store, self._restore = store, restore

    def append(self, held: Any) -> None:
        super().append(self._stored(held))

    def popleft(self) -> Any:
        return self._restored(super().popleft())

    def _stored(self, held: Any) -> Any:
        if isinstance(held, tuple):
            return tuple(map(self._stored, held))
        return _Handle(self._store(held)) if isinstance(held, Tensor) else held

    def _restored(self, stored: Any) -> Any:
        if isinstance(stored, tuple):
            return tuple(map(self._restored, stored))
        return self._restore(stored.kept) if isinstance(stored, _Handle) else stored


@dataclass(frozen=True, slots=True)
class _Handle:
    """Kept tensor as ``_Stored`` holds it."""

    kept: Any


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, tuple | deque):
        for each in held:
            yield from _tensors(each)


def _remembered(results: Any, *, hollow: bool) -> Any:
    """Return a kernel's results as they are kept for the repeated forward: detached from autograd
    or, if ``hollow``, only shape, dtype and device of each tensor."""
    if isinstance(results, tuple | list):
        return tuple(_remembered(each, hollow=hollow) for each in results)
    if not isinstance(results, Tensor):
        return results
    return _Hollow.of(results) if hollow else results.detach()


def _given_back(remembered: Any) -> Any:
    if isinstance(remembered, tuple):
        return tuple(map(_given_back, remembered))
    return remembered.tensor() if isinstance(remembered, _Hollow) else remembered


@dataclass(eq=False)
class _MarkedOp(ABC):
    """Callable that replaces an op marked for recomputation. In a recomputed block a subclass keeps
    the result, skips the op or runs it again; elsewhere the op is just called."""

    block: Recomputing
    called: Callable[..., Any]
    __name__: str = field(init=False)

    def __post_init__(self) -> None:
        self.__name__ = f"{type(self).__name__.strip('_').lower()}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        memory = self.block.memory
        if memory is None:
            return self.called(*args, **kwargs)
        return self._run(memory, *args, **kwargs)

    @abstractmethod
    def _run(self, memory: deque[Any], *args: Any, **kwargs: Any) -> Any:
        """Execute the op in a recomputed block, in the forward or its repetition. ``memory`` is the
        queue of values that the forward keeps for the repetition."""


class _Kept(_MarkedOp):
    def _run(self, memory: deque[Any], *args: Any, **kwargs: Any) -> Any:
        if self.block.is_again:
            result, requires_grad = memory.popleft()
            return result.requires_grad_(requires_grad)
        result = self._keeping_nothing(*args, **kwargs)
        memory.append((result.detach(), result.requires_grad))
        return result

    def _keeping_nothing(self, *args: Any, **kwargs: Any) -> Any:
        """Call an op that will not be repeated; raise if autograd saves a tensor for its
        backward."""
        with torch.autograd.graph.saved_tensors_hooks(self._refuse, self._refuse):
            return self.called(*args, **kwargs)

    def _refuse(self, tensor: Tensor) -> Tensor:
        raise AssertionError(f"{self.called} keeps a tensor: it cannot be left out")


class _Spared(_Kept):
    def _run(self, memory: deque[Any], *args: Any, **kwargs: Any) -> Any:
        if self.block.is_again:
            return memory.popleft().tensor()
        result = self._keeping_nothing(*args, **kwargs)
        memory.append(_Hollow.of(result))
        return result


class _Product(_MarkedOp):
    def _run(self, memory: deque[Any], *args: Any, **kwargs: Any) -> Any:
        self.block.is_spared = True
        result = self.called(*args, **kwargs)
        self.block.is_spared = False
        return result


class _Again(_MarkedOp):
    def _run(self, memory: deque[Any], *args: Any, **kwargs: Any) -> Any:
        with self.block.keeping_nothing():
            return self.called(*args, **kwargs)


class _Tiled(_MarkedOp):
    def _run(self, memory: deque[Any], *args: Any, **kwargs: Any) -> Any:
        if self.block.is_again:
            return self.called.recorded(_given_back(memory.popleft()), *args)  # type: ignore[attr-defined]
        with self.block.keeping_nothing():
            results = self.called(*args)
        memory.append(_remembered(results, hollow=True))
        return results


_MARKED: dict[str, type[_MarkedOp]] = {
    KEPT: _Kept,
    SPARED: _Spared,
    PRODUCT: _Product,
    AGAIN: _Again,
    TILED: _Tiled,
}
