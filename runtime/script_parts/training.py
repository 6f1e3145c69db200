"""The training step of a script on a rank, and its weights as whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import Mesh
from .stages import MICRO_BATCHES, Draw, Stage, StageRank
from .weights import MASTER, Weight

LOSS_SCALE = 1.0
GROWTH_STEPS = 2000
"""Number of finite steps after which the scale of an fp16 loss is doubled."""

COMPARED = 4096
"""Number of values of a tensor that are compared between ranks."""

Count = Callable[[dict[str, Tensor], dict[str, Tensor], int], dict[str, Tensor]]


def mean_counts(
    count: Count | None, batch: dict[str, Tensor], constants: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Run ``count`` on each micro-batch of a batch; return the means of its results, by key."""
    sums: dict[str, Tensor] = {}
    for microbatch in range(MICRO_BATCHES if count is not None else 0):
        found = count(batch, constants, microbatch)  # type: ignore[misc]
        sums = {key: sums[key] + value if key in sums else value for key, value in found.items()}
    return {
        key: total / MICRO_BATCHES if total.is_floating_point() else total // MICRO_BATCHES
        for key, total in sums.items()
    }


def check_same(what: str, tensors: Iterable[Tensor], device: torch.device) -> None:
    """Raise ValueError if ``tensors`` differ between ranks, by sums of their first values.

    Collective over all ranks. The sums may differ as much as between different processors.
    """
    first = [tensor.detach().flatten()[:COMPARED].double() for tensor in tensors]
    sums = torch.stack([values.nan_to_num().abs().sum() for values in first]).to(device)
    largest = torch.stack([sums, -sums])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not torch.allclose(largest[0], -largest[1], rtol=1e-6):
        raise ValueError(f"the ranks have different {what}; they have to be the same on every rank")


class Trainer:
    """Trainer of the stages that this rank computes."""

    def __init__(
        self,
        stages: list[Stage],
        model: nn.Module,
        constants: dict[str, Tensor],
        count: Count | None,
        device: torch.device,
    ) -> None:
        """Keep this rank's part of ``model``, which is whole. Collective over all ranks."""
        self.device, self.count, self.constants = device, count, constants
        self.scale, self.finite_steps, self.table = LOSS_SCALE, 0, stages
        check_same("weights at the start (new_model, --weights)", model.parameters(), device)
        self.stages: dict[int, StageRank] = {}
        meshes: dict[str, Mesh] = {}
        for number, stage in enumerate(stages):
            place = f"{stage.devices} {stage.mesh} {stage.degree}"
            mesh = meshes.get(place) or Mesh(stage.devices, stage.mesh, device.type, stage.degree)
            meshes[place] = mesh
            if dist.get_rank() in stage.devices:
                self.stages[number] = StageRank(stage, mesh, model, constants, device)

    def named_masters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that the optimizer updates; an empty tensor if there are none."""
        named = [(name, weight.master) for _, name, weight in self.all_weights()]
        trained = [(name, master) for name, master in named if master.requires_grad]
        return trained or [("", nn.Parameter(torch.zeros(0)))]

    def all_weights(self) -> list[tuple[int, str, Weight]]:
        """Return the weights of this rank's stages: the stage, the name, the weight."""
        return [
            (number, name, weight)
            for number, stage in self.stages.items()
            for name, weight in stage.weights.items()
        ]

    def begin(self, batch: dict[str, Tensor], seed: int, number: int) -> None:
        """Start a step on a global batch; its random numbers depend on its ``number``."""
        check_same("batches (batches, build_data)", batch.values(), self.device)
        counts = mean_counts(self.count, batch, self.constants)
        counts = {key: value.to(self.device) for key, value in counts.items()}
        for stage in self.stages.values():
            stage.begin(batch, counts, Draw(seed, number))

    def run(self, share: float, *, is_last: bool) -> None:
        """Run forward and backward of a batch, whose loss weighs ``share`` in the update's mean.

        After the last batch of an update, gradients are summed over ranks.
        """
        for stage in self.stages.values():
            for microbatch in range(MICRO_BATCHES):
                stage.forward(microbatch, {})
                stage.backward(microbatch, {}, share * self.scale)
            if is_last:
                stage.complete()

    def is_counted(self, stage: int, name: str) -> bool:
        """Return whether ``stage`` counts the weight in the norm; of all holders one does."""
        return True

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of the whole gradient, on every rank; copies count once."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, name, weight in self.all_weights():
            if weight.gradient is not None and self.is_counted(number, name):
                total += weight.gradient.double().square().sum() / weight.replicas()
        dist.all_reduce(total)
        return total.sqrt() / self.scale

    def update(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> float:
        """Clip the gradient to ``max_norm``, step the optimizer; return the unclipped norm."""
        norm = float(self.gradient_norm())
        factor = 1 / self.scale
        if max_norm is not None:
            factor *= min(1.0, max_norm / (norm + 1e-6))
        for _, _, weight in self.all_weights():
            if weight.gradient is not None:
                weight.master.grad = weight.gradient.to(MASTER)
                if factor != 1:
                    weight.master.grad.mul_(factor)
            weight.gradient = None
        if LOSS_SCALE == 1 or math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        for _, _, weight in self.all_weights():
            weight.refresh()
        if LOSS_SCALE != 1:
            self.rescale(math.isfinite(norm))
        return norm

    def rescale(self, is_finite: bool) -> None:
        """Adapt the scale of an fp16 loss as ``torch.amp.GradScaler`` does."""
        self.finite_steps = self.finite_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self.finite_steps % GROWTH_STEPS == 0:
            self.scale *= 2

    def loss(self) -> float:
        """Return the mean loss of the micro-batches, on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for stage in self.stages.values():
            for loss in stage.losses.values():
                total += loss.double() / MICRO_BATCHES
        dist.all_reduce(total)
        return float(total)

    def whole_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Gather whole weights and buffers into ``model``; return its state. Collective."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        for name, whole in named:
            held = [n for n, s in enumerate(self.table) if name in {*s.parameters, *s.updates}]
            if not held:
                continue
            value = torch.empty_like(whole, device=self.device)
            if held[0] in self.stages:
                value.copy_(self.stages[held[0]].whole(name))
            dist.broadcast(value, self.table[held[0]].devices[0])
            whole.data.copy_(value)
        return model.state_dict()


def load_weights(model: nn.Module, path: str) -> None:
    """Load whole tensors by name into a model; a tied tensor needs only one of its names."""
    state = read_weights(path)
    found = model.load_state_dict(state, strict=False)
    own = model.state_dict()
    given = {own[name].data_ptr() for name in own if name in state}
    missing = [name for name in found.missing_keys if own[name].data_ptr() not in given]
    if missing or found.unexpected_keys:
        raise ValueError(f"{path} lacks {missing} and has {found.unexpected_keys} besides")


def read_weights(path: str) -> dict[str, Tensor]:
    """Read whole tensors by name from a .safetensors file, or a file of ``torch.save``."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path)
    found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def write_weights(path: str, state: dict[str, Tensor]) -> None:
    """Write a file for ``read_weights``; a .safetensors file has tied tensors once."""
    if path.endswith(".safetensors"):
        from safetensors.torch import save_file

        seen: dict[int, str] = {}
        for name, tensor in state.items():
            seen.setdefault(tensor.data_ptr(), name)
        save_file({name: state[name].contiguous() for name in seen.values()}, path)
    else:
        torch.save(state, Path(path))
