"""A forward and backward on a device that holds the weights of one op at a time.

In: a model on the CPU, and a device. Out: a context for the model's forward. Each op gets copies of
its parameters on the device. What autograd saves is moved to the CPU, and back when the backward
reads it. Gradients arrive beside their parameters, on the CPU. A model can thus be computed on a
device that could not hold it, at the speed of the link between device and host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

Tell = Callable[[str], None]

_FACTS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "grad")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
"""Functions that read no values of a parameter."""


@contextmanager
def streamed(model: nn.Module, device: torch.device, tell: Tell) -> Iterator[None]:
    """Within the context ``model`` computes on ``device``; its backward may run afterwards.

    ``tell`` is called with what is being computed, in the forward and in the backward.
    """
    place_buffers(model, device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def save(tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, tensor.detach().to("cpu", copy=True)

    def restore(saved: tuple[torch.device, Tensor]) -> Tensor:
        tell("the reference: backward")
        return saved[1].to(saved[0])

    with torch.device(device), saved_tensors_hooks(save, restore), _Streaming(names, device, tell):
        yield


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves the buffers of ``model``, which ops write in place; parameters stay."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class _Streaming(TorchFunctionMode):
    """Gives ops the parameters ``names``, by ``id``, on ``device``."""

    def __init__(self, names: dict[int, str], device: torch.device, tell: Tell) -> None:
        super().__init__()
        self._names, self._device, self._tell = names, device, tell

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (args, kwargs or {})
        if func not in _FACTS:
            given = tree_map_only(nn.Parameter, self._on_device, given)
        return func(*given[0], **given[1])

    def _on_device(self, parameter: nn.Parameter) -> Tensor:
        name = self._names.get(id(parameter))
        if name is None:
            return parameter
        self._tell(f"the reference: forward of {name}")
        return parameter.to(self._device, copy=True)
