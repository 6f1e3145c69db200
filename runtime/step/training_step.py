"""One training step: forwards and backwards of one or several batches, then an update.

In: an object that computes gradients (a ``BatchRunner`` of a plan, or a ``PlainTrainer`` of one
device's plain module) and ``UpdateOptions``. Out: ``step(*batches)``, the same for both.

With ``on_nan="stop"`` a step whose loss or gradient is not finite updates nothing and ends in an
error that names the origin of the first such value. The host reads the numbers of a step where that
costs no wait: at once on a CPU or where the optimizer needs them, otherwise when the next step has
been started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...passes.programs.batch import leaves, path_text
from ...planner.errors import AutoparallelError
from ..messages.device_queue import queue_of
from ..messages.pending_results import Pending, pending_figure
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

Batch = Any


class Used(NamedTuple):
    """A batch that was run, and the number of batches run before it."""

    batch: Batch
    begun: int


class Trainable(Protocol):
    """Interface of an object that computes gradients, for ``TrainingStep``.

    ``backward`` adds the gradients of a batch, times ``scale``, to existing gradients if it
    ``accumulates``; after the last batch (``is_last``) they are complete. ``updates_itself``: it
    steps the optimizer itself, at the latest in the next step or in ``settle``. ``diagnosis``
    returns the error that names the origin of the first value that is not finite.
    """

    device: torch.device
    batches_begun: int

    @property
    def updates_itself(self) -> bool: ...
    def backward(
        self, batch: Batch, *, scale: Tensor | float, accumulates: bool, is_last: bool
    ) -> Tensor: ...
    def norm(self) -> Pending: ...
    def settle(self) -> None: ...
    def gradients(self) -> list[Tensor]: ...
    def diagnosis(self, batches: Sequence[Used]) -> AutoparallelError: ...


class Figures(NamedTuple):
    """The numbers of a step (loss, norm and so on), as Python numbers read by the host."""

    loss: float
    gradient_norm: float | None
    learning_rate: float | None
    skipped: int
    loss_scale: float | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss of the global batch and the norm of the whole gradient, on every rank.

    Both may arrive after the step has returned: a read of the loss waits for the last stage, a read
    of the norm for all ranks' gradients; the step itself waits only if its update needs the norm.
    The norm is taken before clipping. ``learning_rates`` are the update's, by parameter group;
    ``skipped`` counts the updates skipped so far; ``loss_scale`` is the factor by which the loss is
    scaled, or None. ``norm`` is None with parameter servers, where no rank knows the whole
    gradient.
    """

    losses: tuple[Tensor, ...]
    norm: Pending | None
    learning_rates: tuple[float | Pending, ...] = ()
    skipped: Pending | None = None
    loss_scale: Pending | None = None
    _losses: tuple[Pending, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_losses", tuple(map(pending_figure, self.losses)))

    @property
    def loss(self) -> Tensor:
        """The mean loss over the step's batches."""
        return mean(self.losses)

    @property
    def gradient_norm(self) -> Tensor:
        assert self.norm is not None
        return self.norm.value()

    def read(self) -> Figures:
        """Read the numbers on the host, which waits until this step (not a later one) has run."""
        rate = next(iter(self.learning_rates), None)
        return Figures(
            loss=float(mean([loss.host_value() for loss in self._losses])),
            gradient_norm=None if self.norm is None else float(self.norm.host_value()),
            learning_rate=rate
            if rate is None or isinstance(rate, float)
            else float(rate.host_value()),
            skipped=0 if self.skipped is None else int(self.skipped.host_value()),
            loss_scale=None if self.loss_scale is None else float(self.loss_scale.host_value()),
        )


class TrainingStep:
    """Training steps on one rank: ``trainable`` computes gradients, ``update`` updates the weights.
    ``last_norm()`` returns the gradient norm of the last update."""

    def __init__(self, trainable: Trainable, update: Update) -> None:
        self.trainable = trainable
        self.update = update
        self.last_norm: Callable[[], Tensor] | None = None
        self._losses: list[Tensor] = []
        self._used: list[Used] = []
        self._unread: tuple[StepResult, list[Used]] | None = None

    def accumulate(self, batch: Batch) -> Tensor:
        """Run forward and backward of a batch and add its gradients, without an update; return its
        loss. The last batch of an update is given to ``step``."""
        return self._backward(batch, is_last=False)

    def step(self, batch: Batch) -> StepResult:
        """Run forward and backward of the last batch of an update, then the update; return the
        results. With ``on_nan="stop"``, raises RunError AP910 if this step's or the previous step's
        loss or gradient is not finite."""
        rates = tuple(
            pending_figure(rate.clone()) if isinstance(rate, Tensor) else float(rate)
            for rate in self.update.learning_rates()
        )
        scale = self.update.scale()
        self._backward(batch, is_last=True)
        losses, used = tuple(self._losses), self._used
        self._losses, self._used = [], []
        norm = self._updated(losses)
        result = StepResult(
            losses,
            norm,
            rates,
            self._skipped(),
            None if scale is None else pending_figure(scale),
        )
        self.last_norm = norm.value
        if self.update.options.on_nan == "stop":
            self._check((result, used))
        return result

    def finish(self) -> None:
        """Wait for the last step's update and read its numbers. Raises as ``step`` does."""
        self.trainable.settle()
        self._read(self._unread)
        self._unread = None

    def _backward(self, batch: Batch, *, is_last: bool) -> Tensor:
        trainable, options = self.trainable, self.update.options
        if options.on_nan == "stop":
            self._used.append(Used(batch, trainable.batches_begun))
        scale, accumulates = self.update.loss_scale(), bool(self._losses)
        self._losses.append(
            trainable.backward(batch, scale=scale, accumulates=accumulates, is_last=is_last)
        )
        return self._losses[-1]

    def _updated(self, losses: tuple[Tensor, ...]) -> Pending:
        """Update the weights, unless ``trainable`` does so itself; return the gradient's norm."""
        trainable, update = self.trainable, self.update
        norm = trainable.norm()
        if trainable.updates_itself:
            update.schedule(lambda: mean(losses))
            return norm
        if not update.options.needs_norm:
            update(trainable.gradients, None, lambda: mean(losses))
            return norm
        total = update(trainable.gradients, norm.value(), lambda: mean(losses))
        assert total is not None
        return pending_figure(total)

    def _skipped(self) -> Pending | None:
        return pending_figure(self.update.skipped.clone()) if self.update.options.decides else None

    def _check(self, made: tuple[StepResult, list[Used]]) -> None:
        """Read the numbers of a step and raise an error if one is not finite: now if the host need
        not wait for them, else one step later."""
        update = self.update
        is_read = update.options.decides and update.decides_on_host
        if is_read or not queue_of(self.trainable.device).runs_behind:
            self._read(made)
        else:
            before, self._unread = self._unread, made
            self._read(before)

    def _read(self, made: tuple[StepResult, list[Used]] | None) -> None:
        if made is None:
            return
        result, used = made
        found = result.read()
        numbers = [found.loss]
        if found.gradient_norm is not None and not self.update.options.scales:
            numbers.append(found.gradient_norm)
        if not all(map(math.isfinite, numbers)):
            raise self.trainable.diagnosis(used)


def mean(losses: Sequence[Tensor]) -> Tensor:
    """Return a step's loss: the mean of its batches' losses."""
    return losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()


class PlainTrainer:
    """Trainer of a plain module on one device."""

    updates_itself = False

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Batch], Tensor],
        optimizer: Optimizer,
        options: UpdateOptions,
        build_scheduler: BuildScheduler | None = None,
    ) -> None:
        """Make the trainer; ``loss(batch)`` runs the model and returns the loss, with its graph."""
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
        """Run forward and backward; return the loss. Gradients of the loss times ``scale`` are
        added to the parameters'."""
        if not accumulates:
            self.optimizer.zero_grad(set_to_none=True)
            self._model.zero_grad(set_to_none=True)
        self.batches_begun += 1
        loss = self._loss(batch)
        scaled: Any = loss * scale if isinstance(scale, Tensor) or scale != 1.0 else loss
        scaled.backward()
        return loss.detach()

    def settle(self) -> None:
        """Do nothing: every update is made in its own step."""

    def norm(self) -> GradientNorm:
        """Return the 2-norm of all gradients, in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for gradient in self.gradients():
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            total += norm.square().to(self.device)
        return GradientNorm(total, None)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def diagnosis(self, batches: Sequence[Used]) -> AutoparallelError:
        """Run ``batches`` again; return the error that names the first value that is not finite.
        Buffers get their values back."""
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
