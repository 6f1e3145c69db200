"""One training step: forwards and backwards of one or several batches, then an update.

In: something that computes gradients (a ``BatchRunner`` of a plan, or a ``PlainTrainer`` of one
device) and ``UpdateOptions``. Out: ``step(*batches)``, the same for both.

With ``on_nan="stop"`` a step whose loss or gradient is not finite updates nothing and ends in
an error that names where the first such value came from. The host reads the numbers of a step
where that costs no wait: at once on a CPU or where the optimizer needs them, otherwise when the
next step has been started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...planner.errors import AutoparallelError
from ..messages.device_queue import queue_of
from ..messages.pending_results import Pending, figure
from ..update.update import Update

Batch = Any


class Used(NamedTuple):
    """A batch, and the number of batches that were run before it."""

    batch: Batch
    begun: int


class Trainable(Protocol):
    """What computes gradients.

    ``backward`` adds those of a batch, times ``scale``, to what is there if ``accumulates``;
    after the last one (``is_last``) they are complete. ``updates_itself``: it has stepped the
    optimizer by then, or does so in the next step, at the latest when it is asked to ``settle``.
    ``diagnosis`` is the error that says where the first value came from that is not finite.
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
    """The numbers of a step, as the host has read them."""

    loss: float
    gradient_norm: float | None
    learning_rate: float | None
    skipped: int
    loss_scale: float | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss of the global batch and the norm of the whole gradient, on every rank.

    Both are on their way when the step returns: who reads the loss waits for the last stage,
    who reads the norm for the gradients of all ranks; the step itself waits for neither, unless
    its update needs the norm. The norm is that before clipping. ``learning_rates`` are those of
    the update, by group; ``skipped`` counts the updates skipped so far; ``loss_scale``
    is what the loss was multiplied by, None where it is not scaled. ``norm`` is None where no
    rank knows the whole gradient: with parameter servers.
    """

    losses: tuple[Tensor, ...]
    norm: Pending | None
    learning_rates: tuple[float | Pending, ...] = ()
    skipped: Pending | None = None
    loss_scale: Pending | None = None
    _losses: tuple[Pending, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_losses", tuple(map(figure, self.losses)))

    @property
    def loss(self) -> Tensor:
        """The mean over the step's batches."""
        return mean(self.losses)

    @property
    def gradient_norm(self) -> Tensor:
        assert self.norm is not None
        return self.norm.value()

    def read(self) -> Figures:
        """The numbers, for which the host waits: for this step, not for one that came after it."""
        rate = next(iter(self.learning_rates), None)
        return Figures(
            loss=float(mean([loss.host_value() for loss in self._losses])),
            gradient_norm=None if self.norm is None else float(self.norm.host_value()),
            learning_rate=rate if rate is None or isinstance(rate, float)
            else float(rate.host_value()),
            skipped=0 if self.skipped is None else int(self.skipped.host_value()),
            loss_scale=None if self.loss_scale is None else float(self.loss_scale.host_value()),
        )  # fmt: skip


class TrainingStep:
    """The steps of one rank; ``last_norm`` reads the norm of the last update's gradient."""

    def __init__(self, trainable: Trainable, update: Update) -> None:
        self.trainable = trainable
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
        rates = tuple(
            figure(rate.clone()) if isinstance(rate, Tensor) else float(rate)
            for rate in self.update.learning_rates()
        )
        scale = self.update.scale()
        self._backward(batch, is_last=True)
        losses, used = tuple(self._losses), self._used
        self._losses, self._used = [], []
        norm = self._updated(losses)
        result = StepResult(
            losses, norm, rates, self._skipped(),
            None if scale is None else figure(scale),
        )  # fmt: skip
        self.last_norm = norm.value
        if self.update.options.on_nan == "stop":
            self._check((result, used))
        return result

    def finish(self) -> None:
        """Read what is left of the last step, which waits for it, and for its update. Raises as
        ``step`` does."""
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
        """Updates the weights; the gradient's norm."""
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
        return figure(total)

    def _skipped(self) -> Pending | None:
        return figure(self.update.skipped.clone()) if self.update.options.decides else None

    def _check(self, made: tuple[StepResult, list[Used]]) -> None:
        """Reads the numbers of a step at once where the host waits for nothing, else one later."""
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
    """The loss of a step: the mean over its batches."""
    return losses[0] if len(losses) == 1 else torch.stack(list(losses)).mean()
