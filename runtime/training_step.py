"""One training step: forwards and backwards of one or several batches, then an update.

In: something that computes gradients (a ``Trainer`` of a plan, or a ``PlainTrainer`` of one
device) and ``UpdateOptions``. Out: ``step(*batches)``, the same for both.

With ``on_nan="stop"`` a step whose loss or gradient is not finite updates nothing and ends in
an error that names where the first such value came from. The host reads the numbers of a step
where that costs no wait: at once on a CPU or where the optimizer needs them, otherwise when the
next step has been started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..planner.errors import AutoparallelError
from .optimizer import GradientNorm
from .update import Update
from .watchdog import BETWEEN_STEPS

Batch = Any


class Used(NamedTuple):
    """A batch, and the number of batches that were run before it."""

    batch: Batch
    begun: int


class Trainable(Protocol):
    """What computes gradients.

    ``backward`` adds those of a batch, times ``scale``, to what is there if ``accumulates``;
    after the last one (``is_last``) they are complete. ``updates_itself``: it has stepped the
    optimizer by then. ``diagnosis`` is the error that says where the first value came from
    that is not finite.
    """

    device: torch.device
    batches_begun: int

    @property
    def updates_itself(self) -> bool: ...
    def backward(
        self, batch: Batch, *, scale: Tensor | float, accumulates: bool, is_last: bool
    ) -> Tensor: ...
    def norm(self) -> GradientNorm: ...
    def gradients(self) -> list[Tensor]: ...
    def tell(self, what: str) -> None: ...
    def diagnosis(self, batches: Sequence[Used]) -> AutoparallelError: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss of the global batch and the norm of the whole gradient, on every rank.

    Both are on their way when the step returns: who reads the loss waits for the last stage,
    who reads the norm for the gradients of all ranks; the step itself waits for neither, unless
    its update needs the norm. The norm is that before clipping. ``learning_rates`` are those of
    the update, by group; ``skipped`` counts the updates skipped so far; ``loss_scale``
    is what the loss was multiplied by, None where it is not scaled.
    """

    losses: tuple[Tensor, ...]
    norm: Callable[[], Tensor]
    learning_rates: tuple[float | Tensor, ...] = ()
    skipped: Tensor | None = None
    loss_scale: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The mean over the step's batches."""
        return mean(self.losses)

    @property
    def gradient_norm(self) -> Tensor:
        return self.norm()


class TrainingStep:
    """The steps of one rank; ``last_norm`` reads the norm of the last update's gradient."""

    def __init__(self, trainer: Trainable, update: Update) -> None:
        self._trainer = trainer
        self.update = update
        self.last_norm: Callable[[], Tensor] | None = None
        self._losses: list[Tensor] = []
        self._used: list[Used] = []
        self._unread: tuple[StepResult, list[Used]] | None = None

    def accumulate(self, batch: Batch) -> Tensor:
        """Forward and backward of a batch that is not the last of its update; its loss."""
        return self._backward(batch, is_last=False)

    def step(self, batch: Batch) -> StepResult:
        """Forward and backward of the last batch of an update, and the update.

        Raises RunError AP910 where the options ask to stop: for this step, or the one before.
        """
        rates, scale = self.update.learning_rates(), self.update.scale()
        self._backward(batch, is_last=True)
        losses, used = tuple(self._losses), self._used
        self._losses, self._used = [], []
        result = StepResult(losses, self._updated(losses), rates, self._skipped(), scale)
        self.last_norm = result.norm
        if self.update.options.on_nan == "stop":
            self._check((result, used))
        return result

    def finish(self) -> None:
        """Read what is left of the last step, which waits for it. Raises as ``step`` does."""
        self._read(self._unread)
        self._unread = None

    def _backward(self, batch: Batch, *, is_last: bool) -> Tensor:
        trainer, options = self._trainer, self.update.options
        if options.on_nan == "stop":
            self._used.append(Used(batch, trainer.batches_begun))
        scale, accumulates = self.update.loss_scale(), bool(self._losses)
        self._losses.append(
            trainer.backward(batch, scale=scale, accumulates=accumulates, is_last=is_last)
        )
        return self._losses[-1]

    def _updated(self, losses: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Updates the weights; what reads the gradient's norm."""
        trainer, update = self._trainer, self.update
        norm = trainer.norm()
        if trainer.updates_itself:
            update.schedule(lambda: mean(losses))
            return norm.value
        if not update.options.needs_norm:
            update(trainer.gradients, None, lambda: mean(losses))
            return norm.value
        trainer.tell("waiting for the norm of all ranks' gradients")
        total = update(trainer.gradients, norm.value(), lambda: mean(losses))
        trainer.tell(BETWEEN_STEPS)
        assert total is not None
        return lambda: total

    def _skipped(self) -> Tensor | None:
        return self.update.skipped.clone() if self.update.options.decides else None

    def _check(self, made: tuple[StepResult, list[Used]]) -> None:
        """Reads the numbers of a step at once where the host waits for nothing, else one later."""
        update = self.update
        is_read = update.options.decides and update.decides_on_host
        if is_read or self._trainer.device.type == "cpu":
            self._read(made)
        else:
            before, self._unread = self._unread, made
            self._read(before)

    def _read(self, made: tuple[StepResult, list[Used]] | None) -> None:
        if made is None:
            return
        result, used = made
        numbers = [result.loss] if self.update.options.scales else [result.loss, result.norm()]
        if not all(math.isfinite(float(number)) for number in numbers):
            raise self._trainer.diagnosis(used)


def mean(losses: Sequence[Tensor]) -> Tensor:
    """The loss of a step: the mean over its batches."""
    return losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
