"""Trainers that distribute by themselves, told that they are alone.

``transformers.Trainer``, accelerate and Lightning Fabric look at what torchrun put into the
environment: they would wrap a model in DDP and give each process a part of every batch. A model
that ``parallelize`` made is distributed already, and takes the global batch. Inside
``one_process()`` they see one process; autoparallel itself still sees them all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_HIDDEN = "AUTOPARALLEL_LAUNCHED_"
_OF_LAUNCH = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


@contextmanager
def one_process() -> Iterator[None]:
    """While inside, other libraries take this process for the only one.

    Make the trainer and call it inside::

        model = autoparallel.parallelize(model, example_batch=batch)
        with autoparallel.one_process():
            trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
            trainer.train()

    Batch sizes are then global, every process reads every batch, and every process writes what
    the trainer writes: turn its checkpoints off, or give each rank a folder of its own. Outside of
    torchrun it does nothing.
    """
    with _renamed("", _HIDDEN):
        yield


@contextmanager
def as_launched() -> Iterator[None]:
    """While inside, the environment is torchrun's again."""
    with _renamed(_HIDDEN, ""):
        yield


def under_torchrun() -> bool:
    """Whether this process was started by torchrun."""
    return any(
        f"{prefix}RANK" in os.environ and f"{prefix}WORLD_SIZE" in os.environ
        for prefix in ("", _HIDDEN)
    )


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
