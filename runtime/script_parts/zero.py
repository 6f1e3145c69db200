"""ZeRO in a script: shares of weights, gathered to compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .mesh import Mesh
from .stages import StageRank
from .weights import COMPUTE, GRADIENT, MASTER, Split, Weight, Weights, own


class ShardedWeight(Weight):
    """Weight whose states are cut along dimension 0 over the axis dp (ZeRO).

    The master is this rank's share; all shares have the same number of rows, and the last may end
    in zeros. Stage 1 cuts the gradient after the last micro-batch, 2 and 3 after each; 3 gathers
    the weight for each block that computes with it, 1 and 2 once per update.
    """

    def __init__(
        self, whole: Tensor, split: Split, mesh: Mesh, *, zero: int, trained: bool
    ) -> None:
        self.zero = zero
        self.gathered: list[Tensor] | None = None
        super().__init__(whole, split, mesh, trained=trained)
        self.sums.remove("dp")

    def hold(self, part: Tensor, trained: bool) -> None:
        self.rows = part.shape[0]
        share = own(self.padded(part), {"dp": 0}, self.mesh)
        self.master = nn.Parameter(share.to(MASTER, copy=True), requires_grad=trained)
        self.local = self.master
        if self.zero < 3:
            self.local = nn.Parameter(part.to(COMPUTE, copy=True), requires_grad=trained)
            if trained:
                self.local.register_post_accumulate_grad_hook(self.take)  # type: ignore[no-untyped-call]

    def padded(self, part: Tensor) -> Tensor:
        """Append zeros to ``part``, so that every rank of dp gets as many rows."""
        count = -self.rows % self.mesh.size("dp")
        return torch.cat([part, part.new_zeros(count, *part.shape[1:])]) if count else part

    def gather(self) -> Tensor:
        """Gather this rank's part of the weight from the shares."""
        every = self.mesh.all_gather(self.master.detach().to(COMPUTE), "dp", 0)
        return every[: self.rows]

    def use(self) -> Tensor:
        if self.zero < 3:
            return self.local
        whole: Tensor = GatherWeight.apply(self.master, self)  # type: ignore[no-untyped-call]
        if self.gathered is not None:
            self.gathered.append(whole)
        return whole

    def refresh(self) -> None:
        if self.zero < 3:
            with torch.no_grad():
                self.local.copy_(self.gather())

    def add(self, gradient: Tensor) -> None:
        if self.zero >= 2:
            gradient = self.mesh.reduce_scatter(self.padded(gradient), "dp", 0)
        super().add(gradient)

    def complete(self) -> None:
        if self.zero == 1 and self.gradient is not None:
            self.gradient = self.mesh.reduce_scatter(self.padded(self.gradient), "dp", 0)
        super().complete()

    def box(self) -> tuple[slice, ...]:
        """Return the box of the whole parameter that the master holds, without zeros at its end."""
        first, *others = super().box()
        rows = self.master.shape[0]
        start = min(first.start + self.mesh.coordinate("dp") * rows, first.stop)
        return (slice(start, min(start + rows, first.stop)), *others)


class GatherWeight(torch.autograd.Function):
    """Weight of ZeRO 3, whole for a block; each rank keeps its share of the gradient."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, weight: ShardedWeight) -> Tensor:
        ctx.weight = weight
        return weight.gather()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.weight.add(gradients[0].to(GRADIENT))
        return None, None


@contextmanager
def gathering_again(weights: Weights) -> Iterator[None]:
    """Make autograd drop gathered weights inside the context; the backward gathers them again."""
    sharded = [weight for weight in weights.held.values() if isinstance(weight, ShardedWeight)]
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
            latest.update(weight=weight, whole=weight.gather())
        return torch.as_strided(latest["whole"], size, stride, offset)

    for weight in sharded:
        weight.gathered = []
    with saved_tensors_hooks(pack, unpack):
        yield
    for weight in sharded:
        weight.gathered = None


def run_sharded(block: Callable[..., Any], *inputs: Any) -> Any:
    """Run a block of a stage with ZeRO 3."""
    weights = next(each for each in inputs if isinstance(each, Weights))
    with gathering_again(weights):
        return block(*inputs)


class ShardedStageRank(StageRank):
    """Part of a stage with ZeRO on a rank."""

    def weight(self, whole: Tensor, split: Split, trained: bool) -> Weight:
        is_cut = whole.dim() and self.mesh.shape.get("dp", 1) > 1 and "dp" not in split
        if not self.stage.zero or not is_cut:
            return super().weight(whole, split, trained)
        return ShardedWeight(whole, split, self.mesh, zero=self.stage.zero, trained=trained)
