"""ZeRO 3 in a script: weights gathered for each block, and again for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .weights import GRADIENT, Weight, Weights


class GatheredWeight(Weight):
    """Weight under ZeRO 3: all-gathered for a block, and freed when the block is done."""

    gathered: list[Tensor] | None = None

    def use(self) -> Tensor:
        if self.zero < 3:
            return self.local
        whole: Tensor = GatherWeight.apply(self.master, self)  # type: ignore[no-untyped-call]
        if self.gathered is not None:
            self.gathered.append(whole)
        return whole


class GatherWeight(torch.autograd.Function):
    """All-gather of a ZeRO 3 weight for a block; the backward reduce-scatters its gradient."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, weight: GatheredWeight) -> Tensor:
        ctx.weight = weight
        return weight.compute_part()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.weight.add(gradients[0].to(GRADIENT))
        return None, None


@contextmanager
def gathering_again(weights: Weights) -> Iterator[None]:
    """Make autograd drop gathered weights inside the context; the backward gathers them again."""
    sharded = [weight for weight in weights.held.values() if isinstance(weight, GatheredWeight)]
    latest: dict[str, Any] = {}

    def pack(tensor: Tensor) -> Any:
        memory = tensor.untyped_storage().data_ptr()
        for weight in sharded:
            for whole in weight.gathered or ():
                if whole.untyped_storage().data_ptr() == memory:
                    return weight, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        weight, size, stride, offset = kept
        if latest.get("weight") is not weight:
            latest.update(weight=weight, whole=weight.compute_part())
        return torch.as_strided(latest["whole"], size, stride, offset)

    for weight in sharded:
        weight.gathered = []
    with saved_tensors_hooks(pack, unpack):
        yield
    for weight in sharded:
        weight.gathered = None


def run_sharded(block: Callable[..., Any], *inputs: Any) -> Any:
    """Run a block with ZeRO 3: weights are freed after it, gathered anew in its backward."""
    weights = next(each for each in inputs if isinstance(each, Weights))
    with gathering_again(weights):
        return block(*inputs)
