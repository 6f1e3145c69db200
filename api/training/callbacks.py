"""Callbacks of a run: the protocol of metrics and of a model file's callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoparallel.planner.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Finished step as rank 0 saw it.

    The gradient's norm is taken before clipping, the learning rate is the first group of
    parameters'. ``skipped_steps`` counts the updates skipped so far; ``loss_scale`` is the step's,
    None if the loss is not scaled. ``throughput`` is in ``unit`` ("tokens" or "samples") per
    second.
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

    Called on rank 0 only, so a callback must not communicate with other ranks. An exception
    that it raises ends the run.
    """

    def on_step(self, record: StepRecord) -> None:
        """Handle a finished step; called when the next is under way."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Handle a written checkpoint."""

    def on_end(self) -> None:
        """Handle the planned end of the run."""

    def close(self) -> None:
        """Handle the end of the run, planned or by an error."""


def all_of(callbacks: Iterable[Callback], *, source: str = "") -> Callback:
    """Combine callbacks into a callback that calls them in order.

    Raises UsageError AP907 for anything else; ``source`` names their origin.
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
