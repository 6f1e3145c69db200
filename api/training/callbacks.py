"""Callbacks of a run, for metrics and for the ``callbacks()`` of a model file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoparallel.planner.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Figures of a finished step on rank 0.

    The gradient norm is taken before clipping; the learning rate is of the first parameter group.
    ``skipped_steps`` counts all updates skipped so far; ``loss_scale`` is None if the loss is not
    scaled. ``throughput`` is in ``unit`` ("tokens" or "samples") per second.
    """

    step: int
    loss: float
    gradient_norm: float | None
    memory_bytes: int
    seconds: float
    learning_rate: float | None = None
    skipped_steps: int = 0
    loss_scale: float | None = None
    unit: str = "samples"
    throughput: float = 0.0


class Callback:
    """Observer of a run; subclasses define the methods that they need.

    All methods are called on rank 0 only, so they must not communicate with other ranks. An
    exception in a method ends the run.
    """

    def on_step(self, record: StepRecord) -> None:
        """Handle a finished step; called while the next step runs."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Handle the checkpoint of ``step``, written at ``path``."""

    def on_end(self) -> None:
        """Handle the regular end of the run; not called after an error."""

    def close(self) -> None:
        """Handle the end of the run, after ``on_end`` or after an error."""


def all_of(callbacks: Iterable[Callback], *, source: str = "") -> Callback:
    """Combine callbacks into a single callback that calls them in order.

    Raises UsageError AP907 for an object that is no Callback; ``source`` names where it came from.
    """
    found = tuple(callbacks)
    for each in found:
        if not isinstance(each, Callback):
            raise UsageError(
                "AP907",
                f"{source} returns a {type(each).__name__}, not a Callback",
                fix="return a list of autoparallel.Callback objects",
            )
    return _All(found)


class _All(Callback):
    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks

    def on_step(self, record: StepRecord) -> None:
        for each in self._callbacks:
            each.on_step(record)

    def on_checkpoint(self, step: int, path: Path) -> None:
        for each in self._callbacks:
            each.on_checkpoint(step, path)

    def on_end(self) -> None:
        for each in self._callbacks:
            each.on_end()

    def close(self) -> None:
        for each in self._callbacks:
            each.close()
