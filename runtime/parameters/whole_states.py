"""State dicts with whole tensors, for trainers that save and load by themselves.

Inside of ``one_process()``, ``state_dict()`` of a parallel model and of its optimizers gives whole
tensors on every rank, as a trainer of one process writes them; ``load_state_dict`` takes them, and
each rank keeps its part. So such a checkpoint loads under every plan and alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

_depth = 0


def are_whole() -> bool:
    """Return whether state dicts are to have whole tensors."""
    return _depth > 0


@contextmanager
def whole_states() -> Iterator[None]:
    """While inside, state dicts of optimizers have whole tensors. Collective over all ranks."""
    global _depth
    get, put = Optimizer.state_dict, Optimizer.load_state_dict

    def state_dict(self: Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = tree_map_only(DTensor, lambda part: part.full_tensor(), get(self))
        return found

    def load_state_dict(self: Optimizer, state_dict: Mapping[str, Any]) -> None:
        put(self, _parts(self, state_dict))

    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        Optimizer.state_dict = get  # type: ignore[method-assign]
        Optimizer.load_state_dict = put  # type: ignore[method-assign]


def _parts(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with each whole tensor as this rank's part of it."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    own = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        if isinstance(parameter, DTensor) and number in own:
            own[number] = {key: _part(value, parameter) for key, value in own[number].items()}
    return {**state, "state": own}


def _part(value: Any, parameter: DTensor) -> Any:
    """Return a value of a parameter's state, laid out like the parameter if it has its shape."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
        return value
    mesh = parameter.device_mesh
    value = value.to(parameter.to_local().device)
    is_alike = value.shape == parameter.shape
    placements = parameter.placements if is_alike else [Replicate()] * mesh.ndim
    with torch.no_grad():
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
