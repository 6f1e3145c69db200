"""Training a plain module in one process: what ``Trainer`` is for a plan.

In: a module, its loss and optimizer. Out: gradients, their norm, and a diagnosis, as
``TrainingStep`` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...passes.programs.batch import leaves, path_text
from ...planner.errors import AutoparallelError
from ..update.optimizer import GradientNorm
from ..update.update import BuildScheduler, Update, UpdateOptions
from .diagnosis import (
    GRADIENT,
    OUTPUT,
    WEIGHT,
    Place,
    bad_inputs,
    bad_outputs,
    is_finite,
    not_finite,
    watching,
)
from .training_step import Batch, TrainingStep, Used


class PlainTrainer:
    """One device's trainer of a plain module."""

    updates_itself = False

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Batch], Tensor],
        optimizer: Optimizer,
        options: UpdateOptions,
        build_scheduler: BuildScheduler | None = None,
    ) -> None:
        """``loss(batch)`` is the model's loss, with its graph."""
        self._model, self._loss = model, loss
        self.optimizer = optimizer
        self.batches_begun = 0
        first = next(model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        update = Update(options, optimizer, device=self.device, build_scheduler=build_scheduler)
        self.steps = TrainingStep(self, update)

    def backward(
        self, batch: Batch, *, scale: Tensor | float, accumulates: bool, is_last: bool
    ) -> Tensor:
        """The loss of a batch; its gradients, times ``scale``, are added to the parameters'."""
        if not accumulates:
            self.optimizer.zero_grad(set_to_none=True)
            self._model.zero_grad(set_to_none=True)
        self.batches_begun += 1
        loss = self._loss(batch)
        scaled: Any = loss * scale if isinstance(scale, Tensor) or scale != 1.0 else loss
        scaled.backward()
        return loss.detach()

    def settle(self) -> None:
        """Every update is made in its own step."""

    def norm(self) -> GradientNorm:
        """The 2-norm of all gradients, in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in self.gradients():
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            total += norm.square().to(self.device)
        return GradientNorm(total, None)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def diagnosis(self, batches: Sequence[Used]) -> AutoparallelError:
        """Runs the batches again; the error that names the first module or parameter.

        Buffers get their values back.
        """
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        try:
            for used in batches:
                places = self._places(used.batch)
                if places:
                    return not_finite(places)
        finally:
            with torch.no_grad():
                for name, buffer in self._model.named_buffers():
                    buffer.copy_(buffers[name])
        return not_finite(())

    def _places(self, batch: Batch) -> list[Place]:
        parameters = list(self._model.named_parameters())
        places = [
            Place(WEIGHT, position, 0, f"parameter {name}", "")
            for position, (name, parameter) in enumerate(parameters)
            if not is_finite(parameter)
        ]
        tensors = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, Tensor)}
        places += bad_inputs({path_text(path): leaf for path, leaf in tensors.items()})

        def look(name: str, outputs: Any) -> None:
            if bad_outputs(outputs):
                what = f"the output of {name}" if name else "the output of the model"
                places.append(Place(OUTPUT, len(places), 0, what, ""))

        with watching(dict(self._model.named_modules()), look):
            self.backward(batch, scale=1.0, accumulates=False, is_last=True)
        places += [
            Place(GRADIENT, -position, 0, f"the gradient of {name}", "")
            for position, (name, parameter) in enumerate(parameters)
            if not is_finite(parameter.grad)
        ]
        return places
