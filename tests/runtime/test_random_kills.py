"""SIGKILL at random moments of saves: what a save has returned for is never lost.

Two ranks save ever new states into one folder, in the background or not, new steps or the same
again, until one of them is killed. What is then there must load as one whole state, at least as new
as the last that was complete. The next ranks go on in the same folder, with all that was left.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankError, run_processes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from autoparallel.runtime.checkpoint.checkpoint import (
    Slot,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from autoparallel.runtime.checkpoint.writer import CheckpointWriter

KILLS, SAMPLE = 50, 2
MOST_SECONDS = 0.4
"""Within so long a rank is killed: some twenty saves."""
SHAPE = (64, 4096)


def held(value: float) -> TrainingState:
    """A weight of 1 MiB, split over the ranks, and where there is one process, whole."""
    weight = torch.full(SHAPE, value)
    if dist.is_initialized():
        mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
        weight = distribute_tensor(weight, mesh, [Shard(0)])
    slot = Slot({"weight": weight})
    return TrainingState({"weight": SHAPE}, (slot,), facts={"value": value})


def saves_until_killed(folder: str, first: int, seed: int) -> None:
    chance = random.Random(seed)
    killed, seconds = chance.randrange(2), chance.uniform(0.0, MOST_SECONDS)
    writer, value = CheckpointWriter(), float(first)
    save_checkpoint(folder, held(value), writer, step=first)
    told(folder, value)
    dist.barrier()
    if dist.get_rank() == killed:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    step = first
    while True:
        is_asynchronous, step = chance.random() < 0.5, step + chance.randrange(2)
        value += 1
        pending = save_checkpoint(
            folder, held(value), writer, step=step, keep=2, asynchronous=is_asynchronous
        )
        pending.wait()
        told(folder, value)


def told(folder: str, value: float) -> None:
    """A save has returned: from now on it must not be lost.

    The file appears at once, as the rank may be killed while it writes.
    """
    if dist.get_rank() == 0:
        new = Path(f"{folder}.new")
        new.write_text(str(value))
        new.replace(f"{folder}.told")


@pytest.mark.parametrize(
    "kills", [SAMPLE, pytest.param(KILLS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_what_was_saved_survives_a_kill_at_any_moment(tmp_path: Path, kills: int) -> None:
    folder, first = str(tmp_path / "run"), 1
    for seed in range(kills):
        with pytest.raises(RankError):
            run_processes(2, saves_until_killed, folder, first, seed)
        state = held(0.0)
        loaded = load_checkpoint(folder, state)
        weight: Any = state.slots[0].parameters["weight"]
        assert set(weight.flatten().tolist()) == {loaded.facts["value"]}, f"kill {seed}"
        assert loaded.facts["value"] >= float(Path(f"{folder}.told").read_text()), f"kill {seed}"
        first = loaded.step + 1
