"""Values of tensors that are spread over ranks, as a script reads them: those of the whole tensor.

``parameter.grad.norm().item()`` of a DTensor is this rank's part of the norm, and its branches on
it go different ways on different ranks. Once a model is adopted, numbers, lists and texts made of
a DTensor are made of the whole one, which every rank gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_READS = (
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__format__",
)  # fmt: skip


def read_whole_values() -> None:
    """Have methods that read a DTensor's values on the host read the whole tensor's.

    Collective over the tensor's ranks where it is sharded or a partial sum.
    """
    for name in _READS:
        if name not in DTensor.__dict__:
            setattr(DTensor, name, _of_whole(name))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is spread over ranks, and any other tensor as it is.

    Gradients pass through it. Every rank calls it: it gathers, or sums, over the tensor's ranks.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _of_whole(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @wraps(method)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return method(self.full_tensor(), *args, **kwargs)

    return read
