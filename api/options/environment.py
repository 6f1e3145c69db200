"""Trainers that distribute by themselves, told that they are alone.

``transformers.Trainer``, accelerate and Lightning Fabric look at what torchrun put into the
environment: they would wrap a model in DDP and give each process a part of every batch. A model
that ``parallelize`` made is distributed already, and takes the global batch. Inside
``one_process()`` they see one process; autoparallel itself still sees them all.
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
"""Files of at most this size are copied into a folder of a rank; to larger ones it has links."""


@contextmanager
def one_process() -> Iterator[None]:
    """While inside, other libraries take this process for the only one.

    Make the trainer and call it inside::

        model = autoparallel.parallelize(model, example_batch=batch)
        with autoparallel.one_process():
            trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
            trainer.train()

    Batch sizes are then global, every process reads every batch, and every process writes
    checkpoints, into an ``own_folder``. State dicts of the model and of optimizers have
    whole tensors, and loading them takes whole tensors. Outside of torchrun it does nothing.
    """
    if not under_torchrun():
        yield
        return
    with _renamed("", _HIDDEN), whole_states():
        yield


def own_folder(folder: str | os.PathLike[str]) -> str:
    """Return ``folder`` on rank 0, and on every other rank a temporary one in its place.

    Every process of a trainer that thinks it is alone writes its checkpoints::

        with autoparallel.one_process():
            args = transformers.TrainingArguments(autoparallel.own_folder("out"))

    The temporary folder begins with the present contents of ``folder``, so all ranks resume from
    the same checkpoint. It has folders of its own, copies of files of at most a mebibyte, and links
    to larger ones. If a trainer writes such a larger file again under the same name, every rank
    writes to it. The folder is removed when the process ends.
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
    """While inside, the environment is torchrun's again."""
    with _renamed(_HIDDEN, ""):
        yield


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return any(
        f"{prefix}RANK" in os.environ and f"{prefix}WORLD_SIZE" in os.environ
        for prefix in ("", _HIDDEN)
    )


def rank_of_launch() -> int:
    """Return this process's rank of those that torchrun started; 0 if it started none."""
    return int(os.environ.get("RANK") or os.environ.get(f"{_HIDDEN}RANK") or 0)


@contextmanager
def _renamed(before: str, after: str) -> Iterator[None]:
    """The variables of a launch under another prefix, and as they were at the end."""
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
