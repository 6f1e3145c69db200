"""Data parallelism in a script: the model's own forward, on this rank's rows of each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .stages import MICRO_BATCHES
from .training import check_same
from .weights import COMPUTE, GRADIENT

ROWS: tuple[str, ...] = ()
"""Inputs that have a row for each sample of a batch."""


class ModelTrainer:
    """Trainer of a model that each rank runs on its own rows.

    Under ``zero`` 1 to 3, ``fully_shard`` keeps the shares of each of ``units`` and of the rest.
    They are gathered for a step (1 and 2) or for each forward and backward (3). Gradients are
    reduced after the last backward (0 and 1) or after each (2 and 3). With ``degree``, shares are
    of each group of so many neighbouring ranks, and are summed over groups after the last backward.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor],
        count: Callable[[dict[str, Tensor]], Tensor],
        device: torch.device,
        *,
        zero: int,
        degree: int = 0,
        units: Sequence[str] = (),
    ) -> None:
        """Take this rank's part of ``model``, which is whole. Collective over all ranks.

        ``loss_of`` computes the loss of rows, ``count`` the number of their targets.
        """
        check_same("weights at the start (new_model, --weights)", model.parameters(), device)
        self.loss_of, self.count, self.device, self.zero = loss_of, count, device, zero
        self.model = self.module = model
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        if not zero:
            model.to(device)
            self.module = DistributedDataParallel(model)
            return
        policy = MixedPrecisionPolicy(COMPUTE, GRADIENT, cast_forward_inputs=False)
        ranks = torch.arange(self.ranks).view(-1, degree or self.ranks)
        names = ("groups", "ranks") if degree else ("ranks",)
        mesh = DeviceMesh(device.type, ranks if degree else ranks[0], mesh_dim_names=names)
        for unit in [*map(model.get_submodule, units), model]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)

    def named_masters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that the optimizer updates."""
        return [each for each in self.model.named_parameters() if each[1].requires_grad]

    def begin(self, batch: dict[str, Tensor], seed: int, number: int) -> None:
        """Start a step on this rank's rows of ``batch``, the global batch."""
        check_same("batches (batches, build_data)", batch.values(), self.device)
        count = MICRO_BATCHES * self.ranks
        cut = {name: batch[name].chunk(count) for name in ROWS}
        self.parts = [
            batch | {name: rows[part] for name, rows in cut.items()} for part in range(count)
        ]
        self.losses: list[Tensor] = []

    def run(self, share: float, *, is_last: bool) -> None:
        """Run forward and backward of a batch, whose loss weighs ``share`` in the update's mean.

        A mean over a rank's rows is weighted by the rank's fraction of all targets.
        """
        counts = [int(self.count(rows)) for rows in self.parts]
        for number, at in enumerate(range(self.rank, len(counts), self.ranks), 1):
            is_end = is_last and number == MICRO_BATCHES
            self.synchronize(is_end)
            rows = {name: tensor.to(self.device) for name, tensor in self.parts[at].items()}
            is_half = COMPUTE in (torch.bfloat16, torch.float16)
            with torch.autocast(self.device.type, COMPUTE, enabled=is_half):
                loss = self.loss_of(self.module, rows)
            loss = loss if counts[at] else loss.nan_to_num()  # a mean over no targets
            loss = loss * (counts[at] * len(counts) / sum(counts))
            (loss * (share / MICRO_BATCHES)).backward()  # type: ignore[no-untyped-call]
            self.losses.append(loss.detach())

    def synchronize(self, is_end: bool) -> None:
        """Set whether the next backward reduces gradients; ``is_end``: the last of an update."""
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = is_end  # as under its no_sync()
        elif isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(self.zero >= 2 or is_end)
            self.module.set_requires_all_reduce(is_end)
            self.module.set_reshard_after_backward(self.zero == 3 or is_end)

    def update(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> float:
        """Clip the gradient to ``max_norm``, step the optimizer; return the unclipped norm."""
        most = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def loss(self) -> float:
        """Return the mean loss of the batch, on every rank."""
        total = torch.stack(self.losses).double().mean() / self.ranks
        dist.all_reduce(total)
        return float(total)

    def whole_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return whole weights and buffers by name, on every rank. Collective over all ranks."""
        state = self.model.state_dict()
        return {
            name: each.full_tensor() if isinstance(each, DTensor) else each
            for name, each in state.items()
        }
