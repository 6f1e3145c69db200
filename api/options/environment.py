"""Contexts that hide torchrun from trainers that distribute by themselves.

``transformers.Trainer``, accelerate and Lightning Fabric read the environment variables of
torchrun; they would wrap a model in DDP and give each process a part of every batch. A model made
by ``parallelize`` is distributed already and takes the global batch. Inside ``one_process()`` they
see a single process; autoparallel itself still sees all.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoparallel.runtime.parameters.global_values import whole_states

_HIDDEN = "AUTOPARALLEL_LAUNCHED_"
_OF_LAUNCH = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
)

_COPIED_BYTES = 1 << 20
"""Largest size of files that are copied into a rank's own folder; larger files are linked."""


@contextmanager
def one_process() -> Iterator[None]:
    """Make other libraries see a single process inside the context.

    Create the trainer and call it inside::

        model = autoparallel.parallelize(model, example_batch=batch)
        with autoparallel.one_process():
            trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
            trainer.train()

    Batch sizes are then global, every process reads every batch, and every process writes
    checkpoints, into an ``own_folder``. State dicts of the model and of optimizers have whole
    tensors, and loading them takes whole tensors. Outside torchrun it does nothing.
    """
    if not under_torchrun():
        yield
        return
    with _renamed("", _HIDDEN), whole_states():
        yield


def own_folder(folder: str | os.PathLike[str]) -> str:
    """Return ``folder`` on rank 0, and a temporary folder instead on every other rank.

    Inside ``one_process`` every process of a trainer writes checkpoints::

        with autoparallel.one_process():
            args = transformers.TrainingArguments(autoparallel.own_folder("out"))

    The temporary folder starts with the contents of ``folder``, so all ranks resume from the same
    checkpoint: with its subfolders, copies of files up to 1 MiB, and links to larger files. If a
    trainer overwrites a larger file under its name, all ranks write to the same file. The temporary
    folder is removed when the process ends.
    """
    folder = Path(folder)
    if not rank_of_launch():
        return str(folder)
    own = Path(tempfile.mkdtemp(prefix="autoparallel-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    if folder.is_dir():
        shutil.copytree(folder.absolute(), own, copy_function=_copy_or_link, dirs_exist_ok=True)
    return str(own)


def _copy_or_link(source: str, copy: str) -> None:
    if os.path.getsize(source) <= _COPIED_BYTES:
        shutil.copyfile(source, copy)
    else:
        os.symlink(source, copy)


@contextmanager
def as_launched() -> Iterator[None]:
    """Restore torchrun's variables, which ``one_process`` hides, inside the context."""
    with _renamed(_HIDDEN, ""):
        yield


def under_torchrun() -> bool:
    """Return whether torchrun started this process, as its environment variables say."""
    return any(
        f"{prefix}RANK" in os.environ and f"{prefix}WORLD_SIZE" in os.environ
        for prefix in ("", _HIDDEN)
    )


def rank_of_launch() -> int:
    """Return this process's rank under torchrun, 0 without torchrun."""
    return int(os.environ.get("RANK") or os.environ.get(f"{_HIDDEN}RANK") or 0)


@contextmanager
def _renamed(before: str, after: str) -> Iterator[None]:
    """Rename torchrun's variables from prefix ``before`` to ``after`` inside the context."""
    moved = {name: os.environ[before + name] for name in _OF_LAUNCH if before + name in os.environ}
    for name, value in moved.items():
        del os.environ[before + name]
        os.environ[after + name] = value
    try:
        yield
    finally:
        for name, value in moved.items():
            del os.environ[after + name]
            os.environ[before + name] = value
