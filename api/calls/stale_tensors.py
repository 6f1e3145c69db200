"""Parameters and buffers from before a model was planned, which are trained no longer.

Planning replaces a model's tensors by this rank's shards. A script may still hold the old tensors:
in an optimizer, in a list for clipping, in a term of its loss. They get no gradients and never
change, so every use of them raises an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autoparallel.planner.errors import UsageError

_NAME = "_autoparallel_name"
_STILL_TRUE = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__hash__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "layout", "is_leaf", "requires_grad")
    ),
}
"""Functions that an old tensor still answers, as its replacement has equal results."""


def retire_tensor(tensor: Tensor, name: str) -> None:
    """Free the memory of a tensor that a shard has replaced, and make every use raise AP925.

    Computing a gradient of it raises too.
    """
    if tensor.requires_grad and tensor.is_leaf:
        tensor._backward_hooks = None  # the shard has them
        tensor.register_hook(lambda gradient: _refuse(name))  # type: ignore[no-untyped-call]
    tensor.grad = None
    tensor.data = tensor.new_zeros(()).expand(tensor.shape)
    tensor.__dict__[_NAME] = name
    tensor.__class__ = _StaleParameter if isinstance(tensor, nn.Parameter) else _StaleTensor


def is_retired(tensor: Tensor) -> bool:
    """Return whether ``retire_tensor`` was called for a tensor, which a shard has replaced."""
    return _NAME in tensor.__dict__


def _refuse(name: str) -> NoReturn:
    raise UsageError(
        "AP925",
        f"{name} is used, as it was before the model was planned",
        why="this rank's shards have replaced it: they are trained, and it changes nothing",
        fix="read parameters, and create the optimizer, from model.parameters() or after "
        "model.join(), which plans the model",
    )


class _StaleTensor(Tensor):
    """Tensor that a shard has replaced; every use raises UsageError AP925."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.__dict__[_NAME]}, as it was before the model was planned>"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _STILL_TRUE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        _refuse(next(each.__dict__[_NAME] for each in tensors if isinstance(each, _StaleTensor)))


class _StaleParameter(_StaleTensor, nn.Parameter):
    pass
