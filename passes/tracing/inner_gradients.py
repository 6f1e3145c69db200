"""Inner gradients: ``torch.autograd.grad`` within a forward, as ops of the graph.

In: a forward while it is exported. Out: the ops of its inner backward, recorded like all others.
Composite ops are recorded as their parts, since autograd keeps their inner values for the backward.
Autograd hands an op's result to the backward as another tensor; the recorded tensor replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import decompose, get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...planner.errors import CaptureError

_BACKWARDS = (torch.autograd.backward, Tensor.backward)


class InnerGradientError(Exception):
    """Error of a forward that computes a gradient where ``inner_gradients`` is not active."""


def _is_differentiating() -> bool:
    """Return whether the current op is called inside of a derivative (grad, jvp) of
    ``torch.func``."""
    interpreter = functorch.peek_interpreter_stack()
    kinds = functorch.TransformType
    return interpreter is not None and interpreter.key() in (kinds.Grad, kinds.Jvp)


class _Watched(TorchFunctionMode):
    """Mode that lets a forward compute gradients if ``is_ready``; otherwise the first computation
    raises InnerGradientError, which ends the export."""

    def __init__(self, *, is_ready: bool) -> None:
        super().__init__()
        self._is_ready = is_ready

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            raise CaptureError(
                "AP214",
                "the forward calls backward()",
                why="the gradients of parameters are the training step's, and their place is taken",
                fix="use torch.autograd.grad(..., create_graph=True), which returns the gradient",
            )
        if _is_differentiating():
            raise CaptureError(
                "AP215",
                "the forward takes a gradient by torch.func",
                why="its values are those of one sample, which the capture cannot see into",
                fix="torch.autograd.grad(outputs.sum(), inputs, create_graph=True) gives the "
                "gradients of all samples at once",
            )
        if func is not torch.autograd.grad:
            return func(*args, **kwargs)
        if not self._is_ready:
            raise InnerGradientError
        found = func(*args, **kwargs)
        keeps_graph = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        return found if keeps_graph else tree_map_only(Tensor, Tensor.detach, found)


@contextmanager
def watched_gradients() -> Iterator[None]:
    """Raise InnerGradientError if a forward in the ``with`` block computes a gradient."""
    with _Watched(is_ready=False):
        yield


@contextmanager
def inner_gradients() -> Iterator[None]:
    """Record the gradients that a forward in the ``with`` block computes as ops of the traced
    graph."""
    mode = get_proxy_mode()
    if mode is None:  # nothing is recorded
        yield
        return
    with decompose(_Recorded(mode)), _Watched(is_ready=True):
        yield


class _Recorded(dict[Any, Any]):
    """Table of decompositions with an entry for every op: it calls the op under ``mode``, which
    records it. While an op is recorded, it is reported as missing from the table, so that it is not
    decomposed again."""

    def __init__(self, mode: Any) -> None:
        super().__init__({None: None})  # an empty table is replaced by another
        self._mode = mode
        self._is_recorded = False
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def __contains__(self, op: object) -> bool:
        if self._is_recorded:
            self._is_recorded = False
            return False
        return isinstance(op, OpOverload)

    def __getitem__(self, op: OpOverload) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(FakeTensor, self._known, (args, kwargs))
            if _is_composite(op):
                return op.decompose(*args, **kwargs)
            self._is_recorded = True
            made = op(*args, **kwargs)
            tree_map_only(FakeTensor, self._keep, made)
            return made

        return called

    def _keep(self, tensor: Tensor) -> Tensor:
        return self._made.setdefault(_memory(tensor), tensor)

    def _known(self, tensor: Tensor) -> Tensor:
        """Return the recorded tensor that has the memory of ``tensor``, or ``tensor`` itself if
        there is none."""
        if get_proxy_slot(tensor, self._mode.tracer, None) is not None:
            return tensor
        return self._made.get(_memory(tensor), tensor)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _is_composite(op: OpOverload) -> bool:
    """Return whether an op is composite: autograd records the ops that it consists of, and not the
    op itself."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return (
        op.namespace == "aten"
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradCPU")
    )
