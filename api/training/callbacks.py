"""What a run tells others of: the protocol that metrics and a model file's callbacks follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autoparallel.planner.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished step as rank 0 saw it.

    The gradient's norm is that before clipping, the learning rate that of the first group of
    parameters. ``skipped_steps`` counts the updates skipped so far;
    ``loss_scale`` is that of the step, None where the loss is not scaled. ``throughput`` is in
    ``unit`` ("tokens" or "samples") per second.
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
    """Told of a run as it goes on; subclasses define what they need.

    Called on rank 0 only, so a callback must not communicate with other ranks. An exception
    that it raises ends the run.
    """

    def on_step(self, record: StepRecord) -> None:
        """A step is finished; called when the next one is under way."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint is written."""

    def on_end(self) -> None:
        """The run has ended as planned."""

    def close(self) -> None:
        """The run has ended, as planned or by an error."""


def all_of(callbacks: Iterable[Callback], *, source: str = "") -> Callback:
    """One callback that tells all of these, in order.

    Raises UsageError AP907 where one is none; ``source`` says where they come from.
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
