"""``autoparallel.save`` and ``autoparallel.load``: checkpoints of a script's training.

The same call works for a model made by ``parallelize``, on every rank of torchrun, and for a plain
module in one process; the checkpoints of both are interchangeable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from autoparallel.adoption.module import ParallelModule
from autoparallel.adoption.step import Step
from autoparallel.options.environment import as_launched, under_torchrun
from autoparallel.planner.errors import UsageError
from autoparallel.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from autoparallel.runtime.checkpoint.writer import CheckpointWriter, PendingSave
from autoparallel.runtime.launch.watched_script import watch_script
from autoparallel.runtime.messages.watchdog import BETWEEN_STEPS
from autoparallel.runtime.step.checkpoint_state import module_state
from autoparallel.runtime.step.trainer import Trainer

_WRITERS: WeakKeyDictionary[nn.Module, CheckpointWriter] = WeakKeyDictionary()
"""Checkpoint writers of plain modules; a trainer has its own writer."""


def save(
    path: str | Path,
    model: nn.Module | Step,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    keep: int | None = None,
    asynchronous: bool = False,
    **extras: Any,
) -> PendingSave:
    """Write the checkpoint ``path/step-N`` of a training run. Collective over all ranks.

    ``model`` is a module, or its ``Step``, which includes the optimizer; in a custom loop pass
    ``optimizer`` too. ``extras`` are objects with ``state_dict`` and ``load_state_dict``: a
    scheduler, a gradient scaler, a data loader. The newest ``keep`` checkpoints stay in ``path``,
    None for all. ``asynchronous`` copies the state to CPU memory and writes in the background;
    ``wait()`` on the result, the next save and the end of the process wait for it and raise its
    error.

    Raises UsageError (AP882, AP883, AP887, AP890) for objects that cannot be saved and MachineError
    (AP886) if writing fails; earlier checkpoints stay.
    """
    if keep is not None and keep < 1:
        raise UsageError("AP890", f"keep={keep} would keep no checkpoint", fix="keep=1 or more")
    module, optimizer, parts = _unpack_arguments(model, optimizer, extras)
    trainer = _trainer_of(module)
    if trainer is None:
        writer = _WRITERS.setdefault(module, CheckpointWriter())
        return save_checkpoint(
            path,
            module_state(module, optimizer, parts),
            writer,
            step=step,
            keep=keep,
            asynchronous=asynchronous,
        )
    with _report_action(f"writing the checkpoint of step {step}"):
        return trainer.save(
            path,
            step=step,
            optimizer=optimizer,
            parts=parts,
            keep=keep,
            asynchronous=asynchronous,
        )


def load(
    path: str | Path,
    model: nn.Module | Step,
    optimizer: Optimizer | None = None,
    **extras: Any,
) -> int:
    """Load a checkpoint and return its step. Collective over all ranks.

    ``path`` is a checkpoint, or a folder whose newest complete checkpoint is loaded. It may have
    been written under any plan of the model, or by one process. ``model``, ``optimizer`` and
    ``extras`` are as in ``save``; create a scheduler before you load its state.

    Raises UsageError: AP132 no checkpoint, AP880 damaged, AP881 files on another host, AP884 and
    AP887 to AP889 unsuitable optimizer or extras, AP885 another model.
    """
    module, optimizer, parts = _unpack_arguments(model, optimizer, extras)
    trainer = _trainer_of(module)
    if trainer is None:
        if module in _WRITERS:
            _WRITERS[module].wait()
        return load_checkpoint(path, module_state(module, optimizer, parts)).step
    with _report_action("reading a checkpoint"):
        step = trainer.load(path, optimizer=optimizer, parts=parts)
        if isinstance(module, ParallelModule):
            module.take_untrained()
    return step


def _unpack_arguments(
    model: nn.Module | Step, optimizer: Optimizer | None, extras: dict[str, Any]
) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    """Return the module, its optimizer, and the extras by name; a ``Step`` is replaced by its
    model, and is an extra itself. Raises UsageError AP890 for an object without a state to save."""
    if isinstance(model, Step):
        optimizer = model.optimizer if optimizer is None else optimizer
        return _unpack_arguments(model.model, optimizer, {"update": model, **extras})
    if not isinstance(model, nn.Module):
        raise UsageError(
            "AP890",
            f"a {type(model).__name__} has no weights to save or load",
            fix="pass the module or its autoparallel.Step",
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(
            "AP890",
            f"a {type(optimizer).__name__} is not an optimizer",
            fix="pass other objects by name: scheduler=..., data=...",
        )
    for name, part in extras.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise UsageError(
                "AP890",
                f"{name} is a {type(part).__name__}, which has no state to save or load",
                fix="pass an object with state_dict() and load_state_dict(state)",
            )
    return model, optimizer, extras


def _trainer_of(module: nn.Module) -> Trainer | None:
    """Return the trainer of a model made by ``parallelize``; None for a plain module.

    Raises UsageError AP148 for a plain module under torchrun.
    """
    join = getattr(module, "join", None)
    trainer = join() if callable(join) and under_torchrun() else None
    if isinstance(trainer, Trainer):
        return trainer
    if under_torchrun():
        raise UsageError(
            "AP148",
            "a plain module cannot be saved or loaded under torchrun",
            why="every process would have its own copy",
            fix="model = autoparallel.parallelize(model, example_batch=...)",
        )
    return None


@contextmanager
def _report_action(what: str) -> Iterator[None]:
    """Tell the script's watchdog inside the context that the process is doing ``what``."""
    with as_launched():
        tell = watch_script(os.environ).watchdog.progress
    tell(what)
    yield
    tell(BETWEEN_STEPS)
