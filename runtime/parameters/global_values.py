"""Values of tensors that are spread over ranks, as a script reads them: those of the whole tensor.

``parameter.grad.norm().item()`` of a DTensor is this rank's part of the norm, and its branches on
it go different ways on different ranks. Once a model is adopted, numbers, lists and texts made of
a DTensor are made of the whole one, which every rank gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

_READS = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__format__",
)


def read_whole_values() -> None:
    """Have methods that read a DTensor's values on the host read the whole tensor's.

    Collective over the tensor's ranks where it is sharded or a partial sum.
    """
    for name in _READS:
        if name not in DTensor.__dict__:
            setattr(DTensor, name, _of_whole(name))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is spread over ranks, and any other tensor as it is.

    Gradients pass through. Collective over the ranks that hold the tensor.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _of_whole(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @wraps(method)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return method(self.full_tensor(), *args, **kwargs)

    return read


def take_norms_of_empty_shards(parameters: Iterable[Tensor]) -> None:
    """Have ``clip_grad_norm_`` take the infinity norm where a rank has no element of a parameter.

    torch refuses the largest of no elements.
    """
    if any(map(_has_empty_shards, parameters)):
        op_handlers()[torch.ops.aten._foreach_norm.Scalar] = _foreach_norm


def op_handlers() -> dict[Any, Any]:
    """Return DTensor's table of handlers for single ops, which has no public name."""
    dispatcher: Any = DTensor._op_dispatcher
    return getattr(dispatcher, "_custom_op_handlers", {})


def _has_empty_shards(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    for axis, placement in enumerate(parameter.placements):
        count = parameter.device_mesh.size(axis)
        if isinstance(placement, Shard):
            size = parameter.shape[placement.dim]
            if (count - 1) * -(-size // count) >= size:
                return True
    return False


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The norms of tensors, one by one."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2.0
    return [_norm(tensor, order) for tensor in tensors]


def _norm(tensor: Tensor, order: float) -> Tensor:
    if not isinstance(tensor, DTensor) or abs(order) != math.inf or order < 0:
        found: Tensor = torch.linalg.vector_norm(tensor, order)
        return found
    local = tensor.to_local()
    largest = local.abs().amax() if local.numel() else local.abs().new_zeros(())
    placements = [
        Partial("max") if isinstance(placement, Shard) else Replicate()
        for placement in tensor.placements
    ]
    return DTensor.from_local(largest, tensor.device_mesh, placements, run_check=False)
